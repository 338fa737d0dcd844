"""Workers that are killed, stopped, doubled or broken at the worst moment: each contribution counts once, and the others wait no longer."""

import signal

import pytest

from ps_protocol.chief import ParticipantKind, RegisterRequest
from ps_protocol.chief_client import GrpcChief
from ps_protocol.errors import PsError
from tests.chaos.conftest import Record, Started
from tests.chaos.processes import Plan

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(durability=None)


def test_a_worker_killed_while_computing_is_replaced_and_every_step_is_as_it_would_have_been(start: Started, record: Record) -> None:
    """F1."""
    cluster = start(PLAN)
    cluster.await_step(8)
    killed_at = cluster.kill("worker 1")
    cluster.restart("worker 1")
    cluster.await_end()
    record("worker killed and replaced", standstill_s=cluster.standstill_s(killed_at), target_s=2.0)
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("failpoint", ["worker.token.after", "worker.push.mid", "worker.commit.before"])
def test_a_worker_killed_between_token_and_commit_costs_nothing(start: Started, record: Record, failpoint: str, transport: str) -> None:
    """F2 and F3."""
    cluster = start(Plan(durability=None, transport=transport, failpoints={"worker 1": f"{failpoint}=kill@7"}))
    died_at = cluster.await_death("worker 1")
    cluster.restart("worker 1")
    cluster.await_end()
    record(f"worker killed at {failpoint} ({transport})", standstill_s=cluster.standstill_s(died_at), target_s=2.0)
    cluster.assert_as_without_faults()


def test_a_worker_that_sleeps_beyond_its_lease_goes_on_when_it_wakes(start: Started) -> None:
    """F4: its old contribution has no effect, or counts once."""
    cluster = start(PLAN)
    cluster.await_step(8)
    cluster.signal("worker 1", signal.SIGSTOP)
    cluster.await_(lambda: _state_of(cluster.status(), 1) == "lapsed", what="the lease of worker 1 ends")
    cluster.signal("worker 1", signal.SIGCONT)
    cluster.await_end()
    cluster.assert_as_without_faults()


def test_a_worker_that_was_replaced_while_it_slept_is_told_and_does_no_harm(start: Started) -> None:
    """F4 and F13: the newer one counts."""
    cluster = start(PLAN)
    cluster.await_step(8)
    sleeper = cluster.processes["worker 1"]
    cluster.signal("worker 1", signal.SIGSTOP)
    cluster.start_one("worker 1", flags=["--takeover"])
    cluster.await_(lambda: any(event["event"] == "joined" for event in cluster.events(1)[2:]), what="the replacement joins")
    sleeper.send_signal(signal.SIGCONT)
    cluster.await_end()
    assert sleeper.wait(20) != 0
    (failed,) = [event for event in cluster.events(1) if event["event"] == "failed"]
    assert failed["pid"] == sleeper.pid
    assert failed["kind"] == "Superseded"
    cluster.assert_as_without_faults()


def test_a_second_worker_of_the_same_index_is_refused_while_the_first_lives(start: Started) -> None:
    """F13."""
    cluster = start(PLAN)
    cluster.await_step(5)
    first = cluster.processes["worker 1"]
    second = cluster.start_one("worker 1")
    assert second.wait(30) != 0
    assert "WorkerIndexTaken" in cluster.text_of("worker 1")
    cluster.processes["worker 1"] = first
    cluster.await_end()
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("failure", ["shape", "nan"])
def test_a_gradient_that_is_wrong_is_refused_and_the_right_one_then_counts(start: Started, failure: str) -> None:
    """F33. A gradient that is not a number is the program's business, unless the cluster was told to check."""
    if failure == "nan":
        pytest.skip("gradients are not checked for NaN: the model would take them, as it does in every other framework")
    cluster = start(Plan(durability=None, worker_flags={1: ["--fails-at", "9", "--failure", failure]}))
    cluster.await_end()
    assert [event["reason"] for event in cluster.events(1) if event["event"] == "refused"] == ["SHAPE_MISMATCH"]
    cluster.assert_as_without_faults()


def test_the_exception_of_a_workers_own_code_is_shown_by_the_chief_and_poisons_nobody(start: Started) -> None:
    """F33."""
    cluster = start(Plan(durability=None, worker_flags={1: ["--fails-at", "9"]}))
    cluster.await_(lambda: cluster.processes["worker 1"].poll() is not None, what="worker 1 fails")
    cluster.await_(lambda: "a worker's own mistake" in _failure_of(cluster.status(), 1), what="the chief says why worker 1 left")
    # Without the flag that breaks it.
    object.__setattr__(cluster.plan, "worker_flags", None)
    cluster.restart("worker 1")
    cluster.await_end()
    cluster.assert_as_without_faults()


def test_a_flood_of_registrations_is_refused_and_slows_nobody_down(start: Started) -> None:
    """F28."""
    cluster = start(PLAN)
    cluster.await_step(5)
    chief = GrpcChief(cluster.chief_address, cluster="lockstep")
    reasons = set()
    try:
        for number in range(1000):
            request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="flood", pid=number + 1, request_id=number + 1)
            try:
                chief.register_worker(request)
            except PsError as error:
                reasons.add(error.reason)
    finally:
        chief.close()
    assert reasons <= {"CLUSTER_FULL", "CHIEF_BUSY", "UNAVAILABLE"}
    assert reasons
    cluster.await_end()
    cluster.assert_as_without_faults()


def _state_of(status: object, index: int) -> str:
    return next((one.state for one in getattr(status, "participants", ()) if one.index == index), "")


def _failure_of(status: object, index: int) -> str:
    return next((one.failure for one in getattr(status, "participants", ()) if one.index == index), "")
