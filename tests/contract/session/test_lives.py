"""A session whose whole cluster is lost and replaced by another with the same numbers: earlier answers do not hold in the new one."""

import numpy as np
import pytest

import worker_client
from ps_protocol.roles.chief import TokenReply, TokenResult
from tests.support.chief.rolling import RollingCluster
from worker_client import PushOutcome, Session

VALUES = {"w": np.zeros(40)}
ONES = {"w": np.ones(40)}


def join(session: Session) -> None:
    session.create_or_join(VALUES, optimizer=worker_client.sgd(1.0))


def assert_begun_anew(session: Session, *, num_lost: int) -> None:
    """The worker is at the beginning, in an epoch of the number that the one before had, and continues there."""
    assert (session.local_step, session.epoch, session.num_rollbacks) == (0, 1, num_lost)
    np.testing.assert_array_equal(session.read()["w"], VALUES["w"])
    assert session.step(ONES, timeout_s=20).is_accepted


def test_contributions_accepted_in_a_lost_life_are_no_longer_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """The chief has counted it, all is lost, and the next cluster has the numbers of the one before: epoch, worker and incarnation."""
    cluster = RollingCluster(join)
    with cluster.session() as session:

        def counted_and_lost(reply: TokenReply) -> TokenReply:
            assert reply.commit is not None and reply.commit.outcome is PushOutcome.ACCEPTED
            cluster.begin_anew()
            return TokenReply(result=TokenResult.WAIT, step=0, commit=reply.commit, global_step=0)

        cluster.chief.answer("DequeueTokenRequest", counted_and_lost)
        result = session.step(ONES, timeout_s=20)
        assert (result.outcome, result.step) == (PushOutcome.ROLLED_BACK, 0)
        assert any(
            "rolled back to step 0 (epoch 1): the cluster that you have joined was lost as a whole" in text for text in caplog.messages
        )
        assert_begun_anew(session, num_lost=1)


def test_rows_of_a_step_that_only_the_lost_life_had_are_not_waited_for() -> None:
    cluster = RollingCluster(
        lambda session: session.create_or_join({"t": worker_client.EmbeddingTable((4, 2))}, optimizer=worker_client.sgd(1.0))
    )
    ones = {"t": worker_client.IndexedSlices([1], np.ones((1, 2), np.float32))}
    with cluster.session() as session:
        assert session.step(ones, timeout_s=20).is_accepted
        cluster.begin_anew()
        np.testing.assert_array_equal(session.read_rows("t", [1]), np.zeros((1, 2)))
        assert (session.local_step, session.epoch, session.num_rollbacks) == (0, 1, 1)
