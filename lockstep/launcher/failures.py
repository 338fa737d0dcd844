"""Decides what the end of a process means for a cluster: continue, restart the process, or give up. Knows processes by role; no step."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from lockstep.launcher.cluster import LaunchedCluster
from lockstep.launcher.supervisor import STOP_GRACE_S, LaunchFailed, Process, Supervisor, shell_code
from ps_protocol.errors import TrainingInterrupted

if TYPE_CHECKING:
    from lockstep.launcher.watch import ChiefPoller, StepNeeds


# How often, and after which pause, a failed process is restarted.


# A process that ran this long had started properly, so its earlier failures no longer count.
SOUND_LIFE_S = 30.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 8.0
_MAX_DOUBLINGS = 10


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
        doublings = min(count - 2, _MAX_DOUBLINGS)  # not of every failure: a power of a thousandth is no float
        return 0.0 if count == 1 else min(_FIRST_PAUSE_S * 2.0**doublings, _MAX_PAUSE_S)

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
# Workers that run the same program mostly fail together, each after its own last lines.
_TOGETHER_S = 1.0
# After all workers have ended, the chief ends the roles once the last lease is over. The launcher does not wait for a killed worker's
# lease.
_ROLES_END_S = 1.5
# On a busy machine, a call to the chief may take long.
_ANSWER_S = 5.0

# What workers get that still run after a training was interrupted, and how long each may take. The last is not refused.
_LEAVE_S = 5.0
_SIGNALS = ((signal.SIGINT, 3.0), (signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, 1.0))
# How long the end then waits for the last checkpoint.
_LAST_CHECKPOINT_S = 10.0


_TO_SURVIVE = "\nto train on after the loss of a worker, start with --restart-workers N, --backup-workers B or --min-replicas M"


class ClusterFailed(LaunchFailed):
    """Training cannot continue."""


class TooFewWorkers(ClusterFailed):
    """Workers have failed, and too few are left for a step. Chief and parameter servers still run. The text names the first failure."""


class ClusterWatch:
    """Handles every process that ends, and explains it to the user with `say`."""

    def __init__(self, cluster: LaunchedCluster, *, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._failed: list[Process] = []
        self._failed_at = 0.0
        self._num_reported = 0  # the number of failed workers whose failure has been explained to the user
        self._poller: ChiefPoller | None = None
        self._role_ended_at: float | None = None
        self._role_restarts = RestartLimit(cluster.spec.max_restarts)
        self._worker_restarts = RestartLimit(cluster.spec.restart_workers)
        self._num_starts: Counter[str] = Counter()  # of workers, after the first
        self._restarted: set[str] = set()  # roles that were restarted, and so lost their memory
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
        """Whether a worker is still running. Once the roles have ended after a training, those do not count that have nothing to end.

        These are the ones that only stand for others, and the ones that have not begun, since no host has had room for them.
        """
        running = [worker for worker in self._cluster.workers if worker.is_running]
        if any(role.is_running for role in self._cluster.roles) or self._cluster.trained_until() is None:
            return bool(running)
        return not self._cluster.spec.has_standins and any(map(self._cluster.has_begun, running))

    def see(self, ended: Iterable[Process]) -> None:
        """Handles processes that have ended. Raises ClusterFailed, with the launcher's exit code, if training cannot continue."""
        ended = list(ended)
        if words := self._cluster.follow_moves():
            self._say(words)
        if self.has_running_workers:
            self.ask_chief()  # early: once the chief is gone, it cannot be asked what a step needed
        for process in ended:
            if process in self._cluster.roles:
                self._see_role(process)
        if self._poller is not None and self._poller.has_interrupted:
            return
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
        if len(self._failed) == self._num_reported:
            return longest_s
        return max(0.0, min(longest_s, self._failed_at + _TOGETHER_S - time.monotonic()))

    def close(self) -> None:
        """Stops watching: processes that end from now on are not restarted."""
        self._is_closed = True

    def finish_training(self, supervisor: Supervisor) -> bool:
        """Has the chief finish training, and waits a few seconds for the roles to end by themselves; the supervisor ends the rest.

        Waits longer while the chief saves a last checkpoint. Returns whether there was a training to finish.
        """
        begin, poller, has_reported = time.monotonic(), self.ask_chief(), False
        poller.finish("all workers have ended")
        self.close()
        while self._may_end_by_itself(time.monotonic() - begin):
            if not has_reported and poller.saving and poller.status is not None and time.monotonic() - begin > _SAY_AFTER_S:
                # An earlier one may be under way still.
                last = f"a last checkpoint, of step {poller.status.global_step:,}"
                self._say(f"training is finished; the chief saves {last}; Ctrl-C ends all without it")
                has_reported = True
            self.see(supervisor.poll(timeout_s=0.05))
        poller.close()
        # A training may be shorter than the pause between two calls to the chief.
        return poller.has_begun or self._cluster.trained_until() is not None

    def interrupt(self, supervisor: Supervisor, why: str) -> None:
        """Has the chief end training as interrupted, lets workers leave, and the chief save. The supervisor ends what still runs.

        A worker that does not leave in time gets SIGINT, then SIGTERM, then SIGKILL. Another Ctrl-C ends the waits.
        """
        self.close()
        poller, workers = self.ask_chief(), self._cluster.workers

        def have_left() -> bool:
            # What stands for others does not leave as they do, but the chief ends once they have left.
            return not self.has_running_workers or (self._cluster.spec.has_standins and not self._cluster.chief.is_running)

        if self._cluster.chief.is_running:
            poller.finish(why, interrupts=True)
        if self._cluster.chief.is_running and self.has_running_workers:
            self._say_if_read(f"interrupting training, waiting up to {_LEAVE_S:g} s for the workers to leave; Ctrl-C ends all at once")
            if not supervisor.await_end(have_left, grace_s=_LEAVE_S):
                return
        if self._failed and (later := later_failures(workers, self._failed)):
            self._say_if_read(list_words([*self._failed, *later]))
        for number, grace_s in _SIGNALS:
            if have_left():
                break
            left = [worker for worker in workers if worker.is_running]
            self._say_if_read(f"{number.name} to {', '.join(f'{worker.name} (pid {worker.pid})' for worker in left)}: still running")
            for worker in left:
                worker.signal_group(number)
            if not supervisor.await_end(have_left, grace_s=grace_s):
                return
        begin = time.monotonic()
        if self._cluster.spec.has_checkpoints and self._cluster.chief.is_running:
            self._say_if_read(f"waiting up to {_LAST_CHECKPOINT_S:g} s for a last checkpoint; Ctrl-C ends all at once")
        supervisor.await_end(lambda: not self._may_end_by_itself(time.monotonic() - begin), grace_s=_LAST_CHECKPOINT_S)
        poller.close()

    def _say_if_read(self, text: str) -> None:
        with suppress(OSError):  # the end of the reader may be the cause
            self._say(text)

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
        if self._cluster.makes_way(process) and self._is_worth_a_start(process):
            self._cluster.restart_role(process, pause_s=0.0)
            return
        if not returncode:
            self._role_ended_at = self._role_ended_at or time.monotonic()
            return
        words = f"{_failure_words(process)}; its log: {process.log_path}"
        if not self._plan_restart(process, words):
            count = self._role_restarts.num_in_a_row(process.name)
            often = f"\nit has ended {count} times in quick succession, and is not started again" if count > 1 else ""
            self._fail(process, words + often + self._loss_words(process))

    def _loss_words(self, role: Process) -> str:
        """Returns what the loss of a parameter server costs without checkpoints, for a message."""
        is_chief_alone = role is self._cluster.chief and not self._cluster.spec.chief_in_ps
        if is_chief_alone or self._cluster.spec.has_checkpoints or not self.has_running_workers:
            return ""
        return "\nits part of the model is lost with it: there are no checkpoints to go back to (--checkpoint-dir DIR makes some)"

    def _plan_restart(self, role: Process, words: str) -> bool:
        """Restarts a role, at once or after a pause; False if that is no longer useful."""
        if not self._is_worth_a_start(role):
            return False
        pause_s = self._role_restarts.pause_s(role.name, lived_s=time.monotonic() - role.started_at)
        if pause_s is None:
            return False
        cost = self._cost_words(role)
        process = self._cluster.restart_role(role, pause_s=pause_s)
        self._restarted.add(role.name)
        self._say(f"{words}\n{self._again_words(process, pause_s)}; {cost}")
        return True

    def _is_worth_a_start(self, role: Process) -> bool:
        return not self._is_closed and self.has_running_workers and self._cluster.may_restart(role)

    def _cost_words(self, role: Process) -> str:
        if role is self._cluster.chief and not self._cluster.spec.chief_in_ps:
            return "the parameter servers keep the model, and training continues at its step"
        back = "the cluster goes back to its newest checkpoint, and training continues from there"
        if (other := self._cluster.replica_of(role)) is None or not other.is_running:
            return back
        if other.name not in self._restarted:
            return f"{other.name} has the same, and training continues at its step"
        if not self._cluster.spec.has_checkpoints:
            return f"{other.name} was started again before, without a checkpoint that would have brought it back: the model is lost"
        return f"if {other.name}, which was started again before, has been brought back, training continues at its step; else {back}"

    def _restart_worker(self, worker: Process) -> bool:
        """Restarts a failed worker and returns True, if it may be restarted; otherwise returns False."""
        most = self._cluster.spec.restart_workers
        if self._is_closed or not self._cluster.chief.is_running or self._num_starts[worker.name] >= most:
            return False
        self._num_starts[worker.name] += 1
        pause_s = self._worker_restarts.pause_s(worker.name, lived_s=time.monotonic() - worker.started_at) or 0.0
        process = self._cluster.restart_worker(worker, pause_s=pause_s)
        self._say(f"{_failure_words(worker)}\n{self._again_words(process, pause_s)} (start {self._num_starts[worker.name]} of {most})")
        return True

    def _again_words(self, process: Process, pause_s: float) -> str:
        awaited = ", ".join(self._cluster.awaited_by(process.name))
        when = f", in {pause_s:g} s" if pause_s else f", once {awaited} serves elsewhere" if awaited else ""
        return f"{process.name} is started again, as pid {process.pid}{when}"

    def _check_roles_ended_together(self, ended_ago_s: float) -> None:
        """Handles a role that ended without a failure: either all roles are ending, or it alone was stopped and has to be replaced."""
        running = [process.name for process in self._cluster.roles if process.is_running]
        gone = [process for process in self._cluster.roles if not process.is_running]
        if not self.has_running_workers or not gone:
            return
        may_restart = all(self._cluster.may_restart(process) for process in gone)
        if not running and (self._cluster.trained_until() is not None or not may_restart):
            self._report_end_once(ended_ago_s)
            return
        if ended_ago_s > _ALONE_S and may_restart:
            self._role_ended_at = None
            when = f"while {', '.join(running)} kept running" if running else "before training was finished"
            for process in gone:
                self._plan_restart(process, f"{process.name} (pid {process.pid}) was stopped {when}")
        elif ended_ago_s > _ROLES_END_TOGETHER_S:
            names = ", ".join(process.name for process in gone)
            self._fail(gone[0], f"{names} ended before training was finished, while {', '.join(running)} still ran")

    def _report_end_once(self, ended_ago_s: float) -> None:
        """Reports once which workers still run after training: a program may, but a stuck one would block the launcher silently."""
        if self._has_reported_end or ended_ago_s < _SAY_AFTER_S:
            return
        self._has_reported_end = True
        left = ", ".join(f"{worker.name} (pid {worker.pid})" for worker in self._cluster.workers if worker.is_running)
        self._say(f"training is over, and chief and parameter servers have ended; waiting for {left} to end")

    def _fail(self, process: Process, words: str) -> None:
        raise ClusterFailed(f"{words}\nending all; logs: {process.log_path.parent}", exit_code=shell_code(process.returncode or 0) or 1)

    def _judge_failures(self) -> None:
        """Reports what failures mean, once the workers that fail together have ended and the chief has said what a step needs."""
        from lockstep.launcher.watch import needs_of

        poller, is_of_use = self._poller, self.has_running_workers and self._cluster.chief.is_running
        if is_of_use and time.monotonic() < self._failed_at + _TOGETHER_S:
            return
        if poller is not None and is_of_use and not poller.knows(since=self._failed_at, max_wait_s=_GLANCE_S):
            return
        needs = needs_of(poller.status if poller is not None else None, spec=self._cluster.spec)
        words = "\n".join(map(_failure_words, self._failed[self._num_reported :]))
        self._num_reported = len(self._failed)
        first, num_running = self._failed[0], sum(worker.is_running for worker in self._cluster.workers)
        if self._cluster.spec.num_workers - self._num_reported >= needs.num_workers:
            self._say(f"{words}\ntraining continues: {left_words(num_running, needs)}" if num_running else words)
            return
        # A program that has raised an error would mostly do so again.
        advice = _TO_SURVIVE if (self._failed[-1].returncode or 0) < 0 else ""
        self._say(f"{words}\nending all: {left_words(num_running, needs)}{advice}")
        code = shell_code(first.returncode or 1)
        raise TooFewWorkers(f"{first.name} failed first: {first.end_text}; logs: {first.log_path.parent}", exit_code=code)


