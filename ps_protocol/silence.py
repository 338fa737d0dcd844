"""Says that a call has had no answer for too long, while it still blocks. Knows time, a thread and the log; nothing of what is called.

`retry.py` speaks between two attempts; a server that is stopped, or behind a cut network, lets a single attempt hang until keepalive or
the deadline ends it. Nobody shall wait over 2 s without being told what for, so a thread of its own looks at the calls under way.
Where that may be mended, as by looking for a server that has moved, it sounds an alarm as well.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ps_protocol.retry import FIRST_NOTICE_S, NOTICE_INTERVAL_S

log = logging.getLogger("lockstep.silence")

_LOOK_INTERVAL_S = 0.5
# An answer that was to be waited for is late sooner than one that was to come at once: what it waited for has been said before.
_GRACE_S = 1.0
_ALARM_INTERVAL_S = 2.0


class _Call:
    """One call, watched within its `with` block. One object a call, because that is all that every call pays."""

    __slots__ = ("_calls", "_expected_s", "alarm", "next_alarm_s", "next_notice_s", "started_s", "what")

    def __init__(self, calls: "dict[int, _Call]", what: str, expected_s: float, alarm: Callable[[], None] | None) -> None:
        self._calls, self.what, self._expected_s, self.alarm = calls, what, expected_s, alarm
        self.started_s = self.next_notice_s = self.next_alarm_s = 0.0

    def __enter__(self) -> None:
        self.started_s = time.monotonic()
        self.next_notice_s = self.started_s + max(FIRST_NOTICE_S, self._expected_s and self._expected_s + _GRACE_S)
        self.next_alarm_s = self.started_s + self._expected_s + _GRACE_S
        self._calls[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._calls[id(self)]


class SilenceWatch:
    """Watches calls of any number of threads. A call costs it two dictionary writes; its daemon thread looks twice a second."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lockstep-silence", daemon=True).start()

    def expecting(self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Watches the enclosed call: logs a warning once it has taken 2 s, and 1 s more than `expected_s`; then every 10 s.

        `alarm` is called, in another thread, once it has taken 1 s more than `expected_s`, then every 2 s. It must not block. Where `what`
        is empty, nothing is logged: others speak for it.
        """
        return _Call(self._calls, what, expected_s, alarm)

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            # A list of a dict's values is made in one go, so calls may begin and end meanwhile.
            for call in list(self._calls.values()):
                _look(call, now)


def _look(call: _Call, now: float) -> None:
    if call.alarm is not None and now >= call.next_alarm_s:
        call.next_alarm_s = now + _ALARM_INTERVAL_S
        call.alarm()
    # Half an interval early rather than late.
    if call.what and now + _LOOK_INTERVAL_S >= call.next_notice_s:
        call.next_notice_s = now + NOTICE_INTERVAL_S
        log.warning("no answer yet from %s, for %.1f s: it may be gone, stopped or cut off; still waiting", call.what, now - call.started_s)
