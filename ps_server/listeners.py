"""Readers that wait for a step without a thread: whom to call when anything has changed."""

from collections.abc import Callable
from threading import Condition


class Listeners:
    """Each is called once, without the lock. What ends in `_locked` is called while the lock is held, the rest while it is not."""

    def __init__(self, lock: Condition) -> None:
        self._lock = lock
        self._waiting: set[Callable[[], object]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add_locked(self, listener: Callable[[], object]) -> None:
        """Has a listener called the next time."""
        self._waiting.add(listener)

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        with self._lock:
            self._waiting.discard(listener)

    def tell(self) -> None:
        """Calls them all."""
        if self._waiting:
            with self._lock:
                told, self._waiting = self._waiting, set()
            for listener in told:
                listener()
