"""Measures late workers, with and without backup workers. Knows the arms, the table, and the worker's code."""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json, add_plot, check_files, show
from benchmarks.harness.worker import Station
from benchmarks.report.figures import table_lines
from benchmarks.report.plot import plot_stragglers
from benchmarks.report.straggler_figures import Look, RunOfArm, StragglerReport, arm_figures, predict, run_of_arm
from benchmarks.suites.coordination.learning import BATCH_SIZE, keep_pace, learn, run_workers
from lockstep.demo.digits import NETWORK, Examples, evaluate
from lockstep.launcher.spec import ClusterSpec
from lockstep.planning.simulation import SimulationResult
from lockstep.planning.times import HEADER
from ps_protocol.model.variables import Array
from worker_client import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerWork:
    """The workers' orders: a batch takes at least `pace_s` seconds, and `delay_s` seconds more with `probability`."""

    num_workers: int
    learning_rate: float
    pace_s: float
    delay_s: float
    probability: float
    seed: int
    look_every: int


def delay_s(work: StragglerWork, *, worker: int, step: int) -> float:
    """Returns the delay of a worker in a step: the same for the same seed, however many contributions a step needs."""
    drawn = np.random.default_rng((work.seed, worker, step)).random()
    return work.delay_s if drawn < work.probability else 0.0


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process until the cluster is finished."""
    work = StragglerWork(**orders)
    learn(station, partial(_train, work), learning_rate=work.learning_rate, num_workers=work.num_workers)


def _train(work: StragglerWork, session: Session, part: Examples, test: Examples) -> dict[str, Any]:
    worker = session.worker_index
    steps, began_at, computed_s = [], [], []
    kept: list[tuple[int, float, dict[str, Array]]] = []
    num_accepted = num_delayed = 0
    while not session.is_finished:
        step, begin = session.local_step, time.monotonic()
        variables, gradients = session.views(), session.gradient_buffers()
        if worker == 0 and (not kept or step >= kept[-1][0] + work.look_every):
            kept.append((step, begin, _copy(variables)))  # evaluated after training
        batch = part.batch(BATCH_SIZE, worker=worker, step=step)
        NETWORK.loss_and_gradients(variables, batch.images, batch.labels, into=gradients)
        delayed_s = delay_s(work, worker=worker, step=step)
        keep_pace(begin, pace_s=work.pace_s + delayed_s)
        steps.append(step)
        began_at.append(begin)
        computed_s.append(time.monotonic() - begin)
        num_delayed += delayed_s > 0
        num_accepted += session.step(gradients).is_accepted
    ended_at = time.monotonic()
    if worker == 0:
        kept.append((session.local_step, ended_at, _copy(session.views())))
    report = StragglerReport(
        steps=steps,
        began_at=began_at,
        computed_s=computed_s,
        num_accepted=num_accepted,
        num_delayed=num_delayed,
        ended_at=ended_at,
        last_step=session.local_step,
        looks=[_look(step, at, variables, test) for step, at, variables in kept],
    )
    return asdict(report)


def _copy(variables: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in variables.items()}


def _look(step: int, at: float, variables: dict[str, Array], test: Examples) -> Look:
    found = evaluate(variables, test.images, test.labels)
    return Look(step=step, at=at, loss=found.loss, accuracy=found.accuracy)


_COLUMNS = (
    *("arm", "mean step", "median", "90 %", "99 %", "steps/s", "dropped", "loss, accuracy at the end"),
    *("after the time of the fastest arm", "predicted step", "predicted dropped"),
)

DESCRIPTION = (
    "Learns the digits with real processes; each worker is late at random steps, the same ones in every arm."
    " Arms differ in how many of the slowest workers a step does not wait for, and run by turns."
)


def run(options: argparse.Namespace) -> int:
    """Runs all arms alternately, prints the table, and returns 0."""
    check_files(options)
    backups = sorted({int(number) for number in options.backups.split(",")} | {0})
    arms = _run_arms(options, backups)
    if options.times is not None:
        rows = [row.text for run in arms[0] for row in run.times]
        options.times.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    report = _report(options, arms)
    if options.plot is not None:
        _plot(options, arms, report)
    show(report, in_words, options)
    return 0


def _run_arms(options: argparse.Namespace, backups: Sequence[int]) -> dict[int, list[RunOfArm]]:
    """Returns the runs of each number of backups. Arms alternate, so that a busy minute of the machine affects all of them."""
    arms: dict[int, list[RunOfArm]] = {number: [] for number in backups}
    for number in range(options.repeat):
        for num_backups in backups:
            run = _run(options, num_backups=num_backups, seed=options.seed + number)
            arms[num_backups].append(run)
            options.progress.advance(1, total=options.repeat * len(backups))
            mean_ms = 1e3 * statistics.fmean(run.step_s)
            print(f"R={run.num_required} run {number + 1}: mean step {mean_ms:.1f} ms", file=sys.stderr, flush=True)
    return arms


def _run(options: argparse.Namespace, *, num_backups: int, seed: int) -> RunOfArm:
    """Trains once, with processes for all roles. Raises LaunchFailed with the error's output."""
    spec = ClusterSpec(ps=options.ps, workers=options.workers, backup_workers=num_backups, max_steps=options.steps)
    work = StragglerWork(
        num_workers=options.workers,
        learning_rate=options.learning_rate,
        pace_s=options.pace,
        delay_s=options.delay,
        probability=options.probability,
        seed=seed,
        look_every=max(1, options.steps // 60),
    )
    reports = run_workers(spec, "benchmarks.suites.coordination.straggler", work)
    return run_of_arm([_report_of(report) for report in reports], num_required=spec.num_required)


def _report_of(fields: dict[str, Any]) -> StragglerReport:
    return StragglerReport(**{**fields, "looks": [Look(**look) for look in fields["looks"]]})


def _report(options: argparse.Namespace, arms: dict[int, list[RunOfArm]]) -> dict[str, Any]:
    """Returns all figures, with the predictions of `lockstep plan` from the computing times of the arm without backups."""
    same_time_s = min(statistics.median(run.seconds for run in runs) for runs in arms.values())
    rows = {number: arm_figures(runs, same_time_s=same_time_s) for number, runs in arms.items()}
    calls_s = statistics.median(run.overhead_s for run in arms[0])
    predictions = predict(arms[0], num_workers=options.workers, backups=list(arms), calls_s=calls_s, seed=options.seed)
    for number, prediction in zip(rows, predictions, strict=True):
        rows[number] = {"num_backups": number, **rows[number], "predicted": _prediction(prediction)}
    setting = {name: getattr(options, name) for name in ("workers", "ps", "steps", "pace", "delay", "probability", "repeat", "seed")}
    return {"setting": setting, "calls_s": calls_s, "arms": list(rows.values())}


def _prediction(row: SimulationResult) -> dict[str, float]:
    return {"mean_ms": 1e3 * row.step_s, "median_ms": 1e3 * row.median_step_s, "p90_ms": 1e3 * row.p90_step_s, "dropped": row.dropped}


def _plot(options: argparse.Namespace, arms: dict[int, list[RunOfArm]], report: dict[str, Any]) -> None:
    names = {number: f"R={options.workers - number} of T={options.workers}" for number in arms}
    title = f"{options.workers} workers, each {1e3 * options.delay:g} ms late in a step with probability {options.probability:g}"
    predicted = {names[number]: row["predicted"]["mean_ms"] for number, row in zip(arms, report["arms"], strict=True)}
    plot_stragglers(options.plot, title=title, arms={names[number]: runs for number, runs in arms.items()}, predicted_ms=predicted)


def in_words(report: dict[str, Any]) -> str:
    """Returns the report as a table in Markdown."""
    return "\n".join(table_lines(_COLUMNS, map(_cells, report["arms"])))


def _cells(row: dict[str, Any]) -> list[str]:
    end, at_time, predicted = row["same_steps"], row["same_time"], row["predicted"]
    return [
        f"R={row['num_required']}",
        *(f"{row[name]:.1f} ms" for name in ("mean_ms", "median_ms", "p90_ms", "p99_ms")),
        f"{row['steps_per_s']:.2f}",
        f"{row['num_dropped']} ({row['dropped']:.1%})",
        f"{end['loss']:.4f}, {end['accuracy']:.4f}",
        f"step {at_time['step']:.0f}: {at_time['loss']:.4f}, {at_time['accuracy']:.4f}",
        f"{predicted['mean_ms']:.1f} ms",
        f"{predicted['dropped']:.1%}",
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=int, default=5, help="workers, T (default 5)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--backups", default="0,1,2", metavar="B,B", help="backup workers of each arm; 0 is always there (default 0,1,2)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a training (default 300)")
    parser.add_argument("--pace", type=float, default=0.02, metavar="S", help="seconds that a batch takes at least (default 0.02)")
    parser.add_argument("--delay", type=float, default=0.2, metavar="S", help="seconds that a late worker takes more (default 0.2)")
    parser.add_argument(
        "--probability", type=float, default=0.2, metavar="P", help="probability that a worker is late in a step (default 0.2)"
    )
    parser.add_argument("--learning-rate", type=float, default=0.3, metavar="X", help="with SGD (default 0.3)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the delays; each repetition has another (default 1)")
    parser.add_argument("--repeat", type=int, default=2, help="trainings of each arm (default 2)")
    parser.add_argument("--times", type=Path, metavar="FILE", help="write the times of the arm without backups, for lockstep plan")
    add_json(parser)
    add_plot(parser)
