"""The place of each variable of a shard in its arena, the pieces of memory that hold one, and whether what they hold is finite.

Knows offsets and arrays; no message, no step.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ps_protocol.errors import FrameOutOfOrder, InvalidSpec, NonFiniteGradient, TruncatedStream
from ps_protocol.model.keys import key_range
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array, DataType, VariableSpec

# A shard's arena or rows in memory: pieces that together make one run of bytes.
#
# A server has its arena in one piece. A worker has it in one piece but for the variables that are split over shards: their rows lie in the
# middle of the whole variable, so that the user gets one array and nothing is joined afterwards.


class Segments:
    """Consecutive pieces of an arena, each a one-dimensional uint8 array that shares the owner's memory."""

    def __init__(self, pieces: Sequence[Array]) -> None:
        self.pieces = tuple(pieces)
        starts, end = [], 0
        for piece in self.pieces:
            if piece.dtype != np.uint8 or piece.ndim != 1:
                raise ValueError("a segment must be a one-dimensional uint8 array")
            starts.append(end)
            end += piece.nbytes
        self._starts, self.nbytes = tuple(starts), end

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset, bytes) in order, each of at most `max_bytes`, without copying."""
        for start, piece in zip(self._starts, self.pieces, strict=True):
            view = piece.data
            for offset in range(0, piece.nbytes, max_bytes):
                yield start + offset, view[offset : offset + max_bytes]

    def followed_by(self, pieces: Sequence[Array]) -> "Segments":
        """Returns these pieces and then `pieces`, sharing the memory of both."""
        return Segments((*self.pieces, *pieces))

    def writer(self) -> "SegmentWriter":
        """Returns a writer that fills the pieces from the first byte to the last."""
        return SegmentWriter(self.pieces, self.nbytes)

    def receive(self, feed: "Callable[[SegmentWriter], None]") -> None:
        """Has `feed` write every byte; raises TruncatedStream unless it did."""
        writer = self.writer()
        feed(writer)
        writer.finish()

    def copy_from(self, source: "Segments") -> None:
        """Copies all bytes of `source`, which must have the same length."""
        writer = self.writer()
        for offset, data in source.chunks(1 << 62):
            writer.write(offset, data)
        writer.finish()


class SegmentWriter:
    """Fills segments from frames that come in order. Not thread-safe."""

    def __init__(self, pieces: Sequence[Array], nbytes: int) -> None:
        self._pieces = pieces
        self.nbytes = nbytes
        self._index = 0
        self._piece_offset = 0
        self.num_written = 0

    @property
    def is_full(self) -> bool:
        """Whether every byte has been written."""
        return self.num_written == self.nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies `data` to `offset`; raises FrameOutOfOrder on a gap, an overlap, or bytes beyond the end, and then has copied nothing."""
        length = len(data)
        if offset != self.num_written:
            raise FrameOutOfOrder(f"frame at offset {offset}, expected {self.num_written}; send frames in order, with no gap or overlap")
        if offset + length > self.nbytes:
            raise FrameOutOfOrder(f"frame at offset {offset} has {length} bytes and ends beyond the arena's {self.nbytes}")
        source = np.frombuffer(data, np.uint8) if length else None
        copied = 0
        while copied < length:
            piece = self._pieces[self._index]
            count = min(length - copied, piece.nbytes - self._piece_offset)
            if source is not None:
                piece[self._piece_offset : self._piece_offset + count] = source[copied : copied + count]
            copied += count
            self._piece_offset += count
            if self._piece_offset == piece.nbytes:
                self._index, self._piece_offset = self._index + 1, 0
        self.num_written += length

    def fill(self, receive: Callable[[memoryview], int]) -> None:
        """Has the next bytes written straight into the segments: `receive` is given the memory, and returns how many bytes it wrote."""
        while (length := self._pieces[self._index].nbytes) == self._piece_offset:
            self._index, self._piece_offset = self._index + 1, 0
        count = receive(self._pieces[self._index].data[self._piece_offset :])
        self.num_written += count
        self._piece_offset += count
        if self._piece_offset == length:
            self._index, self._piece_offset = self._index + 1, 0

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""
        if self.num_written != self.nbytes:
            raise TruncatedStream(f"{self.num_written} of {self.nbytes} bytes received; nothing was changed; send it again")


# Where each variable of a shard lies in its arena, and the name (hash) of that arrangement.
#
# A shard's dense variables lie in one run of bytes: by element type, and then by the optimizer that updates them; each slice begins at a
# multiple of 64 bytes, and the padding between is zero. Values, gradients and slots, on the wire and in memory, have this one arrangement.


ALIGNMENT = 64


