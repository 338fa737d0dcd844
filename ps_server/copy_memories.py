"""The memory that a step is copied into before it is written: when it is kept, how it is filled. Knows memories and a budget; no file."""

import math
import threading

import numpy as np

from ps_server.memory import MemoryBudget
from ps_server.model_state import StateMemory, memory_like
from ps_server.stripes import StripeRunner, share

# Where saves follow each other as closely as this, the memory is kept from one to the next; else it would lie idle most of the time.
KEEP_WITHIN_S = 10.0
_PART_BYTES = 4 << 20


class CopyMemories:
    """Lends memory for one copy at a time, counted in the budget, and keeps at most one for the next. Thread-safe.

    What is kept is let go as soon as the budget has too little for anything else.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: StateMemory | None = None
        self._last_lent_s = -math.inf
        self._is_kept_next = False
        budget.on_shortage(self.release)

    def lend(self, like: StateMemory, *, purpose: str, now: float) -> StateMemory:
        """Returns memory of the same sizes, with undefined contents; takes long if it is new. Raises LimitExceeded."""
        with self._lock:
            kept, self._kept = self._kept, None
            self._is_kept_next, self._last_lent_s = now - self._last_lent_s < KEEP_WITHIN_S, now
        if kept is not None:
            if _sizes(kept) == _sizes(like):
                return kept
            self._budget.release(kept.nbytes)
            del kept
        self._budget.reserve(like.nbytes, purpose=purpose)
        try:
            return memory_like(like)
        except BaseException:
            self._budget.release(like.nbytes)
            raise

    def take_back(self, memory: StateMemory) -> None:
        """Accepts what was lent; nobody else may hold it any more."""
        with self._lock:
            if self._is_kept_next and self._kept is None:
                self._kept = memory
                return
        self._budget.release(memory.nbytes)

    def release(self) -> None:
        """Lets go of what is kept."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            self._budget.release(kept.nbytes)


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
