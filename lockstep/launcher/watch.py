"""Polls the chief of a launched cluster, and ends training when too few workers are left for a step. Knows reports; starts nothing.

Imported late: NumPy and grpc are slow to import, and if one is broken, the roles report it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.launcher.cluster import LaunchedCluster
from lockstep.launcher.spec import ClusterSpec
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.waiting import FIRST_NOTICE_S, NOTICE_INTERVAL_S
from ps_protocol.roles.chief import Chief, ClusterState, ClusterStatus, FinishTrainingRequest, Level, ParticipantKind

if TYPE_CHECKING:
    from ps_protocol.roles.checkpoint import Checkpoint
    from ps_protocol.rpc.chief import GrpcChief


# The client of the launched cluster's own chief, regardless of the shell's settings for other clusters.


def own_chief(cluster: LaunchedCluster) -> "GrpcChief":
    """Returns a client of the chief; the caller closes it. Imports grpc, which is slow: call it in a thread."""
    from ps_protocol.roles.request import CallerRole
    from ps_protocol.rpc.channel import Access
    from ps_protocol.rpc.chief import GrpcChief

    return GrpcChief(cluster.chief_address, cluster=cluster.name, access=Access(cluster.security, role=CallerRole.ADMIN))


# The contributions that a step needs at present: programs may change the policy.


_PERIOD_S = 0.1
# A program sets its policy before it creates the model. After this long, the chief's present policy counts.
_LONGEST_DOUBT_S = 3.0
_TRAINING_PERIOD_S = 0.5
# The period of polling once a worker has ended before the others.
_CLOSE_PERIOD_S = 0.5
# A chief that saves a last checkpoint keeps answering. The launcher stops waiting for one that has been silent for this long.
_SILENT_S = 10.0
_BEFORE = (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """The number of workers that training needs to continue, and a description of what a step needs."""

    num_workers: int
    text: str


def needs_of(status: ClusterStatus | None, *, spec: ClusterSpec) -> StepNeeds:
    """Returns the needs by the chief's report or, without one, by the cluster's specification."""
    if status is None:
        return StepNeeds(num_workers=spec.num_workers_needed, text=spec.needs_text)
    needs = f"a step needs {status.replicas_to_aggregate}"
    if status.policy.needs_many_workers:
        places = status.total_num_replicas or spec.num_workers
        num_workers = min(status.replicas_to_aggregate, places, spec.num_workers)
        if status.min_replicas:
            num_workers, needs = min(num_workers, status.min_replicas), f"{needs}, or what is left of them, {status.min_replicas} at least"
        return StepNeeds(num_workers=num_workers, text=needs)
    text = needs if status.policy.has_common_steps else "every contribution is a step"
    return StepNeeds(num_workers=1, text=f"policy {status.policy.text}: {text}")


class ChiefPoller:
    """Polls the chief in a thread of its own, and has it finish training when requested.

    It polls all the time, because the chief has ended when training has.
    """

    def __init__(self, cluster: LaunchedCluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._wanted = threading.Event()
        self._period_s = _TRAINING_PERIOD_S
        self._status: ClusterStatus | None = None
        self._asked_at = 0.0
        self._is_over = self._is_closed = self._has_finished = self._has_begun = False
        self._reason, self._interrupts = "", False
        self._finished_at: int | None = None
        threading.Thread(target=self._run, name="chief-poller", daemon=True).start()

    @property
    def status(self) -> ClusterStatus | None:
        """The latest status; None: there was none."""
        return self._status

    @property
    def asked_at(self) -> float:
        """The time at which the latest status was requested."""
        return self._asked_at

    @property
    def finished_at(self) -> int | None:
        """The step at which the chief finished training at this poller's request; None: it has not, or was not asked to."""
        return self._finished_at

    @property
    def has_interrupted(self) -> bool:
        """Whether training was interrupted at this poller's request: a program that fails after that has not failed by itself."""
        return self._interrupts and self._finished_at is not None

    @property
    def is_finishing(self) -> bool:
        """Whether the request to finish, or the first status after it, is still outstanding."""
        return bool(self._reason) and not self._is_over and (not self._has_finished or self._finished_at is not None)

    @property
    def saving(self) -> str:
        """The checkpoint that the chief saves after training; empty: none, or the chief has been silent for a while."""
        status = self._status
        if status is None or status.checkpoint is None or not self._is_over or time.monotonic() - self._asked_at > _SILENT_S:
            return ""
        return status.checkpoint.saving

    @property
    def has_begun(self) -> bool:
        """Whether training has begun. A chief that never answered counts as having trained."""
        return self._status is None or self._has_begun

    def knows(self, *, since: float, max_wait_s: float) -> bool:
        """Waits at most `max_wait_s` for a status of a model that was requested after `since`. True also if waiting has become useless."""
        self._wanted.set()
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(since), timeout=max_wait_s)
            return self._is_known(since)

    def watch_closely(self) -> None:
        """Polls more often from now on."""
        self._period_s = _CLOSE_PERIOD_S
        self._wanted.set()

    def finish(self, reason: str, *, interrupts: bool = False) -> None:
        """Has the chief finish training if it still can, as planned or (`interrupts`) before its end. Does not wait for it."""
        self._reason, self._interrupts = reason, interrupts
        self._wanted.set()

    def close(self) -> None:
        """Stops polling."""
        self._is_closed = True
        self._wanted.set()

    def _is_known(self, since: float) -> bool:
        is_known = self._asked_at >= since and self._status is not None and self._status.state not in _BEFORE
        return self._is_over or self._is_closed or is_known or time.monotonic() >= since + _LONGEST_DOUBT_S

    def _run(self) -> None:
        chief, address = own_chief(self._cluster), self._cluster.chief_address
        try:
            while not self._is_closed and (not self._is_over or self.saving):
                self._wanted.clear()
                if address != self._cluster.chief_address:  # it was started again on another host
                    chief.close()
                    chief, address = own_chief(self._cluster), self._cluster.chief_address
                with suppress(PsError):  # if the chief is gone, everything ends anyway; a busy one is asked again
                    self._ask(chief)
                self._wanted.wait(_PERIOD_S if self._status is None or self._status.state in _BEFORE else self._period_s)
        finally:
            chief.close()

    def _ask(self, chief: Chief) -> None:
        asked_at = time.monotonic()
        reason = self._reason  # a training that has begun after this status is not finished before there is another
        status = chief.status()
        with self._changed:
            self._status, self._asked_at = status, asked_at
            self._is_over = self._is_over or status.state in _OVER
            # At this poller's request, a training that has not begun ends too.
            self._has_begun = self._has_begun or (status.state not in _BEFORE and not self._has_finished)
            self._changed.notify_all()
        if reason and not self._has_finished and not self._is_over:
            try:
                self._finished_at = chief.call(FinishTrainingRequest(reason=reason, interrupts=self._interrupts))
            finally:
                self._has_finished = True  # asks once only: a chief that refuses will refuse again
            self.watch_closely()


