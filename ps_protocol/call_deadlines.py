"""Ends calls that have no deadline of their own, when their time is up. Knows time and a thread; nothing of what is called."""

import itertools
import math
import threading
import time
from typing import Protocol

from ps_protocol.quick_condition import QuickCondition


class Cancellable(Protocol):
    """A call under way, that can be ended from any thread."""

    def expire(self) -> None:
        """Ends it, since its time is up. Must not block."""


class CallDeadlines:
    """Watches calls of any number of threads, from one thread of its own that begins with the first. A call costs a few microseconds."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, Cancellable]] = {}
        self._changed = QuickCondition()
        self._numbers = itertools.count()
        self._next_look = math.inf
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, call: Cancellable, *, timeout_s: float) -> int:
        """Watches a call from now on; returns its number for `end`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            number = next(self._numbers)
            self._calls[number] = deadline, call
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-deadlines", daemon=True)
                self._thread.start()
            elif deadline < self._next_look:
                self._changed.notify_all()
        return number

    def end(self, number: int) -> None:
        """Stops watching a call."""
        with self._changed:
            self._calls.pop(number, None)

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                overdue = [number for number, (deadline, _) in self._calls.items() if deadline <= now]
                expired = [self._calls.pop(number)[1] for number in overdue]
                if not expired:
                    self._next_look = min((deadline for deadline, _ in self._calls.values()), default=math.inf)
                    self._changed.wait(None if self._next_look == math.inf else self._next_look - now)
            for call in expired:
                call.expire()
