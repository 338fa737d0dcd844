"""A learner, and actors that play CartPole with its newest weights, two steps behind at most; they come, go and are killed meanwhile.

pip install gymnasium
lockstep up --ps 1 --workers 1 -- python examples/actor_learner.py
lockstep up --ps 1 --workers 1 -- python examples/actor_learner.py --synchronous

The learner is the cluster's worker; it starts the actors, which follow the weights. Every sample says the step of its weights.
"""

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import lockstep

Array = NDArray[Any]
MAX_LAG = 2
NUM_ACTORS, NUM_SAMPLES, HIDDEN = 8, 16, 64
# The mean of fifty games that counts as having learned; a game ends at 500.
_LEARNED = 400.0
_DISCOUNT, _TRACE, _CLIP, _VALUE, _ENTROPY, _LONGEST = 0.99, 0.95, 0.2, 0.01, 0.01, 0.5


@dataclass(frozen=True)
class Samples:
    """What an actor saw and did with the weights of one step; `advantages` by these weights, `targets` for the value."""

    step: int
    observations: Array
    actions: Array
    chances: Array
    advantages: Array
    targets: Array
    rewards: list[float]


def first_values(seed: int) -> dict[str, Array]:
    """Two layers, from which the actions' scores and the value follow."""
    random = np.random.default_rng(seed)
    shapes = {"first": (4, HIDDEN), "second": (HIDDEN, HIDDEN), "scores": (HIDDEN, 2), "value": (HIDDEN, 1)}
    scales = {"first": 1.0, "second": 1.0, "scores": 0.01, "value": 1.0}
    values = {name: (scales[name] * random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}
    return values | {f"{name}/bias": np.zeros(shape[1], np.float32) for name, shape in shapes.items()}


def forward(values: Mapping[str, Array], observations: Array) -> tuple[Array, Array, Array, Array]:
    """Returns both layers, the chances of the actions, and the value."""
    first = np.tanh(observations @ values["first"] + values["first/bias"])
    second = np.tanh(first @ values["second"] + values["second/bias"])
    scores = second @ values["scores"] + values["scores/bias"]
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    return first, second, chances / chances.sum(-1, keepdims=True), (second @ values["value"] + values["value/bias"])[..., 0]


def gradients(values: Mapping[str, Array], batch: list[Samples]) -> dict[str, Array]:
    """The gradients of PPO's loss: samples of older weights count by how likely their actions are now, within bounds."""
    seen, actions, before, advantages, targets = (
        np.concatenate([getattr(samples, name) for samples in batch])
        for name in ("observations", "actions", "chances", "advantages", "targets")
    )
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    first, second, chances, value = forward(values, seen)
    rows, count = np.arange(len(seen)), len(seen)
    ratio = chances[rows, actions] / before
    is_bound = np.where(advantages > 0, ratio > 1 + _CLIP, ratio < 1 - _CLIP)
    chosen = np.zeros_like(chances)
    chosen[rows, actions] = 1.0
    logs = np.log(chances + 1e-12)
    by_scores = (np.where(is_bound, 0.0, ratio * advantages)[:, None] * (chances - chosen)) / count
    by_scores += _ENTROPY * chances * (logs - (chances * logs).sum(1, keepdims=True)) / count
    by_value = (_VALUE * (value - targets) / count)[:, None]
    by_second = (by_scores @ values["scores"].T + by_value @ values["value"].T) * (1 - second**2)
    by_first = (by_second @ values["second"].T) * (1 - first**2)
    found: dict[str, Array] = {}
    for name, inputs, outputs in (
        ("first", seen, by_first), ("second", first, by_second), ("scores", second, by_scores), ("value", second, by_value),
    ):  # fmt: skip
        found |= {name: inputs.T @ outputs, f"{name}/bias": outputs.sum(0)}
    length = np.sqrt(sum(float((gradient**2).sum()) for gradient in found.values()))
    return {name: (gradient * min(1.0, _LONGEST / length)).astype(np.float32) for name, gradient in found.items()}


class Player:
    """Plays on from where it was."""

    def __init__(self, seed: int) -> None:
        self._game = gymnasium.make("CartPole-v1")
        self._random = np.random.default_rng(seed)
        self._seen, _ = self._game.reset(seed=seed)
        self._reward = 0.0

    def play(self, values: Mapping[str, Array], step: int) -> Samples:
        """Plays with these weights, which are of a step."""
        seen, actions, chances, guesses, ends, rewards = [], [], [], [], [], []
        for _ in range(NUM_SAMPLES):
            _, _, both, guess = forward(values, self._seen)
            action = int(self._random.random() < both[1])
            seen.append(self._seen)
            actions.append(action)
            chances.append(both[action])
            guesses.append(float(guess))
            self._seen, reward, is_lost, is_long, _ = self._game.step(action)
            self._reward += float(reward)
            # After a game that was only cut short, the value goes on.
            ends.append((is_lost, is_lost or is_long, float(forward(values, self._seen)[3]) if is_long else 0.0))
            if is_lost or is_long:
                rewards.append(self._reward)
                self._reward = 0.0
                self._seen, _ = self._game.reset()
        following, advantage = float(forward(values, self._seen)[3]), 0.0
        advantages = np.zeros(NUM_SAMPLES, np.float32)
        for at in reversed(range(NUM_SAMPLES)):
            is_lost, is_end, beyond = ends[at]
            ahead = 0.0 if is_lost else beyond if is_end else following
            advantage = 1.0 + _DISCOUNT * ahead - guesses[at] + (0.0 if is_end else _DISCOUNT * _TRACE * advantage)
            advantages[at], following = advantage, guesses[at]
        targets = advantages + np.array(guesses, np.float32)
        return Samples(step, np.array(seen, np.float32), np.array(actions), np.array(chances), advantages, targets, rewards)


def act(learner: Connection, seed: int, is_synchronous: bool) -> None:
    """Is an actor, until the learner hangs up."""
    player = Player(seed)
    with suppress(EOFError, ConnectionError), lockstep.follow(wire="float32") as weights:
        while True:
            step = weights.wait(step=learner.recv()) if is_synchronous else weights.wait(max_lag=MAX_LAG)
            learner.send(player.play(weights.arrays, step))
            if not is_synchronous:
                learner.recv()  # no more lies between the two than the learner takes


class Actors:
    """The actors' processes and the ends of their pipes."""

    def __init__(self, seed: int, *, is_synchronous: bool) -> None:
        self._seed, self._is_synchronous = 1000 * seed, is_synchronous
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self._asked: int | None = None
        for _ in range(NUM_ACTORS):
            self.start()

    def start(self) -> None:
        """Starts one more."""
        self._seed += 1
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=act, args=(there, self._seed, self._is_synchronous), daemon=True)
        process.start()
        there.close()
        self._processes[here] = process
        if self._asked is not None:  # in the place of one that was asked and is gone
            here.send(self._asked)

    def lose(self, *, is_killed: bool) -> None:
        """Kills the one that has been there longest, or sends it home."""
        pipe = next(iter(self._processes))
        if is_killed:
            self._processes[pipe].kill()
        self._forget(pipe)

    def ask(self, step: int) -> None:
        """Has all of them play with the weights of a step."""
        self._asked = step
        for pipe in self._processes:
            pipe.send(step)

    def take(self) -> list[Samples]:
        """Waits for samples, and returns those that have come."""
        found = []
        for pipe in wait(list(self._processes)):
            assert isinstance(pipe, Connection)
            try:
                found.append(pipe.recv())
                if not self._is_synchronous:
                    pipe.send(True)
            except (EOFError, ConnectionError):  # it is gone
                self._forget(pipe)
                self.start()
        return found

    def _forget(self, pipe: Connection) -> None:
        pipe.close()
        del self._processes[pipe]


