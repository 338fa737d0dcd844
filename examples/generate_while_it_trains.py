"""Learns which of ten levers to pull in which room, from what two generators try out with the newest policy, while it trains.

lockstep up --ps 1 --workers 1 -- python examples/generate_while_it_trains.py
"""

import contextlib
import multiprocessing
import queue
from typing import Any

import numpy as np

import lockstep

NUM_ROOMS, NUM_LEVERS, NUM_TRIES = 8, 10, 64
NUM_STEPS = 300
MAX_LAG = 2


def probabilities(logits: Any) -> Any:
    """Returns the softmax of each row."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def generate(seed: int, samples: Any) -> None:
    """Pulls levers by the newest policy until training ends. Each sample carries the step of the weights that made it."""
    rng = np.random.default_rng(seed)
    with lockstep.follow() as weights:
        while not weights.is_over:
            weights.wait(max_lag=MAX_LAG)
            policy = probabilities(weights.arrays["logits"])
            rooms = rng.integers(NUM_ROOMS, size=NUM_TRIES)
            levers = np.array([rng.choice(NUM_LEVERS, p=policy[room]) for room in rooms])
            rewards = (levers == rooms).astype(np.float64)  # the right lever of a room has its number
            samples.put((weights.step, rooms, levers, rewards))


def gradient(logits: Any, rooms: Any, levers: Any, rewards: Any) -> Any:
    """Returns the gradient of what is to become small: minus the expected reward."""
    policy = probabilities(logits)
    advantages = rewards - rewards.mean()
    found = np.zeros_like(logits)
    for room, lever, advantage in zip(rooms, levers, advantages, strict=True):
        found[room] += advantage * policy[room]
        found[room, lever] -= advantage
    return found / len(rooms)


def main() -> None:
    """Trains from the generators' samples, and prints how the reward grows and how old the samples were."""
    context = multiprocessing.get_context("spawn")
    samples = context.Queue(maxsize=1)
    generators = [context.Process(target=generate, args=(seed, samples)) for seed in range(2)]
    with lockstep.connect() as session:
        session.create_or_join({"logits": np.zeros((NUM_ROOMS, NUM_LEVERS))}, optimizer=lockstep.adam(0.05))
        for process in generators:
            process.start()
        lags, recent = [], []
        while session.global_step < NUM_STEPS:
            logits = session.read()["logits"]
            made_at, rooms, levers, rewards = samples.get(timeout=60)
            lags.append(session.global_step - made_at)
            recent.append(rewards.mean())
            session.step({"logits": gradient(logits, rooms, levers, rewards)})
            if session.global_step % 50 == 0:
                print(f"step {session.global_step}: reward {np.mean(recent[-20:]):.2f}, samples {np.mean(lags[-20:]):.1f} steps old")
        session.finish("enough steps")
    for process in generators:
        while process.is_alive():  # it ends when its last samples are taken
            with contextlib.suppress(queue.Empty):
                samples.get(timeout=0.1)


if __name__ == "__main__":
    main()
