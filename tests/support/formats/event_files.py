"""TensorBoard's event files, read record by record with their checksums checked. Knows the format; writes nothing."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.process.event_file import masked_crc


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a step, and scalars by tag or the mark of a start."""

    step: int = 0
    is_start: bool = False
    scalars: dict[str, float] = field(default_factory=dict)


def records(content: bytes) -> Iterator[bytes]:
    """Yields the events' bytes; a checksum that is wrong raises AssertionError."""
    position = 0
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        assert struct.unpack_from("<I", content, position + 8)[0] == masked_crc(content[position : position + 8])
        event = content[position + 12 : position + 12 + length]
        assert struct.unpack_from("<I", content, position + 12 + length)[0] == masked_crc(event)
        yield event
        position += 16 + length


def events(path: Path) -> list[Event]:
    """Returns the events of a file, the first of which says the version."""
    return [_event(dict(_fields(one))) for one in records(path.read_bytes())]


def _event(found: dict[int, object]) -> Event:
    step, summary, session_log = found.get(2, 0), found.get(5, b""), found.get(7)
    assert isinstance(step, int) and isinstance(summary, bytes)
    scalars = {}
    for number, value in _fields(summary):
        assert number == 1 and isinstance(value, bytes)
        parts = dict(_fields(value))
        tag, packed = parts[1], parts[2]
        assert isinstance(tag, bytes) and isinstance(packed, bytes)
        scalars[tag.decode()] = struct.unpack("<f", packed)[0]
    return Event(step, session_log == b"\x08\x01", scalars)


def _fields(message: bytes) -> Iterator[tuple[int, object]]:
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        length, position = (8, position) if kind == 1 else (4, position) if kind == 5 else _varint(message, position)
        yield key >> 3, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
