"""Asks the chief of a launched cluster what a step needs, and ends training when too few workers are left. Knows reports; starts nothing.

Imported late: NumPy and grpc take long to import, and if one is broken, the roles report it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.launcher.cluster import LocalCluster
from lockstep.launcher.spec import ClusterSpec
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import Chief, ClusterState, ClusterStatus, ParticipantKind

if TYPE_CHECKING:
    from ps_protocol.rpc.chief import GrpcChief


# How a launcher reaches the chief of its own cluster, regardless of the shell's settings for others.


def own_chief(address: str, *, cluster: str, token_file: Path | None) -> "GrpcChief":
    """Returns a client of the chief; the caller closes it. Imports grpc, which is slow: call it in a thread."""
    from ps_protocol.rpc.channel import Access
    from ps_protocol.rpc.chief import GrpcChief
    from ps_protocol.security.options import Security
    from ps_protocol.security.permissions import CallerRole

    return GrpcChief(address, cluster=cluster, access=Access(Security(token_file=token_file), role=CallerRole.ADMIN))


# What a step needs from the workers, as the chief has it now: programs may change the policy.


_PERIOD_S = 0.1
# A program sets its policy before it creates the model. After this long the policy is taken as it is.
_LONGEST_DOUBT_S = 3.0
_TRAINING_PERIOD_S = 1.0
# Once a worker has ended before the others.
_CLOSE_PERIOD_S = 0.5
# A chief that saves a last checkpoint answers all the while; one that has been silent for so long is not waited for.
_SILENT_S = 10.0
_BEFORE = (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """The number of workers that training needs to continue, and what a step needs, in words."""

    num_workers: int
    text: str


def needs_of(status: ClusterStatus | None, *, spec: ClusterSpec) -> StepNeeds:
    """Returns the needs by the chief's report, or without one by what the cluster was started with."""
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
    """Polls the chief in the launcher's one thread for that, and asks it to finish training when requested.

    It polls all the time because after training the chief is gone and cannot be asked.
    """

    def __init__(self, cluster: LocalCluster) -> None:
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
        """The latest answer; None: there was none."""
        return self._status

    @property
    def asked_at(self) -> float:
        """When the latest answer was asked for."""
        return self._asked_at

    @property
    def finished_at(self) -> int | None:
        """The step at which the chief finished training at our request; None: it has not, or was not asked."""
        return self._finished_at

    @property
    def is_finishing(self) -> bool:
        """Whether the chief has yet to be asked to finish, or to say what it does since it has."""
        return bool(self._reason) and not self._is_over and (not self._has_finished or self._finished_at is not None)

    @property
    def saving(self) -> str:
        """What the chief saves after training; empty: nothing, or it has said no more for a while."""
        status = self._status
        if status is None or status.checkpoint is None or not self._is_over or time.monotonic() - self._asked_at > _SILENT_S:
            return ""
        return status.checkpoint.saving

    @property
    def has_begun(self) -> bool:
        """Whether training has begun. A chief that never answered counts as having trained."""
        return self._status is None or self._has_begun

    def knows(self, *, since: float, max_wait_s: float) -> bool:
        """Whether an answer about what a step needs, asked for after `since`, is there, or there is nothing more to wait for."""
        self._wanted.set()
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(since), timeout=max_wait_s)
            return self._is_known(since)

    def watch_closely(self) -> None:
        """Asks more often from now on."""
        self._period_s = _CLOSE_PERIOD_S
        self._wanted.set()

    def finish(self, reason: str, *, interrupts: bool = False) -> None:
        """Has the chief finish training if it still can, as planned or before its time; does not wait for that."""
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
        chief = own_chief(self._cluster.chief_address, cluster=self._cluster.name, token_file=self._cluster.token_file)
        try:
            while not self._is_closed and (not self._is_over or self.saving):
                self._wanted.clear()
                with suppress(PsError):  # if the chief is gone, everything ends anyway; a busy one is asked again
                    self._ask(chief)
                self._wanted.wait(_PERIOD_S if self._status is None or self._status.state in _BEFORE else self._period_s)
        finally:
            chief.close()

    def _ask(self, chief: Chief) -> None:
        asked_at = time.monotonic()
        status = chief.status()
        with self._changed:
            self._status, self._asked_at = status, asked_at
            self._is_over = self._is_over or status.state in _OVER
            # At our request, a training ends that has not begun, too.
            self._has_begun = self._has_begun or (status.state not in _BEFORE and not self._has_finished)
            self._changed.notify_all()
        if self._reason and not self._has_finished and not self._is_over:
            try:
                self._finished_at = chief.finish(reason=self._reason, interrupts=self._interrupts)
            finally:
                self._has_finished = True  # once: a chief that refuses will refuse again
            self.watch_closely()


