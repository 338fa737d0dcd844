"""Figures from repeated looks at a cluster: speeds, and the last contributor. No thread and no clock."""

from typing import Any

from chief.page.feed import snapshot
from chief.page.look import Look, eta_s
from chief.page.recorder import Recorder
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.roles.chief import ClusterState, ClusterStatus, LedgerEntry, WorkerTraffic
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import MetricCell
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status


class Scene:
    """A cluster that a test moves on."""

    def __init__(self) -> None:
        self.now, self.num_asked = 100.0, 0
        self.current = cluster_status()
        self.cells: list[MetricCell] | PsError = []
        self.recorder = Recorder(self, read_metrics=self.read_metrics, clock=lambda: self.now, wall=lambda: self.now + 1e9)

    def status(self, *, max_ledger_entries: int) -> ClusterStatus:
        self.num_asked += 1
        return self.current

    def read_metrics(self, status: ClusterStatus) -> list[MetricCell]:
        if isinstance(self.cells, PsError):
            raise self.cells
        return self.cells

    def look(self, *, step: int, after_s: float = 1.0, accepted: tuple[int, ...] = (), **changes: Any) -> Look:
        workers = [worker_status(index, num_accepted=number) for index, number in enumerate(accepted)]
        self.current = cluster_status(*workers, global_step=step, **changes)
        self.now += after_s
        return self.recorder.look()


def entries(*last: int, wait_s: float = 0.05) -> tuple[LedgerEntry, ...]:
    ids = (PushId(worker=0, incarnation=1, sequence=1),)
    return tuple(
        LedgerEntry(
            step=number,
            contributors=ids,
            num_stale=0,
            num_late=0,
            duration_s=0.1,
            apply_duration_s=0.01,
            wait_duration_s=wait_s,
            last_worker=worker,
        )
        for number, worker in enumerate(last)
    )


def test_speed_is_that_of_the_latest_looks() -> None:
    scene = Scene()
    assert scene.look(step=0).steps_per_s is None
    for number in range(1, 30):
        look = scene.look(step=number * 20, accepted=(number * 20, number * 10), waiting_for="")
    assert look.steps_per_s == 20.0
    assert look.contributions_per_s == {0: 20.0, 1: 10.0}
    assert eta_s(look) == (600 - 580) / 20.0


def test_no_time_is_left_while_training_waits_and_afterwards_it_is_that_of_the_steps_since() -> None:
    scene, usual = Scene(), entries(*[0] * 20)
    for number in range(12):
        look = scene.look(step=number * 10, waiting_for="", step_age_s=0.05, ledger=usual)
    assert eta_s(look) == 49.0
    look = scene.look(step=110, step_age_s=1.0, ledger=usual)
    assert (eta_s(look), snapshot(look)["is_held_up"]) == (None, True)
    for _ in range(30):
        scene.look(step=110, step_age_s=30.0, ledger=usual)
    scene.look(step=110, waiting_for="", step_age_s=0.05, ledger=usual)
    assert eta_s(scene.look(step=120, waiting_for="", step_age_s=0.05, ledger=usual)) == 48.0


def test_a_rollback_is_no_negative_speed() -> None:
    scene = Scene()
    scene.look(step=100)
    scene.look(step=110)
    assert scene.look(step=50).steps_per_s is None
    assert scene.look(step=60).steps_per_s == 10.0
    assert [value for _, _, value in scene.recorder.speed(after=0.0)] == [10.0, None, 10.0]


def test_readers_at_the_same_time_cost_one_look() -> None:
    scene = Scene()
    for _ in range(50):
        scene.recorder.look(max_age_s=0.4)
    assert scene.num_asked == 1


def test_the_recorder_keeps_no_points_while_nothing_is_trained() -> None:
    scene = Scene()
    for _ in range(5):
        scene.look(step=7, state=ClusterState.FINISHED)
    assert scene.recorder.speed(after=0.0) == []


def test_metrics_are_read_while_training_and_not_otherwise() -> None:
    scene = Scene()
    for weight in (1.0, 2.0):
        scene.look(step=int(weight))
        scene.cells = [MetricCell(name="loss", worker=0, total=3 * weight, weight=weight, count=1, last=3.0)]
        scene.recorder.read_metrics_now()
    scene.cells = Unavailable("must not be asked")
    scene.look(step=3, state=ClusterState.RECOVERING)
    scene.recorder.read_metrics_now()
    metrics, _ = scene.recorder.metrics(after=0.0)
    assert [(step, value) for _, step, value in metrics["loss"]] == [(2, 3.0)]


def test_parts_of_a_step_add_up() -> None:
    look = Scene().look(step=200, ledger=entries(3), shards=(server_status(0),))
    (row,) = snapshot(look)["steps"]["rows"]
    assert row[:6] == [0, 0.0, 0.04, 0.05, 0.01, 3]


def read_parts(scene: Scene, traffic: WorkerTraffic | None) -> list[float]:
    """Returns how long reading and computing took in a step to which worker 0 contributed first."""
    workers = worker_status(0, traffic=traffic), worker_status(1)
    scene.now += 1.0
    scene.current = cluster_status(*workers, global_step=200, ledger=entries(0))
    (row,) = snapshot(scene.recorder.look())["steps"]["rows"]
    return row[1:3]  # type: ignore[no-any-return]


def test_reading_is_the_mean_of_what_the_first_contributor_read_lately() -> None:
    scene = Scene()
    assert read_parts(scene, None) == [0.0, 0.04], "it has not said yet"
    assert read_parts(scene, WorkerTraffic(num_reads=10, reading_s=0.1)) == [0.01, 0.03]
    for _ in range(10):
        read_parts(scene, WorkerTraffic(num_reads=10, reading_s=0.1))
    assert read_parts(scene, WorkerTraffic(num_reads=20, reading_s=0.3)) == [0.02, 0.02], "of the latest looks"
    assert read_parts(scene, WorkerTraffic(num_reads=2, reading_s=0.06)) == [0.03, 0.01], "another process has its place"
    assert read_parts(scene, WorkerTraffic(num_reads=3, reading_s=3.0))[0] == 0.04, "no more than there was time for"


def test_the_cost_says_whether_memory_is_shared() -> None:
    for transport, is_shared in (("grpc", False), ("grpc, shared_memory", True)):
        scene = Scene()
        scene.current = cluster_status(worker_status(0, transport=transport), worker_status(1, transport="grpc"))
        assert snapshot(scene.recorder.look())["cost"]["is_shared"] == is_shared


def test_bytes_of_a_worker_are_shown() -> None:
    scene = Scene()
    scene.current = cluster_status(worker_status(0, traffic=WorkerTraffic(sent_bytes=7, received_bytes=9)), worker_status(1))
    table = snapshot(scene.recorder.look())["workers"]
    first, second = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    assert (first["sent_bytes"], first["received_bytes"]) == (7, 9)
    assert (second["sent_bytes"], second["received_bytes"]) == (None, None)
