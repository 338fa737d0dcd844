"""Workers that are killed, stopped, doubled or broken in the middle of a step: each contribution counts once, and no other worker hangs."""

import signal

import numpy as np
import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ParticipantKind, RegisterRequest
from ps_protocol.rpc.chief import GrpcChief
from tests.chaos import claims, script
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import ENDLESS, Plan

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(durability=None)


@pytest.mark.shows("F1")
def test_a_worker_killed_while_computing_is_replaced_and_every_step_is_as_it_would_have_been(start: Started, record: Record) -> None:
    cluster = start(PLAN)
    cluster.await_step(8)
    cluster.kill("worker 1")
    cluster.await_(lambda: "worker 1" in cluster.waiting_for(), what="the chief says who is missing")
    cluster.restart("worker 1")
    cluster.await_end()
    record("worker killed: the new process's first step", standstill_s=cluster.contributing_s(1), target_s=2.0)
    cluster.assert_as_without_faults()


@pytest.mark.shows("F1")
def test_with_backup_workers_a_killed_worker_is_not_even_missed(start: Started, record: Record) -> None:
    """Nobody takes its place, and the steps are made of those that are left."""
    cluster = start(Plan(durability=None, history=True, replicas_to_aggregate=2))
    cluster.await_step(8)
    killed_at = cluster.kill("worker 1")
    cluster.await_end(workers=[0, 2])
    record("worker killed, with a backup worker", standstill_s=cluster.standstill_s(killed_at), target_s=2.0)
    assert cluster.reached() == cluster.plan.max_steps
    claims.assert_history_is_clean(cluster.history)


@pytest.mark.shows("F4")
def test_a_late_gradient_of_a_worker_that_slept_is_dropped(start: Started) -> None:
    """Within its lease: the others continued without it, and its old contribution counts for nothing."""
    cluster = start(Plan(durability=None, history=True, max_steps=80, lease_s=30.0, replicas_to_aggregate=2))
    cluster.await_step(8)
    cluster.signal("worker 1", signal.SIGSTOP)
    slept_at = cluster.reached()
    cluster.await_step(slept_at + 10)
    woken_at = cluster.signal("worker 1", signal.SIGCONT)
    cluster.await_end()
    first = next(event for event in cluster.events(1) if event["event"] == "step" and event["at"] > woken_at)
    assert first["outcome"] in ("STALE", "LATE")
    assert first["step"] <= slept_at + 1
    claims.assert_history_is_clean(cluster.history)


@pytest.mark.parametrize("transport", ["grpc", "sockets", "shared_memory"])
@pytest.mark.parametrize("failpoint", ["worker.token.after", "worker.push.mid", "worker.commit.before"])
@pytest.mark.shows("F2", "F3")
def test_a_worker_killed_between_token_and_commit_costs_nothing(start: Started, record: Record, failpoint: str, transport: str) -> None:
    cluster = start(Plan(durability=None, transport=transport, failpoints={"worker 1": f"{failpoint}=kill@7"}))
    cluster.await_death("worker 1")
    cluster.restart("worker 1")
    cluster.await_end()
    record(f"worker killed at {failpoint}: the new process's first step", standstill_s=cluster.contributing_s(1), target_s=2.0)
    cluster.assert_as_without_faults()


@pytest.mark.shows("F4")
def test_a_worker_that_sleeps_beyond_its_lease_continues_when_it_wakes(start: Started) -> None:
    """Its old contribution has no effect, or counts once."""
    cluster = start(PLAN)
    cluster.await_step(8)
    cluster.signal("worker 1", signal.SIGSTOP)
    cluster.await_(lambda: _state_of(cluster.status(), 1) == "lapsed", what="the lease of worker 1 ends")
    cluster.signal("worker 1", signal.SIGCONT)
    cluster.await_end()
    cluster.assert_as_without_faults()


@pytest.mark.shows("F4", "F13")
def test_a_worker_replaced_while_it_was_stopped_gets_an_error_and_changes_nothing(start: Started) -> None:
    """The newer one counts."""
    cluster = start(Plan(durability=None, max_steps=ENDLESS))
    cluster.await_step(8)
    sleeper = cluster.processes["worker 1"]
    cluster.signal("worker 1", signal.SIGSTOP)
    replacement = cluster.start_one("worker 1", flags=["--takeover"])
    cluster.await_(lambda: _has_joined(cluster, 1, pid=replacement.pid), what="the replacement joins")
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(20) != 0
    last = cluster.finish()
    (failed,) = [event for event in cluster.events(1) if event["event"] == "failed"]
    assert failed["pid"] == sleeper.pid
    assert failed["kind"] == "Superseded"
    cluster.assert_as_without_faults(num_steps=last)


