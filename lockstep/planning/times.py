"""Computing times by worker and step: reading, writing, and recording from ledgers. Knows no chief and no file."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping

from lockstep.planning.simulation import MAX_WORKERS
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterStatus, LedgerEntry

# Reading and writing: CSV or JSON lines with how long each worker computed for each step.


HEADER = "worker,step,seconds"
_FIELDS = HEADER.split(",")
_MAX_ROWS = 10_000_000


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ComputingTime:
    """One computation: its worker, the step of its variables, and its duration."""

    worker: int
    step: int
    seconds: float

    @property
    def text(self) -> str:
        """The row's line in a CSV file."""
        return f"{self.worker},{self.step},{self.seconds:.6f}"


def parse_times(lines: Iterable[str], *, name: str) -> Iterator[ComputingTime]:
    """Yields the rows of a file of times: CSV with a heading, or one JSON object a line; other columns are ignored.

    Raises InvalidSpec, which names the file as `name`, and the line.
    """
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise InvalidSpec(f"{name}: it is empty; want lines of {HEADER}")
    if first[1].lstrip().startswith("{"):
        rows = _json_rows([first], name=name), _json_rows(numbered, name=name)
    else:
        rows = iter(()), _csv_rows(first[1], numbered, name=name)
    count = 0
    for part in rows:
        for number, fields in part:
            count += 1
            if count > _MAX_ROWS:
                raise InvalidSpec(f"{name}: more than {_MAX_ROWS} rows; a part of them says the same")
            yield _row(fields, where=f"{name} line {number}")
    if not count:
        raise InvalidSpec(f"{name}: a heading and no rows; want lines of {HEADER}")


def times_by_worker(rows: Iterable[ComputingTime]) -> dict[int, list[float]]:
    """Returns each worker's times, in the order of the rows."""
    times: dict[int, list[float]] = {}
    for row in rows:
        times.setdefault(row.worker, []).append(row.seconds)
    return times


def _json_rows(numbered: Iterable[tuple[int, str]], *, name: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in numbered:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidSpec(f"{name} line {number}: not JSON: {error}; want lines of {HEADER}") from error
        if isinstance(fields, dict) and "traceEvents" in fields:
            raise InvalidSpec(
                f"{name}: this is a recording of `lockstep trace`, for Perfetto; want computing times, lines of {HEADER}:"
                " `lockstep plan --record times.csv` makes them"
            )
        if not isinstance(fields, dict):
            raise InvalidSpec(f'{name} line {number}: want an object like {{"worker": 0, "step": 7, "seconds": 1.25}}')
        yield number, fields


def _csv_rows(heading: str, numbered: Iterable[tuple[int, str]], *, name: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    columns = [column.strip().lower() for column in heading.strip().removeprefix("\ufeff").split(",")]
    if missing := [field for field in _FIELDS if field not in columns]:
        raise InvalidSpec(f"{name}: no column {missing[0]!r} in its first line; want a heading with {HEADER}")
    for number, line in numbered:
        try:
            values = next(csv.reader([line.strip()]))
        except csv.Error as error:
            raise InvalidSpec(f"{name} line {number}: {error}") from error
        if len(values) != len(columns):
            raise InvalidSpec(f"{name} line {number}: {len(values)} values, want {len(columns)} as in the heading")
        yield number, dict(zip(columns, values, strict=True))


def _row(fields: Mapping[str, object], *, where: str) -> ComputingTime:
    worker = _whole(fields, "worker", limit=MAX_WORKERS - 1, where=where)
    step = _whole(fields, "step", limit=1 << 62, where=where)
    given = fields.get("seconds")
    seconds = _number(given)
    if not 0 < seconds < 1e6:
        raise InvalidSpec(f"{where}: seconds: got {str(given)[:40]!r}, want a number > 0")
    return ComputingTime(worker=worker, step=step, seconds=seconds)


def _whole(fields: Mapping[str, object], name: str, *, limit: int, where: str) -> int:
    given = fields.get(name)
    value = _number(given)
    if not (0 <= value <= limit and value == int(value)):
        raise InvalidSpec(f"{where}: {name}: got {str(given)[:40]!r}, want a whole number from 0 to {limit}")
    return int(value)


def _number(given: object) -> float:
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        return math.nan
    try:
        return float(given)
    except (ValueError, OverflowError):
        return math.nan


# Computing times of a running cluster, from the ledger of its chief, which has when each contribution to a step came: where all workers
# begin when a step is opened, that is how long each took, reading and pushing included.


class TimesRecorder:
    """Derives computing times from statuses with their ledgers, given in order of time. Only where every step needs all workers."""

    def __init__(self) -> None:
        self._next_step: int | None = None
        self._seen: set[tuple[int, int]] = set()

    def observe(self, status: ClusterStatus) -> list[ComputingTime]:
        """Returns the computations of steps that earlier statuses did not have. Raises InvalidSpec if a step does not need all workers."""
        _check_needs_all(status)
        entries = sorted(status.ledger, key=lambda entry: entry.step)
        # What came before the first status may have been made under another policy: it shows only who was there.
        begin = status.global_step if self._next_step is None else self._next_step
        self._next_step = status.global_step  # less than before after a rollback, whose steps are computed again
        return [row for entry in entries for row in self._rows(entry) if entry.step >= begin]

    def _rows(self, entry: LedgerEntry) -> Iterator[ComputingTime]:
        for push, arrival_us in zip(entry.contributors, entry.arrivals_us, strict=False):
            who = push.worker, push.incarnation
            # The first contribution of a worker has its start in it.
            if who in self._seen and arrival_us:
                yield ComputingTime(worker=push.worker, step=entry.step, seconds=arrival_us / 1e6)
            self._seen.add(who)


def _check_needs_all(status: ClusterStatus) -> None:
    if not status.policy.needs_many_workers:
        raise InvalidSpec(
            f"the cluster's policy is {status.policy.text}: times can be recorded under sync only; let the program write them itself"
        )
    if status.total_num_replicas and status.replicas_to_aggregate != status.total_num_replicas:
        needs = f"{status.replicas_to_aggregate} contributions of {status.total_num_replicas} workers"
        raise InvalidSpec(
            f"a step needs {needs}, so that not all times are known; record without backup workers, or let the program write them"
        )