class Ended(Protocol):
    """A process that has ended."""

    name: str

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative: the signal that ended it."""

    @property
    def end_text(self) -> str:
        """How it ended, in words."""


def left_words(num_running: int, needs: "StepNeeds") -> str:
    """Returns how many workers are left at this time, and how many a step needs."""
    left = {0: "no worker is", 1: "1 worker is"}.get(num_running, f"{num_running} workers are")
    return f"{left} left, {needs.text}"


def later_failures(workers: Iterable[Ended], known: Collection[Ended]) -> list[Ended]:
    """Returns the workers that have failed by themselves since: not `known`, and not by the end of the training that they were told of."""
    return [one for one in workers if one.returncode and one not in known and TrainingInterrupted.__name__ not in one.end_text]


def list_words(failed: Sequence[Ended]) -> str:
    """Returns a line for each way to fail, with the workers that failed that way, in the order of the first of each."""
    ways: dict[str, list[str]] = {}
    for one in failed:
        ways.setdefault(one.end_text, []).append(one.name)
    return "\n".join(f"failed by {'itself' if len(names) == 1 else 'themselves'}: {', '.join(names)}: {end}" for end, names in ways.items())


def _failure_words(process: Process) -> str:
    place = f" on {process.host}" if process.host else ""
    return f"{process.name} (pid {process.pid}) failed{place}: {process.end_text}"
