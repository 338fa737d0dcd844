"""The elements of largest magnitude of each chunk, as positions and integers of 4 bits, and back. Knows arrays; no arena."""

from collections.abc import Iterator

import numpy as np

from ps_protocol.encodings.integers import SCALE_BYTES, quantize
from ps_protocol.errors import IndexOutOfRange, MalformedMessage
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

# A position in a chunk has 12 bits and a value 4, so that an element that is sent takes two whole bytes; what so few bits lose is fed back.
# As SparseLoCo (arXiv 2508.15706) has it: chunks let every part of the model learn something, however large another's gradients are.
CHUNK = 4096
# Bytes of the number that a range begins with, and of an element that is sent.
COUNT_BYTES = 8
ENTRY_BYTES = 2
_VALUE_BITS = 4
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Chunks that are converted at a time: their 65,536 elements stay in a core's cache.
_NUM_AT_ONCE = 16


@light_dataclass(frozen=True, slots=True)
class TopKChunks:
    """Sends the `count` elements of largest magnitude of each whole chunk, and as large a share of a shorter last one; NaN is the largest.

    Values are whole chunks, or end where the range does.
    """

    count: int

    def nbytes(self, size: int) -> int:
        """Returns the bytes of so many elements."""
        num_whole, rest = divmod(size, CHUNK)
        num_entries = num_whole * self.count + self._count_of(rest)
        return SCALE_BYTES * (num_whole + bool(rest)) + ENTRY_BYTES * num_entries

    def encode(self, values: Array, encoded: Array) -> None:
        """Writes float32 `values` into `encoded`, uint8."""
        for chunks, scales, entries in self._parts(values, encoded):
            size, number = chunks.shape[1], entries.shape[1]
            magnitudes = chunks.view(np.int32) & _MAGNITUDE
            positions = np.sort(np.argpartition(magnitudes, size - number, axis=1)[:, size - number :], axis=1)
            chosen = np.take_along_axis(chunks, positions, axis=1)
            integers = np.empty_like(chosen)
            with np.errstate(all="ignore"):
                quantize(chosen, scales, integers, bits=_VALUE_BITS)
            np.copyto(entries, positions | (integers.astype(np.int64) & 15) << 12, casting="unsafe")

    def decode(self, encoded: Array, out: Array) -> None:
        """Fills float32 `out`. Raises MalformedMessage or IndexOutOfRange."""
        out.fill(0)
        for chunks, scales, entries in self._parts(out, encoded):
            positions = (entries & 0xFFF).astype(np.intp)
            if positions.size and positions.max() >= chunks.shape[1]:
                raise IndexOutOfRange(f"top k: position {positions.max()}, the chunk has {chunks.shape[1]} elements")
            if not (positions[:, 1:] > positions[:, :-1]).all():
                raise MalformedMessage("top k: positions do not ascend; send each once, in order")
            with np.errstate(all="ignore"):
                np.put_along_axis(chunks, positions, (entries.view(np.int16) >> 12) * scales[:, None], axis=1)

    def _count_of(self, size: int) -> int:
        return -(-self.count * size // CHUNK)

    def _parts(self, values: Array, encoded: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Yields chunks of one size, with their scales and entries: the whole ones some at a time, then a shorter last one."""
        num_whole, rest = divmod(values.size, CHUNK)
        begin = 0
        for number, size, first in ((num_whole, CHUNK, 0), (int(rest > 0), rest, num_whole * CHUNK)):
            chunk = np.dtype([("scale", "<f4"), ("entries", "<u2", (self._count_of(size),))])
            end = begin + number * chunk.itemsize
            chunks, coded = values[first : first + number * size].reshape(number, size), encoded[begin:end].view(chunk)
            for start in range(0, number, _NUM_AT_ONCE):
                part = coded[start : start + _NUM_AT_ONCE]
                yield chunks[start : start + _NUM_AT_ONCE], part["scale"], part["entries"]
            begin = end


def top_k_nbytes(size: int, count: int) -> int:
    """Returns the bytes of a range of so many elements, `count` of each chunk, with the number that it begins with."""
    return COUNT_BYTES + TopKChunks(count).nbytes(size)


def begin_top_k(count: int, encoded: Array) -> TopKChunks:
    """Writes the number that a range begins with; the chunks follow it."""
    encoded[:COUNT_BYTES].view("<u8")[0] = count
    return TopKChunks(count)


def decode_top_k(encoded: Array, out: Array) -> int:
    """Fills float32 `out` from what `encoded` begins with; returns how many bytes that was. Raises MalformedMessage or IndexOutOfRange."""
    _take(encoded, COUNT_BYTES)
    count = int(encoded[:COUNT_BYTES].view("<u8")[0])
    if count > CHUNK:
        raise MalformedMessage(f"top k: {count} elements of each {CHUNK}; send each at most once")
    nbytes = top_k_nbytes(out.size, count)
    _take(encoded, nbytes)
    TopKChunks(count).decode(encoded[COUNT_BYTES:nbytes], out)
    return nbytes


def _take(encoded: Array, nbytes: int) -> None:
    if nbytes > encoded.size:
        raise MalformedMessage(f"top k: {encoded.size} bytes are left, {nbytes} at least by the number of elements; they do not fit")
