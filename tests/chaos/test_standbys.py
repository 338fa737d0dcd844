"""Standbys of parameter servers: the loss of one of the two costs no step, the loss of both is a rollback.

In all cases `lockstep audit` computes again what both servers held, before and after one took the other's place.
"""

import signal

import pytest

from tests.chaos import claims, table_worker
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import Plan
from tests.support.cluster.processes import KILLED

pytestmark = pytest.mark.timeout(150)
TARGET_S = 5.0


def test_a_killed_primary_is_replaced_by_its_standby_without_a_rollback(start: Started, record: Record) -> None:
    cluster = start(Plan(has_standbys=True, history=True, durability=None))
    cluster.await_step(12)
    killed_at = cluster.kill("ps 1")
    cluster.await_end(expected={"ps 1": KILLED})
    record("ps killed, with a standby", standstill_s=cluster.standstill_s(killed_at), target_s=TARGET_S)
    _assert_nothing_lost(cluster)
    assert "its standby at" in cluster.text_of("chief")


def test_a_killed_standby_is_done_without(start: Started, record: Record) -> None:
    cluster = start(Plan(has_standbys=True, history=True, durability=None))
    cluster.await_step(12)
    killed_at = cluster.kill("standby 0")
    cluster.await_end(expected={"standby 0": KILLED})
    record("standby killed", standstill_s=cluster.standstill_s(killed_at), target_s=TARGET_S)
    _assert_nothing_lost(cluster)
    assert "training continues without it" in cluster.text_of("chief")


def test_a_restarted_primary_comes_back_as_standby_and_takes_over_again(start: Started, record: Record) -> None:
    cluster = start(Plan(has_standbys=True, history=True, max_steps=400))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_(lambda: _standby_of(cluster, 1) == cluster.address("ps 1"), what="the restarted server goes along")
    reached = cluster.reached()
    cluster.await_step(reached + 5)
    killed_at = cluster.kill("standby 1")
    cluster.await_end(expected={"standby 1": KILLED}, timeout_s=90)
    record("second replica killed after the first came back", standstill_s=cluster.standstill_s(killed_at), target_s=TARGET_S)
    _assert_nothing_lost(cluster)


def test_a_server_brought_back_as_standby_knows_how_often_keys_without_rows_occurred(start: Started) -> None:
    cluster = start(Plan(program=("-m", "tests.chaos.table_worker"), has_standbys=True, max_steps=200))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_(lambda: _standby_of(cluster, 1) == cluster.address("ps 1"), what="the restarted server goes along")
    cluster.kill("standby 1")
    cluster.await_end(expected={"standby 1": KILLED}, timeout_s=90)
    claims.assert_each_step_once(cluster.events())
    cluster.assert_values(table_worker.reference(num_steps=200, num_workers=cluster.plan.num_workers))


def test_a_primary_that_stood_still_is_replaced_and_comes_back(start: Started, record: Record) -> None:
    cluster = start(Plan(has_standbys=True, history=True, max_steps=400))
    cluster.await_step(12)
    stopped_at = cluster.signal("ps 0", signal.SIGSTOP)
    cluster.await_(lambda: _address_of(cluster, 0) == cluster.address("standby 0"), what="the standby takes its place")
    reached = cluster.reached()
    cluster.await_step(reached + 5)
    cluster.signal("ps 0", signal.SIGCONT)
    cluster.await_(lambda: _standby_of(cluster, 0) == cluster.address("ps 0"), what="the server that stood still goes along")
    cluster.await_end(timeout_s=90)
    record("ps stopped, with a standby", standstill_s=cluster.standstill_s(stopped_at), target_s=TARGET_S)
    _assert_nothing_lost(cluster)


def test_both_replicas_killed_is_a_rollback(start: Started) -> None:
    cluster = start(Plan(has_standbys=True, history=True))
    cluster.await_step(12)
    cluster.processes["ps 1"].kill()
    cluster.kill("standby 1")
    cluster.await_death("ps 1")
    cluster.restart("ps 1")
    cluster.restart("standby 1")
    cluster.await_end()
    assert {event["epoch"] for event in cluster.events() if event["event"] == "step"} == {1, 2}
    cluster.assert_as_without_faults()
    claims.assert_history_is_clean(cluster.history)


@pytest.mark.parametrize("lost", [[], ["ps 1"]], ids=["chief_alone", "with_a_primary"])
def test_another_chief_counts_on_the_replicas_that_are_there(start: Started, record: Record, lost: list[str]) -> None:
    """The primary's death with the chief's is no loss where another server vouches for the standby's step."""
    cluster = start(Plan(has_standbys=True, history=True, max_steps=60))
    cluster.await_step(12)
    for name in lost:
        cluster.processes[name].kill()
    killed_at = cluster.kill("chief")
    for name in lost:
        cluster.await_death(name)
        cluster.restart(name)
    cluster.restart("chief")
    cluster.await_end()
    record(f"chief killed, with standbys, and {lost or 'nobody'} else", standstill_s=cluster.standstill_s(killed_at), target_s=TARGET_S)
    _assert_nothing_lost(cluster)


def test_another_chief_continues_with_the_replica_that_was_counted_on_alone(start: Started) -> None:
    """The other one is gone for good: the one that is left says that it was the only one."""
    cluster = start(Plan(has_standbys=True, history=True, num_ps=1, durability=None, max_steps=60))
    cluster.await_step(12)
    cluster.kill("ps 0")
    reached = cluster.reached()
    cluster.await_step(reached + 3)
    cluster.kill("chief")
    cluster.restart("chief")
    cluster.await_end(expected={"ps 0": KILLED})
    _assert_nothing_lost(cluster)


def _address_of(cluster: Cluster, shard: int) -> str:
    status = cluster.status()
    return "" if status is None else status.shards[shard].address


def _standby_of(cluster: Cluster, shard: int) -> str:
    status = cluster.status()
    return "" if status is None else status.shards[shard].standby


def _assert_nothing_lost(cluster: Cluster) -> None:
    assert cluster.rollbacks() == 0
    assert {event["epoch"] for event in cluster.events() if event["event"] == "step"} == {1}
    cluster.assert_as_without_faults()
    claims.assert_history_is_clean(cluster.history)
