"""Says that a call has had no answer for too long, while it still blocks. Knows time, a thread and the log; nothing of what is called.

`retry.py` speaks between two attempts; a server that is stopped, or behind a cut network, lets a single attempt hang until keepalive or
the deadline ends it. Nobody shall wait over 2 s without being told what for, so a thread of its own looks at the calls under way.
"""

import logging
import threading
import time
from contextlib import AbstractContextManager

from ps_protocol.retry import FIRST_NOTICE_S, NOTICE_INTERVAL_S

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5


class _Call:
    """One call, watched within its `with` block. One object a call, because that is all that every call pays."""

    __slots__ = ("_calls", "_expected_s", "next_notice_s", "started_s", "what")

    def __init__(self, calls: "dict[int, _Call]", what: str, expected_s: float) -> None:
        self._calls, self.what, self._expected_s = calls, what, expected_s
        self.started_s = self.next_notice_s = 0.0

    def __enter__(self) -> None:
        self.started_s = time.monotonic()
        self.next_notice_s = self.started_s + self._expected_s + FIRST_NOTICE_S
        self._calls[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._calls[id(self)]


class SilenceWatch:
    """Watches calls of any number of threads. A call costs it two dictionary writes; its daemon thread looks twice a second."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lockstep-silence", daemon=True).start()

    def expecting(self, what: str, *, expected_s: float = 0.0) -> AbstractContextManager[None]:
        """Watches the enclosed call: logs a warning once it has taken 2 s more than `expected_s`, then every 10 s."""
        return _Call(self._calls, what, expected_s)

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            # A list of a dict's values is made in one go, so calls may begin and end meanwhile. Half an interval early rather than late.
            for call in [call for call in list(self._calls.values()) if now + _LOOK_INTERVAL_S >= call.next_notice_s]:
                call.next_notice_s = now + NOTICE_INTERVAL_S
                log.warning(
                    "no answer yet from %s, for %.1f s: it may be stopped or cut off; still waiting", call.what, now - call.started_s
                )
