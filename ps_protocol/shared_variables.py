"""The variables of a shard as they lie in memory that it shares: which arena has which step, and copies of one step. No RPC, no slot."""

import threading

from ps_protocol import shared_memory as at
from ps_protocol.memory_segments import Segment
from ps_protocol.segments import Segments
from ps_protocol.shared_memory import NO_STEP, PushMode
from ps_protocol.tensors import Array

# A copy is faster than a step; whoever is overtaken so often asks the server, which may wait for its readers.
_MAX_TRIES = 3


class SharedVariables:
    """What a shard publishes, for reading. Thread-safe."""

    def __init__(self, segment: Segment, *, layout_hash: str) -> None:
        self._arenas = segment.arenas
        self._words = segment.words
        self._layout_hash = layout_hash
        # Taken only to keep reads in their order, also where the processor may change it.
        self._fence = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch that the shard serves; 0: it serves nobody."""
        return int(self._words[at.EPOCH])

    @property
    def max_slots(self) -> int:
        """How many contributions of one worker the shard holds."""
        return int(self._words[at.MAX_SLOTS])

    def view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns the arena of a step; None if it is not there, or not for this caller."""
        words = self._words
        if words[at.EPOCH] == epoch and layout_hash == self._layout_hash:
            for position, arena in zip(at.ARENA_AT, self._arenas, strict=True):
                if words[position + at.STEP] == step:
                    return arena
        return None

    def copy(self, into: Segments, *, epoch: int, step: int | None, layout_hash: str, held_step: int | None) -> int | None:
        """Copies a step (None: the latest) unless it is the held one, and returns it; None as `view` does, or if it is overtaken."""
        words = self._words
        for _ in range(_MAX_TRIES):
            if words[at.EPOCH] != epoch or layout_hash != self._layout_hash or into.nbytes != self._arenas[0].nbytes:
                return None
            # The version first: if it stays the same, so did what is read after it.
            states = [(words[position + at.VERSION], words[position + at.STEP], number) for number, position in enumerate(at.ARENA_AT)]
            found = [state for state in states if state[1] != NO_STEP and step in (None, state[1])]
            if not found:
                return None
            version, found_step, number = max(found, key=lambda state: state[1])
            if found_step == held_step:
                return found_step
            is_torn_allowed = words[at.MODE] == PushMode.BY_CALL
            with self._fence:
                into.copy_from(Segments([self._arenas[number]]))
            if is_torn_allowed or words[at.ARENA_AT[number] + at.VERSION] == version:
                return found_step
        return None
