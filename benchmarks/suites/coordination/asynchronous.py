"""The toy of asynchronous local SGD, arXiv 2401.09135: a mixture of Gaussians, and workers of unequal speed on a simulated clock."""

import argparse
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import lockstep
from benchmarks.harness.arguments import add_json, at_least_one, show
from benchmarks.report.figures import as_row, head_rows
from lockstep.demo.digits import NETWORK, NUM_CLASSES, NUM_PIXELS, evaluate, initial_values
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array

DESCRIPTION = __doc__
_COLUMNS = ("outer steps", "inner steps", "rate", "loss", "± of seeds", "accuracy", "time")
_GAUSSIANS, _SPREAD, _NUM_TEST, _BATCH_SIZE = 8, 0.35, 4000, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train. `is_together`: an outer step takes the mean of all workers; else of one alone, as it comes.

    `by_speed`: a worker makes as many inner steps as it can while the fastest makes all, as `Session.inner_steps` has it.
    """

    name: str
    outer: OptimizerSpec
    rate: float
    is_together: bool = False
    by_speed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """The work: `num_inner` inner steps of all workers together, of which worker w takes `paces[w]` seconds for each."""

    paces: tuple[float, ...] = (1.0, 1.0, 1.0, 4.0)
    num_inner: int = 12_000
    most: int = 50
    inner_rate: float = 3e-3

    def inner_steps(self, worker: int, arm: Arm) -> int:
        """Returns how many a worker makes for a contribution."""
        return max(1, int(self.most * min(self.paces) / self.paces[worker])) if arm.by_speed else self.most


class AdamW:
    """AdamW (arXiv 1711.05101) in the worker's own memory, as PyTorch has it, with its usual numbers."""

    def __init__(self, values: Mapping[str, Array], rate: float) -> None:
        self._rate, self._step = rate, 0
        self._moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in values.items()}

    def step(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Changes the values in place."""
        self._step += 1
        for name, gradient in gradients.items():
            first, second = self._moments[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient * gradient - second)
            values[name][...] *= 1 - 0.01 * self._rate
            scale = np.sqrt(second / (1 - 0.999**self._step)) + 1e-8
            values[name][...] -= self._rate / (1 - 0.9**self._step) * first / scale


class Gaussians:
    """Examples of ten classes, each of several Gaussians; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._centres = np.random.default_rng(seed).normal(0, _SPREAD, (NUM_CLASSES * _GAUSSIANS, NUM_PIXELS)).astype(np.float32)

    def draw(self, random: np.random.Generator, number: int) -> tuple[Array, Array]:
        """Returns so many, and their classes."""
        chosen = random.integers(len(self._centres), size=number)
        return self._centres[chosen] + random.standard_normal((number, NUM_PIXELS), np.float32), chosen % NUM_CLASSES


class Learner:
    """A worker: its variables, its own optimizer and its batches."""

    def __init__(self, anchor: Mapping[str, Array], toy: Toy, data: Gaussians, seed: tuple[int, int]) -> None:
        self._data, self._random = data, np.random.default_rng(seed)
        self.values = {name: value.copy() for name, value in anchor.items()}
        self._inner, self._gradients = AdamW(self.values, toy.inner_rate), {name: np.zeros_like(value) for name, value in anchor.items()}

    def contribution(self, anchor: Mapping[str, Array], num_inner: int) -> dict[str, Array]:
        """Makes so many inner steps from the anchor, and returns how far they led."""
        for name, value in anchor.items():
            self.values[name][...] = value
        for _ in range(num_inner):
            NETWORK.loss_and_gradients(self.values, *self._data.draw(self._random, _BATCH_SIZE), into=self._gradients)
            self._inner.step(self.values, self._gradients)
        return {name: value - self.values[name] for name, value in anchor.items()}


def arms(rate: float, momentum: float, num_workers: int) -> Iterator[Arm]:
    """Yields all ways: together, and each contribution as it comes by Nesterov momentum and by delayed Nesterov momentum."""
    nesterov = lockstep.momentum(rate, momentum, use_nesterov=True)
    yield Arm(name="sync, Nesterov", outer=nesterov, rate=rate, is_together=True)
    yield Arm(name="sync, Nesterov", outer=nesterov, rate=rate, is_together=True, by_speed=True)
    for by_speed in (False, True):
        for one in (rate, rate / num_workers):
            yield Arm(name="async, Nesterov", outer=lockstep.momentum(one, momentum, use_nesterov=True), rate=one, by_speed=by_speed)
        delayed = lockstep.delayed_nesterov(rate, momentum, delay=num_workers)
        yield Arm(name="async, delayed Nesterov", outer=delayed, rate=rate, by_speed=by_speed)


def train(arm: Arm, toy: Toy, seed: int) -> tuple[float, float, float]:
    """Returns loss and accuracy on other examples after `num_inner` inner steps, and the seconds of the simulated clock."""
    data, workers = Gaussians(seed), range(len(toy.paces))
    num_inner = [toy.inner_steps(worker, arm) for worker in workers]
    with lockstep.local() as session:
        session.set_policy(lockstep.async_policy())
        session.create_or_join(initial_values(seed=seed), optimizer=arm.outer)
        first = session.read()
        anchors = [first for _ in workers]
        learners = [Learner(first, toy, data, (seed, worker)) for worker in workers]
        due = [(toy.paces[worker] * num_inner[worker], worker) for worker in workers]
        heapq.heapify(due)
        num_made, now = 0, 0.0
        while num_made < toy.num_inner:
            group = [heapq.heappop(due) for _ in (workers if arm.is_together else (0,))]
            now = group[-1][0]
            deltas = [learners[worker].contribution(anchors[worker], num_inner[worker]) for _, worker in group]
            weights = np.array([num_inner[worker] for _, worker in group], np.float32)
            weights /= weights.sum()
            session.step({name: sum(w * one[name] for w, one in zip(weights, deltas, strict=True)) for name in first})
            newest = session.read()
            for _, worker in group:
                anchors[worker] = newest
                num_made += num_inner[worker]
                heapq.heappush(due, (now + toy.paces[worker] * num_inner[worker], worker))
        found = evaluate(session.read(), *data.draw(np.random.default_rng((seed, 1000)), _NUM_TEST))
        return found.loss, found.accuracy, now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    toy = Toy()
    parser.add_argument(
        "--paces", type=float, nargs="+", default=[*toy.paces], help="seconds of each worker's inner step (default 1 1 1 4)"
    )
    parser.add_argument(
        "--inner", type=at_least_one, default=toy.num_inner, help="inner steps of all workers together (default %(default)s)"
    )
    parser.add_argument("--every", type=at_least_one, default=toy.most, help="inner steps of a contribution, at most (default %(default)s)")
    parser.add_argument("--inner-rate", type=float, default=toy.inner_rate, help="AdamW's rate (default %(default)s)")
    parser.add_argument("--outer", type=float, nargs=2, default=[0.7, 0.9], metavar=("RATE", "MOMENTUM"), help="(default 0.7 0.9)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(default 0 to 4)")
    parser.add_argument("--only", default="", metavar="WORDS", help="outer steps whose names begin so: sync, async (default all)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Trains each way with each seed and prints a row of it; returns 0."""
    toy = Toy(paces=tuple(options.paces), num_inner=options.inner, most=options.every, inner_rate=options.inner_rate)
    if not options.json:
        print(head_rows(_COLUMNS), flush=True)
    rate, momentum = options.outer
    for arm in arms(rate, momentum, len(toy.paces)):
        if not arm.name.startswith(options.only) or (arm.by_speed and len({*toy.paces}) == 1):
            continue
        found = np.array([train(arm, toy, seed) for seed in options.seeds])
        loss, accuracy, seconds = found.mean(axis=0)
        row = {
            "steps": arm.name,
            "by_speed": arm.by_speed,
            "rate": arm.rate,
            "loss": loss,
            "deviation": found[:, 0].std(),
            "accuracy": accuracy,
            "seconds": seconds,
            "toy": asdict(toy),
        }
        show(row, _in_words, options)
    return 0


def _in_words(row: dict[str, Any]) -> str:
    most = row["toy"]["most"]
    figures = [f"{row['rate']:g}", f"{row['loss']:.4f}", f"{row['deviation']:.4f}", f"{row['accuracy']:.1%}", f"{row['seconds']:,.0f} s"]
    return as_row([row["steps"], f"{most} × speed" if row["by_speed"] else str(most), *figures])
