"""A session whose cluster rolls back, or gets another chief: it continues by itself, and reports the outcome of its contributions."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DeadlineExceeded, EpochMismatch, LeaseExpired, Superseded, Unavailable, WorkerIndexTaken
from ps_protocol.roles.chief import ParticipantKind
from tests.support.chief.rolling import RollingCluster
from tests.support.waiting import wait_until
from worker_client import PushOutcome, Session, sync_replicas
from worker_client.core.state import WorkerState

VALUES = {"a": np.zeros(40), "b": np.zeros(40)}
ONES = {name: np.ones(40) for name in VALUES}


def join(session: Session) -> None:
    session.create_or_join(VALUES, optimizer=worker_client.sgd(1.0))


def assert_value(session: Session, value: float) -> None:
    for array in session.read().values():
        np.testing.assert_array_equal(array, np.full(40, value))


def rolled_back(after: int = 2, **options: Any) -> tuple[RollingCluster, Session]:
    """A worker that has made some steps, and a cluster that was brought back since."""
    cluster = RollingCluster(join, **options)
    session = cluster.session()
    for _ in range(after):
        assert session.step(ONES, timeout_s=20).is_accepted
    cluster.roll_back()
    return cluster, session


def test_a_step_after_a_rollback_returns_rolled_back_and_the_worker_continues_at_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    _, session = rolled_back()
    with session:
        gradients = session.gradient_buffers()
        result = session.step(ONES, timeout_s=20)
        assert (result.outcome, result.step, result.is_accepted) == (PushOutcome.ROLLED_BACK, 2, False)
        assert (session.local_step, session.global_step, session.epoch, session.num_rollbacks) == (0, 0, 2, 1)
        assert any("worker 0: rolled back to step 0 (epoch 2): cluster epoch is 2" in text for text in caplog.messages)
        assert_value(session, 0.0)
        assert session.step(ONES, timeout_s=20).is_accepted
        assert_value(session, -1.0)
        assert all(session.gradient_buffers()[name] is array for name, array in gradients.items())


@pytest.mark.parametrize("act", [Session.wait, Session.read_metrics], ids=lambda act: act.__name__)
def test_every_call_continues_after_a_rollback(act: Callable[[Session], Any]) -> None:
    cluster, session = rolled_back()
    with session:
        act(session)
        assert (session.local_step, session.num_rollbacks) == (0, 1)
        cluster.roll_back()
        assert session.push(ONES).outcome is PushOutcome.ROLLED_BACK
        assert session.step(ONES, timeout_s=20).is_accepted
        assert_value(session, -1.0)


@pytest.mark.parametrize("act", [lambda s: s.read(), Session.wait], ids=["read", "wait"])
def test_a_rejoin_that_ran_out_of_time_is_completed_by_the_next_call(
    act: Callable[[Session], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = rolled_back()
    join = WorkerState.join

    def late(self: WorkerState, **options: Any) -> bool:
        monkeypatch.setattr(WorkerState, "join", join)
        raise DeadlineExceeded("no token in time")

    with session:
        monkeypatch.setattr(WorkerState, "join", late)
        with pytest.raises(DeadlineExceeded):
            session.step(ONES, timeout_s=20)
        act(session)
        assert_value(session, 0.0)
        assert (session.epoch, session.local_step, session.num_rollbacks) == (2, 0, 1)
        assert session.step(ONES, timeout_s=20).is_accepted


@pytest.mark.parametrize("act", [lambda s: s.step(ONES, timeout_s=20), lambda s: s.push(ONES)], ids=["step", "push"])
def test_the_memory_of_the_epoch_before_a_rollback_is_freed(act: Callable[[Session], Any]) -> None:
    """Also where nobody looks for cycles: a program that makes few objects seldom does, and the variables of a lost server are large."""
    cluster = RollingCluster(join)
    with cluster.session() as session:
        session.step(ONES, timeout_s=20)
        before = weakref.ref(session._worker.model_side)
        gc.disable()
        try:
            cluster.roll_back()
            act(session)
            assert session.epoch == 2
            assert before() is None
        finally:
            gc.enable()


def test_restarted_server_is_waited_for_until_the_chief_knows_of_it() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        session.step(ONES, timeout_s=20)
        cluster.restart_shard(1)
        asked = threading.Event()

        def heard(answer: bool) -> bool:
            asked.set()
            return answer

        def notice() -> None:
            asked.wait(20)
            cluster.roll_back()

        cluster.chief.answer("HeartbeatRequest", heard)
        noticing = threading.Thread(target=notice)
        noticing.start()
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ROLLED_BACK
        noticing.join()
        assert_value(session, 0.0)


def test_server_that_the_chief_knows_nothing_of_is_an_error_in_time() -> None:
    cluster = RollingCluster(join, timeout_s=0.3)
    with cluster.session() as session:
        cluster.restart_shard(1)
        with pytest.raises(EpochMismatch, match="no chief has adopted it"):
            session.step(ONES)


def test_contribution_that_the_checkpoint_has_is_accepted() -> None:
    """The answer was on its way when the cluster was brought back, to a step that has the contribution."""
    cluster = RollingCluster(join)
    with cluster.session() as session:

        def lost(_: Any) -> Any:
            cluster.rise()
            raise Unavailable("the answer was lost")

        cluster.chief.answer("DequeueTokenRequest", lost)
        result = session.step(ONES, timeout_s=20)
        assert (result.outcome, result.step, result.applied_step, session.epoch) == (PushOutcome.ACCEPTED, 0, 0, 2)
        assert_value(session, -1.0)
        assert session.step(ONES, timeout_s=20).is_accepted
        assert_value(session, -2.0)


def test_heartbeat_registers_again_while_the_worker_computes() -> None:
    cluster = RollingCluster(join, lease_s=0.06)
    with cluster.session() as session:
        session.step(ONES, timeout_s=20)
        cluster.replace_chief()
        wait_until(lambda: bool(cluster.registered), what="the worker is registered again")
        assert session.step(ONES, timeout_s=20).is_accepted
        cluster.roll_back()
        wait_until(lambda: bool(cluster.registered), what="the worker is registered in the new epoch")
        # What was computed meanwhile is not even sent.
        sent = len(cluster.shards[0].arguments_of("push_gradients"))
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ROLLED_BACK
        assert len(cluster.shards[0].arguments_of("push_gradients")) == sent
        assert session.step(ONES, timeout_s=20).is_accepted


def test_worker_whose_place_was_taken_is_superseded() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        cluster.chief.refuse("DequeueTokenRequest", LeaseExpired("worker 0: lease ended 31 s ago. Register again"))
        cluster.chief.refuse("RegisterRequest", WorkerIndexTaken("worker 0 is already running on host-b pid 912"))
        with pytest.raises(Superseded, match=r"lease ended 31 s ago.*already running on host-b"):
            session.step(ONES, timeout_s=20)


def test_wait_for_a_chief_that_stays_silent_ends_at_its_own_deadline() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        cluster.chief.refuse("DequeueTokenRequest", *[DeadlineExceeded("the chief does not answer")] * 10_000)
        with pytest.raises(DeadlineExceeded, match=r"a token after step 0: not within 0\.3 s: the chief does not answer"):
            session.step(ONES, timeout_s=0.3)
        cluster.chief._refused.clear()
        assert session.wait(timeout_s=20)
        assert_value(session, -1.0)


def test_repeated_push_to_a_dead_server_is_given_up_once_the_epoch_has_risen(caplog: pytest.LogCaptureFixture) -> None:
    cluster = RollingCluster(join, lease_s=0.06)
    with cluster.session() as session, caplog.at_level(logging.WARNING):
        cluster.shards[1].refuse("push_gradients", *[Unavailable("nobody there")] * 10_000)
        rolling = threading.Timer(0.1, cluster.roll_back)
        rolling.start()
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ROLLED_BACK
        rolling.join()
        cluster.shards[1]._refused.clear()
        assert session.step(ONES, timeout_s=20).is_accepted


def test_observer_reads_on_after_a_rollback() -> None:
    cluster = RollingCluster(join)
    link = cluster.link()
    with (
        cluster.session() as session,
        worker_client.Observer(link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False)) as observer,
    ):
        session.step(ONES, timeout_s=20)
        np.testing.assert_array_equal(observer.read()["a"], np.full(40, -1.0))
        cluster.roll_back()
        np.testing.assert_array_equal(observer.read()["a"], np.zeros(40))
        assert observer.step == 0


def test_a_monitored_session_continues_after_a_rollback() -> None:
    cluster = RollingCluster(lambda session: _declared(session))

    def opened(index: int | None) -> Session:
        link = cluster.link()
        return Session(link, link.register(kind=ParticipantKind.WORKER, index=index, takeover=False))

    with sync_replicas.Graph().as_default():
        sync_replicas.get_variable("w", np.zeros(4))
        op = sync_replicas.GradientDescentOptimizer(1.0).minimize(
            lambda variables: (0.0, {"w": np.ones(4)}), sync_replicas.get_or_create_global_step()
        )
        with sync_replicas.MonitoredTrainingSession(opened, log_step_count_steps=None) as monitored:
            session = monitored.session
            assert [monitored.run(op).outcome for _ in range(2)] == [PushOutcome.ACCEPTED] * 2
            cluster.roll_back()
            assert monitored.run(op).outcome is PushOutcome.ROLLED_BACK
            result = monitored.run(op)
            assert (result.outcome, result.step, monitored.session is session) == (PushOutcome.ACCEPTED, 0, True)
            np.testing.assert_array_equal(monitored.read()["w"], -np.ones(4))


def _declared(session: Session) -> None:
    session.create_or_join({"w": worker_client.Variable(np.zeros(4))}, optimizer=worker_client.sgd(1.0))
