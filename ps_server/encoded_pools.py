"""Memory for arenas that stay as they travelled: halves, and the top k until they are decoded."""

import numpy as np

from ps_protocol.encodings import FloatEncoding, encoded_nbytes, encoded_ranges
from ps_protocol.encodings_top_k import check_top_k_nbytes
from ps_protocol.errors import MalformedMessage
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from ps_server.arena import padding_words, word_bytes
from ps_server.memory import BufferPool, MemoryBudget

# Lengths whose free buffers are kept: halves have one, and a worker's top k have one.
_MAX_LENGTHS = 4


class EncodedPools:
    """Reused buffers by their length. What is lent is counted in `budget`. Not thread-safe, but for `clear_padding`."""

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
        elif encoding is FloatEncoding.TOP_K:
            check_top_k_nbytes(self._layout, nbytes)
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
        """Zeroes what lies between the slices of an arena in halves, whatever a client sent there."""
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
