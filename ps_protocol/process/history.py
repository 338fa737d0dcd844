"""The files of a history, which `lockstep audit` reads: what a process did and received, record by record. Knows files; no role.

A process writes segments NAME.000001.history, NAME.000002.history, … A segment is a run of records: the length of a message (four bytes),
the message, its content. Each record goes to the system as soon as it is made, so that a process that is killed leaves everything but
perhaps the end of its last record. Nothing is written over, and nothing is read that could run.

A history has a bound: the oldest segments go. So each segment begins with an event that can be understood without those before it.
"""

import hashlib
import logging
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from google.protobuf.message import DecodeError

from ps_protocol.errors import DataLoss, InvalidSpec, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process.options import HISTORY_MAX_BYTES
from ps_protocol.roles import history as events
from ps_protocol.roles.history import Event
from ps_protocol.v1.history_pb2 import HistoryRecord
from ps_protocol.wire import codec

log = logging.getLogger("lockstep.history")

FORMAT = 2
_SUFFIX = ".history"
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,40}")
# A segment is full with this part of all that a process may keep.
_NUM_SEGMENTS = 8
_MAX_MESSAGE_BYTES = 64 << 20
_LENGTH_BYTES = 4
# What the system takes in one call.
_MAX_PIECES = 1000
# So often a reader looks for the segments of a cluster that removes them meanwhile.
_MAX_LOOKS = 100
# Rows in a file have their slots between them, and are copied: so many at a time, for all may be more than there is memory.
_ROWS_AT_ONCE = 1 << 12
_EVENTS: Mapping[str, Any] = {re.sub("(?<=.)[A-Z]", r"_\g<0>", event.__name__).lower(): event for event in get_args(Event)}
_FIELDS: Mapping[type, str] = {event: name for name, event in _EVENTS.items()}
# What happens to a server's values needs the values.
_NEEDS_EARLIER = (events.Configured, events.Applied, events.Arrived)


def can_begin(event: Event) -> bool:
    """Whether a segment may begin with this event: it says something without those before it."""
    return not isinstance(event, _NEEDS_EARLIER)


