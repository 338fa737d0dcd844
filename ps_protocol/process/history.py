"""The record of what a process did and received, for `lockstep audit`: lines of JSON and a file of bytes. Knows files; no role."""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message

from ps_protocol.errors import DataLoss, InvalidSpec, PsError
from ps_protocol.model.layout import Segments
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, PushHeader, ShardSettings, ShardSpec
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec

# What a process did and received: lines of JSON and a file of bytes.
#
# A process writes `NAME.jsonl`, one object a line, and `NAME.bin`, the arrays that the lines name by offset and length. Each record goes to
# the system as soon as it is made, bytes before words, so that a process that is killed leaves everything but perhaps the end of its last
# line. Nothing is written over, and nothing is read that could run.


log = logging.getLogger("lockstep.history")

VARIABLE = "LOCKSTEP_HISTORY"
FORMAT = 1
_LINES, _BYTES = ".jsonl", ".bin"
_ROLE = re.compile(r"[a-z][a-z0-9-]{0,40}")
_MAX_LINE_BYTES = 64 << 20
Words = Mapping[str, object]


class History(Protocol):
    """Takes records, in order."""

    def write(self, kind: str, words: Words, pieces: Iterable[Array] = ()) -> None:
        """Appends one record; `pieces` are one-dimensional uint8 arrays, kept as one run of bytes."""


