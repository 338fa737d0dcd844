"""What the end of a process means for a cluster, judged of fake processes at a time that the test passes in: go on, restart, or end."""

import itertools
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.cli.clusters import up
from lockstep.launcher import cluster, failures, watch
from lockstep.launcher.cluster import LaunchedCluster
from lockstep.launcher.failures import ClusterFailed, ClusterWatch, TooFewWorkers
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import LaunchFailed, ProcessSpec
from lockstep.launcher.watch import GRACE_S, LastWorkers, newest_checkpoint, what_is_not_saved
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.process.listening import end_beside
from ps_protocol.roles.chief import CheckpointStatus, ClusterStatus
from tests.support.chief.cluster_status import cluster_status, worker_status
from tests.support.parameter_servers.checkpoints import save


@dataclass(eq=False)
class Process:
    """A process that runs until the test says how it has ended."""

    name: str
    pid: int
    started_at: float
    returncode: int | None = None
    host: str = ""
    log_path: Path = Path("/run/logs/x.log")
    signals: list[signal.Signals] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.returncode is None

    @property
    def end_text(self) -> str:
        return f"killed by {-(self.returncode or 0)}" if (self.returncode or 0) < 0 else f"exit code {self.returncode}"

    def signal_group(self, number: signal.Signals) -> None:
        self.signals.append(number)


class Supervisor:
    """Starts such processes, which serve at once, and lets time pass; `happens` at each look. The first of a name is pid 7, the next 8."""

    token = "token"

    def __init__(self, directory: Path) -> None:
        self.directory, self.now = directory, 100.0
        self.happens: Callable[[], None] = lambda: None
        self.has_another_interrupt = False
        self._known: set[str] = set()

    def monotonic(self) -> float:
        return self.now

    def start(self, spec: ProcessSpec) -> Process:
        for flag, word in itertools.pairwise(spec.command):
            if flag == "--announce":
                Path(word).write_text("unix:somewhere")
        pid = 8 if spec.name in self._known else 7
        self._known.add(spec.name)
        return Process(spec.name, pid, started_at=self.now)

    def poll(self, *, timeout_s: float) -> list[Process]:
        self.now += timeout_s
        self.happens()
        return []

    def await_end(self, has_ended: Callable[[], bool], *, grace_s: float) -> bool:
        self.happens()
        self.now += 0.0 if has_ended() else grace_s
        return not self.has_another_interrupt


class Poller:
    """The chief's latest report, and how it was asked to finish."""

    def __init__(self, status: ClusterStatus | None = None) -> None:
        self.status, self.asked_at, self.finished_at, self.saving = status, 0.0, None, ""
        self.has_interrupted = self.is_finishing = False
        self.has_begun = True
        self.asked: list[str] = []

    def knows(self, *, since: float, max_wait_s: float) -> bool:
        return True

    def watch_closely(self) -> None:
        pass

    def close(self) -> None:
        pass

    def finish(self, reason: str, *, interrupts: bool = False) -> None:
        self.asked.append(reason)
        self.has_interrupted = interrupts
        self.finished_at = self.status.global_step if self.status is not None else None  # type: ignore[assignment]


