"""Where each variable of a shard lies in its arena, and the name (hash) of that arrangement. Knows offsets; holds no bytes.

A shard's dense variables lie in one run of bytes: by element type, and then by the optimizer that updates them; each slice begins at a
multiple of 64 bytes, and the padding between is zero. Values, gradients and slots, on the wire and in memory, have this one arrangement.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array, DataType, VariableSpec

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSlice:
    """The part `start` to `stop` along `axis` of one variable; the other axes are whole. A scalar has one row."""

    variable: VariableSpec
    start: int
    stop: int
    axis: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.axis < max(1, len(self.variable.shape)):
            raise InvalidSpec(f"variable {self.variable.name!r}: shape {self.variable.shape} has no axis {self.axis}")
        if not 0 <= self.start <= self.stop <= self.extent:
            rows = f"rows {self.start} to {self.stop} of axis {self.axis}, want rows within 0 to {self.extent}"
            raise InvalidSpec(f"variable {self.variable.name!r}: {rows}")

    @property
    def extent(self) -> int:
        """Extent of the whole variable along `axis`."""
        return self.variable.shape[self.axis] if self.variable.shape else 1

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the variable."""
        return self.start == 0 and self.stop == self.extent

    @property
    def is_contiguous(self) -> bool:
        """Whether it is one run of bytes of the whole variable."""
        return self.axis == 0 or self.is_whole

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        whole, axis = self.variable.shape, self.axis
        return (*whole[:axis], self.stop - self.start, *whole[axis + 1 :]) if whole else ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one unit along `axis`."""
        return self.variable.nbytes // self.extent if self.extent else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return (self.stop - self.start) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRange:
    """The bytes of a shard's memory that hold one element type and are updated by one rule, a position in `Layout.rules`."""

    data_type: DataType
    rule: int
    start: int
    stop: int


class Layout:
    """The arrangement of some slices in a shard's memory; the same slices in the same order give the same layout everywhere.

    `slices` are those of dense variables: they lie in the arena, at `offsets`, in the order `order` (positions in `slices`). `tables` are
    those of sparse variables, in the order given; they are no part of the arena. `rules` are the different optimizers of the variables, in
    order of appearance; None stands for the model's own. `rule_of_table` has the position of each table's.
    """

    def __init__(self, slices: Sequence[VariableSlice]) -> None:
        self.slices = tuple(piece for piece in slices if not piece.variable.is_sparse)
        self.tables = tuple(piece for piece in slices if piece.variable.is_sparse)
        # Dense ones first, as they travel, so that the order in which a program mixes the two does not matter.
        slices = (*self.slices, *self.tables)
        rules = {_rule_key(piece): piece.variable.optimizer for piece in slices}
        positions = {key: position for position, key in enumerate(rules)}
        rule_of = [positions[_rule_key(piece)] for piece in self.slices]
        self.rules: tuple[OptimizerSpec | None, ...] = tuple(rules.values())
        self.rule_of_table = tuple(positions[_rule_key(piece)] for piece in self.tables)
        offsets, order = [0] * len(self.slices), []
        arenas, end = [], 0
        members: dict[tuple[DataType, int], list[int]] = {}
        for index, piece in enumerate(self.slices):
            members.setdefault((piece.variable.data_type, rule_of[index]), []).append(index)
        for data_type in DataType:
            for rule in range(len(rules)):
                start = end
                for index in members.get((data_type, rule), ()):
                    offsets[index] = end
                    order.append(index)
                    end += -(-self.slices[index].nbytes // ALIGNMENT) * ALIGNMENT
                if end > start:
                    arenas.append(ArenaRange(data_type=data_type, rule=rule, start=start, stop=end))
        self.offsets: tuple[int, ...] = tuple(offsets)
        self.order: tuple[int, ...] = tuple(order)
        self.arenas: tuple[ArenaRange, ...] = tuple(arenas)
        self.nbytes = end
        self.hash = _hash_of(slices)

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
    for piece in sorted(slices, key=lambda piece: (piece.variable.name, piece.axis, piece.start, piece.stop)):
        name = piece.variable.name
        before = last.get(name)
        if before is not None and before.variable != piece.variable:
            raise InvalidSpec(f"variable {name!r} occurs twice, with different shapes or dtypes; names must be unique")
        if before is not None and before.axis != piece.axis:
            raise InvalidSpec(f"variable {name!r} is cut along axis {before.axis} and along axis {piece.axis}; cut it along one")
        if before is not None and (piece.start < before.stop or piece == before):
            raise InvalidSpec(f"variable {name!r}: rows {piece.start} to {min(before.stop, piece.stop)} occur twice; place each row once")
        last[name] = piece


def aligned_bytes(nbytes: int) -> Array:
    """Returns a zeroed one-dimensional uint8 array of `nbytes` bytes whose first byte lies at a multiple of 64."""
    buffer = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def _rule_key(piece: VariableSlice) -> str:
    return piece.variable.optimizer.key if piece.variable.optimizer is not None else ""


def _hash_of(slices: Sequence[VariableSlice]) -> str:
    rows = [
        [s.variable.name, s.variable.data_type.value, s.variable.shape, s.axis, s.start, s.stop, s.variable.is_sparse, _rule_key(s)]
        for s in slices
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]