# Says once what all workers wait for; they log it as INFO then (`LAUNCHER_SAYS`).


_FIRST_PAUSE_S, _MAX_PAUSE_S = NOTICE_INTERVAL_S, 600.0
# Of an open step the chief says nothing before a second is over; if it still says it after this time, it is worth a line.
_LASTING_S = 0.5
# Of these the remedy is to start a worker.
_WORKER_MISSING = frozenset({"program failed", "program ended", "worker gone", "worker absent", "nobody left"})


class WaitWords:
    """Says what training waits for, by the chief's reports; about the same condition again after 10 s, then twice as long each time."""

    def __init__(self, say: Callable[[str], None], *, runs_all: Callable[[], bool]) -> None:
        self._say = say
        self._runs_all = runs_all  # whether a process of each worker runs, or will after a pause
        self._seen: ClusterStatus | None = None
        self._standing, self._since = "", 0.0  # the condition of the report before, and when it was seen first
        self._said = ""
        self._again_at: dict[str, tuple[float, float]] = {}  # when, and how long to pause after that

    def see(self, status: ClusterStatus | None, *, now: float) -> None:
        """Reads a report; one that was read before changes nothing."""
        if status is None or status is self._seen:
            return
        self._seen = status
        one = next((one for one in status.conditions if one.is_standstill), None)
        # A step of workers that all compute is long, and nobody waits for it.
        if one is None or (one.level is Level.GREEN and status.state is ClusterState.TRAINING and not _is_anybody_waiting(status)):
            if self._said and status.state is ClusterState.TRAINING:
                self._say(f"training continues at step {status.global_step}")
            self._standing = self._said = ""
            return
        if one.name != self._standing:
            self._standing, self._since = one.name, now
        due_at, pause_s = self._again_at.get(one.name, (now, _FIRST_PAUSE_S))
        if now < max(due_at, self._since + (_LASTING_S if status.state is ClusterState.TRAINING else FIRST_NOTICE_S)):
            return
        self._again_at[one.name] = now + pause_s, min(2 * pause_s, _MAX_PAUSE_S)
        if one.level is not Level.GREEN:
            self._said = one.name
        # What the launcher has started, perhaps again, a user should not start beside it.
        has_remedy = status.state not in _BEFORE and not (one.name in _WORKER_MISSING and self._runs_all())
        words = f"{one.line}. {one.advice}" if has_remedy and one.advice else one.line
        self._say("\n".join([words, *(f"    {command}" for command in one.commands if has_remedy)]))


