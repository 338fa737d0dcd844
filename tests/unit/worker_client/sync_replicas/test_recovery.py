"""A monitored session that is lost or begins from a checkpoint: what is repeated, what is not, and what it begins with."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import EpochMismatch, LeaseExpired, PsError, ShuttingDown, Superseded, Unavailable
from tests.support.facade import FakeCluster, Recording, quadratic
from worker_client.sync_replicas import (
    GradientDescentOptimizer,
    Graph,
    MonitoredTrainingSession,
    SyncReplicasOptimizer,
    TrainOp,
    get_or_create_global_step,
    get_variable,
)

LOSS = quadratic()


@pytest.fixture(autouse=True)
def graph() -> Iterator[Graph]:
    with Graph().as_default() as made:
        get_variable("w", np.zeros(2))
        yield made


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def train_op(loss: Any = LOSS) -> TrainOp:
    return GradientDescentOptimizer(1.0).minimize(loss, get_or_create_global_step())


@pytest.mark.parametrize("error", [Unavailable("gone"), LeaseExpired("paused"), EpochMismatch("rolled back")])
@pytest.mark.parametrize("is_counted", [False, True])
def test_push_of_a_lost_session_is_not_repeated(
    error: Any, is_counted: bool, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it counts cannot be known: the answer may be what was lost."""
    op, record = train_op(), list[str]()
    with MonitoredTrainingSession(cluster, hooks=[Recording(record)]) as session:
        lost = session.session
        cluster.faults.append((error, is_counted))
        with caplog.at_level(logging.WARNING):
            result, step = session.run([op, get_or_create_global_step()])
        assert (result.outcome, result.loss, step, len(cluster.pushes)) == (None, 1.0, is_counted, is_counted)
        assert "session lost, making a new one" in caplog.text
        assert lost.is_closed
        assert session.session is not lost
        assert cluster.opened == [(None, False), (3, True)]
        assert session.run(op).is_accepted
    assert [word.split()[0] for word in record] == ["begin", "created", "before", "created", "after", "before", "after", "end"]


def test_run_is_repeated_if_the_session_was_lost_before_the_push(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    op = train_op()
    with MonitoredTrainingSession(cluster) as session:

        def lost(_: str, indices: Any = None) -> Any:
            raise Unavailable("gone while reading")

        monkeypatch.setattr(session.session, "read", lambda: lost("w"))
        assert session.run(op).is_accepted
    assert len(cluster.pushes) == 1


@pytest.mark.parametrize("error", [Superseded("worker 3 is another process now"), ShuttingDown("the chief is shutting down")])
def test_worker_that_was_replaced_or_sent_home_gives_up(error: PsError, cluster: FakeCluster) -> None:
    op = train_op()
    cluster.faults.append((error, False))
    with pytest.raises(type(error)), MonitoredTrainingSession(cluster) as session:
        session.run(op)


def test_chief_begins_with_the_newest_whole_checkpoint(cluster: FakeCluster, tmp_path: Path) -> None:
    op = SyncReplicasOptimizer(GradientDescentOptimizer(1.0), 1).minimize(LOSS, get_or_create_global_step())
    with MonitoredTrainingSession(cluster, checkpoint_dir=tmp_path, save_checkpoint_steps=1) as session:
        session.run(op)
    (tmp_path / "model.ckpt-00000009.safetensors").write_bytes(b"damaged")
    new = FakeCluster()
    with MonitoredTrainingSession(new, checkpoint_dir=tmp_path) as session:
        np.testing.assert_equal(session.read()["w"], np.ones(2))


def test_checkpoint_of_another_model_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    train_op()
    MonitoredTrainingSession(cluster, checkpoint_dir=tmp_path)
    with Graph().as_default():
        get_variable("w", np.zeros(3))
        train_op()
        with pytest.raises(ValueError, match=r"'w' has shape \(3,\) float64, the checkpoint's has \(2,\)"):
            MonitoredTrainingSession(FakeCluster(), checkpoint_dir=tmp_path)
