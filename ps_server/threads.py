"""Threads that help with an apply: they wait for work, do it, and report its errors. Knows threads; no array, step or wire."""

import contextlib
import queue
import threading
from collections.abc import Callable

Work = Callable[[int], None]


class ApplyThreads:
    """A StripeRunner of `num_threads` threads, of which one is the caller's. Thread-safe; `stop` ends the others.

    They are started when first needed. One apply has them at a time; an apply that comes meanwhile does its work alone.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._in_use = threading.Lock()
        self._helpers: list[threading.Thread] = []
        # None ends a helper.
        self._work: queue.SimpleQueue[tuple[Work, int] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_stopped = False

    def run(self, work: Work, *, num_threads: int) -> None:
        """See StripeRunner."""
        if not self._in_use.acquire(blocking=False):
            work(0)
            return
        try:
            num_helpers = self._call(min(num_threads, self.num_threads) - 1, work)
            try:
                work(0)
            finally:
                error = self._await_ends(num_helpers)
        finally:
            self._in_use.release()
        if error is not None:
            raise error

    def stop(self) -> None:
        """Ends the threads, after work under way. Idempotent; `run` continues in the thread of its caller."""
        with self._in_use:
            self._is_stopped = True
            for _ in self._helpers:
                self._work.put(None)
            for helper in self._helpers:
                helper.join()
            self._helpers.clear()

    def _call(self, num_helpers: int, work: Work) -> int:
        if self._is_stopped:
            return 0
        while len(self._helpers) < num_helpers:
            # A daemon, since a process that ends for another reason is not to wait for it.
            helper = threading.Thread(target=self._help, name=f"apply-{len(self._helpers) + 1}", daemon=True)
            helper.start()
            self._helpers.append(helper)
        for index in range(num_helpers):
            self._work.put((work, index + 1))
        return num_helpers

    def _await_ends(self, num_helpers: int) -> BaseException | None:
        """Returns the first error of the helpers, when all have ended. Does not wait for those that have not begun: no work is left."""
        first_error = None
        with contextlib.suppress(queue.Empty):
            while num_helpers:
                self._work.get_nowait()
                num_helpers -= 1
        for _ in range(num_helpers):
            error = self._ends.get()
            first_error = first_error or error
        return first_error

    def _help(self) -> None:
        while (called := self._work.get()) is not None:
            work, index = called
            error = None
            try:
                work(index)
            except BaseException as caught:
                error = caught
            # Not kept until there is more to do: it holds on to the memories of the step.
            del work, called
            self._ends.put(error)
            error = None
