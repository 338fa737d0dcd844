"""Computing times by worker and step: reading, writing, and recording from statuses. Knows no chief and no file."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping

from lockstep.planning.simulation import MAX_WORKERS
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterStatus, ParticipantKind, ParticipantStatus

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


# Computing times of a running cluster, from consecutive statuses of its chief.
#
# The chief does not know when a worker computes. But it counts each worker's contributions, and reports when the open step was opened: that
# is when the workers that had contributed to the previous step began. So a time runs from there to the status that first counts the
# contribution, and includes reading and pushing. Uncertain times are left out.


@light_dataclass(slots=True, kw_only=True)
class _Seen:
    """The last status of one incarnation of a worker: its counts, and when it began to compute for `step` (None: unknown, or it waits)."""

    incarnation: int
    num_contributions: int
    num_stale: int
    began_at: float | None = None
    step: int = 0
    waits_in: int | None = None  # the step that it has contributed to


class TimesRecorder:
    """Derives computing times from statuses, given in order of time. Only under the policy sync with strict tokens."""

    def __init__(self) -> None:
        self._workers: dict[int, _Seen] = {}
        self._last_at = 0.0
        self._last_step = 0

    def observe(self, status: ClusterStatus, *, at: float) -> list[ComputingTime]:
        """Returns the computations that have ended since the previous status; `at`: the time of the status by any clock, in seconds.

        Raises InvalidSpec if workers do not begin when a step is opened.
        """
        _check_strict(status)
        rows = []
        for one in status.participants:
            if one.kind is not ParticipantKind.WORKER or one.state != "live":
                continue
            seen = self._workers.get(one.index)
            if seen is None or seen.incarnation != one.incarnation:
                self._workers[one.index] = _first_seen(one, status)
                continue
            if (row := self._row_of_change(seen, one, status, at)) is not None:
                rows.append(row)
            if seen.waits_in is not None and status.global_step > seen.waits_in:
                # It was released when the step after its own was opened: that time is known if that step is still open.
                seen.began_at = at - status.step_age_s if status.global_step == seen.waits_in + 1 else None
                seen.step, seen.waits_in = status.global_step, None
        self._last_at, self._last_step = at, status.global_step
        return rows

    def _row_of_change(self, seen: _Seen, one: ParticipantStatus, status: ClusterStatus, at: float) -> ComputingTime | None:
        is_stale, num_new = one.num_stale > seen.num_stale, _count(one) - seen.num_contributions
        if not num_new:
            return None
        began_at, ended_at, step = seen.began_at, (self._last_at + at) / 2, seen.step
        seen.num_contributions, seen.num_stale, seen.began_at = _count(one), one.num_stale, None
        seen.waits_in = status.global_step if one.is_waiting else self._last_step
        if num_new > 1:
            seen.waits_in = status.global_step if one.is_waiting else None
            return None
        if is_stale and not one.is_waiting:
            # A stale contribution is answered with a token at once.
            seen.began_at, seen.step, seen.waits_in = ended_at, status.global_step, None
        if began_at is None or ended_at <= began_at:
            return None
        return ComputingTime(worker=one.index, step=step, seconds=ended_at - began_at)


def _check_strict(status: ClusterStatus) -> None:
    if not status.policy.needs_many_workers:
        raise InvalidSpec(
            f"the cluster's policy is {status.policy.text}: times can be recorded under sync only; let the program write them itself"
        )
    if status.total_num_replicas and status.replicas_to_aggregate > status.total_num_replicas:
        needs = f"{status.replicas_to_aggregate} contributions of {status.total_num_replicas} workers"
        raise InvalidSpec(f"a step needs {needs}: so it is unknown when each begins; let the program write the times itself")


def _first_seen(one: ParticipantStatus, status: ClusterStatus) -> _Seen:
    waits_in = status.global_step if one.is_waiting else None
    return _Seen(incarnation=one.incarnation, num_contributions=_count(one), num_stale=one.num_stale, waits_in=waits_in)


def _count(one: ParticipantStatus) -> int:
    return one.num_accepted + one.num_stale + one.num_late
