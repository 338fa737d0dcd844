"""What the end of a process means for a cluster, judged of fake processes at a time that the test passes in: go on, restart, or end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.launcher import failures, watch
from lockstep.launcher.failures import ClusterFailed, ClusterWatch, TooFewWorkers
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.watch import GRACE_S, LastWorkers
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import ClusterStatus
from tests.support.chief.cluster_status import cluster_status, worker_status


@dataclass(eq=False)
class Process:
    """A process that runs until the test says how it has ended."""

    name: str
    returncode: int | None = None
    pid: int = 7
    started_at: float = 0.0
    log_path: Path = Path("/run/logs/x.log")

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def end_text(self) -> str:
        return f"killed by {-(self.returncode or 0)}" if (self.returncode or 0) < 0 else f"exit code {self.returncode}"


@dataclass
class Cluster:
    """Processes of a server, a chief and workers; what is restarted is a new process of that name."""

    spec: ClusterSpec
    trained: int | None = None
    roles: list[Process] = field(default_factory=lambda: [Process("ps 0"), Process("chief")])
    workers: list[Process] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [Process(f"worker {index}") for index in range(self.spec.num_workers)]

    @property
    def chief(self) -> Process:
        return self.roles[-1]

    def may_restart(self, role: Process) -> bool:
        return self.spec.has_checkpoints or role is self.chief

    def replica_of(self, role: Process) -> None:
        return None

    def trained_until(self) -> int | None:
        return self.trained

    def restart_role(self, role: Process, *, pause_s: float) -> Process:
        self.roles[self.roles.index(role)] = again = Process(role.name, pid=8)
        return again

    def restart_worker(self, worker: Process, *, pause_s: float) -> Process:
        self.workers[self.workers.index(worker)] = again = Process(worker.name, pid=8)
        return again


class Poller:
    """The chief's latest report, and how it was asked to finish."""

    def __init__(self, status: ClusterStatus | None = None) -> None:
        self.status, self.asked_at, self.finished_at, self.saving = status, 0.0, None, ""
        self.has_interrupted = False
        self.asked: list[str] = []

    def knows(self, *, since: float, max_wait_s: float) -> bool:
        return True

    def watch_closely(self) -> None:
        pass

    def finish(self, reason: str, *, interrupts: bool = False) -> None:
        self.asked.append(reason)
        self.finished_at = self.status.global_step if self.status is not None else None  # type: ignore[assignment]


