"""A monitored session that the cluster gives up, or whose answers are lost, continues by itself, and no contribution counts twice."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import DeadlineExceeded, LeaseExpired
from ps_protocol.roles.chief import DeregisterRequest, ModelState, PushOutcome
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.network.faults import Flaky
from tests.support.sessions.facade_programs import running_cluster
from worker_client import Session
from worker_client.sync_replicas import (
    GradientDescentOptimizer,
    Graph,
    MonitoredSession,
    MonitoredTrainingSession,
    SyncReplicasOptimizer,
    TrainOp,
    get_or_create_global_step,
    get_variable,
)


@pytest.fixture(autouse=True)
def graph() -> Iterator[Graph]:
    with Graph().as_default() as made:
        get_variable("w", np.zeros(3))
        yield made


@pytest.fixture
def master(socket_dir: Path) -> Iterator[Any]:
    with running_cluster("in process", directory=socket_dir) as running:
        yield running


def counting(optimizer: Any) -> TrainOp:
    """Training by which `w` is the number of contributions that count."""
    op: TrainOp = optimizer.minimize(lambda _: (0.0, {"w": -np.ones(3)}), get_or_create_global_step())
    return op


def one_a_step() -> tuple[TrainOp, Any]:
    """The same, synchronously, with one worker."""
    optimizer = SyncReplicasOptimizer(GradientDescentOptimizer(1.0), 1)
    op = counting(optimizer)
    return op, optimizer.make_session_run_hook(True, 0)


def give_up(session: MonitoredSession) -> None:
    """Has the chief end the worker's lease, as if it had been silent for too long."""
    membership = session.session.membership
    membership.link.chief.call(DeregisterRequest(participant=membership.participant, failure="was silent"))


def another_worker(master: Any) -> Session:
    """A worker that only keeps the cluster from ending when it is left by the other."""
    return worker_client.connect(master, worker_index=1) if isinstance(master, str) else worker_client.local(master, worker_index=1)


def test_worker_whose_lease_ended_comes_back_under_its_index(master: Any) -> None:
    op = counting(GradientDescentOptimizer(1.0, use_locking=True))
    with MonitoredTrainingSession(master, worker_index=0, max_wait_secs=30) as session, another_worker(master):
        results = [session.run(op) for _ in range(2)]
        lost = session.session
        give_up(session)
        results += [session.run(op) for _ in range(3)]
        # The session has come back by itself, as another incarnation of its index.
        assert session.session is lost
        assert session.session.worker_index == 0
        num_accepted = sum(result.is_accepted for result in results)
        assert num_accepted in (4, 5)  # the one under way is repeated only if its push had not begun
        np.testing.assert_array_equal(session.read()["w"], np.full(3, float(num_accepted)))
        assert session.run("global_step") == num_accepted


def test_contribution_that_counted_before_its_answer_was_lost_is_not_repeated() -> None:
    op, hook = one_a_step()
    real = InProcessCluster(num_ps=2)
    chief = Flaky(real.chief)

    def lost(_: Any) -> Any:
        raise LeaseExpired("the worker was silent for too long")

    with MonitoredTrainingSession(SimpleNamespace(chief=chief, shards=real.shards), hooks=[hook], worker_index=0) as session:
        assert session.run(op).is_accepted
        chief.answer("DequeueTokenRequest", lost)
        result = session.run(op)
        assert (result.outcome, result.step) == (PushOutcome.ACCEPTED, 1)
        np.testing.assert_array_equal(session.read()["w"], np.full(3, 2.0))
        assert session.run(op).is_accepted
        np.testing.assert_array_equal(session.read()["w"], np.full(3, 3.0))


def test_a_worker_waits_for_the_chiefs_model_no_longer_than_its_limit(master: Any) -> None:
    op, hook = one_a_step()
    del op, hook
    with pytest.raises(DeadlineExceeded):
        MonitoredTrainingSession(master, is_chief=False, worker_index=0, max_wait_secs=0.1)


def test_servers_that_do_not_come_back_are_waited_for_no_longer_than_max_wait_secs() -> None:
    op, hook = one_a_step()
    real = InProcessCluster(num_ps=1)
    chief = Flaky(real.chief)

    def not_yet(reply: Any) -> Any:
        return replace(reply, state=ModelState.WAIT, waiting_for="ps 0 is brought back")

    master = SimpleNamespace(chief=chief, shards=real.shards)
    with pytest.raises(DeadlineExceeded, match="ps 0 is brought back"):
        with MonitoredTrainingSession(master, hooks=[hook], worker_index=0, max_wait_secs=0.2) as session:
            assert session.run(op).is_accepted
            give_up(session)
            chief.answer("RegisterModelRequest", *[not_yet] * 100_000)
            session.run(op)


def test_closing_waits_for_a_silent_chief_no_longer_than_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    op, hook = one_a_step()
    asked: list[float | None] = []

    def finish(self: Session, reason: str = "", timeout_s: float | None = None) -> int:
        asked.append(timeout_s)
        raise DeadlineExceeded("finish: not within 10 s")

    monkeypatch.setattr(Session, "finish", finish)
    with pytest.raises(DeadlineExceeded):
        with MonitoredTrainingSession("", hooks=[hook]) as session:
            session.run(op)
    assert asked == [10.0]


def test_session_with_an_address_as_master_joins_over_the_network(socket_dir: Path) -> None:
    op, hook = one_a_step()
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(), stack, directory=socket_dir)
        with MonitoredTrainingSession(cluster.chief_address, hooks=[hook], worker_index=0) as session:
            assert session.run(op).is_accepted
        assert cluster.chief.ended() == 0  # the chief worker's end was the cluster's


def test_session_without_a_master_makes_a_cluster_of_its_own() -> None:
    op, hook = one_a_step()
    with MonitoredTrainingSession("", hooks=[hook]) as session:
        assert session.run(op).is_accepted
