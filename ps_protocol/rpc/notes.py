"""Warnings that whoever reaches a port can cause: written seldom, and without waiting for the log's reader. Knows logging; no call."""

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger("lockstep.rpc")

INTERVAL_S = 10.0


class Notes:
    """One kind of warning. Thread-safe, never waits: another thread writes it, since the log may be a pipe that nobody reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_at = 0.0

    def warn(self, words: str, values: Callable[[], tuple[object, ...]]) -> None:
        """Warns, unless it has within the last INTERVAL_S; `values`, which belong into the words, are asked for only then."""
        with self._lock:
            if time.monotonic() < self._next_at:
                return
            self._next_at = math.inf  # until it is written
        threading.Thread(target=self._write, args=(words, values()), name="notes", daemon=True).start()

    def _write(self, words: str, values: tuple[object, ...]) -> None:
        log.warning(words, *values)
        self._next_at = time.monotonic() + INTERVAL_S
