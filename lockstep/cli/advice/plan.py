"""`lockstep plan`: says how many backup workers pay off, and records times. Knows terminal, files and chief; simulates nothing."""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.formatting import duration_text, table
from lockstep.cli.results import CommandFailed, CommandResult
from lockstep.cli.watch.recordings import statuses
from lockstep.planning.latencies import Latency, latency_of, measured, numbers_of, with_failures, with_stragglers
from lockstep.planning.plan import Plan, Question, make_plan
from lockstep.planning.simulation import Costs
from lockstep.planning.times import HEADER, ComputingTime, TimesRecorder, parse_times, times_by_worker
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import Chief, ClusterState

# The result of `lockstep plan` as text: tables and a recommendation.


def plan_text(plan: Plan) -> str:
    """Returns tables and the recommendation as text."""
    question = plan.question
    head = f"{question.size_text}; computing: {question.latency.text}{_costs_words(question.costs)}"
    steps = f"{plan.rows[0].num_steps} simulated steps each, seed {question.seed}"
    parts = [f"{head}\n{steps}", table(list(_planned_rows(plan)))]
    if plan.compared:
        parts.append(table(list(_compared_rows(plan)), left=(0,)))
    return "\n\n".join([*parts, "\n".join(_advice(plan))])


def _costs_words(costs: Costs) -> str:
    named = {"calls": costs.calls_s, "send": costs.send_s, "receive": costs.receive_s, "apply": costs.apply_s}
    return "".join(f"; {name} {duration_text(value)}" for name, value in named.items() if value)


def _planned_rows(plan: Plan) -> Iterator[Sequence[str]]:
    yield ("b", "R", "T", "step", "±", "median", "90 %", "dropped", "efficiency", "speed/worker", "")
    for row in plan.rows:
        times = (_time_text(row.step_s), _time_text(row.step_error_s), _time_text(row.median_step_s), _time_text(row.p90_step_s))
        marks = "← recommended" if row is plan.best else ""
        shares = (f"{row.dropped:.1%}", f"{row.efficiency:.1%}", f"{plan.speed(row):.3f}")
        yield (str(row.num_backups), str(row.num_required), str(row.num_workers), *times, *shares, marks)


def _compared_rows(plan: Plan) -> Iterator[Sequence[str]]:
    yield ("policy", "R", "T", "step", "efficiency", "speed/worker", "mean staleness", "greatest")
    for row in plan.compared:
        figures = (f"{row.efficiency:.1%}", f"{plan.speed(row):.3f}", f"{row.mean_staleness:.1f}", str(row.max_staleness))
        yield (row.policy, str(row.num_required), str(row.num_workers), _time_text(row.step_s), *figures)


def _advice(plan: Plan) -> Iterator[str]:
    best, shortest = plan.best, plan.shortest
    flags = f"--workers {best.num_workers} --backup-workers {best.num_backups}"
    gain = f"{plan.speed(best) - 1:+.1%} contributions a second and worker against b = 0" if best.num_backups else "backups gain nothing"
    yield f"recommended: b = {best.num_backups} ({gain}): {flags}"
    if plan.question.num_required and shortest.num_backups > best.num_backups:
        by, more = f"{1 - shortest.step_s / best.step_s:.1%}", shortest.num_workers - best.num_workers
        yield f"the shortest step has b = {shortest.num_backups}: {by} shorter, but each worker gets less done ({more} more of them)"
    if plan.question.num_workers and best.num_backups:
        yield f"a step is then the mean of {best.num_required} contributions, not {best.num_workers}: its gradient is a little noisier"
    if best is plan.rows[-1] and len(plan.rows) > 1:
        yield f"more than {best.num_backups} backups were not tried; name them with --backup-workers"


