"""Networks between any two roles that are slow, silent in one or both directions, torn or shut: no step differs, and training finishes."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import Plan

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(transport="grpc", has_proxies=True, durability=None, lease_s=20.0)
SOCKETS = replace(PLAN, transport="sockets")
HEAL_TARGET_S = 5.0


@pytest.mark.parametrize("who", ["workers and ps", "chief and ps", "workers and chief"])
@pytest.mark.parametrize("way", ["both ways", "there", "back"])
@pytest.mark.parametrize("plan", [PLAN, SOCKETS], ids=["grpc", "sockets"])
@pytest.mark.shows("F14", "F17")
def test_a_partition_that_heals_changes_nothing(start: Started, record: Record, who: str, way: str, plan: Plan) -> None:
    """Bytes are held back, and neither end is told."""
    cluster = start(plan)
    cluster.await_step(10)
    conditions = {"workers and ps": cluster.worker_conditions, "chief and ps": cluster.chief_conditions}.get(who, cluster.worker_to_chief)
    conditions.to_server, conditions.to_client = way == "back", way == "there"
    cluster.await_standstill()
    assert len(cluster.running(cluster.everybody)) == len(cluster.everybody)
    conditions.to_server = conditions.to_client = True
    healed_at = time.monotonic()
    cluster.await_end()
    record(f"partition of {who}, {way}: after healing", standstill_s=_first_step_after(cluster, healed_at), target_s=HEAL_TARGET_S)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("who", ["workers and ps", "chief and ps", "workers and chief"])
@pytest.mark.parametrize("plan", [PLAN, SOCKETS], ids=["grpc", "sockets"])
@pytest.mark.shows("F2", "F15")
def test_connections_that_break_all_at_once_are_made_again(start: Started, record: Record, who: str, plan: Plan) -> None:
    """Requests and answers are lost, and it is not known which."""
    cluster = start(plan)
    for step in (8, 16, 24):
        cluster.await_step(step)
        proxies = [cluster.chief_proxy] if who == "workers and chief" else cluster.proxies
        conditions = {"workers and ps": cluster.worker_conditions, "chief and ps": cluster.chief_conditions}.get(who)
        for proxy in proxies:
            proxy.sever(conditions)
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("num_bytes", [100, 700, 2000])
@pytest.mark.parametrize("plan", [PLAN, SOCKETS], ids=["grpc", "sockets"])
@pytest.mark.shows("F2")
def test_a_connection_cut_in_the_middle_of_a_contribution_is_without_effect(start: Started, num_bytes: int, plan: Plan) -> None:
    """Half of it was sent."""
    cluster = start(plan)
    for number, step in enumerate((8, 16, 24)):
        cluster.await_step(step)
        cluster.worker_conditions.cut_in = num_bytes
        cluster.await_(partial(_has_cut, cluster, number), what="a connection is cut")
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("num_bytes", [300, 900])
@pytest.mark.parametrize("plan", [PLAN, SOCKETS], ids=["grpc", "sockets"])
@pytest.mark.shows("F2")
def test_a_worker_killed_with_half_of_its_contribution_sent_is_replaced(start: Started, num_bytes: int, plan: Plan) -> None:
    """Nobody sends the rest."""
    cluster, killed, has_struck = start(plan), [], threading.Event()

    def strike(pid: int) -> None:
        killed.append(cluster.name_of(pid))
        cluster.processes[killed[-1]].kill()
        has_struck.set()

    cluster.await_step(10)
    cluster.worker_conditions.on_cut = strike
    cluster.worker_conditions.cut_in = num_bytes
    cluster.await_(has_struck.is_set, what="a worker is killed while it pushes")
    cluster.await_death(killed[0])
    cluster.restart(killed[0])
    cluster.await_end()
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("way", ["both ways", "there", "back"])
@pytest.mark.shows("F14")
def test_a_worker_cut_off_from_one_server_delays_the_step_and_nothing_else(start: Started, record: Record, way: str) -> None:
    """All other ways are open, so that the rest of the step is there; none of it shows anywhere before the missing part."""
    cluster = start(replace(PLAN, lonely=("worker 1", 1)))
    cluster.await_step(10)
    conditions = cluster.lonely_conditions
    conditions.to_server, conditions.to_client = way == "back", way == "there"
    cluster.await_standstill()
    assert "worker 1" in cluster.waiting_for()
    conditions.to_server = conditions.to_client = True
    healed_at = time.monotonic()
    cluster.await_end()
    record(f"worker parted from a ps, {way}: after healing", standstill_s=_first_step_after(cluster, healed_at), target_s=HEAL_TARGET_S)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("plan", [PLAN, SOCKETS], ids=["grpc", "sockets"])
@pytest.mark.shows("F14")
def test_servers_that_refuse_all_callers_for_a_while_are_asked_again(start: Started, record: Record, plan: Plan) -> None:
    """All connections are broken, and new ones refused until it is mended."""
    cluster = start(plan)
    cluster.await_step(10)
    for conditions in (cluster.worker_conditions, cluster.chief_conditions, cluster.worker_to_chief):
        conditions.lets_in = False
    for proxy in [*cluster.proxies, cluster.chief_proxy]:
        proxy.sever()
    cluster.await_standstill()
    assert len(cluster.running(cluster.everybody)) == len(cluster.everybody)
    for conditions in (cluster.worker_conditions, cluster.chief_conditions, cluster.worker_to_chief):
        conditions.lets_in = True
    healed_at = time.monotonic()
    cluster.await_end()
    record("all ways broken: after healing", standstill_s=_first_step_after(cluster, healed_at), target_s=HEAL_TARGET_S)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


def _is_slow(cluster: Cluster) -> None:
    for conditions in (cluster.worker_conditions, cluster.chief_conditions, cluster.worker_to_chief):
        conditions.delay_s = 0.05


def _drips(cluster: Cluster) -> None:
    cluster.worker_conditions.drips = True


@pytest.mark.parametrize("make_it", [_is_slow, _drips])
@pytest.mark.shows("F15", "F18")
def test_a_slow_network_gives_the_same_values(start: Started, make_it: Callable[[Cluster], None]) -> None:
    cluster = start(PLAN)
    cluster.await_step(5)
    make_it(cluster)
    cluster.await_end(timeout_s=90)
    cluster.assert_as_without_faults()


@pytest.mark.chaos
@pytest.mark.shows("F15")
def test_packets_that_are_lost_doubled_and_disordered_give_the_same_values() -> None:
    """In a network namespace of its own, where the system permits one."""
    if shutil.which("tc") is None or shutil.which("unshare") is None:
        pytest.skip("no `tc` or `unshare` on this machine (package iproute2), so no network can be made bad")
    bad = "tc qdisc add dev lo root netem delay 20ms 10ms loss 2% duplicate 1% reorder 5%"
    probe = subprocess.run(["unshare", "-rn", "sh", "-c", f"ip link set lo up && {bad}"], capture_output=True, text=True, timeout=20)
    if probe.returncode:
        pytest.skip(f"this system permits no network namespace with netem: {probe.stderr.strip()}")
    command = f"ip link set lo up && {bad} && exec .venv/bin/python -m tests.chaos.lossy"
    result = subprocess.run(["unshare", "-rn", "sh", "-c", command], capture_output=True, text=True, timeout=140)
    assert result.returncode == 0, result.stdout + result.stderr


def _has_cut(cluster: Cluster, more_than: int) -> bool:
    return cluster.worker_conditions.num_cuts > more_than


def _first_step_after(cluster: Cluster, since: float) -> float:
    return next((event["at"] - since for event in cluster.events() if event["event"] == "step" and event["at"] > since), float("inf"))