class Scene:
    """A watch over a fake cluster, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: ClusterStatus | None = None, **spec: Any) -> None:
        self.now, self.said, self.poller = 100.0, list[str](), Poller(status)
        clock: Any = type("Clock", (), {"monotonic": lambda _: self.now})()
        monkeypatch.setattr(failures, "time", clock)
        monkeypatch.setattr(watch, "time", clock)
        monkeypatch.setattr(watch, "ChiefPoller", lambda cluster: self.poller)
        self.cluster: Any = Cluster(ClusterSpec(**{"workers": 3, **spec}))
        self.watch = ClusterWatch(cast(Any, self.cluster), say=self.said.append)

    def end(self, *processes: Any, code: int = 1, after_s: float = 2.0) -> None:
        """The processes end, and the launcher looks at once and once more when others have had the time to fail as well."""
        for process in processes:
            process.returncode = code
        self.watch.see(processes)
        self.now += after_s
        self.watch.see(())

    @property
    def last(self) -> str:
        return self.said[-1]


Open = Callable[..., Scene]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Open:
    return lambda *arguments, **spec: Scene(monkeypatch, *arguments, **spec)


def status_of(policy: PolicySpec, *, required: int, **fields: Any) -> ClusterStatus:
    return cluster_status(policy=policy, replicas_to_aggregate=required, total_num_replicas=3, **fields)


def test_a_failed_worker_within_the_backups_is_said_and_training_goes_on(scene: Open) -> None:
    found = scene(replicas_to_aggregate=2)
    found.end(found.cluster.workers[2])
    assert found.last == "worker 2 (pid 7) failed: exit code 1\ntraining continues: 2 workers are left, a step needs 2"
    assert found.watch.failed_workers == [found.cluster.workers[2]]


@pytest.mark.parametrize(("code", "exit_code", "has_advice"), [(3, 3, False), (-9, 137, True)])
def test_a_failed_worker_that_is_missed_ends_all_with_its_exit_code(scene: Open, code: int, exit_code: int, has_advice: bool) -> None:
    """What raised an error would mostly do so again; what was killed may be started again."""
    found = scene()
    with pytest.raises(TooFewWorkers, match="worker 1 failed first") as raised:
        found.end(found.cluster.workers[1], code=code)
    assert raised.value.exit_code == exit_code
    assert "ending all: 2 workers are left, a step needs 3" in found.last
    assert ("--restart-workers" in found.last) == has_advice


def test_workers_that_fail_together_are_judged_once(scene: Open) -> None:
    found = scene()
    first, second, _ = found.cluster.workers
    first.returncode = 1
    found.watch.see([first])
    assert not found.said and found.watch.pause_s(5.0) <= 1.0
    with pytest.raises(TooFewWorkers, match="worker 0 failed first"):
        found.end(second)
    assert len(found.said) == 1 and "worker 0" in found.last and "worker 1" in found.last


def test_failures_are_judged_by_the_policy_that_the_program_has_set(scene: Open) -> None:
    found = scene(status_of(PolicySpec(name=PolicyName.ASYNC), required=1))
    found.end(found.cluster.workers[0], found.cluster.workers[1])
    assert "training continues: 1 worker is left, policy async: every contribution is a step" in found.last
    missed = scene(status_of(PolicySpec(), required=3), policy="async")
    with pytest.raises(TooFewWorkers):
        missed.end(missed.cluster.workers[0])
    assert "ending all: 2 workers are left, a step needs 3" in missed.last


def test_a_failed_worker_is_started_again_as_often_as_allowed(scene: Open) -> None:
    found = scene(restart_workers=1)
    found.end(found.cluster.workers[0])
    assert "worker 0 is started again, as pid 8 (start 1 of 1)" in found.last
    with pytest.raises(TooFewWorkers):
        found.end(found.cluster.workers[0])


def test_a_failed_server_ends_all_and_what_is_lost_is_said(scene: Open) -> None:
    found = scene()
    with pytest.raises(ClusterFailed, match=r"ps 0 .* failed: killed by 9.*\n.*part of the model is lost") as raised:
        found.end(found.cluster.roles[0], code=-9)
    assert raised.value.exit_code == 137


@pytest.mark.parametrize(("index", "words"), [(0, "goes back to its newest checkpoint"), (1, "training continues at its step")])
def test_with_checkpoints_a_failed_role_is_started_again_with_what_that_costs(scene: Open, index: int, words: str) -> None:
    found = scene(checkpoint_dir="/checkpoints")
    found.end(found.cluster.roles[index])
    assert words in found.last and "is started again, as pid 8" in found.last
    assert all(role.is_running for role in found.cluster.roles)


def test_a_chief_that_somebody_has_stopped_is_replaced_and_roles_that_end_together_are_not(scene: Open) -> None:
    stopped = scene()
    stopped.end(stopped.cluster.chief, code=0)
    assert "chief (pid 7) was stopped while ps 0 kept running" in stopped.last and stopped.cluster.chief.is_running
    over = scene()
    over.cluster.trained = 50
    over.end(*over.cluster.roles, code=0, after_s=3.0)
    assert over.last.startswith("training is over, and chief and parameter servers have ended; waiting for worker 0 (pid 7), worker 1")


def test_workers_that_leave_too_few_behind_end_the_training_early_and_get_time_to_leave(scene: Open) -> None:
    waits = cluster_status(
        worker_status(0, is_waiting=True), worker_status(1, is_waiting=False, state="left"), worker_status(2, is_waiting=True),
        global_step=10, num_contributions=2, replicas_to_aggregate=3, total_num_replicas=3,
    )  # fmt: skip
    found = scene(waits)
    last = LastWorkers(found.cluster, poller=found.poller, say=found.said.append)  # type: ignore[arg-type]
    found.cluster.workers[1].returncode = 0
    last.see()
    assert not found.poller.asked, "others may still come to an end in the same moment"
    for _ in range(2):
        found.now += GRACE_S + 1.0
        # A new report each time.
        found.poller.status, found.poller.asked_at = (
            cluster_status(*waits.participants, global_step=10, num_contributions=2, replicas_to_aggregate=3, total_num_replicas=3),
            found.now,
        )
        last.see()
    assert found.poller.asked == ["too few workers are left: 2 of 3 workers still run; a step needs 3"]
    assert last.failure == f"training ended early at step 10: {found.poller.asked[0]}"
    assert "worker 1 ended with exit code 0 while 2 of 3 workers still run; a step needs 3" in found.said
    assert not last.is_time_up
    found.now += 6.0
    assert last.is_time_up


def test_a_worker_that_leaves_within_the_backups_ends_nothing(scene: Open) -> None:
    found = scene(cluster_status(worker_status(0, is_waiting=True), worker_status(1, is_waiting=False, state="left"),
                                 replicas_to_aggregate=2, total_num_replicas=3), replicas_to_aggregate=2)  # fmt: skip
    last = LastWorkers(found.cluster, poller=found.poller, say=found.said.append)  # type: ignore[arg-type]
    found.cluster.workers[1].returncode = 0
    for _ in range(4):
        found.now += GRACE_S
        found.poller.asked_at = found.now
        last.see()
    assert not found.poller.asked and not last.failure