class Scene:
    """A watch over a cluster of fake processes."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, status: ClusterStatus | None = None, **spec: Any) -> None:
        directory.mkdir()
        self.said, self.poller, self.supervisor = list[str](), Poller(status), Supervisor(directory)
        for module in (cluster, failures, watch):
            monkeypatch.setattr(module, "time", self.supervisor)
        monkeypatch.setattr(watch, "ChiefPoller", lambda cluster: self.poller)
        started = LaunchedCluster(ClusterSpec(**{"workers": 3, **spec}), supervisor=cast(Any, self.supervisor), note=self.said.append)
        started.start_roles()
        started.start_workers(["train"])
        self.cluster: Any = started
        self.watch = ClusterWatch(started, say=self.said.append)

    def end(self, *processes: Any, code: int = 1, after_s: float = 2.0) -> None:
        """The processes end, and the launcher looks at once and once more when others have had the time to fail as well."""
        for process in processes:
            process.returncode = code
        self.watch.see(processes)
        self.supervisor.now += after_s
        self.watch.see(())

    def train_until(self, *, epoch: int, step: int) -> None:
        """The chief leaves word that training has ended."""
        end_beside(self.supervisor.directory / "chief.address").write_text(f"{epoch} {step}")

    @property
    def last(self) -> str:
        return self.said[-1]


Open = Callable[..., Scene]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    numbers = itertools.count()
    return lambda *arguments, **spec: Scene(tmp_path / str(next(numbers)), monkeypatch, *arguments, **spec)


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


def test_a_failed_worker_is_started_again_as_often_as_allowed_after_growing_pauses(scene: Open) -> None:
    found = scene(restart_workers=2)
    found.end(found.cluster.workers[0])
    assert "worker 0 is started again, as pid 8 (start 1 of 2)" in found.last
    found.end(found.cluster.workers[0])
    assert "worker 0 is started again, as pid 8, in 0.5 s (start 2 of 2)" in found.last
    with pytest.raises(TooFewWorkers):
        found.end(found.cluster.workers[0])


def test_workers_that_all_fail_end_the_training_as_interrupted_by_the_first(scene: Open) -> None:
    found = scene(checkpoint_dir="/checkpoints")
    with pytest.raises(TooFewWorkers, match=r"worker 0 failed first: exit code 7; logs: /run/logs") as raised:
        found.end(*found.cluster.workers, code=7)
    assert raised.value.exit_code == 7 and "ending all: no worker is left, a step needs 3" in found.last
    found.watch.interrupt(cast(Any, found.supervisor), str(raised.value))
    assert found.poller.asked == [str(raised.value)]
    assert found.last == "waiting up to 10 s for a last checkpoint; Ctrl-C ends all at once"


def test_a_failed_server_ends_all_and_what_is_lost_is_said(scene: Open) -> None:
    found = scene()
    with pytest.raises(ClusterFailed, match=r"ps 0 .* failed: killed by 9.*\n.*part of the model is lost") as raised:
        found.end(found.cluster.roles[0], code=-9)
    assert raised.value.exit_code == 137


@pytest.mark.parametrize(("index", "words"), [(0, "goes back to its newest checkpoint"), (1, "training continues at its step")])
def test_with_checkpoints_a_failed_role_is_started_again_with_what_that_costs(scene: Open, index: int, words: str) -> None:
    found = scene(checkpoint_dir="/checkpoints")
    found.end(found.cluster.roles[index], code=-9)
    assert words in found.last and "is started again, as pid 8" in found.last
    assert all(role.is_running for role in found.cluster.roles)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "chief (pid 7) was stopped while ps 0 kept running"),
        ({"ps": 2, "chief_in_ps": True, "checkpoint_dir": "/c"}, "ps 0 (pid 7) was stopped while ps 1 kept running"),
        ({"chief_in_ps": True, "checkpoint_dir": "/c"}, "ps 0 (pid 7) was stopped before training was finished"),
    ],
)
def test_a_chief_that_somebody_has_stopped_is_replaced(scene: Open, flags: dict[str, Any], words: str) -> None:
    found = scene(**flags)
    found.end(found.cluster.chief, code=0)
    assert words in found.last and found.cluster.chief.is_running


def test_roles_that_end_together_have_ended_the_training(scene: Open) -> None:
    over = scene()
    over.train_until(epoch=1, step=50)
    over.end(*over.cluster.roles, code=0, after_s=3.0)
    assert over.last.startswith("training is over, and chief and parameter servers have ended; waiting for worker 0 (pid 7), worker 1")


def test_a_server_is_replaced_by_its_standby_and_not_by_one_that_came_back_empty(scene: Open) -> None:
    found = scene(standbys=True)
    server, standby, _ = found.cluster.roles
    found.end(server, code=-9)
    assert "ps 0 is started again, as pid 8; standby 0 has the same, and training continues at its step" in found.last
    found.end(standby, code=-9)
    assert "ps 0 was started again before, without a checkpoint that would have brought it back: the model is lost" in found.last


def test_the_end_waits_for_the_last_checkpoint_as_long_as_the_chief_saves_it(scene: Open) -> None:
    found = scene(cluster_status(global_step=3))
    found.poller.saving, began_at = "step-000000003", found.supervisor.now

    def save_for_a_minute() -> None:
        if found.supervisor.now > began_at + 60.0:
            found.poller.saving, found.cluster.chief.returncode = "", 0

    found.supervisor.happens = save_for_a_minute
    assert found.watch.finish_training(cast(Any, found.supervisor))
    assert 60.0 < found.supervisor.now - began_at < 62.0
    assert found.said == ["training is finished; the chief saves a last checkpoint, of step 3; Ctrl-C ends all without it"]


def test_the_end_waits_for_roles_a_moment_and_for_a_chief_that_finishes_longer(scene: Open) -> None:
    for is_finishing, waited_s in ((False, 1.5), (True, 5.0)):
        found = scene(cluster_status(global_step=3))
        found.poller.is_finishing, began_at = is_finishing, found.supervisor.now
        found.watch.finish_training(cast(Any, found.supervisor))
        assert found.supervisor.now - began_at == pytest.approx(waited_s, abs=0.06)
        for role in found.cluster.roles:
            role.returncode = 0
        began_at = found.supervisor.now
        found.watch.finish_training(cast(Any, found.supervisor))
        assert found.supervisor.now == began_at


def test_a_training_that_no_report_has_seen_is_known_by_what_its_chief_left(scene: Open) -> None:
    for has_trained in (False, True):
        found = scene()
        found.poller.has_begun = False
        if has_trained:
            found.train_until(epoch=1, step=3)
        assert found.watch.finish_training(cast(Any, found.supervisor)) is has_trained


SAVES = CheckpointStatus(durability="interval", failure="No space left on device")


@pytest.mark.parametrize(
    ("saved", "trained_until", "status", "words"),
    [
        ([], None, cluster_status(checkpoint=SAVES), r"no checkpoint could be written to \S+: No space.*; what it has learnt is lost"),
        ([], None, None, r"no checkpoint could be written to \S+: .*x.log says why"),
        ([5], None, cluster_status(checkpoint=SAVES), "its end could not be saved to .*: No space.* learnt since step-000000005 is lost"),
        ([5], (2, 5), cluster_status(global_step=4), "its end could not be saved to .*: .*x.log says why"),
        ([5, 41], None, cluster_status(checkpoint=SAVES), ""),
        ([5], (1, 5), cluster_status(checkpoint=SAVES), ""),
        ([5], None, cluster_status(checkpoint=CheckpointStatus(durability="none")), ""),
    ],
)
def test_what_was_learnt_since_the_last_checkpoint_is_said_to_be_lost(
    scene: Open, tmp_path: Path, saved: list[int], trained_until: tuple[int, int] | None, status: ClusterStatus | None, words: str
) -> None:
    found, place = scene(checkpoint_dir=tmp_path / "checkpoints"), LocalStorage(tmp_path / "checkpoints")
    for step in saved:
        save(place, step=step, cluster=found.cluster.name)
    if trained_until is not None:
        found.train_until(epoch=trained_until[0], step=trained_until[1])
    assert re.match(words or "$", what_is_not_saved(found.cluster, status))
    newest = newest_checkpoint(found.cluster)
    assert (newest.step if newest is not None else None) == (saved[-1] if saved else None)
    assert what_is_not_saved(scene().cluster, status) == ""


def test_workers_that_fail_while_the_others_leave_are_named_and_not_started_again(scene: Open) -> None:
    found = scene(restart_workers=1)
    first, second, third = found.cluster.workers
    found.end(first)
    with pytest.raises(TooFewWorkers):
        found.end(found.cluster.workers[0])

    def fail() -> None:
        second.returncode, third.returncode = 5, 0

    found.supervisor.happens = fail
    found.watch.interrupt(cast(Any, found.supervisor), "worker 0 failed first")
    assert "failed by itself: worker 0: exit code 1\nfailed by itself: worker 1: exit code 5" in found.said
    found.watch.see([second])
    assert found.cluster.workers[1] is second


def test_an_interrupted_worker_that_stays_gets_one_signal_after_the_other(scene: Open) -> None:
    found = scene(workers=1)
    (worker,) = found.cluster.workers
    found.watch.interrupt(cast(Any, found.supervisor), "SIGINT")
    assert worker.signals == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    assert [words.partition(" to ")[0] for words in found.said[1:]] == ["SIGINT", "SIGTERM", "SIGKILL"]
    assert found.said[1].endswith("worker 0 (pid 7): still running")
    hurried = scene(workers=1)
    hurried.supervisor.has_another_interrupt = True
    hurried.watch.interrupt(cast(Any, hurried.supervisor), "SIGINT")
    assert hurried.said == ["interrupting training, waiting up to 5 s for the workers to leave; Ctrl-C ends all at once"]
    assert not hurried.cluster.workers[0].signals, "the supervisor ends all at once"


def test_what_stands_for_workers_of_an_engine_is_not_waited_for_once_the_chief_has_ended(
    scene: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"RANK": "0", "SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)
    found = scene(workers=2, engine="mpi")
    begin = found.supervisor.now

    def end() -> None:
        for role in found.cluster.roles:
            role.returncode = 0

    found.supervisor.happens = end
    found.watch.interrupt(cast(Any, found.supervisor), "SIGTERM")
    assert found.supervisor.now == begin and not any(worker.signals for worker in found.cluster.workers), found.said


def test_a_worker_that_has_not_begun_is_not_waited_for_once_the_roles_have_ended_after_a_training(scene: Open) -> None:
    found = scene()
    first, second, third = found.cluster.workers
    found.cluster.has_begun = lambda worker: worker is not third
    first.returncode = second.returncode = 0
    assert found.watch.has_running_workers
    found.train_until(epoch=1, step=10)
    assert found.watch.has_running_workers, "it may still come and hear it"
    for role in found.cluster.roles:
        role.returncode = 0
    assert not found.watch.has_running_workers


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
        found.supervisor.now += GRACE_S + 1.0
        # A new report each time.
        found.poller.status, found.poller.asked_at = (
            cluster_status(*waits.participants, global_step=10, num_contributions=2, replicas_to_aggregate=3, total_num_replicas=3),
            found.supervisor.now,
        )
        last.see()
    assert found.poller.asked == ["too few workers are left: 2 of 3 workers still run; a step needs 3"]
    assert last.failure == f"training ended early at step 10: {found.poller.asked[0]}"
    assert "worker 1 ended with exit code 0 while 2 of 3 workers still run; a step needs 3" in found.said
    assert not last.is_time_up
    found.supervisor.now += 6.0
    assert last.is_time_up


def test_a_released_worker_that_does_not_end_is_not_waited_for(scene: Open) -> None:
    waits = cluster_status(
        worker_status(0, is_waiting=True), worker_status(1, is_waiting=False, state="left"), global_step=0, num_contributions=1
    )
    found = scene(waits, workers=2)
    found.cluster.workers[1].returncode = 0

    def report_again() -> None:
        found.poller.status, found.poller.asked_at = replace(waits), found.supervisor.now

    found.supervisor.happens, output = report_again, SimpleNamespace(note=found.said.append, failure=found.said.append)
    with pytest.raises(LaunchFailed, match="training ended early at step 0: too few workers are left"):
        up._train(found.cluster, found.watch, supervisor=cast(Any, found.supervisor), output=cast(Any, output), log_directory=Path("logs"))
    assert found.cluster.workers[0].is_running


@pytest.mark.parametrize(("policy", "required"), [(PolicySpec(), 2), (PolicySpec(name=PolicyName.ASYNC), 1)])
def test_a_worker_that_leaves_enough_behind_ends_nothing(scene: Open, policy: PolicySpec, required: int) -> None:
    left = worker_status(0, is_waiting=True), worker_status(1, is_waiting=False, state="left")
    found = scene(cluster_status(*left, policy=policy, num_contributions=0, replicas_to_aggregate=required, total_num_replicas=3))
    last = LastWorkers(found.cluster, poller=found.poller, say=found.said.append)  # type: ignore[arg-type]
    found.cluster.workers[1].returncode = 0
    for _ in range(4):
        found.supervisor.now += GRACE_S
        found.poller.asked_at = found.supervisor.now
        last.see()
    assert not found.poller.asked and not last.failure


def test_a_range_of_workers_is_its_end_of_which_a_step_needs_the_begin() -> None:
    spec = ClusterSpec(workers="2:8")
    assert (spec.num_workers, spec.min_replicas, spec.num_workers_needed) == (8, 2, 2)
    assert spec.told["LOCKSTEP_MIN_REPLICAS"] == "2"
    for wrong in ("8:2", "0:3", "2:", "a:b"):
        with pytest.raises(LaunchFailed, match=f"--workers: got '{wrong}', want a number, or LEAST:MOST"):
            ClusterSpec(workers=wrong)
    with pytest.raises(LaunchFailed, match="--workers 2:8 and --min-replicas say the same in two ways; give one of them"):
        ClusterSpec(workers="2:8", min_replicas=3)
