"""How long a wait lasts and when it says what it waits for. Knows a clock and a log; nothing of what is waited for."""

import logging
import time

from ps_protocol.errors import DeadlineExceeded, InvalidSpec

log = logging.getLogger("lockstep.waits")

FIRST_NOTICE_S = 2.0
REPEAT_S = 10.0
# Who is asked answers as often as this, so that one who has fallen silent is noticed: at first soon, later at little cost.
_FIRST_SLICE_S = 1.0
_LATER_SLICE_S = 3.0


class Wait:
    """One wait, cut in slices: after 2 s, then every 10 s, it says what it waits for; at its deadline it gives up with the same words."""

    def __init__(self, what: str, *, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s >= 0:
            raise InvalidSpec(f"timeout_s: got {timeout_s!r}, want seconds >= 0, or None for no limit")
        self._what = what
        self._start_s = time.monotonic()
        self._deadline_s = None if timeout_s is None else self._start_s + timeout_s
        self._timeout_s = timeout_s
        self._next_words_s = self._start_s + FIRST_NOTICE_S

    def slice_s(self) -> float:
        """Returns how long the next call may block, in seconds: until there is something to say, or the deadline, and not for long."""
        now = time.monotonic()
        end = self._next_words_s if self._deadline_s is None else min(self._next_words_s, self._deadline_s)
        return max(0.0, min(end - now, _FIRST_SLICE_S if now < self._start_s + FIRST_NOTICE_S else _LATER_SLICE_S))

    def left_s(self) -> float | None:
        """Returns the time to the deadline in seconds; None if there is none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Blocks for so long, at most to the deadline."""
        left_s = self.left_s()
        time.sleep(seconds if left_s is None else min(seconds, left_s))

    def explain(self, waiting_for: str) -> None:
        """Takes note that the wait goes on; logs why if it is time to. Raises DeadlineExceeded at the deadline."""
        now = time.monotonic()
        reason = waiting_for or "no reason was given"
        if self._deadline_s is not None and now >= self._deadline_s:
            raise DeadlineExceeded(f"{self._what}: not within {self._timeout_s:g} s: {reason}")
        if now >= self._next_words_s:
            log.warning("%s: waiting for %.0f s: %s", self._what, now - self._start_s, reason)
            self._next_words_s = now + REPEAT_S
