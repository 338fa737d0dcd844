"""The memory of one shard: its variables twice, with the step that each copy belongs to, and its slots. Knows bytes and steps; no lock.

Step g+1 is written beside step g. A reader may copy a buffer while another thread writes it, without a lock: each buffer has a version
that grows before the first byte of it is overwritten, so a reader that finds the version unchanged after copying has copied no mixture.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ps_protocol.layout import ALIGNMENT, Layout
from ps_protocol.tensors import Array
from ps_server.memory import MemoryBudget

_WORD_BYTES = 4


@dataclass(slots=True, kw_only=True)
class VersionedBuffer:
    """One copy of an arena. `step` is None while it is being written or was never written."""

    memory: Array
    step: int | None = None
    version: int = 0


class ShardArena:
    """Two copies of a shard's variables, and its slots. The caller takes care that only one writer writes at a time."""

    def __init__(self, layout: Layout, *, slots: Mapping[str, float], budget: MemoryBudget) -> None:
        budget.check(arena_bytes(layout, num_slots=len(slots)), purpose="the model's part on this shard (variables twice, slots)")
        self.layout = layout
        self._budget = budget
        self._padding = padding_words(layout)
        self._buffers = [VersionedBuffer(memory=budget.allocate(layout.nbytes, purpose="a copy of the variables")) for _ in range(2)]
        self._current = 0
        self.slots = {name: budget.allocate(layout.nbytes, purpose=f"slot {name!r}") for name in sorted(slots)}
        self._slot_values = dict(slots)
        # Grows before the slots are touched.
        self.slots_version = 0

    def fill_slots(self) -> None:
        """Gives every slot the value that it starts with. Takes as long as a copy."""
        for name, memory in self.slots.items():
            for arena in self.layout.arenas:
                # The padding too: a zero there would make adagrad divide zero by zero.
                self.layout.arena(memory, arena).fill(self._slot_values[name])

    @property
    def current(self) -> VersionedBuffer:
        """The copy that holds the latest step."""
        return self._buffers[self._current]

    def begin_next(self) -> VersionedBuffer:
        """Returns the other copy, to be overwritten; from now on its readers know that it is gone."""
        spare = self._buffers[1 - self._current]
        spare.step = None
        spare.version += 1
        return spare

    def begin_slots(self) -> None:
        """Tells readers of slots that these will be overwritten."""
        self.slots_version += 1

    def publish_next(self, step: int) -> None:
        """Makes the other copy, now whole, the latest."""
        self._current = 1 - self._current
        self.current.step = step
        if self._buffers[1 - self._current].step == step:
            # Initial values were replaced by others of the same step.
            self.begin_next()

    def find(self, step: int) -> VersionedBuffer | None:
        """Returns the copy that holds `step`, if one does."""
        return next((buffer for buffer in self._buffers if buffer.step == step), None)

    def clear_padding(self, memory: Array) -> None:
        """Zeroes the bytes between the slices, whatever a client sent there."""
        if self._padding.size:
            memory.view(np.uint32)[self._padding] = 0

    def release(self) -> None:
        """Takes the arena's bytes off the budget; the owner must not use it again."""
        self._budget.release(arena_bytes(self.layout, num_slots=len(self.slots)))


def arena_bytes(layout: Layout, *, num_slots: int) -> int:
    """Bytes that a ShardArena allocates."""
    return layout.nbytes * (2 + num_slots)


def padding_words(layout: Layout) -> Array:
    """Returns the indices of the 4-byte words of a shard's memory that belong to no slice."""
    ends = np.array([offset + piece.nbytes for offset, piece in zip(layout.offsets, layout.slices, strict=True)], np.int64)
    counts = (-ends % ALIGNMENT) // _WORD_BYTES
    firsts = np.repeat(ends // _WORD_BYTES - np.cumsum(counts) + counts, counts)
    return firsts + np.arange(int(counts.sum()))
