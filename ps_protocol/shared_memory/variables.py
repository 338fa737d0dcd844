"""The variables of a shard as they lie in memory that it shares: which arena has which step, and copies of one step. No RPC, no buffer."""

import threading

from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import MAX_STEP, ReadRequest
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.segment import SharedSegment
from ps_protocol.shared_memory.words import PushMode

# A copy is faster than a step. A reader that is overtaken this often asks the server, which may wait for its readers.
_MAX_TRIES = 3


class SharedVariables:
    """The variables that a shard publishes, for reading. Thread-safe."""

    def __init__(self, segment: SharedSegment, *, layout_hash: str) -> None:
        self._arenas = segment.arenas
        self._words = segment.words
        self._layout_hash = layout_hash
        # Taken only to keep reads in their order, also where the processor may change it.
        self._fence = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch that the shard serves; 0: none."""
        return int(self._words[at.EPOCH])

    @property
    def max_buffers(self) -> int:
        """How many contributions of one worker the shard holds."""
        return int(self._words[at.MAX_BUFFERS])

    def view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns the arena of a step; None if it is not there, or not for this caller."""
        words = self._words
        if words[at.EPOCH] == epoch and layout_hash == self._layout_hash:
            for position, arena in zip(at.ARENA_AT, self._arenas, strict=True):
                if words[position + at.STEP] == step:
                    return arena
        return None

    def copy(self, request: ReadRequest, into: Segments) -> int | None:
        """Copies a step (None: the latest) unless it is the held one, and returns it; None as `view` does, or if it is overtaken."""
        words, step = self._words, request.step
        for _ in range(_MAX_TRIES):
            if words[at.EPOCH] != request.epoch or request.layout_hash != self._layout_hash or into.nbytes != self._arenas[0].nbytes:
                return None
            # The version first: if it stays the same, so did what is read after it.
            states = [(words[position + at.VERSION], words[position + at.STEP], number) for number, position in enumerate(at.ARENA_AT)]
            # Neither one that is being written (NO_STEP) nor one that cannot be.
            found = [state for state in states if state[1] <= MAX_STEP and step in (None, state[1])]
            if not found:
                return None
            version, found_step, number = max(found, key=lambda state: state[1])
            if found_step == request.held_step:
                return found_step
            is_torn_allowed = words[at.MODE] == PushMode.BY_CALL
            with self._fence:
                into.copy_from(Segments([self._arenas[number]]))
            if is_torn_allowed or words[at.ARENA_AT[number] + at.VERSION] == version:
                return found_step
        return None
