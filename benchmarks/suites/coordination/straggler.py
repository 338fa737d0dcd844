"""Late workers, with and without backup workers. Knows the arms, the table, and what one worker does."""

import argparse
import dataclasses
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.processes import Cluster
from benchmarks.harness.worker import Station
from benchmarks.report.plot import CannotPlot, check_plot, plot_stragglers
from benchmarks.report.straggler_figures import Look, RunOfArm, StragglerReport, arm_figures, predict, run_of_arm
from lockstep.demo.digits import Examples, evaluate, initial_values, load_digits, loss_and_gradients, split
from lockstep.launcher.spec import ClusterSpec
from lockstep.planning.simulation import SimulationResult
from lockstep.planning.trace import HEADER
from ps_protocol.model.variables import Array
from ps_protocol.process.options import MAX_STEPS
from worker_client import Session

SEED = 7
BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerWork:
    """What every worker is given: a batch takes `pace_s` seconds at least, and with `probability` `delay_s` seconds more."""

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
    train, test = split(load_digits())
    with worker_client.connect() as session:
        session.create_or_join(initial_values(seed=SEED), optimizer=worker_client.sgd(work.learning_rate))
        station.await_go()
        report = _train(session, train.part(session.worker_index, num_parts=work.num_workers), test, work)
        station.say("done", report=dataclasses.asdict(report))


def _train(session: Session, part: Examples, test: Examples, work: StragglerWork) -> StragglerReport:
    worker = session.worker_index
    steps, began_at, computed_s = [], [], []
    kept: list[tuple[int, float, dict[str, Array]]] = []
    num_accepted = num_delayed = 0
    while not session.is_finished:
        step, begin = session.local_step, time.monotonic()
        variables, gradients = session.views(), session.gradient_buffers()
        if worker == 0 and (not kept or step >= kept[-1][0] + work.look_every):
            kept.append((step, begin, _copy(variables)))  # looked at when nobody waits
        batch = part.batch(BATCH_SIZE, worker=worker, step=step)
        loss_and_gradients(variables, batch.images, batch.labels, into=gradients)
        delayed_s = delay_s(work, worker=worker, step=step)
        threading.Event().wait(max(0.0, work.pace_s + delayed_s - (time.monotonic() - begin)))
        steps.append(step)
        began_at.append(begin)
        computed_s.append(time.monotonic() - begin)
        num_delayed += delayed_s > 0
        num_accepted += session.step(gradients).is_accepted
    ended_at = time.monotonic()
    if worker == 0:
        kept.append((session.local_step, ended_at, _copy(session.views())))
    return StragglerReport(
        steps=steps,
        began_at=began_at,
        computed_s=computed_s,
        num_accepted=num_accepted,
        num_delayed=num_delayed,
        ended_at=ended_at,
        last_step=session.local_step,
        looks=[_look(step, at, variables, test) for step, at, variables in kept],
    )


def _copy(variables: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in variables.items()}


def _look(step: int, at: float, variables: dict[str, Array], test: Examples) -> Look:
    found = evaluate(variables, test.images, test.labels)
    return Look(step=step, at=at, loss=found.loss, accuracy=found.accuracy)


