"""How the writing of a checkpoint gives way to steps: between two of its pieces."""

import time
from collections.abc import Callable
from typing import Protocol

# So many seconds of steps may be waited for with each second of writing: a file takes three times as long at most.
_WAITS_PER_WORK = 2.0


class StepTurns(Protocol):
    """Whether a step is under way; `ps_server.turns` knows."""

    @property
    def is_idle(self) -> bool:
        """Whether none is."""

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits until none is, but not longer than this."""


class SavePace:
    """The pace of one file; `give_way` is called between its pieces, by the thread that writes it."""

    def __init__(self, turns: StepTurns, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns, self._clock = turns, clock
        self._left_s = 0.0
        self._since_s = clock()

    def give_way(self) -> None:
        """Waits for the step under way, if there is one, but no longer than the writing has earned."""
        now = self._clock()
        self._left_s += _WAITS_PER_WORK * (now - self._since_s)
        if not self._turns.is_idle:
            self._turns.wait_until_idle(self._left_s)
            waited_until = self._clock()
            self._left_s -= waited_until - now
            now = waited_until
        self._since_s = now
