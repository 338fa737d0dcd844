"""A worker's memory for the dense variables, arranged as the shards' arenas are. Knows offsets and bytes; no steps and no transport.

Each shard's whole variables lie in one run of bytes, as they do on the shard. A variable that is cut along axis 0 lies in an array of its
own, and the shards reach their rows of it through segments, so the user always gets one array and nothing is joined or copied. One that is
cut along another axis has an array of its own too, but its slices are no runs of bytes: they are copied, by `pack` and `unpack`.
"""

from collections.abc import Sequence

import numpy as np

from ps_protocol.layout import ALIGNMENT, Layout, VariableSlice, aligned_bytes
from ps_protocol.model import ModelSpec
from ps_protocol.segments import Segments
from ps_protocol.tensors import Array


class ModelMemory:
    """One array for each dense variable, and for each shard the segments that together are its arena. Allocates only when it is made."""

    def __init__(self, model: ModelSpec, *, layouts: Sequence[Layout], is_writable: bool) -> None:
        # What lies between two slices of a shard is zero there and means nothing here; all such gaps share these bytes.
        self._padding = np.zeros(ALIGNMENT, np.uint8)
        self._memories: list[Array] = [self._padding]
        self._packed: list[tuple[Array, Array]] = []  # slices that are no run of bytes: where they are sent from, and as part of the whole
        split = {piece.variable.name: piece.variable for layout in layouts for piece in layout.slices if not piece.is_whole}
        self._arrays = {
            name: self._allocate(variable.nbytes).view(variable.data_type.dtype).reshape(variable.shape) for name, variable in split.items()
        }
        self.layouts = tuple(layouts)
        self.segments = tuple(self._segments_of(layout) for layout in layouts)
        self.arrays = {variable.name: self._arrays[variable.name] for variable in model.variables if not variable.is_sparse}
        self.views = {name: _view(array, is_writable=is_writable) for name, array in self.arrays.items()}
        self._owners = frozenset(id(_owner(memory)) for memory in self._memories)

    def shares(self, array: Array) -> bool:
        """Whether the bytes of `array` lie in this memory."""
        return id(_owner(array)) in self._owners

    def pack(self) -> None:
        """Brings the arrays into the segments; to be called before those are sent."""
        for packed, part in self._packed:
            np.copyto(packed, part)

    def unpack(self) -> None:
        """Brings the segments into the arrays; to be called after those have been filled."""
        for packed, part in self._packed:
            np.copyto(part, packed)

    def _allocate(self, nbytes: int) -> Array:
        memory = aligned_bytes(nbytes)
        self._memories.append(memory)
        return memory

    def _segments_of(self, layout: Layout) -> Segments:
        ordered = [layout.slices[index] for index in layout.order]
        run = self._allocate(sum(_aligned(piece.nbytes) for piece in ordered if _lies_in_run(piece)))
        pieces: list[Array] = []
        start = end = 0  # of the part of the run that no segment has yet
        for piece in ordered:
            if _lies_in_run(piece):
                self._place(piece, run[end : end + piece.nbytes])
                end += _aligned(piece.nbytes)
                continue
            pieces += [run[start:end], self._rows(piece), self._padding[: _aligned(piece.nbytes) - piece.nbytes]]
            start = end
        pieces.append(run[start:end])
        return Segments([piece for piece in pieces if piece.nbytes])

    def _place(self, piece: VariableSlice, memory: Array) -> None:
        array = memory.view(piece.variable.data_type.dtype).reshape(piece.shape)
        if piece.is_whole:
            self._arrays[piece.variable.name] = array
            return
        part = np.moveaxis(np.moveaxis(self._arrays[piece.variable.name], piece.axis, 0)[piece.start : piece.stop], 0, piece.axis)
        self._packed.append((array, part))

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


def _owner(array: Array) -> object:
    return array if array.base is None else array.base