_TIMEOUT_S = 600.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_COLUMNS = (
    *("arm", "mean step", "median", "90 %", "99 %", "steps/s", "dropped", "loss, accuracy at the end"),
    *("after the time of the fastest arm", "predicted step", "predicted dropped"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all arms by turns, prints the table, and returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    backups = sorted({int(number) for number in options.backups.split(",")} | {0})
    try:
        if options.plot is not None:
            check_plot(options.plot)
    except CannotPlot as error:
        parser.error(str(error))
    arms = _run_arms(options, backups)
    if options.trace is not None:
        rows = [row.text for run in arms[0] for row in run.trace]
        options.trace.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    report = _report(options, arms)
    if options.plot is not None:
        _plot(options, arms, report)
    if options.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _run_arms(options: argparse.Namespace, backups: Sequence[int]) -> dict[int, list[RunOfArm]]:
    """Returns the runs of each number of backups. One arm after the other, again and again, so that a busy minute falls on all."""
    arms: dict[int, list[RunOfArm]] = {number: [] for number in backups}
    for number in range(options.repeat):
        for num_backups in backups:
            run = _run(options, num_backups=num_backups, seed=options.seed + number)
            arms[num_backups].append(run)
            mean_ms = 1e3 * statistics.fmean(run.step_s)
            print(f"R={run.num_required} run {number + 1}: mean step {mean_ms:.1f} ms", file=sys.stderr, flush=True)
    return arms


def _run(options: argparse.Namespace, *, num_backups: int, seed: int) -> RunOfArm:
    """Trains once, with processes for all roles. Raises LaunchFailed in the words of what failed."""
    spec = ClusterSpec(num_ps=options.ps, num_workers=options.workers, num_backups=num_backups, passed_on={MAX_STEPS: options.steps})
    work = StragglerWork(
        num_workers=options.workers,
        learning_rate=options.learning_rate,
        pace_s=options.pace,
        delay_s=options.delay,
        probability=options.probability,
        seed=seed,
        look_every=max(1, options.steps // 60),
    )
    with Cluster(spec) as cluster:
        cluster.local.start_roles(environment=_ONE_THREAD)
        cluster.start_workers("benchmarks.suites.coordination.straggler", work, environment=_ONE_THREAD)
        cluster.processes.await_events("up", options.workers, timeout_s=_TIMEOUT_S)
        cluster.processes.go()
        cluster.processes.await_events("done", options.workers, timeout_s=_TIMEOUT_S)
    reports = [_report_of(event["report"]) for event in cluster.processes.by_process("done")]
    return run_of_arm(reports, num_required=spec.replicas_to_aggregate)


def _report_of(fields: dict[str, object]) -> StragglerReport:
    looks = fields.pop("looks")
    assert isinstance(looks, list)
    return StragglerReport(**fields, looks=[Look(**look) for look in looks])  # type: ignore[arg-type]


def _report(options: argparse.Namespace, arms: dict[int, list[RunOfArm]]) -> dict[str, object]:
    """Returns all figures, with what `lockstep plan` predicts from the trace of the arm without backups."""
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


def _plot(options: argparse.Namespace, arms: dict[int, list[RunOfArm]], report: dict[str, object]) -> None:
    rows: list[dict[str, object]] = report["arms"]  # type: ignore[assignment]
    names = {number: f"R={options.workers - number} of T={options.workers}" for number in arms}
    title = f"{options.workers} workers, each {1e3 * options.delay:g} ms late in a step with probability {options.probability:g}"
    predicted = {names[number]: row["predicted"]["mean_ms"] for number, row in zip(arms, rows, strict=True)}  # type: ignore[index]
    plot_stragglers(options.plot, title=title, arms={names[number]: runs for number, runs in arms.items()}, predicted_ms=predicted)


def _print_table(report: dict[str, object]) -> None:
    print("| " + " | ".join(_COLUMNS) + " |\n| " + " | ".join(["---"] * len(_COLUMNS)) + " |")
    rows: list[dict] = report["arms"]  # type: ignore[assignment,type-arg]
    for row in rows:
        end, at_time, predicted = row["same_steps"], row["same_time"], row["predicted"]
        cells = [
            f"R={row['num_required']}",
            *(f"{row[name]:.1f} ms" for name in ("mean_ms", "median_ms", "p90_ms", "p99_ms")),
            f"{row['steps_per_s']:.2f}",
            f"{row['num_dropped']} ({row['dropped']:.1%})",
            f"{end['loss']:.4f}, {end['accuracy']:.4f}",
            f"step {at_time['step']:.0f}: {at_time['loss']:.4f}, {at_time['accuracy']:.4f}",
            f"{predicted['mean_ms']:.1f} ms",
            f"{predicted['dropped']:.1%}",
        ]
        print("| " + " | ".join(cells) + " |")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks run straggler",
        description="Learns the digits with real processes; each worker is late at random steps, the same ones in every arm."
        " Arms differ in how many of the slowest workers a step does not wait for, and run by turns.",
    )
    parser.add_argument("--workers", type=int, default=5, help="workers, T (default 5)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--backups", default="0,1,2", metavar="B,B", help="backup workers of each arm; 0 is always there (default 0,1,2)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a training (default 300)")
    parser.add_argument("--pace", type=float, default=0.02, metavar="S", help="seconds that a batch takes at least (default 0.02)")
    parser.add_argument("--delay", type=float, default=0.2, metavar="S", help="seconds that a late worker takes more (default 0.2)")
    parser.add_argument("--probability", type=float, default=0.2, metavar="P", help="of a worker to be late in a step (default 0.2)")
    parser.add_argument("--learning-rate", type=float, default=0.3, metavar="X", help="with SGD (default 0.3)")
    parser.add_argument("--seed", type=int, default=1, help="of the delays; each repetition has another (default 1)")
    parser.add_argument("--repeat", type=int, default=2, help="trainings of each arm (default 2)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of the arm without backups, for lockstep plan")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs the extra bench")
    return parser
