"""The memory of one shard: its variables twice, with the step of each copy, its slots and averages. Knows bytes and steps; no lock.

Step g+1 is written beside step g. A reader may copy a buffer while another thread writes it, without a lock: each buffer has a version
that grows before the first byte of it is overwritten, so a reader that finds the version unchanged after copying has copied no mixture.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ps_protocol.model.layout import ALIGNMENT, Layout
from ps_protocol.model.spec import AVERAGE_SLOT, AverageSpec
from ps_protocol.model.variables import Array
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.words import NO_STEP, Words
from ps_server.numbers.apply import AverageKeeper, averaged_slices
from ps_server.numbers.memory import MemoryBudget, VariablesMemory, private_variables
from ps_server.optimizers.rule import UpdateRule


class VersionedBuffer:
    """One copy of an arena. `step` is None while it is being written or was never written. Publishes both at a place among `words`."""

    __slots__ = ("_place", "_words", "memory", "step", "version")

    def __init__(self, memory: Array, words: Words, *, place: int) -> None:
        self.memory = memory
        self.step: int | None = None
        self.version = 0
        self._words = words
        self._place = place
        words[place + at.STEP] = NO_STEP

    def hold(self, step: int) -> None:
        """Says that it holds a step, whole."""
        self.step = step
        self._words[self._place + at.STEP] = step

    def withdraw(self) -> None:
        """Tells readers that the step is gone."""
        self.step = None
        self._words[self._place + at.STEP] = NO_STEP
        self.renew()

    def renew(self) -> None:
        """Tells readers that the copy that they have begun is void."""
        self.version += 1
        self._words[self._place + at.VERSION] = self.version


class ShardArena:
    """Two copies of a shard's variables, and its slots. The caller takes care that only one writer writes at a time."""

    def __init__(
        self,
        layout: Layout,
        *,
        rules: Sequence[UpdateRule],
        averages: AverageSpec | None = None,
        budget: MemoryBudget,
        allocate: Callable[[int], VariablesMemory] = private_variables,
    ) -> None:
        names = slot_names(layout, rules)
        has_averages = averages is not None and bool(averaged_slices(layout, averages))
        self._nbytes = arena_bytes(layout, num_slots=len(names) + has_averages)
        budget.check(self._nbytes, purpose="the model's part on this shard (variables twice, slots)")
        self.layout = layout
        self._rules = tuple(rules)
        self._budget = budget
        self.padding = Padding(layout)
        self.memory = budget.allocate_by(lambda: allocate(layout.nbytes), 2 * layout.nbytes, purpose="the copies of the variables")
        self.words = self.memory.words
        self._buffers = [
            VersionedBuffer(memory, self.words, place=place) for memory, place in zip(self.memory.arenas, at.ARENA_AT, strict=True)
        ]
        self._current = 0
        self.slots = {name: budget.allocate(layout.nbytes, purpose=f"slot {name!r}") for name in names}
        self._averages = AverageKeeper(layout, averages, initial_step=0) if averages is not None and has_averages else None
        self.average = budget.allocate(layout.nbytes, purpose="the moving averages") if has_averages else None
        # Grows before the slots or the averages are touched.
        self.slots_version = 0

    def fill_slots(self, values: Array) -> None:
        """Gives every slot the value that it starts with, and the averages theirs, from the variables' first `values`.

        Takes as long as a copy. Elements of variables without the slot stay zero.
        """
        self.renew_slots()
        if self._averages is not None and self.average is not None:
            self._averages.start(self.average, values)

    def renew_slots(self) -> None:
        """Gives every slot the value that it starts with."""
        for arena in self.layout.arenas:
            for name, initial in self._rules[arena.rule].slots.items():
                # The padding too: a zero there would make adagrad divide zero by zero.
                self.layout.arena(self.slots[name], arena).fill(initial)

    def readable_slot(self, name: str) -> Array | None:
        """Returns the memory of a slot, or of the averages under their own name; None if there is none of that name."""
        return self.average if name == AVERAGE_SLOT else self.slots.get(name)

    @property
    def current(self) -> VersionedBuffer:
        """The copy that holds the latest step."""
        return self._buffers[self._current]

    def begin_next(self) -> VersionedBuffer:
        """Returns the other copy, to be overwritten; from now on its readers find its step gone."""
        spare = self._buffers[1 - self._current]
        spare.withdraw()
        return spare

    def begin_slots(self) -> None:
        """Tells readers of slots that these will be overwritten."""
        self.slots_version += 1

    def publish_next(self, step: int) -> None:
        """Makes the other copy, now whole, the latest."""
        self._current = 1 - self._current
        if self._buffers[1 - self._current].step == step:
            # Initial values were replaced by others of the same step.
            self.begin_next()
        self.current.hold(step)

    def find(self, step: int) -> VersionedBuffer | None:
        """Returns the copy that holds `step`, if one does."""
        return next((buffer for buffer in self._buffers if buffer.step == step), None)

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots and the averages."""
        return self._nbytes - 2 * self.layout.nbytes

    def release(self) -> None:
        """Takes the arena's bytes off the budget; the owner must not use it again."""
        self._budget.release(self._nbytes)


class Padding:
    """The bytes of a layout's memory that belong to no slice."""

    def __init__(self, layout: Layout) -> None:
        self._words = padding_words(layout)
        self._word = np.dtype(f"u{word_bytes(layout)}")

    def clear(self, memory: Array) -> None:
        """Zeroes the padding: a client may have sent anything there."""
        if self._words.size:
            memory.view(self._word)[self._words] = 0


def slot_names(layout: Layout, rules: Sequence[UpdateRule]) -> tuple[str, ...]:
    """Returns the names of the slots that some dense variable has, sorted."""
    return tuple(sorted({name for arena in layout.arenas for name in rules[arena.rule].slots}))


def arena_bytes(layout: Layout, *, num_slots: int) -> int:
    """Bytes that a ShardArena allocates; the averages count as one more slot."""
    return layout.nbytes * (2 + num_slots)


def word_bytes(layout: Layout) -> int:
    """Bytes of the largest word that every slice is a multiple of: 2 where there are half-precision variables, else 4."""
    return min((4, *(piece.variable.data_type.itemsize for piece in layout.slices)))


def padding_words(layout: Layout) -> Array:
    """Returns the indices of the words (of `word_bytes`) of a shard's memory that belong to no slice."""
    size = word_bytes(layout)
    ends = np.array([offset + piece.nbytes for offset, piece in zip(layout.offsets, layout.slices, strict=True)], np.int64)
    counts = (-ends % ALIGNMENT) // size
    firsts = np.repeat(ends // size - np.cumsum(counts) + counts, counts)
    return firsts + np.arange(int(counts.sum()))
