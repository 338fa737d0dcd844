"""Sums of squares, slice by slice, of gradients that come in blocks. Knows arrays and offsets; no optimizer and no step."""

import numpy as np

from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from ps_server.apply_plan import Run


class SquareSums:
    """Adds up in float64, where the square of any float32 has room. Takes it that the padding between slices is zero."""

    def __init__(self, layout: Layout, *, max_block_size: int) -> None:
        self._sums = np.zeros(len(layout.slices))
        self._squares = np.empty(max_block_size)
        self._indices = np.array([index for index in layout.order if layout.slices[index].nbytes], np.int64)
        self._offsets = np.array(layout.offsets, np.int64)[self._indices]

    @property
    def values(self) -> list[float]:
        """The sum of each of `layout.slices`, so far."""
        return [float(total) for total in self._sums]

    def add(self, run: Run, start: int, block: Array) -> None:
        """Adds a block of gradients that begins at element `start` of a run."""
        itemsize = run.arena.data_type.itemsize
        first_byte = run.start + start * itemsize
        squares = np.multiply(block, block, out=self._squares[: block.size], dtype=np.float64)
        first = int(np.searchsorted(self._offsets, first_byte, side="right")) - 1
        last = int(np.searchsorted(self._offsets, first_byte + block.size * itemsize, side="left"))
        starts = np.maximum(self._offsets[first:last] - first_byte, 0) // itemsize
        self._sums[self._indices[first:last]] += np.add.reduceat(squares, starts)
