"""Parameter servers that are killed or stopped at every point of a step: no step is half applied, and the cluster recovers by itself."""

import signal
import time

import psutil
import pytest

from ps_protocol.process.history import read_history
from ps_protocol.roles.chief import ClusterState
from ps_protocol.roles.history import Applied
from tests.chaos import claims
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import ENDLESS, Plan

pytestmark = pytest.mark.timeout(150)
PS_TARGET_S = 10.0


@pytest.mark.quick
@pytest.mark.shows("F5")
def test_a_parameter_server_killed_between_steps_costs_the_steps_since_the_checkpoint_and_nothing_else(
    start: Started, record: Record
) -> None:
    """Without a failpoint: the plain loss of a server."""
    cluster = start(Plan())
    cluster.await_step(12)
    killed_at = cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    record("ps killed", standstill_s=cluster.standstill_s(killed_at), target_s=PS_TARGET_S)
    assert {event["epoch"] for event in cluster.events() if event["event"] == "step"} == {1, 2}
    cluster.assert_as_without_faults()


@pytest.mark.parametrize(
    ("failpoint", "case"),
    [
        ("ps.push.staged_before_ack", "a contribution is staged, its sender never hears"),
        ("ps.push.staged_before_ack", "… over data sockets"),
        ("ps.apply.before", "the other server has applied"),
        ("ps.apply.mid", "some variables are applied, others not"),
        ("ps.apply.before_publish", "all are applied, nobody can see it"),
        ("ps.apply.before_ack", "applied, the chief never hears"),
    ],
)
@pytest.mark.parametrize("durability", ["interval", "step"])
@pytest.mark.shows("F5", "F6", "F7", "F8")
def test_a_parameter_server_killed_within_a_step_leaves_no_step_half_done(
    start: Started, record: Record, failpoint: str, case: str, durability: str
) -> None:
    # In shared memory a push is staged without that call.
    transport = "auto"
    if failpoint == "ps.push.staged_before_ack":
        transport = "sockets" if "sockets" in case else "grpc"
    steps, points = None if durability == "step" else 5, {"ps 1": f"{failpoint}=kill@12"}
    cluster = start(Plan(durability=durability, checkpoint_steps=steps, failpoints=points, transport=transport, history=True))
    died_at = cluster.await_death("ps 1")
    told = max((event["after"] for event in cluster.events() if event["event"] == "step"), default=0)
    cluster.restart("ps 1")
    cluster.await_end()
    record(f"ps killed at {failpoint} (durability {durability})", standstill_s=cluster.standstill_s(died_at), target_s=PS_TARGET_S)
    cluster.assert_as_without_faults()
    claims.assert_history_is_clean(cluster.history)
    if failpoint in ("ps.apply.before", "ps.apply.before_ack"):
        assert _was_applied(cluster, step=11, epoch=1, shard=0)
    if durability == "step":
        # What a worker was told to be done stays done.
        again = [event["step"] for event in cluster.events() if event["event"] == "step" and event["at"] > died_at]
        assert min(again) >= told, case


def test_a_killed_parameter_server_is_noticed_at_once_and_named(start: Started, record: Record) -> None:
    """Nobody starts it again for a while: the chief says within a second which one it waits for."""
    cluster = start(Plan())
    cluster.await_step(12)
    assert cluster.status() is not None
    killed_at = cluster.kill("ps 1")
    cluster.await_(lambda: _waits_for_ps(cluster, 1), what="the chief says that ps 1 does not answer")
    record("ps killed: noticed by the chief", standstill_s=time.monotonic() - killed_at, target_s=1.0)
    cluster.await_(lambda: "ps 1" in cluster.waiting_for(), what="the chief names the server that it waits for")
    cluster.restart("ps 1")
    cluster.await_end()
    assert cluster.rollbacks() > 0
    cluster.assert_as_without_faults()