# Whether a cluster that was to have checkpoints has one of its end.


def what_is_not_saved(cluster: LocalCluster, status: ClusterStatus | None) -> str:
    """Returns what of a training that is over is in no whole checkpoint, and why, in words; empty: nothing, or there was to be none.

    `status`: the last that the chief has said, perhaps a second before the end.
    """
    if not cluster.spec.recovery.has_checkpoints:
        return ""
    from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage

    place = cluster.spec.recovery.checkpoint_dir
    try:
        storage = open_storage(place)
        whole, _ = list_checkpoints(storage, cluster=cluster.name)
    except (PsError, OSError) as error:
        return f"its checkpoints cannot be read: {error}"
    last = status.checkpoint if status is not None else None
    # Of a training that was over within a second nothing had been asked.
    why = last.failure if last is not None and last.failure else f"{cluster.chief.log_path} says why"
    if not whole:
        return f"no checkpoint could be written to {storage.place}: {why}; what it has learnt is lost"
    newest = whole[-1].checkpoint
    if status is None or newest.age_order >= (status.epoch, status.global_step) or (last is not None and last.durability == "none"):
        return ""
    return f"its end could not be saved to {storage.place}: {why}; what it has learnt since {newest.tag} is lost"


def newest_checkpoint(cluster: LocalCluster) -> str:
    """Returns the name of the newest whole checkpoint; empty: there is none, or it cannot be read."""
    from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage

    try:
        whole, _ = list_checkpoints(open_storage(cluster.spec.recovery.checkpoint_dir), cluster=cluster.name)
    except (PsError, OSError):
        return ""
    return whole[-1].checkpoint.tag if whole else ""


# Decides whether the remaining workers can make another step.


# Some workers may be about to exit, or to join: nothing is concluded for this long.
GRACE_S = 5.0


class Standstill:
    """Decides that from consecutive reports."""

    def __init__(self) -> None:
        self._step = -1
        self._since: float | None = None

    def see(self, status: ClusterStatus, *, now: float, gone_s: Mapping[int, float]) -> bool:
        """Whether no step has been possible for `GRACE_S`. `gone_s`: how long ago the processes of workers ended, by index."""
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


# Workers that end within this of each other ended together: that is not reported.
_TOGETHER_S = 2.0
# How long released workers may take to exit after training was ended.
_LEAVE_S = 10.0


class LastWorkers:
    """Call `see()` after every poll. Polls the chief more often once a worker has ended before the others."""

    def __init__(self, cluster: LocalCluster, *, poller: ChiefPoller, say: Callable[[str], None]) -> None:
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
        """Why training was ended early; empty if it was not."""
        step = self._poller.finished_at
        return f"training ended early at step {step}: {self._words}" if self._words and step is not None else ""

    @property
    def is_time_up(self) -> bool:
        """Whether the time is up in which workers may exit by themselves after training was ended."""
        return self._leave_until is not None and time.monotonic() > self._leave_until

    def see(self) -> None:
        """Notes workers that have ended, and reports what that means."""
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
        """Looks at a new report, and ends training if no worker can make another step."""
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
