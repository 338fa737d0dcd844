"""What a demo shows while it runs: a live table on a terminal, plain lines elsewhere. Knows progress and processes; changes neither."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lockstep.demo_progress import Progress
from lockstep.process import Process

_PLAIN_PERIOD_S = 1.0


class Display(Protocol):
    """Where a demo shows itself."""

    def say(self, text: str) -> None:
        """Shows words that stay."""

    def show(self, progress: Progress | None, processes: Sequence[Process]) -> None:
        """Shows a moment of the demo; may be called as often as one likes."""


@contextmanager
def open_display(*, num_steps: int, is_plain: bool) -> Iterator[Display]:
    """Opens the display that suits standard output; plain if asked for, if that is no terminal, or if rich isn't installed."""
    if is_plain or not sys.stdout.isatty():
        yield PlainDisplay(num_steps=num_steps)
        return
    try:
        from lockstep.demo_live import LiveDisplay
    except ImportError:
        print("(for a live table: pip install 'lockstep-ps[demo]')")
        yield PlainDisplay(num_steps=num_steps)
        return
    with LiveDisplay(num_steps=num_steps) as display:
        yield display


class PlainDisplay:
    """One line a second."""

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._shown_at = 0.0
        self._shown: Progress | None = None
        self._has_said_pids = False

    def say(self, text: str) -> None:
        """Prints the words."""
        print(text, flush=True)

    def show(self, progress: Progress | None, processes: Sequence[Process]) -> None:
        """Prints a line if the last one is a second old and there is something new."""
        if not self._has_said_pids and len(processes) > 1:
            self._has_said_pids = True
            self.say("processes: " + ", ".join(f"{process.name} pid {process.pid}" for process in processes))
        is_last = progress is not None and progress.step >= self._num_steps
        if progress is None or progress is self._shown or (time.monotonic() < self._shown_at + _PLAIN_PERIOD_S and not is_last):
            return
        self._shown, self._shown_at = progress, time.monotonic()
        self.say(progress_line(progress, num_steps=self._num_steps))


def progress_line(progress: Progress, *, num_steps: int) -> str:
    """Returns the moment in one line."""
    accepted = " ".join(f"{worker.index}:{worker.num_accepted}" for worker in progress.workers)
    line = (
        f"step {progress.step:>4}/{num_steps}  loss {progress.loss:.4f}  test accuracy {progress.test_accuracy:.3f}"
        f"  {progress.steps_per_s:5.1f} steps/s  contributions {accepted}  stale {progress.num_stale}  late {progress.num_late}"
    )
    if progress.max_staleness:
        line += f"  staleness up to {progress.max_staleness}"
    return f"{line}  waiting: {progress.waiting_for}" if progress.waiting_for else line
