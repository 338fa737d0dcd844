"""Says that a call has had no answer for too long, while it still blocks. Knows time, a thread and the log; nothing of what is called.

`retry.py` speaks between two attempts; a server that is stopped, or behind a cut network, lets a single attempt hang until keepalive or
the deadline ends it. Nobody shall wait over 2 s without being told what for, so a thread of its own looks at the calls under way.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ps_protocol.retry import FIRST_NOTICE_S, NOTICE_INTERVAL_S

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.5


@dataclass(slots=True, kw_only=True)
class _Call:
    what: str
    started_s: float
    next_notice_s: float


class SilenceWatch:
    """Watches calls of any number of threads. A call costs it two dictionary writes; its daemon thread looks twice a second."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lockstep-silence", daemon=True).start()

    @contextmanager
    def expecting(self, what: str, *, expected_s: float = 0.0) -> Iterator[None]:
        """Watches the enclosed call: logs a warning once it has taken 2 s more than `expected_s`, then every 10 s."""
        number, now = next(self._numbers), time.monotonic()
        with self._lock:
            self._calls[number] = _Call(what=what, started_s=now, next_notice_s=now + expected_s + FIRST_NOTICE_S)
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            with self._lock:
                # Half an interval early rather than half an interval late.
                overdue = [call for call in self._calls.values() if now + _LOOK_INTERVAL_S >= call.next_notice_s]
                for call in overdue:
                    call.next_notice_s = now + NOTICE_INTERVAL_S
            for call in overdue:
                log.warning(
                    "no answer yet from %s, for %.1f s: it may be stopped or cut off; still waiting", call.what, now - call.started_s
                )
