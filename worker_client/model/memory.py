"""A worker's memory for the dense variables, laid out like the shards' arenas. Knows offsets and bytes; no steps and no transport.

Each shard's whole variables lie in one run of bytes, as on the shard. A variable that is split along axis 0 lies in an array of its own,
and segments refer to each shard's rows of it, so the user gets one array without joining or copying. A variable that is split along another
axis has an array of its own too, but its slices are not contiguous, so `pack` and `unpack` copy them.

Where a shard gives an arena (`on`), its whole variables are views of that arena. Split variables still have arrays of their own, which all
memories for the same model share, and `pack` and `unpack` copy every slice of them.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage
from ps_protocol.model.layout import ALIGNMENT, Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.spec import ModelSpec, Placement, check_placement, layouts
from ps_protocol.model.variables import Array

# A slice as it is sent, and as part of the whole variable.
_Packed = tuple[Array, Array]


def arranged(model: ModelSpec, placement: Placement, *, num_shards: int) -> tuple[Layout, ...]:
    """Returns each shard's layout for the chief's placement of the model. Raises MalformedMessage unless the whole model is placed."""
    try:
        check_placement(placement, model, num_shards=num_shards)
    except InvalidSpec as error:
        raise MalformedMessage(f"the chief's placement of the model: {error.message}") from None
    return layouts(placement, num_shards=num_shards)


class ModelMemory:
    """One array for each dense variable, and for each shard the segments that form its arena. Allocates only in the constructor."""

    def __init__(self, model: ModelSpec, *, layouts: Sequence[Layout], is_writable: bool) -> None:
        # Gaps between two slices of a shard have no meaning; all of them share these zero bytes.
        self._padding = np.zeros(ALIGNMENT, np.uint8)
        self._memories: list[Array] = [self._padding]
        self._is_writable = is_writable
        split = {piece.variable.name: piece.variable for layout in layouts for piece in layout.slices if not piece.is_whole}
        self._arrays = {
            name: self._allocate(variable.nbytes).view(variable.data_type.dtype).reshape(variable.shape) for name, variable in split.items()
        }
        self._names = tuple(variable.name for variable in model.variables if not variable.is_sparse)
        self.layouts = tuple(layouts)
        self.arenas: tuple[Array | None, ...] = (None,) * len(self.layouts)
        self._packed_of: list[list[_Packed]] = [[] for _ in self.layouts]
        self.segments = tuple(self._segments_of(layout, packed) for layout, packed in zip(self.layouts, self._packed_of, strict=True))
        self._finish()

    def on(self, arenas: Sequence[Array | None]) -> "ModelMemory":
        """Returns memory on the shards' own arenas, uint8 arrays of their layouts' lengths; None: the shard's part is that of this memory.

        Split variables lie in the same arrays as here. The views are writable where the arenas and this memory are.
        """
        memory = ModelMemory.__new__(ModelMemory)
        memory._padding, memory._is_writable, memory._names = self._padding, self._is_writable, self._names
        memory._memories = list(self._memories)
        memory._arrays = dict(self._arrays)
        memory.layouts, memory.arenas = self.layouts, tuple(arenas)
        memory._packed_of = list(self._packed_of)
        segments = list(self.segments)
        for index, arena in enumerate(arenas):
            if arena is not None:
                segments[index], memory._packed_of[index] = Segments((arena,)), memory._lay_on(arena, self.layouts[index])
        memory.segments = tuple(segments)
        memory._finish()
        return memory

    def _finish(self) -> None:
        self._packed = [pair for packed in self._packed_of for pair in packed]
        self.arrays = {name: self._arrays[name] for name in self._names}
        self.views = {name: _view(array, is_writable=self._is_writable and array.flags.writeable) for name, array in self.arrays.items()}
        self._owners = frozenset(id(owner) for memory in self._memories for owner in (memory, _owner(memory)))
        # Variables whose bytes a server may still read after a push.
        lent = {
            piece.variable.name
            for index, layout in enumerate(self.layouts)
            if self.is_lent(index)
            for piece in layout.slices
            if piece.is_whole
        }
        self._lent_views = [view for name, view in self.views.items() if name in lent]
        self.is_locked = False

    @property
    def copies(self) -> bool:
        """Whether `pack` and `unpack` have something to copy."""
        return bool(self._packed)

    def is_lent(self, index: int) -> bool:
        """Whether a shard's part lies in an arena given to `on`."""
        return self.arenas[index] is not None

    def shares(self, array: Array) -> bool:
        """Whether the bytes of `array` lie in this memory."""
        return id(_owner(array)) in self._owners

    def pack(self) -> None:
        """Copies arrays into the segments; call it before the segments are sent."""
        for packed, part in self._packed:
            np.copyto(packed, part)

    def unpack(self) -> None:
        """Copies segments into the arrays; call it after the segments have been filled."""
        for packed, part in self._packed:
            np.copyto(part, packed)

    def lock(self, is_locked: bool = True) -> None:
        """Makes the views of arenas given to `on` read-only, or writable again; other views stay writable."""
        if is_locked is not self.is_locked:
            _set_writable(self._lent_views, is_writable=not is_locked)
            self.is_locked = is_locked

    def _allocate(self, nbytes: int) -> Array:
        try:
            memory = aligned_bytes(nbytes)
        except MemoryError:
            raise LimitExceeded(f"this machine does not give the {nbytes} bytes that variables of the model take") from None
        self._memories.append(memory)
        return memory

    def _lay_on(self, arena: Array, layout: Layout) -> list[_Packed]:
        self._memories.append(arena)
        packed: list[_Packed] = []
        for position, piece in enumerate(layout.slices):
            part = layout.view(arena, position)
            if piece.is_whole:
                self._arrays[piece.variable.name] = part
            elif piece.nbytes:
                packed.append((part, self._part(piece)))
        return packed

    def _segments_of(self, layout: Layout, packed: list[_Packed]) -> Segments:
        ordered = [layout.slices[index] for index in layout.order]
        run = self._allocate(sum(_aligned(piece.nbytes) for piece in ordered if _lies_in_run(piece)))
        pieces: list[Array] = []
        start = end = 0  # of the part of the run that is not in a segment yet
        for piece in ordered:
            if _lies_in_run(piece):
                self._place(piece, run[end : end + piece.nbytes], packed)
                end += _aligned(piece.nbytes)
                continue
            pieces += [run[start:end], self._rows(piece), self._padding[: _aligned(piece.nbytes) - piece.nbytes]]
            start = end
        pieces.append(run[start:end])
        return Segments([piece for piece in pieces if piece.nbytes])

    def _place(self, piece: VariableSlice, memory: Array, packed: list[_Packed]) -> None:
        array = memory.view(piece.variable.data_type.dtype).reshape(piece.shape)
        if piece.is_whole:
            self._arrays[piece.variable.name] = array
            return
        packed.append((array, self._part(piece)))

    def _part(self, piece: VariableSlice) -> Array:
        whole = self._arrays[piece.variable.name]
        return np.moveaxis(np.moveaxis(whole, piece.axis, 0)[piece.start : piece.stop], 0, piece.axis)

    def _rows(self, piece: VariableSlice) -> Array:
        whole = self._arrays[piece.variable.name].reshape(-1).view(np.uint8)
        return whole[piece.start * piece.row_bytes : piece.stop * piece.row_bytes]


def _lies_in_run(piece: VariableSlice) -> bool:
    return piece.is_whole or not piece.is_contiguous


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(array: Array, *, is_writable: bool) -> Array:
    view = array.view()
    view.flags.writeable = is_writable
    return view


def _set_writable(views: Iterable[Array], *, is_writable: bool) -> None:
    for view in views:
        view.flags.writeable = is_writable


def _owner(array: Array) -> object:
    return array if array.base is None else array.base


def with_tables(values: ModelMemory, index: int, tables: Mapping[str, Array]) -> Segments:
    """Returns the bytes of a shard's first values: its arena, then the rows of those tables that have no initializer."""
    sent = [piece for piece in values.layouts[index].tables if piece.variable.initializer is None]
    rows = [tables[piece.variable.name][piece.start : piece.stop].reshape(-1).view(np.uint8) for piece in sent]
    return values.segments[index].followed_by([piece for piece in rows if piece.nbytes])
