"""Contributions that lie in memory which workers share: found by their ids when a step is applied. Knows headers; no lock, no mapping.

A worker makes a contribution whole by writing a header, and tells nobody here. So nothing is known of it until the chief names it, or the
status is asked for. Every number in a header is read once and believed only if it is what it should be: the worker may write anything.
A slot whose worker has gone stays as long as what is whole in it may still be applied. If the worker was lost without a word, any of its
slots stays for some steps: perhaps it lives, has not heard of it yet, and commits one more contribution.
"""

from collections.abc import Callable, Iterator, Sequence

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import SegmentWriter
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import PushId
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.words import Words
from ps_server.contributions.staging import StagedGradients

# A worker's counts are only added up; beyond this they are nonsense.
_MAX_COUNT = 1 << 53
# A worker reads in its slot that it is closed; until then it can contribute to the open step and the next one at most.
_STEPS_OF_THE_LOST = 2


class GradientSlot:
    """One slot. `num_held`: contributions in it that the shard was told of and still holds."""

    def __init__(self, memory: Array, words: Words, *, worker: int, incarnation: int, epoch: int) -> None:
        self.memory = memory
        self.words = words
        self.key = worker, incarnation
        self.staged = StagedGradients(SegmentWriter((), 0), memory, is_foreign=True)
        self.num_held = 0
        self.is_orphan = False
        self.kept_until_step = 0
        self._epoch = epoch

    def whole(self) -> tuple[int, int] | None:
        """Returns sequence and step of the contribution that is whole here and not done with; None if there is none."""
        words = self.words
        sequence, step = words[at.SEQUENCE], words[at.OF_STEP]
        if not sequence or sequence == words[at.DONE] or words[at.OF_EPOCH] != self._epoch:
            return None
        return sequence, step

    def count(self, position: int) -> int:
        """Returns one of the worker's counts."""
        count = int(self.words[position])
        return count if count <= _MAX_COUNT else 0


class GradientSlots:
    """The slots of one shard's workers. `release` is called for each when its memory is not needed any more."""

    def __init__(self, *, release: Callable[[GradientSlot], None]) -> None:
        self._release = release
        self._of: dict[tuple[int, int], list[GradientSlot]] = {}
        self._orphans: list[GradientSlot] = []
        self._open_step = 0
        self._accepts_any_step = False
        # What workers that have gone had counted.
        self._counted = dict.fromkeys((at.NUM_PUSHES, at.NUM_STALE, at.NUM_DUPLICATES), 0)

    def __iter__(self) -> Iterator[GradientSlot]:
        for slots in self._of.values():
            yield from slots
        yield from self._orphans

    @property
    def num_staged(self) -> int:
        """Contributions that are whole and wait for their step."""
        return sum(self._is_waiting(slot) for slot in self)

    def total(self, position: int) -> int:
        """Returns what all workers together have counted."""
        return self._counted[position] + sum(slot.count(position) for slot in self)

    def num_waiting(self, push_id: PushId, *, but: int | None = None) -> int:
        """Returns how many contributions of the worker that pushes wait here, not counting those in its slot `but`."""
        slots = self._of.get((push_id.worker, push_id.incarnation), ())
        return sum(self._is_waiting(slot) for index, slot in enumerate(slots) if index != but)

    def add(self, slots: Sequence[GradientSlot]) -> None:
        """Adds slots of one worker; their numbers go on from those that it has."""
        for slot in slots:
            self._of.setdefault(slot.key, []).append(slot)

    def remove(self, slots: Sequence[GradientSlot], *, is_lost: bool = False) -> None:
        """Notes that a worker has given up its slots, or was lost: what is whole in them may still be applied."""
        for slot in slots:
            mine = self._of.get(slot.key, [])
            if slot in mine:
                mine.remove(slot)
                if not mine:
                    del self._of[slot.key]
                slot.is_orphan = True
                # Before it is looked at for the last time: the worker looks after it has made a contribution whole.
                slot.words[at.CLOSED] = 1
                slot.kept_until_step = self._open_step + _STEPS_OF_THE_LOST if is_lost else 0
                self._orphans.append(slot)
        self._drop_orphans()

    def slot(self, push_id: PushId, index: int) -> GradientSlot:
        """Returns a worker's slot by its number; raises InvalidSpec if it has none of that number."""
        slots = self._of.get((push_id.worker, push_id.incarnation), ())
        if index < len(slots):
            return slots[index]
        raise InvalidSpec(
            f"worker {push_id.worker}: it has {len(slots)} slots of shared memory, not one of number {index};"
            " share memory first, or send the gradients"
        )

    def find(self, push_id: PushId) -> tuple[GradientSlot, int] | None:
        """Returns the slot in which a contribution is whole and waits, and its step."""
        wanted = push_id.sequence
        for slot in self._of.get((push_id.worker, push_id.incarnation), ()):
            if slot.words[at.SEQUENCE] == wanted and self._is_waiting(slot):
                return slot, slot.words[at.OF_STEP]
        for slot in self._orphans:
            if slot.key == (push_id.worker, push_id.incarnation) and slot.words[at.SEQUENCE] == wanted and self._is_waiting(slot):
                return slot, slot.words[at.OF_STEP]
        return None

    def end(self, slot: GradientSlot, sequence: int) -> None:
        """Tells the worker that a contribution has been applied or dropped, so that the slot is free."""
        slot.words[at.DONE] = sequence
        if slot.is_orphan:
            self._drop_orphans()

    def discard(self, push_id: PushId) -> None:
        """Drops a contribution that nobody will apply; a sequence of 0 stands for all of that incarnation."""
        for slot in list(self):
            if slot.key == (push_id.worker, push_id.incarnation):
                sequence = slot.words[at.SEQUENCE]
                if sequence and push_id.sequence in (0, sequence):
                    self.end(slot, sequence)

    def advance(self, step: int, *, accepts_any_step: bool) -> None:
        """Begins a step: unless any is accepted, what belongs to another does not count."""
        self._open_step, self._accepts_any_step = step, accepts_any_step
        if self._orphans:
            self._drop_orphans()

    def clear(self) -> None:
        """Drops everything: a new epoch begins, or the model goes. Workers that still have slots must not be served from them."""
        for slot in self:
            slot.words[at.SEQUENCE] = 0
            slot.kept_until_step = 0
        self.remove([slot for slots in list(self._of.values()) for slot in slots])
        self._drop_orphans()

    def _is_waiting(self, slot: GradientSlot) -> bool:
        whole = slot.whole()
        return whole is not None and (self._accepts_any_step or whole[1] == self._open_step)

    def _is_needed(self, slot: GradientSlot) -> bool:
        return slot.num_held > 0 or slot.kept_until_step > self._open_step or self._is_waiting(slot)

    def _drop_orphans(self) -> None:
        kept = [slot for slot in self._orphans if self._is_needed(slot)]
        gone = [slot for slot in self._orphans if slot not in kept]
        self._orphans = kept
        for slot in gone:
            for position in self._counted:
                self._counted[position] += slot.count(position)
            self._release(slot)
