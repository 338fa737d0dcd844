"""Training data over real processes that are killed and stopped: at the end, the model has counted each sample of each pass once."""

import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import worker_client
from ps_protocol.roles.chief import ClusterStatus
from tests.processes.recovery.cluster import Cluster

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 2000, 4, 2


def done(status: ClusterStatus) -> int:
    data = status.data
    return 0 if data is None else data.epoch * data.num_ranges + data.num_done


def go_on(cluster: Cluster, num_ranges: int) -> None:
    """Waits until more ranges are done than there are now."""
    wanted = done(cluster.reach(lambda status: status.data is not None, "the way through the data")) + num_ranges
    cluster.reach(lambda status: done(status) >= wanted, f"{wanted} ranges")


def test_each_sample_counts_once_whatever_is_killed_or_stopped(socket_dir: Path) -> None:
    program = (Path(__file__).with_name("data_worker.py"), NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS)
    # Each contribution is a step by itself.
    with ExitStack() as stack:
        cluster = Cluster(socket_dir, stack, program=program, chief=("--policy", "async", "--checkpoint-steps", 50))
        go_on(cluster, 40)
        sleeper = cluster.processes["worker 0"]
        sleeper.send_signal(signal.SIGSTOP)
        cluster.reach(lambda status: any(one.index == 0 and one.state == "lapsed" for one in status.participants), "the end of its lease")
        sleeper.send_signal(signal.SIGCONT)
        go_on(cluster, 40)
        cluster.restart("ps")
        cluster.reach(lambda status: status.epoch == 2, "the new epoch")
        go_on(cluster, 40)
        cluster.restart("chief")
        go_on(cluster, 40)
        with worker_client.observe(cluster.address) as observer:
            assert cluster.await_workers() == [0, 0]
            np.testing.assert_array_equal(observer.read()["count"], np.full(NUM_SAMPLES, NUM_EPOCHS, np.float32))