def _is_anybody_waiting(status: ClusterStatus) -> bool:
    return any(one.is_waiting for one in status.participants)


# Whether a cluster with checkpoints has saved its end.


def what_is_not_saved(cluster: LaunchedCluster, status: ClusterStatus | None) -> str:
    """Returns which part of a finished training is in no complete checkpoint, and why; empty: all is saved, or nothing was to be saved.

    `status`: the chief's last status, perhaps from a second before the end, which the chief has told since if it has ended by itself.
    """
    if not cluster.spec.has_checkpoints:
        return ""
    from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage

    place = cluster.spec.checkpoint_dir
    try:
        storage = open_storage(place)
        whole, _ = list_checkpoints(storage, cluster=cluster.name)
    except (PsError, OSError) as error:
        return f"its checkpoints cannot be read: {error}"
    last = status.checkpoint if status is not None else None
    # There may be no status of a training that was over within a second.
    why = last.failure if last is not None and last.failure else f"{cluster.chief.log_path} says why"
    if not whole:
        return f"no checkpoint could be written to {storage.place}: {why}; what it has learnt is lost"
    newest = whole[-1].checkpoint
    if status is None or (last is not None and last.durability == "none"):
        return ""
    if newest.age_order >= (cluster.trained_until() or (status.epoch, status.global_step)):
        return ""
    return f"its end could not be saved to {storage.place}: {why}; what it has learnt since {newest.tag} is lost"


def newest_checkpoint(cluster: LaunchedCluster) -> "Checkpoint | None":
    """Returns the newest complete checkpoint; None: there is none, or the checkpoints cannot be read."""
    from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage

    try:
        whole, _ = list_checkpoints(open_storage(cluster.spec.checkpoint_dir), cluster=cluster.name)
    except (PsError, OSError):
        return None
    return whole[-1].checkpoint if whole else None


def steps_lost(poller: ChiefPoller, newest: "Checkpoint | None") -> str:
    """Returns how many steps have been made since the newest checkpoint, by the chief's last words, and why; empty: none."""
    status = poller.status
    if status is None or (lost := max(status.global_step, poller.finished_at or 0) - (newest.step if newest is not None else 0)) <= 0:
        return ""
    why = f": {status.checkpoint.failure}" if status.checkpoint is not None and status.checkpoint.failure else ""
    return f"{lost:,} step{'s' * (lost > 1)}" + (f" since {newest.tag}" if newest is not None else ", there is no checkpoint") + why


# Decides whether the remaining workers can make another step.


# Some workers may be about to exit or to join, so a standstill counts only after this long.
GRACE_S = 5.0


