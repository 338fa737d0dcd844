"""Repeats an idempotent call for as long as its server cannot be reached. Knows time and the log; no channel, no service.

The clients of this package make one attempt a call; whoever wants patience wraps the call:

    retry.call(lambda left_s: shard.push_gradients(header, gradients, timeout_s=left_s), what="ps 0", timeout_s=60)
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ps_protocol.backoff import delays_s
from ps_protocol.errors import Cancelled, DeadlineExceeded, Unavailable

log = logging.getLogger("lockstep.rpc")

FIRST_NOTICE_S = 2.0
NOTICE_INTERVAL_S = 10.0
# A server that is started again is found about as soon as it serves: those who repeat are idle meanwhile.
MAX_PAUSE_S = 1.0

Result = TypeVar("Result")


def call(attempt: Callable[[float], Result], *, what: str, timeout_s: float, stop: threading.Event | None = None) -> Result:
    """Returns `attempt(seconds left)`, repeated with jittered pauses while it raises Unavailable, within `timeout_s` altogether.

    Every other error passes through at once. Logs a warning after 2 s, then every 10 s. Raises the last Unavailable when time is up, and
    Cancelled when `stop` is set meanwhile. `attempt` must be idempotent.
    """
    started = time.monotonic()
    try:
        return attempt(timeout_s)
    except Unavailable as error:
        # Made only now: nearly every call succeeds at once.
        wait = _Wait(what=what, timeout_s=timeout_s, stop=stop, started=started)
        wait.pause(error)
    while True:
        try:
            return attempt(wait.left_s())
        except Unavailable as error:
            wait.pause(error)
        except DeadlineExceeded as error:
            raise wait.explained(error) from None


class _Wait:
    """One caller's patience: what it waits for, since when, and why."""

    def __init__(self, *, what: str, timeout_s: float, stop: threading.Event | None, started: float) -> None:
        self._what, self._timeout_s, self._stop = what, timeout_s, stop
        self._started = started
        self._delays: Iterator[float] = delays_s(random.Random(), max_s=MAX_PAUSE_S)
        self._next_notice_s = FIRST_NOTICE_S
        self._failure = ""  # its words: the error itself would hold its caller's frames, and those hold this

    def left_s(self) -> float:
        return self._timeout_s - (time.monotonic() - self._started)

    def pause(self, failure: Unavailable) -> None:
        """Sleeps before the next attempt, or raises if there will be none."""
        self._failure = failure.message
        delay_s, left_s = next(self._delays), self.left_s()
        elapsed_s = self._timeout_s - left_s
        if delay_s >= left_s:
            raise Unavailable(f"{failure.message} (tried for {elapsed_s:.1f} s)", facts=failure.facts) from None
        # The pause counts: when it ends, nobody shall have waited over 2 s in silence.
        if elapsed_s + delay_s >= self._next_notice_s:
            log.warning("still trying what=%s elapsed_s=%.1f left_s=%.1f cause=%s", self._what, elapsed_s, left_s, failure.message)
            self._next_notice_s = elapsed_s + NOTICE_INTERVAL_S
        if (self._stop or threading.Event()).wait(delay_s):
            raise Cancelled(f"{self._what}: closed while it was waited for; the last failure: {failure.message}")

    def explained(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """Returns the error with the failures that used up its time."""
        if not self._failure:
            return error
        return DeadlineExceeded(f"{error.message} (before that: {self._failure})", facts=error.facts)
