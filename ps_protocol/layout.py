"""Where each variable of a shard lies in its arena, and the name (hash) of that arrangement. Knows offsets; holds no bytes.

A shard's memory is one run of bytes: first the float32 arena, then the float64 one; each slice begins at a multiple of 64 bytes, and
the padding between is zero. Everything that travels or is stored per shard (values, gradients, slots) has this one arrangement.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.tensors import Array, DataType, VariableSpec

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSlice:
    """Rows `start` to `stop` (along axis 0) of one variable; a scalar has one row."""

    variable: VariableSpec
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.variable.num_rows:
            rows = f"rows {self.start} to {self.stop}, want rows within 0 to {self.variable.num_rows}"
            raise InvalidSpec(f"variable {self.variable.name!r}: {rows}")

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the variable."""
        return self.start == 0 and self.stop == self.variable.num_rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return (self.stop - self.start, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.variable.nbytes // self.variable.num_rows if self.variable.num_rows else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return (self.stop - self.start) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRange:
    """The bytes of a shard's memory that hold one element type."""

    data_type: DataType
    start: int
    stop: int


class Layout:
    """The arrangement of some slices in a shard's memory; the same slices in the same order give the same layout everywhere."""

    def __init__(self, slices: Sequence[VariableSlice]) -> None:
        self.slices = tuple(slices)
        self.offsets: tuple[int, ...]
        self.arenas: tuple[ArenaRange, ...]
        offsets = [0] * len(self.slices)
        arenas, end = [], 0
        for data_type in DataType:
            start = end
            for index, piece in enumerate(self.slices):
                if piece.variable.data_type is data_type:
                    offsets[index] = end
                    end += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
            if end > start:
                arenas.append(ArenaRange(data_type=data_type, start=start, stop=end))
        self.offsets, self.arenas, self.nbytes = tuple(offsets), tuple(arenas), end
        self.hash = _hash_of(self.slices)

    def __eq__(self, other: object) -> bool:
        return self.hash == other.hash if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def view(self, memory: Array, index: int) -> Array:
        """Returns slice `index` as an array of its shape that shares `memory`, a one-dimensional uint8 array of `nbytes` bytes."""
        piece, offset = self.slices[index], self.offsets[index]
        return memory[offset : offset + piece.nbytes].view(piece.variable.data_type.dtype).reshape(piece.shape)

    def arena(self, memory: Array, arena: ArenaRange) -> Array:
        """Returns one arena as a flat array of its element type that shares `memory`."""
        return memory[arena.start : arena.stop].view(arena.data_type.dtype)


def check_disjoint(slices: Sequence[VariableSlice]) -> None:
    """Raises InvalidSpec if a row occurs twice, or slices of one name disagree on their variable."""
    last: dict[str, VariableSlice] = {}
    for piece in sorted(slices, key=lambda piece: (piece.variable.name, piece.start, piece.stop)):
        name = piece.variable.name
        before = last.get(name)
        if before is not None and before.variable != piece.variable:
            raise InvalidSpec(f"variable {name!r} occurs twice, with different shapes or dtypes; names must be unique")
        if before is not None and (piece.start < before.stop or piece == before):
            raise InvalidSpec(f"variable {name!r}: rows {piece.start} to {min(before.stop, piece.stop)} occur twice; place each row once")
        last[name] = piece


def aligned_bytes(nbytes: int) -> Array:
    """Returns a zeroed one-dimensional uint8 array of `nbytes` bytes whose first byte lies at a multiple of 64."""
    buffer = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def _hash_of(slices: Sequence[VariableSlice]) -> str:
    rows = [[s.variable.name, s.variable.data_type.value, s.variable.shape, s.start, s.stop] for s in slices]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
