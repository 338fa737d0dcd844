"""Late workers, with and without backup workers. Knows the arms and the table."""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report.plot import CannotPlot, check_plot
from benchmarks.report.straggler_figures import RunOfArm, arm_figures, predict, run_of_arm
from benchmarks.report.straggler_plot import plot_stragglers
from benchmarks.suites.straggler_worker import Look, StragglerReport, StragglerWork
from lockstep.launcher.cluster import ClusterSpec, LocalCluster, last_lines
from lockstep.launcher.supervisor import Interrupted, LaunchFailed, Supervisor
from lockstep.planning.simulation import SimulationResult
from lockstep.planning.trace import HEADER

_POLL_S = 0.05
_TIMEOUT_S = 600.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_COLUMNS = (
    *("arm", "mean step", "median", "90 %", "99 %", "steps/s", "dropped", "loss, accuracy at the end"),
    *("after the time of the fastest arm", "predicted step", "predicted dropped"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all arms by turns, prints the table, and returns 0."""
    options = _parser().parse_args(arguments)
    backups = sorted({int(number) for number in options.backups.split(",")} | {0})
    try:
        if options.plot is not None:
            check_plot(options.plot)
        arms = _run_arms(options, backups)
    except (CannotPlot, LaunchFailed) as error:
        print(f"benchmarks.suites.straggler: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"benchmarks.suites.straggler: {interrupted}", file=sys.stderr)
        return interrupted.exit_code
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
    spec = ClusterSpec(num_ps=options.ps, num_workers=options.workers, num_backups=num_backups, max_steps=options.steps)
    reports: dict[str, StragglerReport] = {}
    up: set[str] = set()

    def hear(name: str, line: str) -> None:
        if line.startswith('{"event": "up"'):
            up.add(name)
        elif line.startswith('{"event": "done"'):
            reports[name] = _report_of(json.loads(line)["report"])
        elif name.startswith("worker"):
            print(f"{name}: {line}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=hear) as supervisor:
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles(environment=_ONE_THREAD)
        go = supervisor.directory / "go"
        work = StragglerWork(
            num_workers=options.workers,
            learning_rate=options.learning_rate,
            pace_s=options.pace,
            delay_s=options.delay,
            probability=options.probability,
            seed=seed,
            look_every=max(1, options.steps // 60),
            go=str(go),
        )
        command = [sys.executable, "-m", "benchmarks.suites.straggler_worker", json.dumps(dataclasses.asdict(work))]
        cluster.start_workers(command, environment=_ONE_THREAD)
        for _ in _polls(supervisor):
            if len(up) == options.workers and not go.exists():
                go.touch()
            if len(reports) == options.workers:
                return run_of_arm([reports[name] for name in sorted(reports)], num_required=spec.replicas_to_aggregate)
    raise LaunchFailed(f"R={spec.replicas_to_aggregate}: not finished within {_TIMEOUT_S:g} s")


def _polls(supervisor: Supervisor) -> Iterator[None]:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for process in supervisor.poll(timeout_s=_POLL_S):
            if process.returncode:
                raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
        yield


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
        prog="python -m benchmarks.suites.straggler",
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


if __name__ == "__main__":
    sys.exit(main())
