"""The progress of work that takes longer than two seconds: a bar on a terminal, else a line at intervals. Knows numbers and a stream."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from lockstep.cli.formatting import bytes_text, duration_text

# Work that ends sooner shows no progress.
_QUIET_S = 2.0
_BAR_EVERY_S, _LINE_EVERY_S = 0.1, 5.0
_BAR_WIDTH = 30
_ERASE = "\r\x1b[K"


class Progress:
    """Shows the progress of some work on a stream other than the command's output. Thread-safe.

    `what`: the work, for example "verifying step-000000400". `words`: formats a number. `total`: how much there is to do, as far as known.
    """

    def __init__(
        self,
        what: str,
        *,
        words: Callable[[int], str] = str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._words, self._clock = what, words, clock
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._began, self._done, self.total = clock(), 0, 0
        self._show_at = self._began + _QUIET_S
        self._has_bar = False

    def advance(self, number: int, *, total: int) -> None:
        """Notes that `number` more of `total` is done (0: the total is unknown)."""
        with self._lock:
            self._done += number
            self.total = total
            self._show()

    def _show(self) -> None:
        now = self._clock()
        if now < self._show_at:
            return
        text = self._text(now, self.total)
        if self._is_terminal:
            self._show_at, self._has_bar = now + _BAR_EVERY_S, True
            self._stream.write(f"{_ERASE}{text}")
        else:
            self._show_at = now + _LINE_EVERY_S
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Removes the bar, so that the command's output takes its place."""
        if self._has_bar:
            self._stream.write(_ERASE)
            self._stream.flush()

    def _text(self, now: float, total: int) -> str:
        passed_s = now - self._began
        if total <= 0:
            done = f"{self._words(self._done)} in " if self._done else "at work for "
            return f"{self._what}: {done}{duration_text(passed_s)}"
        part = min(1.0, self._done / total)
        left = f", about {duration_text(passed_s * (1.0 - part) / part)} left" if part > 0.0 else ""
        progress = f"{self._words(self._done)} of {self._words(total)} ({100 * part:.0f} %){left}"
        if not self._is_terminal:
            return f"{self._what}: {progress}"
        full = round(part * _BAR_WIDTH)
        return f"{self._what} [{'█' * full}{'░' * (_BAR_WIDTH - full)}] {progress}"


@contextmanager
def shown(what: str, *, is_bytes: bool = False) -> Iterator[Progress]:
    """Shows the progress of some work within the block."""
    progress = Progress(what, words=bytes_text if is_bytes else "{:,}".format)
    try:
        yield progress
    finally:
        progress.close()
