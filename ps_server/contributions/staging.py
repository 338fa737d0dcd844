"""Memory for contributions under way: what a header asks for, checked and lent, and put in order once whole. Knows no push id or step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import pairwise

import numpy as np

from ps_protocol.encodings.arena import DecodingWriter, check_packed_nbytes, decoding_writer, unpack
from ps_protocol.encodings.formats import FORMATS, FloatEncoding, Packed, Units, encoded_nbytes, encoded_ranges, stretch
from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage
from ps_protocol.model.checksums import checksum
from ps_protocol.model.layout import (
    ALIGNMENT,
    Layout,
    Segments,
    SegmentWriter,
    VariableSlice,
    are_finite,
    gradient_ranges,
    refuse_nonfinite,
)
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.updates import FormulaUpdate, check_fits
from ps_protocol.model.variables import MAX_TENSOR_BYTES, Array
from ps_protocol.roles.shard import SparsePart
from ps_server.numbers.arena import Padding, padding_words, word_bytes
from ps_server.numbers.memory import BufferPool, MemoryBudget
from ps_server.numbers.row_gradients import RowGradient, check_indices, in_order

# Memory for arenas that stay as they travelled: halves, and the top k until they are decoded.


# Lengths whose free buffers are kept: halves have one, and a worker's top k have one.
_MAX_LENGTHS = 4


class EncodedPools:
    """Reused buffers by their length. Lent memory is counted in `budget`. Not thread-safe, except `clear_padding`."""

    def __init__(self, layout: Layout, *, budget: MemoryBudget) -> None:
        self._layout = layout
        self._budget = budget
        self._pools: dict[int, BufferPool] = {}
        self._padding: Array | None = None

    def check(self, encoding: FloatEncoding, nbytes: int, *, is_left_out: bool) -> None:
        """Raises MalformedMessage unless an arena can have this length in that encoding; 0 may stand for as it is."""
        if is_left_out:
            if nbytes:
                raise MalformedMessage(f"encoded_bytes: {nbytes}, but the arena is left out; say 0")
        elif isinstance(packed := FORMATS[encoding].coding, Packed):
            check_packed_nbytes(self._layout, encoding, packed, nbytes)
        else:
            expected = encoded_nbytes(self._layout, encoding)
            if nbytes != expected and (nbytes or encoding is not FloatEncoding.AS_IS):
                raise MalformedMessage(f"encoded_bytes: {nbytes} for {encoding.name}; this shard's arena takes {expected}")

    def lend(self, nbytes: int, *, purpose: str) -> Array:
        """Returns a buffer with undefined contents; raises LimitExceeded if a new one would not fit."""
        pool = self._pools.get(nbytes)
        if pool is None:
            pool = self._pools[nbytes] = BufferPool(nbytes, budget=self._budget)
        return pool.lend(purpose=purpose)

    def take_back(self, buffer: Array) -> None:
        """Accepts a buffer again."""
        self._pools[buffer.nbytes].take_back(buffer)
        if len(self._pools) > _MAX_LENGTHS:
            self.release_all()

    def end_step(self) -> None:
        """Lets go of buffers that no step has needed lately."""
        for nbytes, pool in [*self._pools.items()]:
            pool.end_step()
            if not pool.num_buffers:
                del self._pools[nbytes]

    def release_all(self) -> None:
        """Lets go of every buffer that is not lent."""
        for nbytes, pool in [*self._pools.items()]:
            pool.release_all()
            if not pool.num_buffers:
                del self._pools[nbytes]

    def close(self) -> None:
        """Lets go of every buffer, and of each that is lent as soon as it comes back."""
        for pool in self._pools.values():
            pool.close()

    def clear_padding(self, halves: Array) -> None:
        """Zeroes the padding between the slices of an arena in halves: a client may have sent anything there."""
        if self._padding is None:
            self._padding = _padding_of_halves(self._layout)
        if self._padding.size:
            halves.view(np.uint16)[self._padding] = 0


def _padding_of_halves(layout: Layout) -> Array:
    """Returns the indices of those 16-bit words of an arena in halves that belong to no slice."""
    starts = padding_words(layout) * word_bytes(layout)
    words = []
    for one in encoded_ranges(layout, FloatEncoding.BFLOAT16):
        inside = starts[(starts >= one.arena.start) & (starts < one.arena.stop)] - one.arena.start
        # All words of an encoded range are whole elements, or their two halves: each element has one word left.
        words.append(one.start // 2 + (np.unique(inside // 4) if one.is_encoded else _words_of(inside, word_bytes(layout))))
    return np.concatenate(words) if words else np.empty(0, np.int64)


def _words_of(offsets: Array, nbytes: int) -> Array:
    return (offsets[:, None] + np.arange(0, nbytes, 2)).reshape(-1) // 2


# Memory of one contribution: lent, decoded and put in order.


INDEX_DTYPE = np.dtype("<i8")
# Beside the received rows: memory for sorting or merging them, and the journal of the rows that they touch.
_COPIES_OF_ROWS = 3
_NO_BYTES = np.empty(0, np.uint8)


@light_dataclass(slots=True, eq=False)
class StagedGradients:
    """One contribution's memory. `dense` is the arena, empty if it was left out; `rows` are the tables' gradients by position.

    `encoding`: of `dense` in memory: none, or halves, which the apply converts. `packed`: the encoding and bytes received, if they are
    decoded when all of it is there. `is_foreign`: `dense` lies in a worker's memory. `formulas` are to be computed when it is applied; the
    slices that they write are among the `absent`. `checksum`: once it has been computed.
    """

    writer: SegmentWriter | DecodingWriter
    dense: Array
    absent: tuple[int, ...] = ()
    rows: dict[int, RowGradient] = field(default_factory=dict)
    reserved_bytes: int = 0
    awaited: Sequence[SparsePart] = ()
    encoding: FloatEncoding = FloatEncoding.AS_IS
    packed: tuple[Packed, Array] | None = None
    is_foreign: bool = False
    formulas: tuple[FormulaUpdate, ...] = ()
    checksum: int | None = None


class StagingMemory:
    """Lends memory for contributions of one layout. The arenas come from `pool`; rows are counted in `budget` as long as they are lent.

    Halves stay halves. Others are decoded as they arrive or, if their length varies, when all is there. `padding`: the layout's, if it is
    there already. `new_rows`: for each table, the bytes of each row that a gradient may make; `await_rows` makes room on a disk for so many
    of a table, and takes it back.
    """

    def __init__(
        self,
        layout: Layout,
        pool: BufferPool,
        *,
        budget: MemoryBudget,
        padding: Padding | None = None,
        new_rows: Sequence[int] = (),
        await_rows: Callable[[int, int], None] = lambda table, num_rows: None,
    ) -> None:
        self._new_rows = new_rows or (0,) * len(layout.tables)
        self._await_rows = await_rows
        self._layout = layout
        self._pool = pool
        self._budget = budget
        self._padding = padding or Padding(layout)
        self._encoded = EncodedPools(layout, budget=budget)

    def lend(
        self,
        sparse: Sequence[SparsePart],
        absent: tuple[int, ...],
        *,
        encoding: FloatEncoding = FloatEncoding.AS_IS,
        encoded_bytes: int = 0,
        dense: Array | None = None,
        formulas: tuple[FormulaUpdate, ...] = (),
        purpose: str,
    ) -> StagedGradients:
        """Returns memory with undefined contents.

        `dense`: foreign memory that already has the arena; then only the rows are to be written. Raises InvalidSpec if the layout
        has no such tables or slices, or `formulas` do not fit it, MalformedMessage if an arena cannot have so many bytes in that encoding,
        LimitExceeded.
        """
        if not sparse and not absent and dense is None and encoding is FloatEncoding.AS_IS and not encoded_bytes and not formulas:
            memory = self._pool.lend(purpose=purpose)
            return StagedGradients(SegmentWriter((memory,), memory.nbytes), memory)
        self._check(sparse, absent)
        check_fits(formulas, self._layout, absent)
        is_left_out = bool(absent) and len(absent) == len(self._layout.slices)
        if dense is None:
            self._encoded.check(encoding, encoded_bytes, is_left_out=is_left_out)
        pieces, rows, reserved = self._rows_memory(sparse, purpose)
        try:
            if dense is not None:
                staged = StagedGradients(Segments(pieces).writer(), dense, is_foreign=True)
            elif is_left_out:
                staged = StagedGradients(Segments(pieces).writer(), _NO_BYTES)
            else:
                staged = self._lend_arena(encoding, encoded_bytes, pieces, purpose)
        except BaseException:
            self._release_rows(sparse, reserved)
            raise
        written = {position for update in formulas for position in update.writes}
        staged.absent, staged.formulas = tuple(sorted(written.union(absent))) if written else absent, formulas
        staged.rows, staged.reserved_bytes, staged.awaited = rows, reserved, sparse
        return staged

    def nothing(self) -> StagedGradients:
        """Returns a contribution that has no gradient for any variable; it takes no memory, and need not be given back."""
        return StagedGradients(SegmentWriter((), 0), _NO_BYTES, absent=tuple(range(len(self._layout.slices))))

    def _lend_arena(self, encoding: FloatEncoding, encoded_bytes: int, pieces: Sequence[Array], purpose: str) -> StagedGradients:
        coding = FORMATS[encoding].coding
        if isinstance(coding, Units) and coding.kept is not None:
            halves = self._encoded.lend(encoded_bytes, purpose=purpose)
            return StagedGradients(Segments([halves, *pieces]).writer(), halves, encoding=encoding)
        dense = self._pool.lend(purpose=purpose)
        if not isinstance(coding, Packed):
            return StagedGradients(decoding_writer(self._layout, encoding, Segments([dense]), followed_by=pieces), dense)
        try:
            packed = self._encoded.lend(encoded_bytes, purpose=purpose)
        except BaseException:
            self._pool.take_back(dense)
            raise
        return StagedGradients(Segments([packed, *pieces]).writer(), dense, packed=(coding, packed))

    def take_back(self, staged: StagedGradients) -> None:
        """Accepts memory again."""
        if staged.packed is not None:
            self._encoded.take_back(staged.packed[1])
        if staged.encoding is not FloatEncoding.AS_IS:
            self._encoded.take_back(staged.dense)
        elif staged.dense is not _NO_BYTES and not staged.is_foreign:
            self._pool.take_back(staged.dense)
        if staged.rows or staged.reserved_bytes:
            self._release_rows(staged.awaited, staged.reserved_bytes)
            staged.rows, staged.reserved_bytes, staged.awaited = {}, 0, ()

    def end_step(self) -> None:
        """Lets go of arenas that no step has needed lately."""
        self._pool.end_step()
        self._encoded.end_step()

    def close(self) -> None:
        """Frees the memory that is not lent, and the rest as soon as it comes back."""
        self._pool.close()
        self._encoded.close()

    def put_in_order(self, staged: StagedGradients) -> None:
        """Decodes the encodings that need all bytes, zeroes the padding between the slices, and makes indices ascend, each once.

        Raises IndexOutOfRange, MalformedMessage.
        """
        if staged.packed is not None:
            unpack(self._layout, *staged.packed, staged.dense)
        if staged.encoding is not FloatEncoding.AS_IS:
            self._encoded.clear_padding(staged.dense)
        for position, gradient in staged.rows.items():
            piece = self._layout.tables[position]
            check_indices(gradient.indices, piece)
            with np.errstate(all="ignore"):
                staged.rows[position] = in_order(gradient, sum_dtype=piece.variable.data_type.sum_dtype)
        self.clear_padding(staged)

    def checksum(self, staged: StagedGradients) -> int:
        """Returns the checksum of a contribution that is in order: the same at all servers that received the same contribution."""
        if staged.checksum is None or staged.is_foreign:
            staged.checksum = checksum(self._parts(staged))
        return staged.checksum

    def _parts(self, staged: StagedGradients) -> Iterator[Array]:
        """Yields all arrays of a contribution, as they are in memory."""
        if staged.absent or staged.encoding is not FloatEncoding.AS_IS:
            # The maps come in no order.
            formulas = [
                (update.text, *(sorted(names.items()) for names in (update.variables, update.arrays, update.numbers)))
                for update in staged.formulas
            ]
            yield np.frombuffer(repr((staged.encoding.value, staged.absent, formulas)).encode(), np.uint8)
        if staged.absent and staged.dense.size:
            yield from self._given(staged)
        else:
            yield staged.dense
        for position, gradient in sorted(staged.rows.items()):
            yield np.array([position], INDEX_DTYPE)
            yield np.ascontiguousarray(gradient.indices)
            yield np.ascontiguousarray(gradient.rows)

    def _given(self, staged: StagedGradients) -> Iterator[Array]:
        """Yields a contribution's memory for each dense slice with a gradient or a formula's array; the rest is undefined."""
        layout = self._layout
        undefined = set(staged.absent).difference(*(update.arrays.values() for update in staged.formulas))
        for arena in layout.arenas:
            for position, (piece, start) in enumerate(zip(layout.slices, layout.offsets, strict=True)):
                if arena.start <= start < arena.stop and position not in undefined:
                    yield stretch(layout, staged.dense, staged.encoding, arena, start, start + piece.nbytes)

    def clear_padding(self, staged: StagedGradients) -> None:
        """Zeroes the padding between the slices of gradients that are not encoded: a client may have sent anything there."""
        if staged.dense.size and staged.encoding is FloatEncoding.AS_IS:
            self._padding.clear(staged.dense)

    def check_finite(self, staged: StagedGradients, *, who: str) -> None:
        """Raises NonFiniteGradient, naming the first variable, unless all gradients of a contribution that is in order are finite."""
        if staged.dense.size:
            self._check_finite_arena(staged, who)
        for position, gradient in staged.rows.items():
            refuse_nonfinite(self._layout.tables[position].variable.name, gradient.rows.reshape(-1), who=who)

    def _check_finite_arena(self, staged: StagedGradients, who: str) -> None:
        layout, absent = self._layout, frozenset(staged.absent)
        for arena in gradient_ranges(layout):
            if are_finite(stretch(layout, staged.dense, staged.encoding, arena, arena.start, arena.stop)):
                continue
            # Slices without a gradient may have any content.
            for position, (piece, start) in enumerate(zip(layout.slices, layout.offsets, strict=True)):
                if arena.start <= start < arena.stop and position not in absent:
                    elements = stretch(layout, staged.dense, staged.encoding, arena, start, start + piece.nbytes)
                    refuse_nonfinite(piece.variable.name, elements, who=who)

    def _check(self, sparse: Sequence[SparsePart], absent: tuple[int, ...]) -> None:
        tables, num_slices, num_tables = [part.table for part in sparse], len(self._layout.slices), len(self._layout.tables)
        if absent and not _ascend(absent, num_slices):
            raise InvalidSpec(f"absent: want ascending positions of the shard's {num_slices} slices, each at most once; ask for the layout")
        if tables and not _ascend(tables, num_tables):
            raise InvalidSpec(f"sparse: want ascending positions of the shard's {num_tables} tables, each at most once; ask for the layout")

    def _rows_memory(self, sparse: Sequence[SparsePart], purpose: str) -> tuple[list[Array], dict[int, RowGradient], int]:
        pieces: list[Array] = []
        rows: dict[int, RowGradient] = {}
        nbytes = sum(_part_bytes(part, self._layout.tables[part.table]) for part in sparse)
        # Half-precision rows are merged in float32.
        halves = [part for part in sparse if self._layout.tables[part.table].variable.data_type.itemsize == 2]
        reserved = nbytes * _COPIES_OF_ROWS + sum(part.num_rows * self._layout.tables[part.table].row_bytes for part in halves)
        # No step may fail for want of memory for the rows that it makes, so that is there before they are pushed.
        reserved += sum(part.num_rows * self._new_rows[part.table] for part in sparse)
        self._budget.reserve(reserved, purpose=f"{purpose} (rows of tables)")
        num_awaited = 0
        try:
            for part in sparse:
                self._await_rows(part.table, part.num_rows)
                num_awaited += 1
                piece = self._layout.tables[part.table]
                indices, values = _uninitialised(part.num_rows * INDEX_DTYPE.itemsize), _uninitialised(part.num_rows * piece.row_bytes)
                shape = part.num_rows, math.prod(piece.variable.shape[1:])
                values_view = values.view(piece.variable.data_type.dtype).reshape(shape)
                rows[part.table] = RowGradient(indices=indices.view(INDEX_DTYPE), rows=values_view)
                pieces += (indices, values)
        except BaseException as error:
            self._release_rows(sparse[:num_awaited], reserved)
            if not isinstance(error, MemoryError):
                raise
            raise LimitExceeded(f"{purpose}: this machine does not give the memory for its rows; push fewer rows at once") from None
        return pieces, rows, reserved

    def _release_rows(self, awaited: Sequence[SparsePart], reserved_bytes: int) -> None:
        self._budget.release(reserved_bytes)
        for part in awaited:
            self._await_rows(part.table, -part.num_rows)


def _part_bytes(part: SparsePart, piece: VariableSlice) -> int:
    nbytes = part.num_rows * (INDEX_DTYPE.itemsize + piece.row_bytes)
    if part.num_rows < 0:
        raise InvalidSpec(f"variable {piece.variable.name!r}: {part.num_rows} rows, want >= 0")
    if nbytes > MAX_TENSOR_BYTES:
        raise LimitExceeded(
            f"variable {piece.variable.name!r}: a gradient of {part.num_rows} rows; push at most {MAX_TENSOR_BYTES} bytes of them"
        )
    return nbytes


def _uninitialised(nbytes: int) -> Array:
    # Rounded up, so that NumPy's allocator gives memory that any element type is aligned in.
    return np.empty(-(-nbytes // ALIGNMENT) * ALIGNMENT, np.uint8)[:nbytes]


def _ascend(positions: Sequence[int], count: int) -> bool:
    return positions[0] >= 0 and positions[-1] < count and all(a < b for a, b in pairwise(positions))
