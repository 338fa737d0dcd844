"""The bytes that a shard may allocate, and its reused buffers. Knows sizes; nothing of what the bytes mean."""

import mmap
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol, TypeVar

import numpy as np

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import format_bytes
from ps_protocol.model.variables import Array
from ps_protocol.shared_memory.words import Words, private_words

Memory = TypeVar("Memory")

# Python has a name for it only lately, and systems other than Linux reserve nothing.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

# Steps over which a pool remembers how many buffers it needed at once.
_PEAK_WINDOW = 64


class MemoryBudget:
    """Counts allocated bytes against a limit. As thread-safe as `lock`, which is entered while it counts; None: for one thread.

    `make_file` gives so many bytes in a file, for rows of tables without a size, which are not counted; None: they are in memory.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        owner: str,
        lock: AbstractContextManager[object] | None = None,
        make_file: "Callable[[int], BytesInFile] | None" = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.make_file = make_file
        self.allocated_bytes = 0
        self._owner = owner
        self._lock = lock or nullcontext()
        self._let_go: list[Callable[[], object]] = []

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are free; None: there is no limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.allocated_bytes

    def check(self, nbytes: int, *, purpose: str) -> None:
        """Raises LimitExceeded unless `nbytes` more are free."""
        if self._fits(nbytes):
            return
        for let_go in self._let_go:
            let_go()
        self._check_as_it_is(nbytes, purpose=purpose)

    def on_shortage(self, let_go: Callable[[], object]) -> None:
        """Has `let_go` release memory that is only kept for later, before a request is refused. It is called without the lock."""
        self._let_go.append(let_go)

    def reserve(self, nbytes: int, *, purpose: str) -> None:
        """Counts bytes that the caller will allocate by itself, until `release`; raises LimitExceeded if they do not fit."""
        self.check(nbytes, purpose=purpose)
        with self._lock:
            self._check_as_it_is(nbytes, purpose=purpose)
            self.allocated_bytes += nbytes

    def allocate(self, nbytes: int, *, purpose: str) -> Array:
        """Returns a zeroed buffer; raises LimitExceeded if it does not fit."""
        return self.allocate_by(lambda: aligned_bytes(nbytes), nbytes, purpose=purpose)

    def reserve_spare(self, nbytes: int) -> bool:
        """Counts bytes as `reserve` does if they fit without anybody's letting go of anything; returns whether they do."""
        with self._lock:
            if is_free := self._fits(nbytes):
                self.allocated_bytes += nbytes
            return is_free

    def allocate_spare(self, nbytes: int) -> Array | None:
        """Returns a zeroed buffer if it fits without anybody's letting go of anything, else None."""
        if not self.reserve_spare(nbytes):
            return None
        try:
            return aligned_bytes(nbytes)
        except MemoryError:
            self.release(nbytes)
            return None

    def allocate_by(self, make: Callable[[], Memory], nbytes: int, *, purpose: str) -> Memory:
        """Returns `make(nbytes)`; raises LimitExceeded if the bytes do not fit, or if `make` raises MemoryError or OSError."""
        self.reserve(nbytes, purpose=purpose)
        try:
            return make()
        except (MemoryError, OSError):
            self.release(nbytes)
            raise LimitExceeded(
                f"{self._owner}: {purpose} needs {format_bytes(nbytes)}, which this machine does not give; add parameter servers"
            ) from None

    def release(self, nbytes: int) -> None:
        """Subtracts the bytes of a released buffer from the count; a negative number counts bytes that are held already."""
        with self._lock:
            self.allocated_bytes -= nbytes

    def _check_as_it_is(self, nbytes: int, *, purpose: str) -> None:
        if self.limit_bytes is None or self._fits(nbytes):
            return
        free = max(0, self.limit_bytes - self.allocated_bytes)
        raise LimitExceeded(
            f"{self._owner}: {purpose} needs {format_bytes(nbytes)}, {format_bytes(free)} of {format_bytes(self.limit_bytes)} free;"
            " add parameter servers, or raise --max-memory-bytes",
            facts={"needed_bytes": str(nbytes), "free_bytes": str(free), "limit_bytes": str(self.limit_bytes)},
        )

    def _fits(self, nbytes: int) -> bool:
        return self.limit_bytes is None or self.allocated_bytes + nbytes <= self.limit_bytes


def growing_bytes(nbytes: int, *, purpose: str) -> Array:
    """Returns zeroed bytes of which only those take memory that have been written, so that what lies there grows without being moved.

    Raises LimitExceeded.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=flags)
    except (OSError, MemoryError):
        raise LimitExceeded(f"{purpose}: this machine sets no addresses aside; let it with sysctl vm.overcommit_memory=0") from None
    with suppress(AttributeError, OSError):  # not every system knows it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


class BytesInFile(Protocol):
    """Zeroed bytes in a file, of which the system keeps in memory what is used, as far as there is memory."""

    @property
    def memory(self) -> Array:
        """The bytes. They are there also when the file is closed."""

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the disk has room for the first bytes, before they are written. Raises LimitExceeded."""

    def prefetch(self, starts: Array, nbytes: int) -> None:
        """Has the system read so many bytes from each of some places, without waiting for them."""

    def close(self) -> None:
        """Reserves no more."""


class VariablesMemory(Protocol):
    """The memory of both copies of a shard's variables, and the words that say which steps these are, as `shared_memory` has them."""

    @property
    def arenas(self) -> tuple[Array, ...]:
        """The two, zeroed, each at a multiple of 64 bytes."""

    @property
    def words(self) -> Words:
        """The header page."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _PrivateVariables:
    """Memory of this process only."""

    arenas: tuple[Array, ...]
    words: Words


def private_variables(arena_bytes: int) -> VariablesMemory:
    """Returns memory that is not shared."""
    return _PrivateVariables(arenas=(aligned_bytes(arena_bytes), aligned_bytes(arena_bytes)), words=private_words())


class BufferPool:
    """Buffers of one size, lent out and taken back. Keeps as many as were needed at once lately. Not thread-safe."""

    def __init__(self, nbytes: int, *, budget: MemoryBudget) -> None:
        self._nbytes = nbytes
        self._budget = budget
        self._free: list[Array] = []
        self._num_lent = 0
        self._peak = 0
        self._peaks: deque[int] = deque(maxlen=_PEAK_WINDOW)
        self._is_closed = False

    @property
    def num_buffers(self) -> int:
        """Buffers held, lent or free."""
        return self._num_lent + len(self._free)

    def lend(self, *, purpose: str) -> Array:
        """Returns a buffer with undefined contents; raises LimitExceeded if a new one would not fit."""
        buffer = self._free.pop() if self._free else self._budget.allocate(self._nbytes, purpose=purpose)
        self._num_lent += 1
        self._peak = max(self._peak, self._num_lent)
        return buffer

    def take_back(self, buffer: Array) -> None:
        """Accepts a buffer again."""
        self._num_lent -= 1
        if self._is_closed:
            self._budget.release(self._nbytes)
        else:
            self._free.append(buffer)

    def end_step(self) -> None:
        """Lets go of buffers that no step has needed lately, so that workers that left do not keep memory."""
        self._peaks.append(self._peak)
        self._peak = self._num_lent
        while self._free and self.num_buffers > max(self._peaks):
            self._free.pop()
            self._budget.release(self._nbytes)

    def release_all(self) -> None:
        """Lets go of every free buffer."""
        self._budget.release(self._nbytes * len(self._free))
        self._free.clear()

    def close(self) -> None:
        """Lets go of every free buffer, and of each that is lent as soon as it comes back."""
        self._is_closed = True
        self.release_all()
