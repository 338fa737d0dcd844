"""Decides what the end of a process means for a cluster: continue, restart the process, or give up. Knows processes by role; no step."""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from lockstep.launcher.cluster import LocalCluster, last_lines, last_words
from lockstep.launcher.supervisor import LaunchFailed, Process, Supervisor, describe_end, shell_code

if TYPE_CHECKING:
    from lockstep.launcher.watch import ChiefPoller, StepNeeds


# How often, and after which pause, a failed process is restarted.


# A process that ran this long had started properly, so its earlier failures no longer count.
SOUND_LIFE_S = 30.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 8.0


class RestartLimit:
    """Counts each process's failures in quick succession. `max_restarts` 0: nothing is restarted."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._in_a_row: dict[Hashable, int] = {}

    def pause_s(self, name: Hashable, *, lived_s: float) -> float | None:
        """Notes a failure and returns the seconds to wait before the next start (0 after the first); None: it has failed too often."""
        count = 1 if lived_s >= SOUND_LIFE_S else self._in_a_row.get(name, 0) + 1
        self._in_a_row[name] = count
        if count > self._max_restarts:
            return None
        return 0.0 if count == 1 else min(_FIRST_PAUSE_S * 2.0 ** (count - 2), _MAX_PAUSE_S)

    def num_in_a_row(self, name: Hashable) -> int:
        """Returns the number of failures in quick succession."""
        return self._in_a_row.get(name, 0)


# The chief ends the parameter servers before itself: a server may be gone this long before the chief is.
_ROLES_END_TOGETHER_S = 5.0
# A role that was stopped while the chief kept running, and that can be restarted, is restarted after this long.
_ALONE_S = 1.5
_SAY_AFTER_S = 2.0
# How long a call to the chief may delay the output of the other processes.
_GLANCE_S = 0.2
# After all workers have ended, the chief ends the roles once the last lease is over. The launcher does not wait for a killed worker's
# lease.
_ROLES_END_S = 1.5
# On a busy machine, a call to the chief may take long.
_ANSWER_S = 5.0


_TO_SURVIVE = "\nto train on after the loss of a worker, start with --restart-workers N, --backup-workers B or --min-replicas M"


class ClusterFailed(LaunchFailed):
    """Training cannot continue."""


class TooFewWorkers(ClusterFailed):
    """Workers have failed, and too few are left for a step. Chief and parameter servers still run."""


class ClusterWatch:
    """Handles every process that ends, and explains it to the user with `say`.

    `is_all_shown`: whether the user has seen all output of the processes, so that it need not be repeated.
    """

    def __init__(self, cluster: LocalCluster, *, say: Callable[[str], None], is_all_shown: Callable[[], bool] = lambda: False) -> None:
        self._cluster = cluster
        self._say, self._is_all_shown = say, is_all_shown
        self._failed: list[Process] = []
        self._failed_at = 0.0
        self._num_reported = 0  # the number of failed workers whose failure has been explained to the user
        self._poller: ChiefPoller | None = None
        self._role_ended_at: float | None = None
        self._role_restarts = RestartLimit(cluster.spec.recovery.max_restarts)
        self._worker_restarts: Counter[str] = Counter()
        self._restarted: set[str] = set()  # roles that were restarted, and so lost their memory
        self._due: dict[str, tuple[Process, float]] = {}  # roles to restart, and when
        self._is_closed = self._has_reported_end = False

    def ask_chief(self) -> "ChiefPoller":
        """Returns the poller of the chief; the first call starts it."""
        if self._poller is None:
            from lockstep.launcher.watch import ChiefPoller  # NumPy is slow to import, and if it is broken, the roles report it

            self._poller = ChiefPoller(self._cluster)
        return self._poller

    @property
    def failed_workers(self) -> list[Process]:
        """Workers that have ended with a failure, in the order in which they ended."""
        return self._failed

    @property
    def has_running_workers(self) -> bool:
        """Whether a worker is still running."""
        return any(worker.is_running for worker in self._cluster.workers)

    def see(self, ended: Iterable[Process]) -> None:
        """Handles processes that have ended. Raises ClusterFailed, with the launcher's exit code, if training cannot continue."""
        ended = list(ended)
        if self.has_running_workers:
            self.ask_chief()  # early: once the chief is gone, it cannot be asked what a step needed
        for process in ended:
            if process in self._cluster.roles:
                self._see_role(process)
        self._restart_due_roles()
        for process in ended:
            if process in self._cluster.workers and process.returncode and not self._restart_worker(process):
                self._failed.append(process)
                self._failed_at = time.monotonic()
        if len(self._failed) > self._num_reported:
            self._judge_failures()
        if self._role_ended_at is not None:
            self._check_roles_ended_together(time.monotonic() - self._role_ended_at)

    def pause_s(self, longest_s: float) -> float:
        """Returns how many seconds the caller may wait at most before it calls `see` again."""
        now = time.monotonic()
        return max(0.0, min([longest_s, *(due - now for _, due in self._due.values())]))

    def close(self) -> None:
        """Stops watching: processes that end from now on are not restarted."""
        self._is_closed = True
        self._due.clear()

    def finish_training(self, supervisor: Supervisor) -> bool:
        """Has the chief finish training, and waits a few seconds for the roles to end by themselves; the supervisor ends the rest.

        Waits longer while the chief saves a last checkpoint. Returns whether there was a training to finish.
        """
        begin, poller, has_reported = time.monotonic(), self.ask_chief(), False
        poller.finish("all workers have ended")
        self.close()
        try:
            while self._may_end_by_itself(time.monotonic() - begin):
                if not has_reported and poller.saving and time.monotonic() - begin > _SAY_AFTER_S:
                    self._say(f"training is finished; the chief saves a last checkpoint, {poller.saving}; Ctrl-C ends all without it")
                    has_reported = True
                self.see(supervisor.poll(timeout_s=0.05))
        finally:
            poller.close()
        # A training may be shorter than the pause between two calls to the chief.
        return poller.has_begun or self._cluster.trained_until() is not None

    def _may_end_by_itself(self, waited_s: float) -> bool:
        """Whether to keep waiting for the roles to end by themselves."""
        poller, chief_runs = self.ask_chief(), self._cluster.chief.is_running
        if waited_s >= _ANSWER_S:
            return chief_runs and bool(poller.saving)  # the chief itself abandons a checkpoint that takes too long
        # If the chief has ended by itself, training is over.
        has_roles = any(role.is_running for role in self._cluster.roles)
        return (chief_runs and (poller.is_finishing or bool(poller.saving))) or (waited_s < _ROLES_END_S and has_roles)

    def _see_role(self, process: Process) -> None:
        returncode = process.returncode or 0
        if not returncode:
            self._role_ended_at = self._role_ended_at or time.monotonic()
            return
        words = f"{process.name} (pid {process.pid}) failed: {describe_end(returncode)}. {self._output_words(process)}"
        if not self._plan_restart(process, words):
            count = self._role_restarts.num_in_a_row(process.name)
            often = f"\nit has ended {count} times in quick succession, and is not started again" if count > 1 else ""
            self._fail(process, words + often + self._loss_words(process))

    def _output_words(self, role: Process) -> str:
        if role.last_lines and self._is_all_shown():
            return f"Its output is above, and in {role.log_path}"
        return last_lines(role)

    def _loss_words(self, role: Process) -> str:
        """Returns what the loss of a parameter server costs without checkpoints, for a message."""
        is_chief_alone = role is self._cluster.chief and not self._cluster.spec.chief_in_ps
        if is_chief_alone or self._cluster.spec.recovery.has_checkpoints or not self.has_running_workers:
            return ""
        return "\nits part of the model is lost with it: there are no checkpoints to go back to (--checkpoint-dir DIR makes some)"

    def _plan_restart(self, role: Process, words: str) -> bool:
        """Restarts a role, at once or after a pause; False if that is no longer useful."""
        if self._is_closed or not self.has_running_workers or not self._cluster.may_restart(role):
            return False
        now = time.monotonic()
        pause_s = self._role_restarts.pause_s(role.name, lived_s=now - role.started_at)
        if pause_s is None:
            return False
        when = f"in {pause_s:g} s" if pause_s else "now"
        self._say(f"{words}\nstarting {role.name} again {when}; {self._cost_words(role)}")
        self._due[role.name] = (role, now + pause_s)
        self._restart_due_roles()
        return True

    def _cost_words(self, role: Process) -> str:
        if role is self._cluster.chief and not self._cluster.spec.chief_in_ps:
            return "the parameter servers keep the model, and training continues at its step"
        back = "the cluster goes back to its newest checkpoint, and training continues from there"
        if (other := self._cluster.replica_of(role)) is None or not other.is_running:
            return back
        if other.name not in self._restarted:
            return f"{other.name} has the same, and training continues at its step"
        if not self._cluster.spec.recovery.has_checkpoints:
            return f"{other.name} was started again before, without a checkpoint that would have brought it back: the model is lost"
        return f"if {other.name}, which was started again before, has been brought back, training continues at its step; else {back}"

    def _restart_due_roles(self) -> None:
        for name, (role, due) in [*self._due.items()]:
            if time.monotonic() >= due:
                del self._due[name]
                self._restarted.add(name)
                self._say(f"{name} is started again, as pid {self._cluster.restart_role(role).pid}")

    def _restart_worker(self, worker: Process) -> bool:
        """Restarts a failed worker and returns True, if it may be restarted; otherwise returns False."""
        recovery, is_of_use = self._cluster.spec.recovery, self._cluster.chief.is_running or self._due
        if self._is_closed or not is_of_use or self._worker_restarts[worker.name] >= recovery.restart_workers:
            return False
        self._worker_restarts[worker.name] += 1
        process = self._cluster.restart_worker(worker)
        count = f"start {self._worker_restarts[worker.name]} of {recovery.restart_workers}"
        words = f"{worker.name} (pid {worker.pid}) failed: {describe_end(worker.returncode or 0)}. {last_words(worker)}"
        self._say(f"{words}\n{worker.name} is started again, as pid {process.pid} ({count})")
        return True

    def _check_roles_ended_together(self, ended_ago_s: float) -> None:
        """Handles a role that ended without a failure: either all roles are ending, or it alone was stopped and has to be replaced."""
        running = [process.name for process in self._cluster.roles if process.is_running]
        gone = [process for process in self._cluster.roles if not process.is_running and process.name not in self._due]
        if not self.has_running_workers or not gone:
            return
        if not running:
            self._report_end_once(ended_ago_s)
            return
        if ended_ago_s > _ALONE_S and self._cluster.chief.is_running and all(self._cluster.may_restart(process) for process in gone):
            self._role_ended_at = None
            for process in gone:
                self._plan_restart(process, f"{process.name} (pid {process.pid}) was stopped while the chief kept running")
        elif ended_ago_s > _ROLES_END_TOGETHER_S:
            names = ", ".join(process.name for process in gone)
            self._fail(gone[0], f"{names} ended before training was finished, while {', '.join(running)} still ran")

    def _report_end_once(self, ended_ago_s: float) -> None:
        """Reports once which workers still run after training: a program may, but a stuck one would block the launcher silently."""
        if self._has_reported_end or ended_ago_s < _SAY_AFTER_S or self._due:
            return
        self._has_reported_end = True
        left = ", ".join(f"{worker.name} (pid {worker.pid})" for worker in self._cluster.workers if worker.is_running)
        self._say(f"training is over, and chief and parameter servers have ended; waiting for {left} to end")

    def _fail(self, process: Process, words: str) -> None:
        raise ClusterFailed(f"{words}\nending all; logs: {process.log_path.parent}", exit_code=shell_code(process.returncode or 0) or 1)

    def _judge_failures(self) -> None:
        """Reports what the failures of workers mean, once the chief has answered what a step needs."""
        from lockstep.launcher.watch import needs_of

        poller, is_of_use = self._poller, self.has_running_workers and self._cluster.chief.is_running
        if poller is not None and is_of_use and not poller.knows(since=self._failed_at, max_wait_s=_GLANCE_S):
            return
        needs = needs_of(poller.status if poller is not None else None, spec=self._cluster.spec)
        for process in self._failed[self._num_reported :]:
            self._num_reported += 1
            self._report_failure(process, num_left=self._cluster.spec.num_workers - self._num_reported, needs=needs)

    def _report_failure(self, process: Process, *, num_left: int, needs: "StepNeeds") -> None:
        assert process.returncode is not None
        words = f"{process.name} (pid {process.pid}) failed: {describe_end(process.returncode)}. {last_words(process)}"
        left = f"{num_left} of {self._cluster.spec.num_workers} workers left, {needs.text}"
        if num_left < needs.num_workers:
            first = self._failed[0].returncode or 1
            # A program that has raised an error would mostly do so again.
            advice = _TO_SURVIVE if process.returncode < 0 else ""
            raise TooFewWorkers(f"{words}\nending all: {left}; logs: {process.log_path.parent}{advice}", exit_code=shell_code(first))
        self._say(f"{words}\ntraining continues: {left}")
