"""One shard's gradients as they travel, with the error that encoding made carried over to the next. Knows arrays; no step, no transport."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ps_protocol.encodings.formats import FORMATS, EncodedRange, FloatEncoding, Packed, Units, is_encodable, ranges_with
from ps_protocol.encodings.top_k import TopKChunks
from ps_protocol.model.layout import ArenaRange, Layout, Segments, aligned_bytes
from ps_protocol.model.variables import Array

# Elements that are worked on at a time; a multiple of every encoding's units. They stay in a core's cache.
_BLOCK = 1 << 16


class GradientEncoder:
    """Encodes contributions of one layout, one after the other. Not thread-safe.

    `fraction` is for encodings that send some of the elements: the share of each chunk that is sent, at least one element. `feedback` is
    the share of what is owed, which was not sent of earlier gradients, or wrongly, that is added to the next: with 1 every gradient
    arrives, later, and with less it fades (SparseLoCo, arXiv 2508.15706). A contribution that did not count leaves no trace in that:
    neither its own error nor what it carried of earlier ones, which is carried on.
    """

    def __init__(self, layout: Layout, encoding: FloatEncoding, *, fraction: float = 0.0, feedback: float = 0.0) -> None:
        self.encoding = encoding
        self._layout = layout
        self._fraction, self._feedback = fraction, np.float32(feedback)
        self._coding = FORMATS[encoding].coding
        self._ranges = tuple(ranges_with(layout, self._nbytes_of()))
        self._encoded = aligned_bytes(self._ranges[-1].stop if self._ranges else 0)
        # What is owed after the last contribution that counts, and what would be after the one that is open: the two change places.
        self._owed = [aligned_bytes(layout.nbytes) for _ in range(2)] if feedback else []
        self._is_open = False
        self._scratch = np.empty(_BLOCK, np.float32)
        encodable = [arena for arena in layout.arenas if is_encodable(layout, arena)]
        offsets = enumerate(layout.offsets)
        self._encodable = frozenset(i for i, offset in offsets if any(arena.start <= offset < arena.stop for arena in encodable))

    @property
    def nbytes(self) -> int:
        """Bytes of a contribution's arena as it travels."""
        return self._encoded.nbytes

    def settle(self, *, is_counted: bool) -> None:
        """Says whether the last contribution that was encoded counts, as far as is known. To be called before the next is encoded."""
        if self._is_open and self._owed and is_counted:
            self._owed.reverse()
        self._is_open = False

    def encode(self, arena: Segments, *, absent: Sequence[int] = ()) -> Array:
        """Returns the bytes of the gradients in `arena` as they travel, valid until the next call.

        `absent`: positions of slices that it has no gradient for; their bytes are neither looked at nor changed by what follows.
        """
        self.settle(is_counted=True)
        source = _Source(self._layout, arena, [index for index in absent if index in self._encodable])
        with np.errstate(all="ignore"):
            for one in self._ranges:
                out = self._encoded[one.start : one.stop]
                if not one.is_encoded:
                    source.copy(one.arena, out)
                elif isinstance(self._coding, Packed):
                    self._encode_blocks(self._coding.begin(self._count, out), one, source, out[self._coding.head_bytes :])
                elif self._coding is not None:
                    self._encode_blocks(self._coding, one, source, out)
            if self._owed:
                for start, stop in source.absent:
                    self._owed[1][start:stop] = self._owed[0][start:stop]
        self._is_open = True
        return self._encoded

    @property
    def _count(self) -> int:
        """How many elements of a chunk are sent."""
        assert isinstance(self._coding, Packed)
        return max(1, math.ceil(self._fraction * self._coding.chunk))

    def _nbytes_of(self) -> Callable[[int], int] | None:
        coding = self._coding
        if isinstance(coding, Packed):
            return lambda size: coding.nbytes(size, self._count)
        return None if coding is None else coding.nbytes

    def _blocks(self, arena: ArenaRange, source: "_Source") -> Iterator[tuple[int, Array]]:
        """The gradients, with what is owed added: then in the memory of what will be owed, which may be changed."""
        if not self._owed:
            yield from source.blocks(arena, self._scratch)
            return
        owed, next_owed = (memory[arena.start : arena.stop].view(np.float32) for memory in self._owed)
        for start, block in source.blocks(arena, self._scratch):
            part = slice(start, start + block.size)
            if self._feedback == 1:
                np.add(block, owed[part], out=next_owed[part])
            else:
                np.multiply(owed[part], self._feedback, out=next_owed[part])
                np.add(block, next_owed[part], out=next_owed[part])
            source.clear_absent(arena.start + 4 * start, next_owed[part])
            yield start, next_owed[part]

    def _encode_blocks(self, units: Units | TopKChunks, one: EncodedRange, source: "_Source", out: Array) -> None:
        begin = 0
        for _, block in self._blocks(one.arena, source):
            nbytes = units.nbytes(block.size)
            encoded = out[begin : begin + nbytes]
            begin += nbytes
            units.encode(block, encoded)
            if self._owed:
                self._subtract(units, encoded, block)

    def _subtract(self, units: Units | TopKChunks, encoded: Array, block: Array) -> None:
        sent = self._scratch[: block.size]
        units.decode(encoded, sent)
        np.subtract(block, sent, out=block)
        # What is not finite is sent as it is, and cannot be owed: it would stay so for ever.
        if not np.isfinite(np.dot(block, block)):
            block[~np.isfinite(block)] = 0


class _Source:
    """An arena in pieces, read in blocks of elements; what is absent reads as zero."""

    def __init__(self, layout: Layout, arena: Segments, absent: Sequence[int]) -> None:
        self._pieces = [(start, np.frombuffer(view, np.uint8)) for start, view in arena.chunks(max(1, arena.nbytes))]
        spans = [(layout.offsets[index], layout.offsets[index] + layout.slices[index].nbytes) for index in absent]
        self.absent = tuple(span for span in spans if span[1] > span[0])

    def blocks(self, arena: ArenaRange, scratch: Array) -> Iterator[tuple[int, Array]]:
        """Yields (position of the first element, elements), valid until the next one."""
        for start in range(arena.start, arena.stop, 4 * _BLOCK):
            stop = min(start + 4 * _BLOCK, arena.stop)
            block = self._view(start, stop)
            if block is None or any(first < stop and last > start for first, last in self.absent):
                block = scratch.view(np.uint8)[: stop - start]
                self._gather(start, block)
                self.clear_absent(start, block)
            yield (start - arena.start) // 4, block.view(np.float32)

    def copy(self, arena: ArenaRange, out: Array) -> None:
        """Copies a range as it is."""
        self._gather(arena.start, out)

    def clear_absent(self, start: int, block: Array) -> None:
        """Zeroes those elements of a block that begins at byte `start` that are absent."""
        memory = block.view(np.uint8)
        for first, last in self.absent:
            if last > start and first < start + memory.size:
                memory[max(first - start, 0) : last - start] = 0

    def _view(self, start: int, stop: int) -> Array | None:
        for first, piece in self._pieces:
            if first <= start and stop <= first + piece.size:
                return piece[start - first : stop - first]
        return None

    def _gather(self, start: int, out: Array) -> None:
        for first, piece in self._pieces:
            begin, end = max(first, start), min(first + piece.size, start + out.size)
            if begin < end:
                out[begin - start : end - start] = piece[begin - first : end - first]
