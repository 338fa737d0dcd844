"""The memory that a step is copied into before it is written: when it is kept, how it is filled."""

import mmap
import threading
from contextlib import suppress

import numpy as np

from ps_protocol.layout import ALIGNMENT
from ps_protocol.tensors import Array
from ps_server.memory import MemoryBudget
from ps_server.model_state import StateMemory, memory_like
from ps_server.stripes import StripeRunner, share

_PART_BYTES = 4 << 20


class CopyMemory:
    """Memory for one copy of a model's state, in one piece; it goes back to the system with its last user."""

    def __init__(self, like: StateMemory) -> None:
        self._mapping = mmap.mmap(-1, like.nbytes + ALIGNMENT * len(like.arrays), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        pages = np.frombuffer(self._mapping, np.uint8)
        # Else the machine gives the pages one by one while steps wait for the copy, which then takes several times as long.
        pages[:: mmap.PAGESIZE] = 0
        self._rest = pages
        self.state = memory_like(like, self._cut)

    def offer(self) -> None:
        """Lets the system have the pages if it needs them before they are written again: what they hold is not wanted any more."""
        self._advise("MADV_FREE")

    def _advise(self, name: str) -> None:
        with suppress(AttributeError, OSError):  # not every system knows it
            self._mapping.madvise(getattr(mmap, name))

    def _cut(self, nbytes: int) -> Array:
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes + -nbytes % ALIGNMENT :]
        return piece


class CopyMemories:
    """Lends memory for one copy at a time, counted in the budget, and keeps it for the next. Thread-safe.

    What is kept is let go as soon as the budget has too little for anything else, and the system may take its pages for other processes.
    As long as neither happens, steps wait for the next copy itself, and for no page of it.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: CopyMemory | None = None
        budget.on_shortage(self.release)

    def lend(self, like: StateMemory, *, purpose: str) -> CopyMemory:
        """Returns memory of the same sizes, with undefined contents; takes long if it is new. Raises LimitExceeded."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if _sizes(kept.state) == _sizes(like):
                return kept
            self._budget.release(kept.state.nbytes)
            del kept
        return self._budget.allocate_by(lambda: CopyMemory(like), like.nbytes, purpose=purpose)

    def take_back(self, memory: CopyMemory) -> None:
        """Accepts what was lent; nobody else may hold it any more."""
        memory.offer()
        with self._lock:
            self._kept = memory

    def release(self) -> None:
        """Lets go of what is kept."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            self._budget.release(kept.state.nbytes)


def copy_memory(source: StateMemory, into: StateMemory, *, stripes: StripeRunner) -> None:
    """Copies all bytes, in all threads there are. Takes as long as that takes."""
    pairs = [(_flat(one), _flat(other)) for one, other in zip(source.arrays, into.arrays, strict=True)]
    parts = [(one, other, start) for one, other in pairs for start in range(0, one.size, _PART_BYTES)]

    def copy(part: tuple[np.ndarray, np.ndarray, int], thread: int) -> int:
        one, other, start = part
        other[start : start + _PART_BYTES] = one[start : start + _PART_BYTES]
        return 0

    share(stripes, parts, copy, num_threads=min(stripes.num_threads, len(parts)) or 1, within=np.errstate)


def _sizes(state: StateMemory) -> list[tuple[tuple[int, ...], str]]:
    return [(memory.shape, memory.dtype.str) for memory in state.arrays]


def _flat(memory: np.ndarray) -> np.ndarray:
    return memory.reshape(-1).view(np.uint8)
