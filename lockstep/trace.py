"""A trace: how long each worker computed for each step, as CSV or JSON lines. Reads and writes its text; knows no cluster and no file."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.simulation import MAX_WORKERS
from ps_protocol.errors import InvalidSpec

HEADER = "worker,step,seconds"
_FIELDS = HEADER.split(",")
_MAX_ROWS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One computation: by which worker, from the variables of which step, and how long it took."""

    worker: int
    step: int
    seconds: float

    @property
    def text(self) -> str:
        """The row's line in a CSV file."""
        return f"{self.worker},{self.step},{self.seconds:.6f}"


def parse_trace(lines: Iterable[str], *, name: str) -> Iterator[TraceRow]:
    """Yields the rows of a trace: CSV with a heading, or one JSON object a line; other columns are ignored.

    Raises InvalidSpec, which names the line, with `name` for the file.
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


def times_by_worker(rows: Iterable[TraceRow]) -> dict[int, list[float]]:
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
            raise InvalidSpec(f"{name} line {number}: not JSON: {error}") from error
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


def _row(fields: Mapping[str, object], *, where: str) -> TraceRow:
    worker = _whole(fields, "worker", limit=MAX_WORKERS - 1, where=where)
    step = _whole(fields, "step", limit=1 << 62, where=where)
    given = fields.get("seconds")
    seconds = _number(given)
    if not 0 < seconds < 1e6:
        raise InvalidSpec(f"{where}: seconds: got {str(given)[:40]!r}, want a number > 0")
    return TraceRow(worker=worker, step=step, seconds=seconds)


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