def _time_text(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


_OVER = (ClusterState.FINISHED, ClusterState.FAILED)
# Policies beside sync by what a user writes: contributions ahead; R, and for how many seconds a step that has R waits for others.
_PLAIN = {one.name.lower(): one for one in PolicyName if one not in (PolicyName.SYNC, PolicyName.SSP, PolicyName.OUTER)}
_COMPARED = ("ssp:AHEAD", *_PLAIN, "outer:R", "outer:R:GRACE_S")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    source = parser.add_argument_group("computing times: one of these")
    source.add_argument("times", nargs="?", type=Path, metavar="TIMES", help=f"file with lines of {HEADER}, CSV with a heading or JSON")
    source.add_argument(
        "--latency", metavar="KIND", help="constant:SECONDS, lognormal:MEDIAN,SIGMA or exponential:LEAST,MEAN_OF_THE_REST, in seconds"
    )
    source.add_argument(
        "--record", type=Path, metavar="FILE", help="do not plan, but write the times of the running cluster of --chief to FILE"
    )
    size = parser.add_argument_group("workers and costs")
    size.add_argument("--workers", type=int, metavar="T", help="number of all workers, backups included (default: those of TIMES)")
    size.add_argument(
        "--replicas-to-aggregate",
        type=int,
        metavar="R",
        help="instead of --workers: contributions that a step needs; backup workers are added to them",
    )
    size.add_argument("--stragglers", metavar="P,FACTOR", help="each computation takes FACTOR times as long with the probability P")
    size.add_argument("--failures", metavar="EVERY,RESTART", help="a worker fails every so many seconds, and takes so many to restart")
    for name, words in (
        ("calls", "for the calls of one contribution, there and back"),
        ("send", "for the servers to send the variables to one worker alone"),
        ("receive", "for the servers to receive one contribution alone"),
        ("apply", "to apply a step"),
    ):
        size.add_argument(f"--{name}", type=float, default=0.0, metavar="S", help=f"seconds {words} (default 0)")
    run = parser.add_argument_group("the simulation")
    run.add_argument("--backup-workers", metavar="B,B,…", help="numbers of backup workers to try (default: some up to a fifth)")
    run.add_argument(
        "--compare", metavar="POLICIES", default="", help=f"other policies to simulate, separated by commas: {', '.join(_COMPARED)}"
    )
    run.add_argument("--steps", type=int, metavar="N", help="steps to simulate for each number (default: about 20000 contributions)")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random times (default 0)")
    record = parser.add_argument_group("recording")
    add_arguments(parser)
    record.add_argument(
        "--for", dest="duration", type=float, default=math.inf, metavar="S", help="seconds to record (default: until training ends)"
    )


def run_plan(arguments: argparse.Namespace) -> CommandResult:
    """Plans or records, and returns the plan, or what was recorded."""
    if sum(given is not None for given in (arguments.times, arguments.latency, arguments.record)) != 1:
        raise InvalidSpec("want one of TIMES, --latency and --record (see lockstep plan --help)")
    if arguments.record is not None:
        return _record(arguments)
    plan = make_plan(_question(arguments))
    return CommandResult(words=plan_text(plan), fields=plan.as_fields())


def _question(arguments: argparse.Namespace) -> Question:
    if arguments.workers is not None and arguments.replicas_to_aggregate is not None:
        raise InvalidSpec("--workers and --replicas-to-aggregate: give one of them; the other follows from the number of backups")
    for name, least in (("workers", 1), ("replicas_to_aggregate", 1), ("steps", 1), ("seed", 0)):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise InvalidSpec(f"--{name.replace('_', '-')}: got {value}, want {least} or more")
    latency: Latency = latency_of(arguments.latency) if arguments.latency is not None else _measured(arguments.times)
    num_workers: int | None = arguments.workers
    if num_workers is None and arguments.replicas_to_aggregate is None:
        if latency.num_workers is None:
            raise InvalidSpec("--latency: how many workers? give --workers T or --replicas-to-aggregate R")
        num_workers = latency.num_workers
    if arguments.stragglers is not None:
        probability, factor = numbers_of(arguments.stragglers, count=2, what="--stragglers", usage="P,FACTOR, for example 0.05,1.3")
        latency = with_stragglers(latency, probability=probability, factor=factor)
    if arguments.failures is not None:
        between_s, restart_s = numbers_of(arguments.failures, count=2, what="--failures", usage="EVERY,RESTART, for example 3600,120")
        latency = with_failures(latency, between_s=between_s, restart_s=restart_s)
    return Question(
        latency=latency,
        costs=Costs(calls_s=arguments.calls, send_s=arguments.send, receive_s=arguments.receive, apply_s=arguments.apply),
        num_workers=num_workers,
        num_required=arguments.replicas_to_aggregate,
        backups=_backups(arguments.backup_workers),
        compared=tuple(_policy(word) for word in arguments.compare.split(",") if word),
        num_rounds=arguments.steps,
        seed=arguments.seed,
    )


def _measured(path: Path) -> Latency:
    try:
        with path.open(encoding="utf-8") as lines:
            return measured(times_by_worker(parse_times(lines, name=str(path))))
    except OSError as error:
        raise InvalidSpec(f"{path}: {error.strerror}; want computing times; `lockstep plan --record FILE` makes them") from error
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"{path}: it is no text; want lines of {HEADER}") from error


