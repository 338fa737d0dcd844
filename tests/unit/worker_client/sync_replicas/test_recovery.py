"""A monitored session that cannot continue, or that begins from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from ps_protocol.errors import PsError, ShuttingDown, Superseded, Unavailable
from tests.support.sessions.facade import FakeCluster, quadratic, train_op
from worker_client.sync_replicas import (
    GradientDescentOptimizer,
    Graph,
    MonitoredTrainingSession,
    SyncReplicasOptimizer,
    get_or_create_global_step,
    get_variable,
)

LOSS = quadratic()


@pytest.mark.parametrize(
    "error", [Superseded("worker 3 is another process now"), ShuttingDown("the chief is shutting down"), Unavailable("tried for 7200 s")]
)
def test_an_error_that_the_session_does_not_recover_from_ends_the_run(error: PsError, cluster: FakeCluster) -> None:
    op = train_op()
    cluster.faults.append(error)
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
