"""How a process is asked to end: by signals. Knows no role."""

import math
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ps_protocol.process.exit_codes import of_signal

_TOGETHER_S = 0.5


def exit_at_sigterm() -> None:
    """Has SIGTERM end this program as an exit does, so that its `with` blocks end."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(of_signal(number))


class EndSignals:
    """A handler of signals that has a role end by `ask(name of the signal)`. Signals within 0.5 s of the first are one request.

    For roles obey a second request at once, and an engine that ends a job signals all of its processes: the role, and the one that stands
    for it beside the launcher, which passes on the signal. That one cannot leave it to the engine: users, too, send signals to either.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask, self._asked_at = ask, -math.inf

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        """Asks, unless that was done just now."""
        now = time.monotonic()
        if now >= self._asked_at + _TOGETHER_S:
            self._asked_at = now
            self._ask(signal.Signals(number).name)