def test_both_parameter_servers_killed_at_once_come_back_together(start: Started, record: Record) -> None:
    cluster = start(Plan())
    cluster.await_step(12)
    cluster.kill("ps 0")
    killed_at = cluster.kill("ps 1")
    cluster.restart("ps 0")
    cluster.restart("ps 1")
    cluster.await_end()
    record("both ps killed", standstill_s=cluster.standstill_s(killed_at), target_s=PS_TARGET_S)
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("has_proxies", [False, True])
def test_repeated_rollbacks_keep_no_memory_of_earlier_epochs(start: Started, has_proxies: bool) -> None:
    """Each makes the variables anew, here and there; who keeps a descriptor of the old ones keeps all of their memory.

    Workers here never look for cycles, which a program that makes few objects seldom does either.
    """
    never = {index: ["--never-collects"] for index in range(3)}
    cluster = start(Plan(max_steps=ENDLESS, worker_flags=never, has_proxies=has_proxies))
    cluster.await_step(10)
    those_that_live = [name for name in cluster.everybody if name not in ("ps 1", "chief")]
    sizes = []
    for _ in range(6):
        cluster.kill("ps 1")
        cluster.restart("ps 1")
        cluster.await_step(cluster.reached() + 20)
        sizes.append({name: psutil.Process(cluster.processes[name].pid).num_fds() for name in those_that_live})
    # It would be four for each rollback, and one for a stream that broke while something was sent. One offer of memory may be under way.
    assert all(size[name] <= sizes[0][name] + 4 for size in sizes for name in those_that_live), sizes
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def test_a_parameter_server_killed_while_it_restores_is_restored_again(start: Started, record: Record) -> None:
    cluster = start(Plan())
    cluster.await_step(12)
    killed_at = cluster.kill("ps 1")
    cluster.start_one("ps 1", failpoints="ps.restore.mid=kill@1")
    cluster.await_death("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    record("ps killed while it restores", standstill_s=cluster.standstill_s(killed_at), target_s=PS_TARGET_S)
    cluster.assert_as_without_faults()


@pytest.mark.shows("F9")
def test_a_parameter_server_that_sleeps_is_waited_for_and_keeps_its_model(start: Started, record: Record) -> None:
    """No rollback, since nothing is lost."""
    cluster = start(Plan())
    cluster.await_step(12)
    stopped_at = cluster.signal("ps 1", signal.SIGSTOP)
    cluster.await_(lambda: _waits_for_ps(cluster, 1), what="the chief says that ps 1 does not answer")
    record("ps stopped: noticed by the chief", standstill_s=time.monotonic() - stopped_at, target_s=30.0)
    cluster.signal("ps 1", signal.SIGCONT)
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.shows("F12", "F17")
def test_a_parameter_server_that_was_replaced_while_it_slept_does_no_harm_when_it_wakes(start: Started, record: Record) -> None:
    """For a server: the old process has lost its address, its connections are silent, and its model is of an older epoch."""
    cluster = start(Plan())
    cluster.await_step(12)
    sleeper = cluster.processes["ps 1"]
    stopped_at = cluster.signal("ps 1", signal.SIGSTOP)
    (cluster.sockets / "ps1").unlink()
    cluster.start_one("ps 1")
    cluster.await_(lambda: cluster.rollbacks() > 0, what="the cluster continues with the new ps 1", timeout_s=60)
    record("ps stopped and replaced: half-open connections given up", standstill_s=time.monotonic() - stopped_at, target_s=40.0)
    sleeper.send_signal(signal.SIGCONT)
    cluster.await_end()
    sleeper.kill()
    sleeper.wait(10)
    cluster.assert_as_without_faults()


def test_without_a_checkpoint_a_lost_parameter_server_ends_the_training_with_a_reason(start: Started) -> None:
    cluster = start(Plan(durability=None))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_(lambda: cluster.processes["chief"].poll() is not None, what="the chief gives up")
    assert cluster.processes["chief"].returncode == 1
    for index in range(cluster.plan.num_workers):
        assert cluster.processes[f"worker {index}"].wait(30) != 0
    assert "ps 1" in cluster.text_of("worker 0")


def _waits_for_ps(cluster: Cluster, index: int) -> bool:
    status = cluster.status()
    return status is not None and (not status.shards[index].is_reachable or status.state is ClusterState.RECOVERING)


def _was_applied(cluster: Cluster, *, step: int, epoch: int, shard: int) -> bool:
    """Whether a server had applied the step before the other one was lost."""
    chronicles = read_history(cluster.history)
    records = [(chronicle.role, one.event) for chronicle in chronicles for one in chronicle.records]
    requests = [(role, event.request) for role, event in records if isinstance(event, Applied)]
    return any(owner == f"ps-{shard}" and request.step == step and request.fence.epoch == epoch for owner, request in requests)
