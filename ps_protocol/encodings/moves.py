"""How a step moved the variables, in 4 bits an element, where that is exact. Knows arenas; no step and no wire.

An optimizer that moves each element of a variable by -7 to 7 times some power of two, as `outer_optimizer(…, bits=4)` does, needs no more
for a reader that has the values before: of each slice the power of two, float32, and the numbers, two in a byte, the first in its lower
half. What takes no gradients, or is of another type than float32, comes as it is.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ps_protocol.encodings.formats import has_encoded_elements
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array

_SCALE_BYTES = 4
_MOST = 7
# Elements that are looked at at a time; an even number.
_NUM_AT_ONCE = 1 << 16
# A difference of two rounded numbers may be slightly too small, never by a tenth.
_ALMOST = np.float32(1.1)


def moves_nbytes(layout: Layout) -> int:
    """Returns the bytes that moves of an arena have."""
    return sum(stop - start for _, _, start, stop in _places(layout))


def encode_moves(layout: Layout, before: Array, after: Array) -> Array | None:
    """Returns what takes a reader from one arena to another, to the last bit; None: this cannot, or is no shorter than the arena."""
    if (nbytes := moves_nbytes(layout)) >= layout.nbytes:
        return None
    out = np.empty(nbytes, np.uint8)
    for index, is_moved, start, stop in _places(layout):
        new, target = layout.view(after, index).reshape(-1), out[start:stop]
        if not is_moved:
            target[:] = new.view(np.uint8)
        elif not _encode(layout.view(before, index).reshape(-1), new, target):
            return None
    return out


def _places(layout: Layout) -> Iterator[tuple[int, bool, int, int]]:
    """Yields each slice, whether its moves travel, and where they begin and end."""
    start = 0
    for index in layout.order:
        piece = layout.slices[index]
        is_moved = has_encoded_elements(piece.variable.data_type, piece.variable.optimizer)
        stop = start + (_SCALE_BYTES + -(-piece.nbytes // 8) if is_moved else piece.nbytes)
        yield index, is_moved, start, stop
        start = stop


def _encode(old: Array, new: Array, out: Array) -> bool:
    with np.errstate(all="ignore"):
        largest = max((float(np.abs(old[part] - new[part]).max()) for part in _parts(old.size)), default=0.0)
        # The largest is 4 to 7 times this power of two; or 1 to 3 times one that is twice or four times as large.
        scale = np.ldexp(np.float32(1), np.frexp(np.float32(largest) * _ALMOST)[1] - 3)
        out[:_SCALE_BYTES].view(np.float32)[0] = scale
        for part in _parts(old.size):
            # What is -0 here is 0 for the reader.
            numbers = np.rint((old[part] - new[part]) / scale) + np.float32(0)
            # Also not so for NaN.
            if not np.abs(numbers).max() <= _MOST:
                return False
            if not np.array_equal((old[part] - numbers * scale).view(np.uint32), new[part].view(np.uint32)):
                return False
            halves = np.zeros(numbers.size + numbers.size % 2, np.uint8)
            halves[: numbers.size] = numbers.astype(np.int8).view(np.uint8) & np.uint8(15)
            begin = _SCALE_BYTES + part.start // 2
            out[begin : begin + halves.size // 2] = halves[::2] | halves[1::2] << np.uint8(4)
    return True


def _parts(size: int) -> Iterator[slice]:
    for start in range(0, size, _NUM_AT_ONCE):
        yield slice(start, min(start + _NUM_AT_ONCE, size))


class MovingWriter:
    """Takes an arena's moves as they come, in order, and moves `arena` by them once all are there. Not thread-safe."""

    def __init__(self, layout: Layout, arena: Array) -> None:
        self._layout, self._arena = layout, arena
        self._encoded = np.empty(moves_nbytes(layout), np.uint8)
        self._writer = Segments([self._encoded]).writer()
        self.num_written = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in all."""
        return self._writer.nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Takes the next bytes; see SegmentWriter."""
        self._writer.write(offset, data)
        self._move()

    def fill(self, receive: Callable[[memoryview], int]) -> None:
        """Takes the next bytes, which `receive` writes into the memory that it is given."""
        self._writer.fill(receive)
        self._move()

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""
        self._writer.finish()

    def _move(self) -> None:
        self.num_written = self._writer.num_written
        if not self._writer.is_full:
            return
        for index, is_moved, start, stop in _places(self._layout):
            values, encoded = self._layout.view(self._arena, index).reshape(-1), self._encoded[start:stop]
            if not is_moved:
                values.view(np.uint8)[:] = encoded
                continue
            scale = encoded[:_SCALE_BYTES].view(np.float32)[0]
            for part in _parts(values.size):
                pairs = encoded[_SCALE_BYTES + part.start // 2 : _SCALE_BYTES + (part.stop + 1) // 2].view(np.int8)
                numbers = np.empty((pairs.size, 2), np.float32)
                numbers[:, 0], numbers[:, 1] = (pairs << 4) >> 4, pairs >> 4
                with np.errstate(all="ignore"):
                    values[part] -= numbers.reshape(-1)[: part.stop - part.start] * scale
