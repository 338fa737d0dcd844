"""Runs the same work under each policy, with one slow worker. Knows the settings, the table, and the worker's code."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json, at_least_one
from benchmarks.harness.worker import Station
from benchmarks.report.figures import as_row, head_rows
from benchmarks.suites.coordination.learning import BATCH_SIZE, keep_pace, learn, run_workers
from lockstep.demo.digits import NETWORK, Examples, evaluate
from lockstep.launcher.spec import ClusterSpec
from worker_client import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWork:
    """The workers' orders: a batch takes at least `pace_s` seconds, and `slowdown` times as long on worker `slow_worker`."""

    num_workers: int
    learning_rate: float
    pace_s: float
    slow_worker: int
    slowdown: float


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process until the cluster is finished."""
    work = PolicyWork(**orders)
    learn(station, partial(_train, work), learning_rate=work.learning_rate, num_workers=work.num_workers)


def _train(work: PolicyWork, session: Session, part: Examples, test: Examples) -> dict[str, Any]:
    """Returns seconds from the first batch to the end and of waiting, contributions with their staleness, and what was learned."""
    pace_s = work.pace_s * (work.slowdown if session.worker_index == work.slow_worker else 1.0)
    begin, waiting_s, staleness, num_batches = time.monotonic(), 0.0, [], 0
    while not session.is_finished:
        batch_begin = time.monotonic()
        batch = part.batch(BATCH_SIZE, worker=session.worker_index, step=num_batches)
        gradients = session.gradient_buffers()
        NETWORK.loss_and_gradients(session.views(), batch.images, batch.labels, into=gradients)
        keep_pace(batch_begin, pace_s=pace_s)
        push_begin = time.monotonic()
        result = session.step(gradients)
        waiting_s += time.monotonic() - push_begin
        num_batches += 1
        if result.is_accepted:
            staleness.append(result.staleness)
    seconds, found = time.monotonic() - begin, evaluate(session.views(), test.images, test.labels)
    return {
        "seconds": seconds,
        "waiting_s": waiting_s,
        "num_dropped": num_batches - len(staleness),
        "staleness": staleness,
        "test_accuracy": found.accuracy,
        "step": session.local_step,
    }


_COLUMNS = (
    *("policy", "test accuracy", "seconds", "steps", "accepted", "dropped", "of the slow worker", "mean staleness", "max staleness"),
    "fast workers wait",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A row of the table: a policy by the flags of `lockstep up` and, with sync, the number of backup workers."""

    name: str
    flags: Mapping[str, object]
    num_backups: int = 0

    def contributions_a_step(self, num_workers: int) -> int:
        """The number of contributions in one update of the variables."""
        return 1 if "policy" in self.flags else num_workers - self.num_backups


ARMS = (
    Arm(name="sync", flags={}),
    Arm(name="sync, 1 backup worker", flags={"backup_workers": 1}, num_backups=1),
    Arm(name="ssp(2)", flags={"policy": "ssp", "staleness": 2}),
    Arm(name="async", flags={"policy": "async"}),
    Arm(name="async, drops beyond staleness 4", flags={"policy": "async", "max_staleness": 4}),
    Arm(name="async, unlocked", flags={"policy": "async", "no_locking": True}),
)

DESCRIPTION = (
    "Learns the digits under each policy with real processes, the last worker slowed down."
    " Every policy has the same examples for each worker, the same first weights, and applies as many contributions."
)


def run(options: argparse.Namespace) -> int:
    """Runs every policy and prints the table; returns 0 if all came as far as sync in test accuracy, within the margin, else 1."""
    rows = list(_rows(options))
    accuracies = [row["test_accuracy"] for _, row in rows]
    spread = max(accuracies) - min(accuracies)
    if not options.json:
        print(f"\ntest accuracies differ by {spread:.4f} at most; wanted: {options.margin} at most")
    return int(spread > options.margin)


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields each policy's figures, and prints them."""
    arms = [arm for arm in ARMS if not options.only or arm.name in options.only]
    if not options.json:
        print(head_rows(_COLUMNS), flush=True)
    for arm in arms:
        runs = []
        for _ in range(options.repeat):
            runs.append(_figures(_run(arm, options)))
            options.progress.advance(1, total=options.repeat * len(arms))
        row = _median(runs)
        print(json.dumps({"policy": arm.name, **row}) if options.json else _row(arm.name, row), flush=True)
        yield arm.name, row


def _run(arm: Arm, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains with processes for all roles; every arm applies the same number of contributions.

    Raises LaunchFailed with the error's output.
    """
    share = arm.contributions_a_step(options.workers)
    max_steps = max(1, options.contributions // share)
    spec = ClusterSpec(ps=options.ps, workers=options.workers, max_steps=max_steps, **arm.flags)
    work = PolicyWork(
        num_workers=options.workers,
        # The rate of an update from n contributions is n times as high, so that equal work is an equal sum of gradients.
        learning_rate=options.learning_rate * share,
        pace_s=options.pace,
        slow_worker=options.workers - 1,
        slowdown=options.slowdown,
    )
    return run_workers(spec, "benchmarks.suites.coordination.policies", work)


def _figures(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the figures of one run, whose last worker is the slow one."""
    staleness = [value for report in reports for value in report["staleness"]]
    fast = reports[:-1] or reports
    return {
        "test_accuracy": reports[0]["test_accuracy"],
        "seconds": max(report["seconds"] for report in reports),
        "steps": max(report["step"] for report in reports),
        "accepted": len(staleness),
        "dropped": sum(report["num_dropped"] for report in reports),
        "of_the_slow_worker": len(reports[-1]["staleness"]),
        "mean_staleness": float(np.mean(staleness)) if staleness else 0.0,
        "max_staleness": max(staleness, default=0),
        "fast_workers_wait": float(np.mean([report["waiting_s"] / report["seconds"] for report in fast])),
    }


def _median(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def _row(name: str, row: dict[str, float]) -> str:
    forms = {"test_accuracy": "{:.4f}", "seconds": "{:.1f}", "mean_staleness": "{:.2f}", "fast_workers_wait": "{:.0%}"}
    return as_row([name, *(forms.get(key, "{:.0f}").format(value) for key, value in row.items())])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=int, default=4, help="workers (default 4)")
    parser.add_argument("--ps", type=int, default=2, help="parameter servers (default 2)")
    parser.add_argument("--contributions", type=int, default=1200, help="batches of 32 that are applied (default 1200)")
    parser.add_argument("--pace", type=float, default=0.02, metavar="S", help="seconds that a batch takes (default 0.02)")
    parser.add_argument("--slowdown", type=float, default=5.0, metavar="X", help="factor by which the last worker takes longer (default 5)")
    parser.add_argument(
        "--learning-rate", type=float, default=0.1, metavar="X", help="learning rate of one contribution, with SGD (default 0.1)"
    )
    parser.add_argument("--repeat", type=at_least_one, default=1, help="whole runs of each policy; medians are shown")
    parser.add_argument("--margin", type=float, default=0.01, metavar="X", help="allowed difference of test accuracies (default 0.01)")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="policy to run, by its name in the table; may be repeated (default: all)"
    )
    add_json(parser)
