"""Contributions that lie in memory which workers share: found by their ids when a step is applied. Knows headers; no lock, no mapping.

A worker completes a contribution by writing a header, without a call. So the server does not know it until the chief names it, or the
status is asked for. Every number in a header is read once and checked before it is used, since the worker may write anything. When a
worker leaves, its buffers stay as long as whole contributions in them may still be applied. When a worker is lost, all of its buffers stay
for some steps: it may still run, and commit one more contribution before it learns that it was given up.
"""

from collections.abc import Callable, Iterator, Sequence

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import SegmentWriter
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.words import Words
from ps_server.contributions.staging import StagedGradients

# A worker's count is only added up; beyond this it is nonsense.
_MAX_PUSHES = 1 << 53
# A worker reads in its buffer that it is closed; until then it can contribute to the open step and the next one at most.
_STEPS_OF_THE_LOST = 2


class SharedBuffer:
    """One buffer. `num_held`: contributions in it that the shard knows and still holds."""

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
        """Returns sequence and step of the whole contribution here that is still needed; None if there is none."""
        words = self.words
        sequence, step = words[at.SEQUENCE], words[at.OF_STEP]
        if not sequence or sequence == words[at.DONE] or words[at.OF_EPOCH] != self._epoch:
            return None
        return sequence, step

    @property
    def num_pushes(self) -> int:
        """How many contributions the worker has made whole here, by its own count."""
        count = int(self.words[at.NUM_PUSHES])
        return count if count <= _MAX_PUSHES else 0


class SharedBuffers:
    """The buffers of one shard's workers. `release` is called for each when its memory is not needed any more."""

    def __init__(self, *, release: Callable[[SharedBuffer], None]) -> None:
        self._release = release
        self._of: dict[tuple[int, int], list[SharedBuffer]] = {}
        self._orphans: list[SharedBuffer] = []
        self._open_step = 0
        self._accepts_any_step = False
        # In buffers that were released.
        self._num_pushes = 0

    def __iter__(self) -> Iterator[SharedBuffer]:
        for buffers in self._of.values():
            yield from buffers
        yield from self._orphans

    @property
    def num_staged(self) -> int:
        """Contributions that are whole and wait for their step."""
        return sum(self._is_waiting(buffer) for buffer in self)

    @property
    def num_pushes(self) -> int:
        """Contributions that workers have made whole."""
        return self._num_pushes + sum(buffer.num_pushes for buffer in self)

    def num_waiting(self, push_id: PushId, *, but: int | None = None) -> int:
        """Returns how many contributions of the worker that pushes wait here, not counting those in its buffer `but`."""
        buffers = self._of.get((push_id.worker, push_id.incarnation), ())
        return sum(self._is_waiting(buffer) for index, buffer in enumerate(buffers) if index != but)

    def waiting(self, key: tuple[int, int]) -> list[int]:
        """Returns the sequences of the contributions that wait here, by worker's incarnation."""
        found = (buffer.whole() for buffer in self._of.get(key, ()))
        return [whole[0] for whole in found if whole is not None and (self._accepts_any_step or whole[1] == self._open_step)]

    def add(self, buffers: Sequence[SharedBuffer]) -> None:
        """Adds buffers of one worker; their numbers follow those of its earlier ones."""
        for buffer in buffers:
            self._of.setdefault(buffer.key, []).append(buffer)

    def remove(self, buffers: Sequence[SharedBuffer], *, is_lost: bool = False) -> None:
        """Notes that a worker has given up its buffers, or was lost: whole contributions in them may still be applied."""
        for buffer in buffers:
            mine = self._of.get(buffer.key, [])
            if buffer in mine:
                mine.remove(buffer)
                if not mine:
                    del self._of[buffer.key]
                buffer.is_orphan = True
                # Before it is looked at for the last time: the worker looks after it has made a contribution whole.
                buffer.words[at.CLOSED] = 1
                buffer.kept_until_step = self._open_step + _STEPS_OF_THE_LOST if is_lost else 0
                self._orphans.append(buffer)
        self._drop_orphans()

    def buffer(self, push_id: PushId, index: int) -> SharedBuffer:
        """Returns a worker's buffer by its number; raises InvalidSpec for an unknown number."""
        buffers = self._of.get((push_id.worker, push_id.incarnation), ())
        if index < len(buffers):
            return buffers[index]
        raise InvalidSpec(
            f"worker {push_id.worker}: it has {len(buffers)} gradient buffers in shared memory, not one of number {index};"
            " share memory first, or send the gradients"
        )

    def find(self, push_id: PushId) -> tuple[SharedBuffer, int] | None:
        """Returns the buffer in which a contribution is whole and waits, and its step."""
        key = push_id.worker, push_id.incarnation
        wanted = push_id.sequence
        for buffer in self._of.get(key, ()):
            if buffer.words[at.SEQUENCE] == wanted and (step := self._step_of(buffer, wanted)) is not None:
                return buffer, step
        for buffer in self._orphans:
            if buffer.key == key and buffer.words[at.SEQUENCE] == wanted and (step := self._step_of(buffer, wanted)) is not None:
                return buffer, step
        return None

    def end(self, buffer: SharedBuffer, sequence: int) -> None:
        """Tells the worker that a contribution has been applied or dropped, so that the buffer is free."""
        buffer.words[at.DONE] = sequence
        if buffer.is_orphan:
            self._drop_orphans()

    def discard(self, push_id: PushId) -> None:
        """Drops a contribution that will never be applied; sequence 0 means all of that incarnation."""
        for buffer in list(self):
            if buffer.key == (push_id.worker, push_id.incarnation):
                sequence = buffer.words[at.SEQUENCE]
                if sequence and push_id.sequence in (0, sequence):
                    self.end(buffer, sequence)

    def advance(self, step: int, *, accepts_any_step: bool) -> None:
        """Begins a step: unless any step is accepted, contributions to another do not count."""
        self._open_step, self._accepts_any_step = step, accepts_any_step
        if self._orphans:
            self._drop_orphans()

    def clear(self) -> None:
        """Drops everything: a new epoch begins, or the model goes. Workers that still have buffers must not be served from them."""
        for buffer in self:
            buffer.words[at.SEQUENCE] = 0
            buffer.kept_until_step = 0
        self.remove([buffer for buffers in list(self._of.values()) for buffer in buffers])
        self._drop_orphans()

    def _is_waiting(self, buffer: SharedBuffer) -> bool:
        whole = buffer.whole()
        return whole is not None and (self._accepts_any_step or whole[1] == self._open_step)

    def _step_of(self, buffer: SharedBuffer, sequence: int) -> int | None:
        """Returns the step of the contribution of this number that waits in a buffer; None if there is none."""
        # The checked number is returned: the worker may write other numbers there at any moment.
        whole = buffer.whole()
        if whole is None or whole[0] != sequence or not (self._accepts_any_step or whole[1] == self._open_step):
            return None
        return whole[1]

    def _is_needed(self, buffer: SharedBuffer) -> bool:
        return buffer.num_held > 0 or buffer.kept_until_step > self._open_step or self._is_waiting(buffer)

    def _drop_orphans(self) -> None:
        kept = [buffer for buffer in self._orphans if self._is_needed(buffer)]
        gone = [buffer for buffer in self._orphans if buffer not in kept]
        self._orphans = kept
        for buffer in gone:
            self._num_pushes += buffer.num_pushes
            self._release(buffer)
