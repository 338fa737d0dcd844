"""What training has used up: of all roles, each of which counts from its own beginning; since they began, and in the last hour."""

from chief.page.cost import HOUR_S, Cost, CostCount
from ps_protocol.roles.chief import ClusterStatus, ParticipantKind, WorkerTraffic
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status


def used(worker_s: float, *, pid: int = 100, server_s: float = 0.0, chief_s: float = 0.0, num_bytes: int = 0) -> ClusterStatus:
    traffic = WorkerTraffic(cpu_s=worker_s, sent_bytes=num_bytes, received_bytes=2 * num_bytes)
    servers = (server_status(0, report=ShardReport(cpu_s=server_s)), server_status(1))
    return cluster_status(worker_status(0, pid=pid, traffic=traffic), worker_status(1), shards=servers, chief_cpu_s=chief_s)


def test_all_roles_are_counted_from_their_beginning() -> None:
    cost = CostCount().add(used(8.0, server_s=4.0, chief_s=2.0, num_bytes=100), at=50.0)
    assert cost == Cost(cpu_s={"workers": 8.0, "servers": 4.0, "chief": 2.0}, sent_bytes=100, received_bytes=200)


def test_the_processor_time_of_several_workers_in_one_process_counts_once() -> None:
    workers = [worker_status(index, pid=7, traffic=WorkerTraffic(cpu_s=3.0, sent_bytes=10)) for index in range(3)]
    cost = CostCount().add(cluster_status(*workers), at=0.0)
    assert (cost.cpu_s["workers"], cost.sent_bytes) == (3.0, 30)


def test_observers_are_counted_by_themselves() -> None:
    worker = worker_status(0, pid=7, traffic=WorkerTraffic(cpu_s=2.0, received_bytes=10))
    watcher = worker_status(0, pid=8, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=3.0, received_bytes=20))
    cost = CostCount().add(cluster_status(worker, watcher), at=0.0)
    assert cost == Cost(cpu_s={"workers": 2.0, "servers": 0.0, "chief": 0.0, "observers": 3.0}, received_bytes=30)


def test_the_processor_time_of_an_observer_in_a_workers_process_counts_once() -> None:
    worker = worker_status(0, pid=7, traffic=WorkerTraffic(cpu_s=3.0))
    watcher = worker_status(0, pid=7, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=3.0))
    assert CostCount().add(cluster_status(watcher, worker), at=0.0) == Cost(cpu_s={"workers": 3.0, "servers": 0.0, "chief": 0.0})


def test_the_cost_of_processes_that_ended_stays_counted() -> None:
    count = CostCount()
    count.add(used(8.0, server_s=4.0, num_bytes=100), at=0.0)
    cost = count.add(used(9.0, pid=101, server_s=1.0, num_bytes=100), at=1.0)
    assert (cost.cpu_s["workers"], cost.cpu_s["servers"], cost.sent_bytes) == (17.0, 5.0, 200), "both were started again"
    assert count.add(used(10.0, pid=101, server_s=1.5, num_bytes=150), at=2.0).cpu_s["workers"] == 18.0


def test_a_worker_that_joins_again_continues_where_it_was() -> None:
    count = CostCount()
    count.add(used(8.0, num_bytes=100), at=0.0)
    silent = cluster_status(worker_status(0, incarnation=2))
    assert count.add(silent, at=1.0).cpu_s["workers"] == 8.0
    cost = count.add(used(9.0, num_bytes=110), at=2.0)
    assert (cost.cpu_s["workers"], cost.sent_bytes) == (9.0, 110)


def test_a_chief_that_gets_another_number_is_the_same_process() -> None:
    count = CostCount()
    count.add(cluster_status(chief_incarnation=1, chief_cpu_s=2.0), at=0.0)
    assert count.add(cluster_status(chief_incarnation=3, chief_cpu_s=2.5), at=1.0).cpu_s["chief"] == 2.5


def test_counters_of_processes_that_are_gone_are_bounded() -> None:
    count = CostCount()
    for pid in range(5_000):
        cost = count.add(used(1.0, pid=pid), at=float(pid))
    assert cost.is_of_last_hour and len(count._heard) < 2_000


def test_after_an_hour_the_cost_is_that_of_the_last_hour() -> None:
    count = CostCount()
    for minute in range(200):
        cost = count.add(used(minute * 30.0, server_s=minute * 6.0, num_bytes=minute), at=minute * 60.0)
        assert cost.is_of_last_hour == (minute >= HOUR_S / 60)
    assert (cost.cpu_s["workers"], cost.cpu_s["servers"], cost.sent_bytes) == (1800.0, 360.0, 60)


def test_the_cost_keeps_samples_of_one_hour_at_most() -> None:
    count = CostCount()
    for second in range(0, 20_000, 5):
        cost = count.add(used(float(second)), at=float(second))
    assert 0.0 <= cost.cpu_s["workers"] - HOUR_S < 120.0
    assert len(count._past) <= 62
