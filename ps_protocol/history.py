"""What a process did and was told, kept for `lockstep verify`: lines of JSON and a file of bytes. Knows files; no role, no cluster.

A process writes `NAME.jsonl`, one object a line, and `NAME.bin`, the arrays that the lines name by offset and length. Each record goes to
the system as soon as it is made, bytes before words, so that a process that is killed leaves everything but perhaps the end of its last
line. Nothing is written over, and nothing is read that could run.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.tensors import Array

VARIABLE = "LOCKSTEP_HISTORY"
FORMAT = 1
_LINES, _BYTES = ".jsonl", ".bin"
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,40}")
_MAX_LINE_BYTES = 64 << 20
Words = Mapping[str, object]


class HistoryWriter:
    """Appends records to two new files in `directory`, which is made if it is missing. Thread-safe.

    `role`: for example "ps-0". Raises InvalidSpec if nothing can be written there; a later failure of the disk raises OSError.
    """

    def __init__(self, directory: str | Path, *, role: str) -> None:
        if not _ROLE.fullmatch(role):
            raise InvalidSpec(f"history: got role {role!r}, want lower-case letters, digits and '-'")
        self._lock = threading.Lock()
        self._place = str(directory)
        self._number = 0
        name = f"{role}-{time.time_ns()}-{os.getpid()}"
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._lines = _create(Path(directory, name + _LINES))
            self._bytes = _create(Path(directory, name + _BYTES))
        except OSError as error:
            raise InvalidSpec(f"history: nothing can be written to {str(directory)!r}: {error.strerror}; name another directory") from None
        self._offset = 0
        self.write("begun", {"format": FORMAT, "role": role, "pid": os.getpid()})

    def write(self, kind: str, words: Words, pieces: Iterable[Array] = ()) -> None:
        """Appends one record; `pieces` are one-dimensional uint8 arrays, kept as one run of bytes. Blocks while it writes."""
        with self._lock:
            start = self._offset
            for piece in pieces:
                self._append(self._bytes, piece.data)
                self._offset += piece.nbytes
            record = {"kind": kind, "number": self._number, "at": round(time.monotonic(), 6), **words}
            if self._offset > start:
                record["bytes"] = [start, self._offset - start]
            self._append(self._lines, memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n"))
            self._number += 1

    def _append(self, file: int, data: memoryview) -> None:
        try:
            _write_all(file, data)
        except OSError as error:
            raise OSError(error.errno, f"the history (--history, {VARIABLE}) cannot be written: {error.strerror}", self._place) from None

    def close(self) -> None:
        """Closes the files; every record is there already."""
        os.close(self._lines)
        os.close(self._bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing that happened: its kind, its number in its file, its words, and its bytes (one-dimensional uint8, read-only)."""

    kind: str
    number: int
    words: Mapping[str, object]
    content: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Chronicle:
    """What one process wrote, in order. `name` is that of its files, `is_torn` whether the last line has no end."""

    name: str
    role: str
    records: tuple[Record, ...]
    is_torn: bool


def read_history(directory: str | Path) -> Iterator[Chronicle]:
    """Yields what each process wrote, by name; the end of a last line that was never finished is left out.

    Raises DataLoss, with file and line, if something else is not as a HistoryWriter leaves it, and InvalidSpec if there is no history.
    """
    found = sorted(Path(directory).glob("*" + _LINES))
    if not found:
        raise InvalidSpec(f"no history in {str(directory)!r}: give the directory that --history named")
    for path in found:
        chronicle = _read(path)
        if chronicle is not None:
            yield chronicle


def _read(path: Path) -> Chronicle | None:
    content = _content_of(path.with_suffix(_BYTES))
    text = path.read_bytes()
    lines = text.split(b"\n")
    is_torn = bool(lines.pop())
    records = tuple(_record(path, number, line, content) for number, line in enumerate(lines))
    if not records:
        return None  # killed before its first line was whole
    first = records[0]
    if first.kind != "begun" or first.words.get("format") != FORMAT:
        raise DataLoss(f"{path}:1: not the beginning of a history of format {FORMAT}")
    return Chronicle(name=path.stem, role=str(first.words.get("role")), records=records, is_torn=is_torn)


def _record(path: Path, number: int, line: bytes, content: Array) -> Record:
    where = f"{path}:{number + 1}"
    try:
        if len(line) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of {len(line)} bytes")
        words = json.loads(line)
        kind, its_number = words.pop("kind"), words.pop("number")
        start, length = words.pop("bytes", (0, 0))
        if not isinstance(kind, str) or its_number != number:
            raise ValueError(f"record {its_number!r} of kind {kind!r}")
        if not (type(start) is int and type(length) is int and start >= 0 and length >= 0 and start + length <= content.size):
            raise ValueError(f"bytes {start!r} to {start!r} + {length!r} of a file of {content.size}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: not a record of a history: {str(error)[:120]}") from None
    return Record(kind=kind, number=number, words=words, content=content[start : start + length])


def _content_of(path: Path) -> Array:
    if not path.is_file() or not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_all(file: int, data: memoryview) -> None:
    # One call, as a rule: a signal that kills the process does not come in the middle of it.
    written = 0
    while written < data.nbytes:
        written += os.write(file, data[written:])