@light_dataclass(frozen=True, slots=True, kw_only=True)
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
        """Extent of the whole variable along `axis`; of a keyed table, its buckets of keys."""
        return self.variable.extent(self.axis)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the variable."""
        return self.start == 0 and self.stop == self.extent

    @property
    def is_contiguous(self) -> bool:
        """Whether the slice is one run of bytes of the whole variable."""
        return self.axis == 0 or self.is_whole

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        whole, axis = self.variable.shape, self.axis
        return (*whole[:axis], self.stop - self.start, *whole[axis + 1 :]) if whole else ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one unit along `axis`."""
        whole, axis = self.variable.shape, self.axis
        return math.prod((*whole[:axis], *whole[axis + 1 :])) * self.variable.data_type.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the part; of a keyed table, which begins without rows, none."""
        return (self.stop - self.start) * self.row_bytes if self.variable.nbytes else 0

    @property
    def first_index(self) -> int:
        """What is subtracted from the index of a row of the whole table where rows of the part are pushed and read."""
        return self.start if self.variable.keys is None else 0

    @property
    def index_range(self) -> tuple[int, int]:
        """The least and the greatest index that a row of the part has in the whole table: a number, or a spread key."""
        return (self.start, self.stop - 1) if self.variable.keys is None else key_range(self.start, self.stop, num_buckets=self.extent)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRange:
    """The bytes of a shard's memory that hold one element type and are updated by one rule, a position in `Layout.rules`."""

    data_type: DataType
    rule: int
    start: int
    stop: int


class Layout:
    """The arrangement of some slices in a shard's memory; the same slices in the same order give the same layout everywhere.

    `slices` are those of dense variables: they lie in the arena, at `offsets`, in the order `order` (positions in `slices`). `tables` are
    those of sparse variables, in the order given; they are no part of the arena. `pieces`: both, one after the other. `rules` are the
    different optimizers of the variables, in order of appearance; None stands for the model's own. `rule_of_table` has the position of each
    table's.
    """

    def __init__(self, slices: Sequence[VariableSlice]) -> None:
        self.slices = tuple(piece for piece in slices if not piece.variable.is_sparse)
        self.tables = tuple(piece for piece in slices if piece.variable.is_sparse)
        # Dense ones first, as they travel, so that the order in which a program mixes the two does not matter.
        self.pieces = slices = (*self.slices, *self.tables)
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
    rows = [[v.name, v.data_type.value, v.shape, s.axis, s.start, s.stop, v.is_sparse, _rule_key(s)] for s in slices for v in (s.variable,)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


# Whether the elements of gradients are finite, and the words for those that are not.


# Elements that are looked at one by one stay in a core's cache.
_BLOCK = 1 << 15
_FLOAT16, _BFLOAT16 = np.uint16(0x7C00), np.uint16(0x7F80)  # the bits of the exponent: all are set where an element is not finite


def gradient_ranges(layout: Layout) -> tuple[ArenaRange, ...]:
    """Returns the parts of an arena that have gradients, not plain updates: an update may be infinite on purpose."""
    rules = layout.rules
    return tuple(arena for arena in layout.arenas if (rule := rules[arena.rule]) is None or not rule.is_update_rule)


def are_finite(elements: Array) -> bool:
    """Whether all elements of a flat array are finite; allocates nothing of its size. uint16 stands for the bits of bfloat16."""
    if elements.itemsize > 2:
        # The dot product is the cheapest look at all elements; it is also not finite where elements are very large.
        with np.errstate(all="ignore"):
            if math.isfinite(np.dot(elements, elements)):
                return True
    return not count_nonfinite(elements)


def count_nonfinite(elements: Array) -> int:
    """Returns how many elements of a flat array are not finite; allocates nothing of its size. uint16 stands for the bits of bfloat16."""
    if elements.itemsize > 2:
        return sum(block.size - int(np.count_nonzero(np.isfinite(block))) for block in _blocks(elements))
    mask = _FLOAT16 if elements.dtype == np.float16 else _BFLOAT16
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in _blocks(elements.view(np.uint16)))


def refuse_nonfinite(name: str, elements: Array, *, who: str) -> None:
    """Raises NonFiniteGradient if some elements of the gradient of this variable are not finite; `who`: whose, and of which step."""
    count = count_nonfinite(elements)
    if count:
        what = "1 non-finite value" if count == 1 else f"{count} non-finite values"
        raise NonFiniteGradient(f"{name!r} has {what} ({who}); nothing was changed", facts={"variable": name, "count": str(count)})


def _blocks(elements: Array) -> Iterator[Array]:
    return (elements[start : start + _BLOCK] for start in range(0, elements.size, _BLOCK))