def main() -> None:
    """Learns, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synchronous", action="store_true", help="all actors play with the same weights, and the learner waits for them")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lose-every", type=int, default=150, help="steps after which an actor is killed, or leaves, by turns")
    options = parser.parse_args()
    lags: Counter[int | str] = Counter()
    rewards: list[float] = []
    learned_after: int | None = None
    with lockstep.connect() as session:
        session.create_or_join(first_values(options.seed), optimizer=lockstep.adam(lockstep.polynomial_decay(0.004, options.steps, 0.0)))
        actors = Actors(options.seed, is_synchronous=options.synchronous)
        waiting: list[Samples] = []
        begin = 0.0
        for step in range(options.steps):
            if step and step % options.lose_every == 0 and not options.synchronous:
                actors.lose(is_killed=step // options.lose_every % 2 == 1)
                actors.start()
            if options.synchronous:
                actors.ask(step)
            while len(waiting) < NUM_ACTORS:
                waiting += actors.take()
                lags["too old"] += sum(step - samples.step > MAX_LAG for samples in waiting)
                waiting = [samples for samples in waiting if step - samples.step <= MAX_LAG]
            begin = begin or time.monotonic()
            batch, waiting = waiting[:NUM_ACTORS], waiting[NUM_ACTORS:]
            lags.update(step - samples.step for samples in batch)
            rewards += [reward for samples in batch for reward in samples.rewards]
            if learned_after is None and np.mean(rewards[-50:] or [0.0]) >= _LEARNED:
                learned_after = step
            session.step(gradients(session.views(), batch))
        samples_s = options.steps * NUM_ACTORS * NUM_SAMPLES / (time.monotonic() - begin)
        final = session.read()
    played = {"reward": evaluate(final), "last_games": float(np.mean(rewards[-100:])), "learned_after": learned_after}
    how = {"seed": options.seed, "synchronous": options.synchronous, "samples_a_s": samples_s, "lags": lags}
    print(json.dumps({**how, **played}))


def evaluate(values: Mapping[str, Array], num_games: int = 20) -> float:
    """Returns the mean reward of games in which the likelier action is taken."""
    game, total = gymnasium.make("CartPole-v1"), 0.0
    for seed in range(num_games):
        (seen, _), is_over = game.reset(seed=10_000 + seed), False
        while not is_over:
            seen, reward, is_lost, is_long, _ = game.step(int(forward(values, seen)[2].argmax()))
            total, is_over = total + float(reward), is_lost or is_long
    return total / num_games


if __name__ == "__main__":
    main()
