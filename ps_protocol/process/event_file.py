"""Scalar summaries in the file format that TensorBoard reads. Knows records, checksums and protobuf's wire format; no training.

A record is its length, a checksum of that, the bytes of an Event message, and a checksum of those; see tensorflow/core/lib/io/record_writer
and tensorflow/core/util/event.proto.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
# SessionLog.START
_START = 1


class EventFile:
    """Appends events to one file. For one thread. Open only while it is written to: there is nothing to close, and no event is lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._write(_event(time.time(), _bytes_field(3, b"brain.Event:2")))

    @classmethod
    def in_directory(cls, directory: str | Path) -> Self:
        """Opens a new file with the name that TensorBoard looks for; makes the directory if need be."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        base = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = 0
        while (path := Path(directory) / f"{base}.{number}").exists():
            number += 1
        return cls(path)

    def add_scalars(self, values: Mapping[str, float], *, step: int) -> None:
        """Appends one event with these values by tag."""
        summary = b"".join(_bytes_field(1, _bytes_field(1, tag.encode()) + _float_field(2, value)) for tag, value in values.items())
        self._write(_event(time.time(), _varint_field(2, step) + _bytes_field(5, summary)))

    def restart(self, *, step: int) -> None:
        """Has TensorBoard forget the values of this step and of later ones, before they are written again."""
        self._write(_event(time.time(), _varint_field(2, step) + _bytes_field(7, _varint_field(1, _START))))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with self.path.open("ab") as file:
            file.write(length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event)))


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_CASTAGNOLI if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_CRC_TABLE = _table()


def crc32c(content: bytes) -> int:
    """Returns the CRC-32C checksum."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc(content: bytes) -> int:
    """Returns the checksum rotated and shifted, as records have it: a checksum of data with checksums in it is a weak one."""
    crc = crc32c(content)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _event(wall_time_s: float, rest: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time_s) + rest


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float_field(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond what a float32 has
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _varint(number << 3 | 5) + packed


def _bytes_field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content
