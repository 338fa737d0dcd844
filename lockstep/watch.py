"""Judges what the end of a process means for a cluster: go on, or give up. Knows processes by their role; starts and ends none."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lockstep.cluster import LocalCluster, last_lines
from lockstep.process import Process, describe_end, shell_code
from lockstep.supervision import LaunchFailed

if TYPE_CHECKING:
    from lockstep.needs import Inquiry, StepNeeds

# The chief ends the parameter servers before itself: this long one may be gone while the chief is not.
_ROLES_END_TOGETHER_S = 5.0
# How long a look at the chief may hold up the output of the others.
_GLANCE_S = 0.2


class ClusterFailed(LaunchFailed):
    """Training can't go on."""


class ClusterWatch:
    """Is shown every process that ends; `say` tells the user what it means."""

    def __init__(self, cluster: LocalCluster, *, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._failed: list[Process] = []
        self._failed_at = 0.0
        self._told = 0  # of the failed ones, those of which it is said what their failure means
        self._inquiry: Inquiry | None = None
        self._role_ended_at: float | None = None

    @property
    def failed_workers(self) -> list[Process]:
        """Workers that have ended with a failure, first one first."""
        return self._failed

    @property
    def has_running_workers(self) -> bool:
        """Whether a worker is still at it."""
        return any(worker.is_running for worker in self._cluster.workers)

    def see(self, ended: Iterable[Process]) -> None:
        """Takes note of processes that have ended. Raises ClusterFailed, with the exit code to end with, if training can't go on."""
        ended = list(ended)
        if self._inquiry is None and self.has_running_workers:
            from lockstep.needs import Inquiry  # NumPy takes its time to import, and a broken one is the roles' to tell of

            self._inquiry = Inquiry(self._cluster.chief_address, cluster=self._cluster.name)
        for process in ended:
            if process in self._cluster.roles:
                self._see_role(process)
        for process in ended:
            if process in self._cluster.workers and process.returncode:
                self._failed.append(process)
                self._failed_at = time.monotonic()
        if len(self._failed) > self._told:
            self._judge()
        if self._role_ended_at is not None and time.monotonic() > self._role_ended_at + _ROLES_END_TOGETHER_S:
            self._check_roles_ended_together()

    def close(self) -> None:
        """Watches no more."""
        if self._inquiry is not None:
            self._inquiry.close()

    def _see_role(self, process: Process) -> None:
        returncode = process.returncode or 0
        if returncode:
            self._fail(process, f"{process.name} (pid {process.pid}) failed: {describe_end(returncode)}. {last_lines(process)}")
        self._role_ended_at = self._role_ended_at or time.monotonic()

    def _check_roles_ended_together(self) -> None:
        running = [process.name for process in self._cluster.roles if process.is_running]
        gone = [process for process in self._cluster.roles if not process.is_running]
        if running and self.has_running_workers:
            names = ", ".join(process.name for process in gone)
            self._fail(gone[0], f"{names} ended before training was finished, while {', '.join(running)} still ran")

    def _fail(self, process: Process, words: str) -> None:
        raise ClusterFailed(f"{words}\nending all; logs: {process.log_path.parent}", exit_code=shell_code(process.returncode or 0) or 1)

    def _judge(self) -> None:
        """Says what the failures of workers mean, once it is known what a step needs."""
        from lockstep.needs import needs_of

        inquiry, is_of_use = self._inquiry, self.has_running_workers and self._cluster.chief.is_running
        if inquiry is not None and is_of_use and not inquiry.knows(since=self._failed_at, max_wait_s=_GLANCE_S):
            return
        needs = needs_of(inquiry.status if inquiry is not None else None, spec=self._cluster.spec)
        for process in self._failed[self._told :]:
            self._told += 1
            self._tell(process, num_left=self._cluster.spec.num_workers - self._told, needs=needs)

    def _tell(self, process: Process, *, num_left: int, needs: "StepNeeds") -> None:
        assert process.returncode is not None
        words = f"{process.name} (pid {process.pid}) failed: {describe_end(process.returncode)}. {last_lines(process)}"
        left = f"{num_left} of {self._cluster.spec.num_workers} workers left, {needs.text}"
        if num_left < needs.num_workers:
            first = self._failed[0]
            raise ClusterFailed(
                f"{words}\nending all: {left}; logs: {process.log_path.parent}", exit_code=shell_code(first.returncode or 1)
            )
        self._say(f"{words}\ntraining goes on: {left}")
