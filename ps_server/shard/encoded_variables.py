"""The latest variables in an encoding, for all readers of a step at once. Knows arrays and a memory budget; no step and no wire."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import field
from itertools import islice

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.encodings.moves import encode_moves
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_server.numbers.memory import MemoryBudget


@light_dataclass(slots=True, eq=False, kw_only=True)
class _SharedFrames:
    """The encoded frames of one version of the variables, in `memory` for all readers; `rest` makes the frames that are not `made` yet.

    `num_frames`: how many there are, once all are made; `num_readers`: how many readers are under way.
    """

    memory: Array
    rest: Iterator[tuple[int, memoryview]]
    made: list[tuple[int, memoryview]] = field(default_factory=list)
    num_frames: int | None = None
    num_readers: int = 0


class EncodedVariables:
    """The latest variables as they travel in an encoding, encoded once for all who read them. Thread-safe.

    It has memory for that only where a step before had several readers in the encoding, and the budget allows; else, and for a step that is
    not the latest, each reader encodes for itself. So do readers under way, from their next frame on, once the memory is given up.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._shared: _SharedFrames | None = None
        # What was read last: an arena, its version, the encoding and the length of the frames; and by how many readers in all, up to now.
        self._arena: weakref.ref[Array] | None = None
        self._kind: tuple[int, FloatEncoding, int] | None = None
        self._num_readers = 0
        budget.on_shortage(self.release)

    def frames(
        self, layout: Layout, arena: Array, encoding: FloatEncoding, max_bytes: int, *, version: int
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Yields the frames of `encoded_frames` for an arena, whose contents have a version."""
        num_taken = 0
        if (shared := self._enter(layout, arena, (version, encoding, max_bytes))) is not None:
            try:
                while (frame := self._frame(shared, num_taken)) is not None:
                    yield frame
                    num_taken += 1
            finally:
                with self._lock:
                    shared.num_readers -= 1
            if num_taken == shared.num_frames:
                return
            shared = None  # this may be the last reader that its memory waits for
        yield from islice(encoded_frames(layout, arena, encoding, max_bytes), num_taken, None)

    def release(self) -> None:
        """Gives its memory up."""
        with self._lock:
            self._release_locked()

    def _enter(self, layout: Layout, arena: Array, kind: tuple[int, FloatEncoding, int]) -> _SharedFrames | None:
        """Returns the frames that are encoded for all, for one more reader; None: it encodes for itself."""
        with self._lock:
            if self._arena is not None and self._arena() is arena and self._kind == kind:
                self._num_readers += 1
            elif self._shared is not None and self._shared.num_readers:
                return None
            else:
                had_several, self._num_readers = self._num_readers > 1, 1
                self._arena, self._kind = weakref.ref(arena), kind
                _, encoding, max_bytes = kind
                memory = self._memory_locked(encoded_nbytes(layout, encoding) if had_several else 0)
                if memory is not None:
                    self._shared = _SharedFrames(memory=memory, rest=encoded_frames(layout, arena, encoding, max_bytes, into=memory))
            if self._shared is not None:
                self._shared.num_readers += 1
            return self._shared

    def _memory_locked(self, nbytes: int) -> Array | None:
        if self._shared is not None and self._shared.memory.nbytes == nbytes:
            return self._shared.memory
        self._release_locked()
        return self._budget.allocate_spare(nbytes) if nbytes else None

    def _release_locked(self) -> None:
        if self._shared is not None:
            self._budget.release(self._shared.memory.nbytes)
            self._shared.rest = iter(())  # it holds the arena, too
            self._shared = None

    def _frame(self, shared: _SharedFrames, position: int) -> tuple[int, memoryview] | None:
        """Returns a frame; None if there are no more, or the memory was given up."""
        with self._lock:
            if shared is not self._shared:
                return None
            if position == len(shared.made):
                try:
                    frame = next(shared.rest, None)
                except BaseException:
                    # Else the others would take the frames up to here for all.
                    self._release_locked()
                    raise
                if frame is None:
                    shared.num_frames = position
                    return None
                shared.made.append(frame)
            return shared.made[position]


class EncodedMoves:
    """How the latest step moved the variables, encoded once for all who read it at a time, and kept no longer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The arena and its version, and what was found for it: None where it cannot be said, or while nobody has it.
        self._arena: weakref.ref[Array] | None = None
        self._version = 0
        self._is_exact = True
        self._found: weakref.ref[Array] | None = None

    def of(self, layout: Layout, before: Array, after: Array, *, version: int, is_intact: Callable[[], bool]) -> Array | None:
        """Returns what `encode_moves` does; None also once the arenas are not intact. `version`: of what `after` contains."""
        with self._lock:
            is_known = self._arena is not None and self._arena() is after and self._version == version
            found = self._found() if is_known and self._found is not None else None
            if found is None and (self._is_exact or not is_known):
                found = encode_moves(layout, before, after)
                self._arena, self._version, self._is_exact = weakref.ref(after), version, found is not None
                if not is_intact():
                    found = None
                self._found = None if found is None else weakref.ref(found)
            return found