def _backups(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise InvalidSpec(f"--backup-workers: got {text[:40]!r}, want whole numbers with commas between") from error


def _policy(word: str) -> PolicySpec:
    name, *numbers = word.strip().split(":")
    try:
        match name, numbers:
            case plain, [] if plain in _PLAIN:
                return PolicySpec(name=_PLAIN[plain])
            case "ssp", [ahead]:
                return PolicySpec(name=PolicyName.SSP, staleness=int(ahead))
            case "outer", [num_required, *grace_s] if len(grace_s) < 2:
                return PolicySpec(
                    name=PolicyName.OUTER, replicas_to_aggregate=int(num_required), grace_s=float(grace_s[0]) if grace_s else 0.0
                )
    except ValueError:  # a word that is no number
        pass
    raise InvalidSpec(f"--compare: got {word[:40]!r}, want {' or '.join(_COMPARED)}")


def _record(arguments: argparse.Namespace) -> CommandResult:
    if not arguments.duration >= 0.001:
        raise InvalidSpec(f"--for: got {arguments.duration:g}, want 0.001 or more seconds")
    path: Path = arguments.record
    rows: list[ComputingTime] = []
    with chief_of(arguments) as chief:
        try:
            with path.open("x", encoding="utf-8") as file:
                try:
                    _write_times(chief, file, rows, seconds=arguments.duration)
                finally:
                    if not rows:
                        path.unlink()
        except FileExistsError as error:
            raise InvalidSpec(f"{path}: it exists; name another file") from error
        except OSError as error:
            raise InvalidSpec(f"{path}: {error.strerror}; name a file that can be written") from error
    if not rows:
        raise CommandFailed(f"{path} is not written: no worker made two contributions; record for longer")
    median_s, num_workers = statistics.median(row.seconds for row in rows), len({row.worker for row in rows})
    return CommandResult(
        words=f"{path}: {len(rows)} times of {num_workers} workers, median {duration_text(median_s)}",
        fields={"file": str(path), "num_times": len(rows), "num_workers": num_workers, "median_s": median_s},
    )


def _write_times(chief: Chief, file: TextIO, rows: list[ComputingTime], *, seconds: float) -> None:
    """Writes each row as soon as it is known, until the time is up, Ctrl-C, or the end of training or of the chief."""
    recorder = TimesRecorder()
    print(HEADER, file=file, flush=True)
    try:
        for status, _ in statuses(chief, seconds=seconds):
            rows += (new := recorder.observe(status))
            file.writelines(f"{row.text}\n" for row in new)
            file.flush()
            if status.state in _OVER:
                return
    except KeyboardInterrupt:
        return
    except PsError as error:
        if not rows:
            raise
        print(f"lockstep plan: the recording ends here: {error.message}", file=sys.stderr)
