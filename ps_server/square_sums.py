"""Sums of squares, slice by slice, of gradients that come in parts, in any order.

A slice's sum is that of its blocks, in their order, however the blocks were grouped and whoever added up each: the same to the last bit.
"""

import numpy as np

from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from ps_server.apply_plan import Run


class SquareSums:
    """Adds up in float64, where the square of any float32 has room. Takes it that the padding between slices is zero.

    `block_bytes`: of the blocks that are summed by themselves; every part begins where one does.
    """

    def __init__(self, layout: Layout, *, block_bytes: int) -> None:
        self._num_slices = len(layout.slices)
        self._block_bytes = block_bytes
        self._indices = np.array([index for index in layout.order if layout.slices[index].nbytes], np.int64)
        self._offsets = np.array(layout.offsets, np.int64)[self._indices]
        # Slices and what was added up of each, by the first byte of the part.
        self._parts: dict[int, tuple[Array, Array]] = {}

    @property
    def values(self) -> list[float]:
        """The sum of each of `layout.slices`, so far."""
        sums = np.zeros(self._num_slices)
        for _, (indices, partial_sums) in sorted(self._parts.items()):
            np.add.at(sums, indices, partial_sums)  # one after the other, also where a slice occurs twice
        return [float(total) for total in sums]

    def add(self, run: Run, start: int, part: Array, *, squares: Array) -> None:
        """Adds the part that begins at element `start` of a run; `squares` is scratch memory for as many float64. Thread-safe."""
        itemsize = run.arena.data_type.itemsize
        first_byte = run.start + start * itemsize
        last_byte = first_byte + part.size * itemsize
        block_size = self._block_bytes // part.dtype.itemsize
        first = int(np.searchsorted(self._offsets, first_byte, side="right")) - 1
        last = int(np.searchsorted(self._offsets, last_byte, side="left"))
        starts = np.maximum(self._offsets[first:last] - first_byte, 0) // itemsize
        starts = np.union1d(starts, np.arange(0, part.size, block_size))
        owners = np.searchsorted(self._offsets, first_byte + starts * itemsize, side="right") - 1
        np.multiply(part, part, out=squares, dtype=np.float64)
        self._parts[first_byte] = self._indices[owners], np.add.reduceat(squares, starts)
