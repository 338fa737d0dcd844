"""Keeps a participant's lease while its own thread computes. Knows a thread and what to do in it; no chief, no model and no step."""

import logging
import threading
from collections.abc import Callable

from ps_protocol.errors import DeadlineExceeded, PsError, ShuttingDown, Unavailable

log = logging.getLogger("lockstep.worker")

# A third of the lease, so that one lost heartbeat does not end it.
BEATS_PER_LEASE = 3
STOP_WAIT_S = 0.25


class Heartbeat:
    """A daemon thread that renews the lease. It bears a chief that is away for a while, and ends when told that the place is lost.

    `beat` renews it once and returns whether training is finished.
    """

    def __init__(self, beat: Callable[[], bool], *, index: int, lease_s: float) -> None:
        self._beat = beat
        self._index = index
        self._interval_s = lease_s / BEATS_PER_LEASE
        self._stopped = threading.Event()
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name=f"lockstep-heartbeat-{index}", daemon=True)

    @property
    def is_finished(self) -> bool:
        """Whether the chief has said that training is finished."""
        return self._is_finished

    def start(self) -> None:
        """Begins to renew the lease."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for it at most a quarter of a second. Can be called at any time, and again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        is_reachable = True
        while not self._stopped.wait(self._interval_s):
            try:
                self._is_finished = self._beat() or self._is_finished
                is_reachable = True
            except (Unavailable, DeadlineExceeded, ShuttingDown) as error:
                if is_reachable and not self._stopped.is_set():
                    log.warning("heartbeat failed, trying on worker=%d: %s", self._index, error)
                is_reachable = False
            except PsError as error:
                # The next call of the worker itself raises this; here it would only be said again and again.
                if not self._stopped.is_set():
                    log.warning("heartbeat ended worker=%d: %s", self._index, error)
                return
