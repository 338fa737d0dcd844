"""Measures a cluster's step with each durability. Knows settings and a table; `step` measures."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, show
from benchmarks.harness.runs import run_once
from benchmarks.harness.setting import Setting, size_title, steps_for, workload_of
from benchmarks.harness.workload import NUM_SLOTS, NUM_WARMUP_STEPS, OPTIMIZERS, Workload
from benchmarks.report.figures import as_row, head_rows

SIZES = ("4KiB/4", "1MiB/8", "64MiB/16")
# (Most bytes, steps between two checkpoints): each checkpoint is written before the next is due.
_BETWEEN = ((1 << 16, 200), (1 << 21, 200), (1 << 24, 60))
_FEWEST_BETWEEN = 40
# (Most bytes, steps), for runs that save each step.
_SAVED = ((1 << 16, 60), (1 << 21, 40), (1 << 24, 20))
_FEWEST_SAVED = 10
# A save begins when a step is announced, and this many following steps may wait for it.
_NUM_AFTER = 3
COLUMNS = ("size", "none, ms", "interval, ms", "all of it", "longest at a save, beyond", "without one", "a copy", "step, ms")

DESCRIPTION = (
    "Measures a step without checkpoints, with one now and then, and with one of every step, by turns, with 2 workers and a"
    " parameter server: medians, all steps together beside those without checkpoints, how much longer than the median the longest step"
    " at a save is (beside the same steps without a save, and a copy of as many bytes). Three minutes."
)


def run(options: argparse.Namespace) -> int:
    """Prints the table as Markdown, row by row; returns the exit code."""
    workloads = [workload_of(size, num_steps=1) for size in options.sizes]
    if options.between is not None and options.between <= NUM_WARMUP_STEPS:
        raise WrongArguments(f"--between: got {options.between}, want more than {NUM_WARMUP_STEPS} steps between saves")
    if not options.json:
        print(head_rows(COLUMNS), flush=True)
    for bare in workloads:
        show(measure(bare, options), lambda report: as_row(cells(report)), options)
    return 0


def measure(bare: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Trains alternately without checkpoints, with some, and with one of each step; times are in milliseconds.

    `excess_ms`: how much the longest step at a save exceeds the median step; the median over all saves. `quiet_excess_ms`: the same for the
    same steps of a run without saves. `copy_ms`: a copy of the saved bytes, in one thread, into memory that has been used before.
    """
    between = options.between or steps_for(bare.total_bytes, _BETWEEN, fewest=_FEWEST_BETWEEN)
    at = range(between - NUM_WARMUP_STEPS, options.saves * between, between)
    many = replace(bare, num_steps=options.saves * between + _NUM_AFTER, optimizer=options.optimizer)
    few = replace(many, num_steps=min(many.num_steps, steps_for(bare.total_bytes, _SAVED, fewest=_FEWEST_SAVED)))
    kept = {"none": (many, None), "interval": (many, between), "step": (few, None)}
    steps: dict[str, list[list[float]]] = {durability: [] for durability in kept}
    copies: list[float] = []
    for _ in range(options.repeat):
        for durability, (workload, checkpoint_steps) in kept.items():
            setting = Setting(transport=options.transport, durability=durability, checkpoint_steps=checkpoint_steps)
            steps[durability].append(run_once(workload, setting=setting).step_s)
            options.progress.advance(1, total=options.repeat * len(kept))
        copies += _plain_copies_s(bare.total_bytes * (1 + NUM_SLOTS[options.optimizer]))
    return {
        **asdict(many),
        "transport": options.transport,
        "steps_between": between,
        "repeat": options.repeat,
        **{f"{durability}_ms": _ms(_middle(runs, statistics.median)) for durability, runs in steps.items()},
        "interval_to_none": round(_middle(steps["interval"], statistics.fmean) / _middle(steps["none"], statistics.fmean), 2),
        "excess_ms": _ms(_excess(steps["interval"], at)),
        "quiet_excess_ms": _ms(_excess(steps["none"], at)),
        "copy_ms": _ms(statistics.median(copies)),
    }


def cells(report: dict[str, Any]) -> list[str]:
    """Returns the row of the table with the columns COLUMNS."""
    size = size_title(Workload(**{field.name: report[field.name] for field in fields(Workload)}))
    medians = [f"{report['none_ms']:.2f}", f"{report['interval_ms']:.2f}", f"x {report['interval_to_none']:.2f}"]
    return [size, *medians, *(f"{report[name]:.1f}" for name in ("excess_ms", "quiet_excess_ms", "copy_ms", "step_ms"))]


def _plain_copies_s(nbytes: int) -> list[float]:
    source, target, seconds = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8), []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return seconds


def _excess(runs: Sequence[Sequence[float]], at: Sequence[int]) -> float:
    """Returns the median, over all saves, of the longest step at a save minus the run's median. Step 0 is saved before the measurement."""
    return statistics.median(max(step_s[first : first + _NUM_AFTER]) - statistics.median(step_s) for step_s in runs for first in at)


def _middle(runs: Sequence[Sequence[float]], of_run: Callable[[Sequence[float]], float]) -> float:
    return statistics.median(of_run(step_s) for step_s in runs)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="BYTES/VARIABLES", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="optimizer of the variables (default adam)")
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "sockets", "grpc"),
        default="auto",
        help="transport of gradients and variables (default: what the SDK chooses)",
    )
    parser.add_argument("--saves", type=at_least_one, default=4, help="checkpoints of a run that is saved now and then (default 4)")
    parser.add_argument("--between", type=int, help="steps between two of them, more than 3; 200 to 40 by size")
    parser.add_argument("--repeat", type=at_least_one, default=2, help="turns (default 2)")
    add_json(parser)