class Standstill:
    """Decides from consecutive reports whether another step is possible."""

    def __init__(self) -> None:
        self._step = -1
        self._since: float | None = None

    def see(self, status: ClusterStatus, *, now: float, gone_s: Mapping[int, float]) -> bool:
        """Returns whether no step has been possible for `GRACE_S`. `gone_s`: by worker index, how many seconds ago the process ended."""
        if not cannot_step(status, gone_s=gone_s):
            self._since = None
            return False
        if self._since is None or status.global_step != self._step:
            self._step, self._since = status.global_step, now
        return now - self._since >= GRACE_S


def cannot_step(status: ClusterStatus, *, gone_s: Mapping[int, float]) -> bool:
    """Whether a worker waits for a step that too few workers can still contribute to."""
    if status.state is not ClusterState.TRAINING:
        return False
    # The chief counts a worker whose process has ended as live until its lease ends, unless another process took its place.
    live = [
        one
        for one in status.participants
        if one.kind is ParticipantKind.WORKER and one.state == "live" and one.seen_ago_s < gone_s.get(one.index, float("inf"))
    ]
    num_waiting = sum(one.is_waiting for one in live)
    return num_waiting > 0 and status.num_contributions + len(live) - num_waiting < status.replicas_to_aggregate


# Ends training when workers have exited with 0 and too few are left for a step.


# Workers that end within this time of each other ended together, which is not reported.
_TOGETHER_S = 2.0
# How long released workers may take to exit after training was ended.
_LEAVE_S = 10.0


class LastWorkers:
    """Ends training early if no worker can make another step. Call `see()` after every poll."""

    def __init__(self, cluster: LaunchedCluster, *, poller: ChiefPoller, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._poller = poller
        self._say = say
        self._standstill = Standstill()
        self._ended_at: dict[int, float] = {}
        self._reported: set[int] = set()
        self._seen: ClusterStatus | None = None
        self._words = ""
        self._leave_until: float | None = None

    @property
    def failure(self) -> str:
        """The reason why training was ended early; empty if it was not."""
        step = self._poller.finished_at
        return f"training ended early at step {step}: {self._words}" if self._words and step is not None else ""

    @property
    def is_time_up(self) -> bool:
        """Whether the time for workers to exit by themselves, after training was ended, is over."""
        return self._leave_until is not None and time.monotonic() > self._leave_until

    def see(self) -> None:
        """Notes workers that have ended, and reports what that means for training."""
        now, workers = time.monotonic(), self._cluster.workers
        self._ended_at |= {index: now for index, one in enumerate(workers) if not one.is_running and index not in self._ended_at}
        early = [index for index, one in enumerate(workers) if one.returncode == 0]
        if not early or not self._num_running:
            return
        self._poller.watch_closely()
        self._judge()
        if (status := self._poller.status) is not None and status.state not in _OVER:
            self._report(index for index in early if now > self._ended_at[index] + _TOGETHER_S)
        if self.failure and self._leave_until is None:
            self._report(early)
            self._leave_until = now + _LEAVE_S
            step = self._poller.finished_at
            self._say(f"{self._words}; ended training at step {step}, waiting up to {_LEAVE_S:g} s for the workers to end")

    def _judge(self) -> None:
        """Reads a new report, and ends training if no worker can make another step."""
        status, asked_at = self._poller.status, self._poller.asked_at
        if status is None or status is self._seen or self._words:
            return
        self._seen = status
        gone_s = {index: asked_at - at for index, at in self._ended_at.items() if at <= asked_at}
        is_still = self._standstill.see(status, now=asked_at, gone_s=gone_s)
        if is_still and self._num_running < needs_of(status, spec=self._cluster.spec).num_workers:
            self._words = f"too few workers are left: {self._count()}"
            self._poller.finish(self._words, interrupts=True)

    @property
    def _num_running(self) -> int:
        return sum(worker.is_running for worker in self._cluster.workers)

    def _count(self) -> str:
        needs = needs_of(self._poller.status, spec=self._cluster.spec)
        return f"{self._num_running} of {self._cluster.spec.num_workers} workers still run; {needs.text}"

    def _report(self, early: Iterable[int]) -> None:
        for index in early:
            if index not in self._reported:
                self._reported.add(index)
                self._say(f"{self._cluster.workers[index].name} ended with exit code 0 while {self._count()}")