class HistoryWriter:
    """Implements History: appends records to two new files in `directory`, which is made if it is missing. Thread-safe.

    `role`: for example "ps-0". Raises InvalidSpec if nothing can be written there. A later failure of the disk is logged once and ends the
    history, which stays readable up to there: a training must not end for a record of it.
    """

    def __init__(self, directory: str | Path, *, role: str) -> None:
        if not _ROLE.fullmatch(role):
            raise InvalidSpec(f"history: got role {role!r}, want lower-case letters, digits and '-'")
        self._lock = threading.Lock()
        self._place = str(directory)
        self._number = 0
        self._has_ended = False
        name = f"{role}-{time.time_ns()}-{os.getpid()}"
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._lines = _create(Path(directory, name + _LINES))
            self._bytes = _create(Path(directory, name + _BYTES))
            self._offset = 0
            self._append("begun", {"format": FORMAT, "role": role, "pid": os.getpid()}, ())
        except OSError as error:
            raise InvalidSpec(f"history: nothing can be written to {str(directory)!r}: {error.strerror}; name another directory") from None

    def write(self, kind: str, words: Words, pieces: Iterable[Array] = ()) -> None:
        """Appends one record; `pieces` are one-dimensional uint8 arrays, kept as one run of bytes. Blocks while it writes."""
        with self._lock:
            if self._has_ended:
                return
            try:
                self._append(kind, words, pieces)
            except OSError as error:
                self._has_ended = True  # a record after half of another could not be read
                with suppress(OSError):  # a byte mostly has room: it shows readers that the history ends before its process
                    os.write(self._lines, b"{")
                log.warning(
                    "the history (--history, %s) in %s ends here, and training continues without it: lockstep audit will miss what follows"
                    " cause=%s",
                    VARIABLE,
                    self._place,
                    error.strerror,
                )

    def _append(self, kind: str, words: Words, pieces: Iterable[Array]) -> None:
        start = self._offset
        for piece in pieces:
            _write_all(self._bytes, piece.data)
            self._offset += piece.nbytes
        record = {"kind": kind, "number": self._number, "at": round(time.monotonic(), 6), **words}
        if self._offset > start:
            record["bytes"] = [start, self._offset - start]
        _write_all(self._lines, memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n"))
        self._number += 1

    def close(self) -> None:
        """Closes the files; every record is there already."""
        os.close(self._lines)
        os.close(self._bytes)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event: its kind, its number in its file, its text, and its bytes (one-dimensional uint8, read-only)."""

    kind: str
    number: int
    words: Mapping[str, object]
    content: Array


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Chronicle:
    """The records of one process, in order. `name`: of its files. `is_torn`: the last line has no end, so there may have been more."""

    name: str
    role: str
    records: tuple[Record, ...]
    is_torn: bool


def read_history(directory: str | Path) -> Iterator[Chronicle]:
    """Yields the records of each process, by name; without a last line that was never finished.

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
    # One system call, as a rule: a signal cannot kill the process in the middle of it.
    written = 0
    while written < data.nbytes:
        written += os.write(file, data[written:])


# The kinds of records of a history, of workers, parameter servers and the chief, each with its fields, written and read.
#
# Knows values and JSON; no file.


AnyMessage = TypeVar("AnyMessage", bound=Message)
Value = TypeVar("Value")
# Written by workers.
CONTRIBUTION, OUTCOME = "contribution", "outcome"
# Written by parameter servers.
CREATED, CONFIGURED, APPLIED, ARRIVED, RESTORED = "created", "configured", "applied", "arrived", "restored"
# Written by the chief.
STEP, ROLLED_BACK, FINISHED = "step", "rolled-back", "finished"


def note_contribution(history: History, header: PushHeader, gradients: Segments, *, shard: int) -> None:
    """Notes a contribution for one shard, without the worker's secret; before it is sent, so that the history has all that is applied."""
    history.write(CONTRIBUTION, {"shard": shard, "header": _json(codec.encode(replace(header, secret=0)))}, gradients.pieces)


def note_outcome(history: History, push_id: PushId, *, epoch: int, outcome: str, step: int, applied_step: int | None = None) -> None:
    """Notes the outcome that the worker received for its contribution: the name of a PushOutcome, or "UNKNOWN"."""
    words = {"push": list(_key(push_id)), "epoch": epoch, "outcome": outcome, "step": step, "applied_step": applied_step}
    history.write(OUTCOME, words)


def note_created(history: History, spec: ShardSpec, content: Sequence[Array], *, process: int) -> None:
    """Notes a shard's model with its first values: the arena, then those tables that have no initializer, as they were sent."""
    history.write(CREATED, {"shard": spec.shard, "process": process, "spec": _json(codec.encode(spec))}, content)


def note_configured(history: History, settings: ShardSettings, *, shard: int, step: int) -> None:
    """Notes how a shard works from now on; `step` is its open step."""
    history.write(CONFIGURED, {"shard": shard, "step": step, "settings": _json(codec.encode(settings))})


def note_applied(history: History, request: ApplyRequest, *, shard: int, sha256: str) -> None:
    """Notes a step that a shard has applied, with the digest of its variables afterwards, before it is announced."""
    history.write(APPLIED, {"shard": shard, "request": _json(codec.encode(request)), "sha256": sha256})


def note_arrived(history: History, push_id: PushId, *, shard: int, epoch: int, step: int) -> None:
    """Notes a contribution that a shard has applied on arrival, as its `step`."""
    history.write(ARRIVED, {"shard": shard, "push": list(_key(push_id)), "epoch": epoch, "step": step})


def note_restored(
    history: History, spec: ShardSpec, settings: ShardSettings, *, process: int, tag: str, from_epoch: int, sha256: str
) -> None:
    """Notes that a shard was brought back to a checkpoint, which was saved at `spec.initial_step` of `from_epoch`."""
    words = {
        "shard": spec.shard,
        "process": process,
        "spec": _json(codec.encode(spec)),
        "settings": _json(codec.encode(settings)),
        "tag": tag,
        "from_epoch": from_epoch,
        "sha256": sha256,
    }
    history.write(RESTORED, words)


def note_step(history: History, *, epoch: int, step: int, contributors: Sequence[PushId], chief: int) -> None:
    """Notes a step that all shards have applied, as the chief counts it, before it is announced; `chief`: its incarnation."""
    history.write(STEP, {"epoch": epoch, "step": step, "contributors": [list(_key(one)) for one in contributors], "chief": chief})


def note_rolled_back(history: History, *, epoch: int, step: int, tag: str, chief: int) -> None:
    """Notes that the cluster continues at `step` of a checkpoint, under a new epoch."""
    history.write(ROLLED_BACK, {"epoch": epoch, "step": step, "tag": tag, "chief": chief})


def digest(arena: Array, tables: Sequence[Array] = ()) -> str:
    """Returns the digest of a shard's variables: of its arena, then of its tables in their order, as bytes."""
    sha = hashlib.sha256(arena.data)
    for table in tables:
        sha.update(table.data)
    return sha.hexdigest()


def header_of(record: Record) -> PushHeader:
    """Returns the header of a CONTRIBUTION. Raises DataLoss."""
    return _decoded(record, "header", pb.PushHeader, partial(codec.decode, PushHeader))


def spec_of(record: Record) -> ShardSpec:
    """Returns the model of CREATED or RESTORED. Raises DataLoss."""
    return _decoded(record, "spec", pb.ShardSpec, partial(codec.decode, ShardSpec))


def settings_of(record: Record) -> ShardSettings:
    """Returns the settings of CONFIGURED or RESTORED. Raises DataLoss."""
    return _decoded(record, "settings", pb.ShardSettings, partial(codec.decode, ShardSettings))


def request_of(record: Record) -> ApplyRequest:
    """Returns the step of APPLIED. Raises DataLoss."""
    return _decoded(record, "request", pb.ApplyRequest, partial(codec.decode, ApplyRequest))


def push_of(record: Record) -> PushId:
    """Returns the push id of OUTCOME or ARRIVED. Raises DataLoss."""
    return _push_id(record, record.words.get("push"))


def contributors_of(record: Record) -> tuple[PushId, ...]:
    """Returns the contributors of STEP. Raises DataLoss."""
    listed = record.words.get("contributors")
    if not isinstance(listed, list):
        raise _broken(record, "contributors")
    return tuple(_push_id(record, one) for one in listed)


def number_of(record: Record, field: str) -> int:
    """Returns a whole number. Raises DataLoss."""
    value = record.words.get(field)
    if type(value) is not int:
        raise _broken(record, field)
    return value


def text_of(record: Record, field: str) -> str:
    """Returns a text. Raises DataLoss."""
    value = record.words.get(field)
    if not isinstance(value, str):
        raise _broken(record, field)
    return value


def _key(push_id: PushId) -> tuple[int, int, int]:
    return push_id.worker, push_id.incarnation, push_id.sequence


def _push_id(record: Record, value: object) -> PushId:
    if not (isinstance(value, list) and len(value) == 3 and all(type(one) is int for one in value)):
        raise _broken(record, "push id")
    worker, incarnation, sequence = value
    return PushId(worker=worker, incarnation=incarnation, sequence=sequence)


def _json(message: Message) -> dict[str, object]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _decoded(record: Record, field: str, message_type: type[AnyMessage], decode: Callable[[AnyMessage], Value]) -> Value:
    value = record.words.get(field)
    try:
        if not isinstance(value, dict):
            raise _broken(record, field)
        return decode(json_format.ParseDict(value, message_type()))
    except (json_format.ParseError, PsError) as error:
        raise DataLoss(f"record {record.number} ({record.kind}): {field}: {str(error)[:200]}") from None


def _broken(record: Record, field: str) -> DataLoss:
    return DataLoss(f"record {record.number} ({record.kind}): {field}: got {str(record.words.get(field))[:80]!r}")
