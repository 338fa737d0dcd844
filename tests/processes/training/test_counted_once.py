"""Data and state of programs over processes that are killed and stopped: each sample counts once, and the state is that of the step."""

import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ps_protocol.roles.chief import ClusterStatus
from tests.support.cluster.processes import Plan, ProcessCluster

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 2000, 4, 2
PLAN = Plan(
    num_workers=2,
    lease_s=1.5,
    durability="interval",
    checkpoint_steps=25,
    # Each contribution is a step by itself.
    chief_flags=("--policy", "async"),
    program=("-m", "tests.processes.training.counting_worker", *map(str, (NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS))),
)


def done(status: ClusterStatus) -> int:
    data = status.data
    return 0 if data is None else data.epoch * data.num_ranges + data.num_done


def go_on(cluster: ProcessCluster) -> None:
    """Waits until more ranges of the data are done than there are now."""
    wanted = done(cluster.await_status(lambda status: status.data is not None, what="the way through the data")) + 40
    cluster.await_status(lambda status: done(status) >= wanted, what=f"{wanted} ranges are done")
    assert len(cluster.running(cluster.workers)) == 2, cluster.logs()


def test_each_sample_counts_once_and_the_state_is_that_of_the_step_whatever_is_killed_or_stopped(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ProcessCluster(PLAN, stack, directory=socket_dir).start()
        go_on(cluster)
        cluster.signal("worker 0", signal.SIGSTOP)
        cluster.await_status(lambda status: any(one.state == "lapsed" for one in status.participants), what="the end of its lease")
        cluster.signal("worker 0", signal.SIGCONT)
        for names in [(), ("worker 0",), ("ps 0",), ("chief",), ("chief", "worker 1"), tuple(cluster.everybody)]:
            cluster.kill(*names)
            cluster.restart(*names)
            go_on(cluster)
        assert cluster.await_status(lambda status: True, what="the chief").epoch == 3
        observer = cluster.observer()
        cluster.await_(lambda: not cluster.running(cluster.workers), what="the data ends")
        assert [cluster.processes[name].returncode for name in cluster.workers] == [0, 0], cluster.logs()
        np.testing.assert_array_equal(observer.read()["samples"], np.full(NUM_SAMPLES, NUM_EPOCHS, np.float32))
