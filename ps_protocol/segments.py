"""A shard's arena or rows, as they lie in somebody's memory: pieces that together make one run of bytes. Knows offsets and bytes; no names.

A server has its arena in one piece. A worker has it in one piece but for the variables that are split over shards: their rows lie in the
middle of the whole variable, so that the user gets one array and nothing is joined afterwards.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ps_protocol.errors import FrameOutOfOrder, TruncatedStream
from ps_protocol.tensors import Array


class Segments:
    """Consecutive pieces of an arena, each a one-dimensional uint8 array that shares the owner's memory."""

    def __init__(self, pieces: Sequence[Array]) -> None:
        self._pieces = tuple(pieces)
        starts, end = [], 0
        for piece in self._pieces:
            if piece.dtype != np.uint8 or piece.ndim != 1:
                raise ValueError("a segment must be a one-dimensional uint8 array")
            starts.append(end)
            end += piece.nbytes
        self._starts, self.nbytes = tuple(starts), end

    @property
    def pieces(self) -> tuple[Array, ...]:
        """The pieces, in order."""
        return self._pieces

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset, bytes) in order, each of at most `max_bytes`, without copying."""
        for start, piece in zip(self._starts, self._pieces, strict=True):
            view = piece.data
            for offset in range(0, piece.nbytes, max_bytes):
                yield start + offset, view[offset : offset + max_bytes]

    def followed_by(self, pieces: Sequence[Array]) -> "Segments":
        """Returns these pieces and then `pieces`, sharing the memory of both."""
        return Segments((*self._pieces, *pieces))

    def writer(self) -> "SegmentWriter":
        """Returns a writer that fills the pieces from the first byte to the last."""
        return SegmentWriter(self._pieces, self.nbytes)

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

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""
        if self.num_written != self.nbytes:
            raise TruncatedStream(f"{self.num_written} of {self.nbytes} bytes received; nothing was changed; send it again")