@pytest.mark.shows("F13")
def test_a_second_worker_of_the_same_index_is_refused_while_the_first_lives(start: Started) -> None:
    cluster = start(Plan(durability=None, max_steps=ENDLESS))
    cluster.await_step(5)
    first = cluster.processes["worker 1"]
    second = cluster.start_one("worker 1")
    assert second.wait(30) != 0
    assert "WorkerIndexTaken" in cluster.text_of("worker 1")
    assert first.poll() is None
    cluster.processes["worker 1"] = first
    cluster.assert_as_without_faults(num_steps=cluster.finish())


@pytest.mark.shows("F33")
def test_a_gradient_of_a_wrong_shape_is_refused_and_the_right_one_then_counts(start: Started) -> None:
    cluster = start(Plan(durability=None, worker_flags={1: ["--fails-at", "9", "--failure", "shape"]}))
    cluster.await_end()
    assert [event["reason"] for event in cluster.events(1) if event["event"] == "refused"] == ["SHAPE_MISMATCH"]
    cluster.assert_as_without_faults()


@pytest.mark.shows("F33")
def test_a_nan_gradient_spoils_its_own_variable_and_no_other(start: Started) -> None:
    """It counts, as any other, and the cluster continues."""
    cluster = start(Plan(durability=None, history=True, worker_flags={1: ["--fails-at", "9", "--failure", "nan"]}))
    cluster.await_end()
    expected = script.reference(num_steps=cluster.plan.max_steps, num_workers=3, gradients_of=_with_nan)
    assert int(np.isnan(expected["b"]).sum()) == 1
    assert not np.isnan(expected["w"]).any()
    cluster.assert_values(expected)
    claims.assert_history_is_clean(cluster.history)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.shows("F33")
def test_a_gradient_that_is_not_a_number_is_refused_where_the_cluster_wants_that(start: Started, transport: str) -> None:
    """Nothing is spoilt, the others continue, and the right one then counts."""
    flags = {1: ["--fails-at", "9", "--failure", "refused nan"]}
    cluster = start(Plan(durability=None, transport=transport, reject_nonfinite=True, worker_flags=flags))
    cluster.await_end()
    (refused,) = [event for event in cluster.events(1) if event["event"] == "refused"]
    assert refused["reason"] == "NON_FINITE_GRADIENT"
    assert refused["words"].startswith("'b' has 1 non-finite value (worker 1, step 9)")
    cluster.assert_as_without_faults()


@pytest.mark.shows("F33")
def test_the_exception_of_a_workers_own_code_is_shown_by_the_chief_and_poisons_nobody(start: Started) -> None:
    cluster = start(Plan(durability=None, worker_flags={1: ["--fails-at", "9"]}))
    cluster.await_(lambda: cluster.processes["worker 1"].poll() is not None, what="worker 1 fails")
    cluster.await_(lambda: "a worker's own mistake" in _failure_of(cluster.status(), 1), what="the chief says why worker 1 left")
    # Without the flag that breaks it.
    object.__setattr__(cluster.plan, "worker_flags", None)
    cluster.restart("worker 1")
    cluster.await_end()
    cluster.assert_as_without_faults()


@pytest.mark.shows("F28")
def test_a_flood_of_registrations_is_refused_and_slows_nobody_down(start: Started) -> None:
    cluster = start(Plan(durability=None, max_steps=ENDLESS))
    cluster.await_step(5)
    chief = GrpcChief(cluster.chief_address, cluster="lockstep")
    reasons, begun_at = set(), cluster.reached()
    try:
        for number in range(1000):
            request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="flood", pid=number + 1, request_id=number + 1)
            try:
                chief.call(request)
            except PsError as error:
                reasons.add(error.reason)
    finally:
        chief.close()
    assert reasons <= {"CLUSTER_FULL", "CHIEF_BUSY", "UNAVAILABLE"}
    assert reasons
    assert cluster.reached() > begun_at, "steps continued meanwhile"
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def _has_joined(cluster: Cluster, index: int, *, pid: int) -> bool:
    return any(event["event"] == "joined" and event["pid"] == pid for event in cluster.events(index))


def _state_of(status: object, index: int) -> str:
    return next((one.state for one in getattr(status, "participants", ()) if one.index == index), "")


def _failure_of(status: object, index: int) -> str:
    return next((one.failure for one in getattr(status, "participants", ()) if one.index == index), "")


def _with_nan(step: int, worker: int) -> script.Values:
    return script.without_a_number(step, worker) if (step, worker) == (9, 1) else script.gradients(step, worker)