class HistoryWriter:
    """Implements History: appends records to new files in `directory`, which is made if it is missing. Thread-safe.

    `role`: for example "ps-0". Keeps `max_bytes` at most: the oldest segments go. Raises InvalidSpec if nothing can be written there. A
    later failure of the disk, or a record larger than all that may be kept, is logged once and ends the history, which stays readable up to
    there: a training must not end for a record of it.
    """

    def __init__(self, directory: str | Path, *, role: str, max_bytes: int = HISTORY_MAX_BYTES.default) -> None:
        if not _ROLE.fullmatch(role):
            raise InvalidSpec(f"history: got role {role!r}, want lower-case letters, digits and '-'")
        self._lock = threading.Lock()
        self._directory, self._role, self._max_bytes = Path(directory), role, max_bytes
        self._name = f"{role}-{time.time_ns()}-{os.getpid()}"
        self._number = self._segment = 0
        self._has_ended = False
        self._file = -1
        # Bytes of each segment that is kept; the last one grows.
        self._kept: dict[Path, int] = {}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._begin_segment()
        except OSError as error:
            raise InvalidSpec(f"history: nothing can be written to {str(directory)!r}: {error.strerror}; name another directory") from None

    def write(self, event: Event, pieces: Iterable[Array] = ()) -> None:
        """Appends one event; `pieces` are arrays, whose bytes are its content. Blocks while it writes."""
        with self._lock:
            if self._has_ended:
                return
            try:
                if self._kept[self._path] >= self._max_bytes // _NUM_SEGMENTS and can_begin(event):
                    self._begin_segment()
                self._append(event, list(pieces))
            except OSError as error:
                self._has_ended = True  # a record after half of another could not be read
                with suppress(OSError):  # a byte mostly has room: it shows readers that the history ends before its process
                    os.write(self._file, b"\0")
                log.warning(
                    "the history (--history, LOCKSTEP_HISTORY) in %s ends here, and training continues without it: lockstep audit will miss"
                    " what follows cause=%s",
                    self._directory,
                    error.strerror,
                )

    def _begin_segment(self) -> None:
        path = self._directory / f"{self._name}.{self._segment + 1:06d}{_SUFFIX}"
        # Before the present one is closed: after a failure, that is the one that ends.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._path, self._file, self._segment = path, file, self._segment + 1
        self._kept[self._path] = 0
        self._append(events.Begun(format=FORMAT, role=self._role, pid=os.getpid(), segment=self._segment), [])

    def _append(self, event: Event, pieces: list[Array]) -> None:
        content_bytes = sum(piece.nbytes for piece in pieces)
        named: Any = {_FIELDS[type(event)]: codec.encode(event)}
        message = HistoryRecord(number=self._number, content_bytes=content_bytes, **named).SerializeToString()
        num_bytes = _LENGTH_BYTES + len(message) + content_bytes
        self._make_room(num_bytes)
        # As a rule one system call: a signal cannot kill the process in the middle of it.
        together = [np.frombuffer(len(message).to_bytes(_LENGTH_BYTES, "little") + message, np.uint8)]
        for piece in pieces:
            for content in _contents(piece):
                together.append(content)
                if not piece.flags.c_contiguous:
                    _write_all(self._file, together)
                    together = []
        _write_all(self._file, together)
        self._kept[self._path] += num_bytes
        self._number += 1

    def _make_room(self, num_bytes: int) -> None:
        while sum(self._kept.values()) + num_bytes > self._max_bytes:
            oldest = next(iter(self._kept))
            if oldest == self._path:
                raise OSError(0, f"--history-max-bytes is {self._max_bytes}, and one record has {num_bytes} bytes")
            oldest.unlink(missing_ok=True)
            del self._kept[oldest]

    def close(self) -> None:
        """Closes the file; every record is there already."""
        os.close(self._file)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event: its number among those of its process, and its content (one-dimensional uint8, read-only)."""

    event: Event
    number: int
    content: Array


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Chronicle:
    """The records of one process, in order. `name`: of its files, without their numbers.

    `is_torn`: the last record has no end, so there may have been more. `is_cut`: the first segments are gone.
    """

    name: str
    role: str
    records: tuple[Record, ...]
    is_torn: bool = False
    is_cut: bool = False


def read_history(directory: str | Path) -> Iterator[Chronicle]:
    """Yields the records of each process, by name; without a last record that was never finished.

    Raises DataLoss, with the file and the place, if something else is not as a HistoryWriter leaves it or a segment is missing between
    others, and InvalidSpec if there is no history. A cluster may be at work on it: then it is read as it is at this moment.
    """
    segments = _segments(Path(directory))
    if not segments:
        raise InvalidSpec(f"no history in {str(directory)!r}: give the directory that --history named")
    for name, contents in segments.items():
        chronicle = _read(name, contents)
        if chronicle is not None:
            yield chronicle


def _segments(directory: Path) -> dict[str, dict[Path, Array]]:
    """Returns what all segments hold at this moment, by the name of their process, in order.

    A cluster at work removes its oldest segments: what is mapped stays, and what goes before it is mapped is looked for again.
    """
    for _ in range(_MAX_LOOKS):
        found: dict[str, dict[Path, Array]] = defaultdict(dict)
        with suppress(FileNotFoundError):
            for path in sorted(directory.glob(f"*.*{_SUFFIX}")):
                found[path.name.split(".")[0]][path] = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
            return found
    raise InvalidSpec(f"the segments in {str(directory)!r} go faster than they can be read; wait until its cluster has ended")


def _read(name: str, contents: Mapping[Path, Array]) -> Chronicle | None:
    records: list[Record] = []
    first: events.Begun | None = None
    torn: Path | None = None
    for path, content in contents.items():
        if torn is not None:
            raise DataLoss(f"{path}: there is no end of the segment before it, {torn.name}")
        found, is_torn = _read_segment(path, content)
        torn = path if is_torn else None
        if not found:
            continue  # killed before its first record was whole
        begun = found[0].event
        if not isinstance(begun, events.Begun) or begun.format != FORMAT:
            raise DataLoss(f"{path}: not a segment of a history of format {FORMAT}")
        if records and found[0].number != records[-1].number + 1:
            raise DataLoss(
                f"{path}: the segment before it is missing, {name}.{begun.segment - 1:06d}{_SUFFIX}; bring it back, or take away those"
                " before it too: the audit then begins here"
            )
        first = first or begun
        records += found
    if first is None:
        return None
    return Chronicle(name=name, role=first.role, records=tuple(records), is_torn=torn is not None, is_cut=first.segment > 1)


def _read_segment(path: Path, content: Array) -> tuple[list[Record], bool]:
    """Returns the records of a segment, and whether it ends within another one."""
    records: list[Record] = []
    at = 0
    while at < content.size:
        start = at + _LENGTH_BYTES
        end = start + int.from_bytes(content[at:start].tobytes(), "little")
        if end - start > _MAX_MESSAGE_BYTES:
            raise DataLoss(f"{path}: byte {at}: not a record of a history: a message of {end - start} bytes")
        if end > content.size:
            return records, True
        try:
            message = HistoryRecord.FromString(content[start:end].tobytes())
            kind = message.WhichOneof("event")
            if kind is None or (records and message.number != records[-1].number + 1):
                raise DataLoss(f"number {message.number} of kind {kind}")
            if end + message.content_bytes > content.size:
                return records, True
            event = codec.decode(_EVENTS[kind], getattr(message, kind))
        except (DecodeError, PsError) as error:
            raise DataLoss(f"{path}: byte {at}: not a record of a history: {str(error)[:200]}") from None
        at = end + message.content_bytes
        records.append(Record(event=event, number=message.number, content=content[end:at]))
    return records, False


def digest(arena: Array, tables: Sequence[Array] = ()) -> str:
    """Returns the digest of a shard's variables: of its arena, then of its tables in their order, as bytes."""
    sha = hashlib.sha256(arena.data)
    for table in tables:
        for content in _contents(table):
            sha.update(content.data)
    return sha.hexdigest()


def _contents(array: Array) -> Iterator[Array]:
    """Yields the bytes of an array, in order: in one piece, or copies of some rows where others lie between them."""
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8)
    else:
        for start in range(0, len(array), _ROWS_AT_ONCE):
            yield array[start : start + _ROWS_AT_ONCE].reshape(-1).view(np.uint8)


def _write_all(file: int, pieces: Sequence[Array]) -> None:
    left = deque(piece.data for piece in pieces if piece.nbytes)
    while left:
        written = os.writev(file, [*islice(left, _MAX_PIECES)])
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]
