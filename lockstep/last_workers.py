"""Ends training when workers have ended with 0 and too few for a step are left. Knows processes and the chief; no tensor."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from lockstep.cluster import LocalCluster
from lockstep.needs import needs_of
from lockstep.own_chief import own_chief
from lockstep.standstill import Standstill
from ps_protocol.chief import Chief, ClusterState
from ps_protocol.errors import PsError

_PERIOD_S = 0.5
# Workers that end together end this close to each other: nothing is said then.
_TOGETHER_S = 2.0
# After training was ended: for the last lines of the workers that it released.
_LEAVE_S = 10.0
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)


class LastWorkers:
    """Call `see()` after every poll. A thread of its own asks the chief, once a worker has ended before the others."""

    def __init__(self, cluster: LocalCluster, *, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._ended_at: dict[int, float] = {}
        self._told: set[int] = set()
        self._thread: threading.Thread | None = None
        self._state: ClusterState | None = None
        self._last_step: int | None = None
        self._words = ""
        self._needs = needs_of(None, spec=cluster.spec)
        self._leave_until: float | None = None

    @property
    def failure(self) -> str:
        """Why training was ended early; empty if it was not."""
        return "" if self._last_step is None else f"training ended early at step {self._last_step}: {self._words}"

    @property
    def is_patience_over(self) -> bool:
        """Whether the workers have had their time to end by themselves after training was ended."""
        return self._leave_until is not None and time.monotonic() > self._leave_until

    def see(self) -> None:
        """Takes note of workers that have ended, and says what that means."""
        now, workers = time.monotonic(), self._cluster.workers
        self._ended_at |= {index: now for index, one in enumerate(workers) if not one.is_running and index not in self._ended_at}
        early = [index for index, one in enumerate(workers) if one.returncode == 0]
        if not early or not self._num_running:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="last-workers", daemon=True)
            self._thread.start()
        if self._state is not None and self._state not in _OVER:
            self._tell(index for index in early if now > self._ended_at[index] + _TOGETHER_S)
        if self._last_step is not None and self._leave_until is None:
            self._tell(early)
            self._leave_until = now + _LEAVE_S
            self._say(f"{self._words}; ended training at step {self._last_step}, waiting up to {_LEAVE_S:g} s for the workers to end")

    @property
    def _num_running(self) -> int:
        return sum(worker.is_running for worker in self._cluster.workers)

    def _count(self) -> str:
        return f"{self._num_running} of {self._cluster.spec.num_workers} workers still run; {self._needs.text}"

    def _tell(self, early: Iterable[int]) -> None:
        for index in early:
            if index not in self._told:
                self._told.add(index)
                self._say(f"{self._cluster.workers[index].name} ended with exit code 0 while {self._count()}")

    def _ask(self) -> None:
        standstill = Standstill()
        chief = own_chief(self._cluster.chief_address, cluster=self._cluster.name, token_file=self._cluster.token_file)
        try:
            while self._last_step is None and self._state not in _OVER and self._num_running:
                with suppress(PsError):  # a chief that is gone ends everything anyway, and one that is busy is asked again
                    self._look(chief, standstill)
                threading.Event().wait(_PERIOD_S)
        finally:
            chief.close()

    def _look(self, chief: Chief, standstill: Standstill) -> None:
        gone_s = {index: time.monotonic() - at for index, at in self._ended_at.copy().items()}
        status = chief.status()
        self._state, self._needs = status.state, needs_of(status, spec=self._cluster.spec)
        is_still = standstill.see(status, now=time.monotonic(), gone_s=gone_s)
        if is_still and self._num_running < self._needs.num_workers:
            self._words = f"too few workers are left: {self._count()}"
            self._last_step = chief.finish(reason=self._words)
