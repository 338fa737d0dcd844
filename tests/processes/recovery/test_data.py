"""Training data over real processes that are killed and stopped: at the end, the model has counted each sample of each pass once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterStatus
from ps_protocol.rpc.chief import GrpcChief
from tests.support.processes.processes import Process, start
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

WORKER = Path(__file__).with_name("data_worker.py")
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 2000, 4, 2


class DataCluster:
    """A server, a chief and two workers as processes; each contribution is a step by itself, and a checkpoint is made now and then."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.server = self.start_server()
        self.chief = self.start_chief()
        self.workers = [self._start_worker(index) for index in range(2)]
        self._client = GrpcChief(f"unix:{directory}/chief")
        stack.callback(self._client.close)

    def start_server(self) -> Process:
        return self._start("-m", "ps_server", "--index", "0", "--address", f"unix:{self._directory}/ps", *self._place)

    def start_chief(self, *options: str) -> Process:
        policy = ("--policy", "async", "--lease", "1.5", "--checkpoint-steps", "50", *options)
        servers = ("--ps", f"unix:{self._directory}/ps")
        return self._start("-m", "chief", "--address", f"unix:{self._directory}/chief", *servers, *policy, *self._place)

    def reach(self, is_there: Callable[[ClusterStatus], bool], what: str) -> None:
        """Waits until the chief reports that; it may be away meanwhile."""

        def has_come() -> bool:
            assert all(worker.poll() is None for worker in self.workers), "a worker has ended"
            try:
                return is_there(self._client.status())
            except PsError:
                return False

        wait_until(has_come, timeout_s=40, what=what)

    def go_on(self, num_ranges: int) -> None:
        """Waits until more ranges are done than there are now."""
        self.reach(lambda status: status.data is not None, "the way through the data")
        data = self._client.status().data
        assert data is not None
        wanted = data.epoch * data.num_ranges + data.num_done + num_ranges
        self.reach(lambda status: done(status) >= wanted, f"{wanted} ranges")

    @property
    def _place(self) -> tuple[str, str]:
        return "--checkpoint-dir", str(self._directory / "checkpoints")

    def _start_worker(self, index: int) -> Process:
        sizes = map(str, (NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS))
        return self._start(str(WORKER), *sizes, LOCKSTEP_CHIEF=f"unix:{self._directory}/chief", LOCKSTEP_WORKER_INDEX=str(index))

    def _start(self, *command: str, **variables: str) -> Process:
        return start(self._stack, *command, environment={"PYTHONPATH": str(ROOT), **variables})


def done(status: ClusterStatus) -> int:
    data = status.data
    return 0 if data is None else data.epoch * data.num_ranges + data.num_done


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[DataCluster]:
    with ExitStack() as stack:
        yield DataCluster(socket_dir, stack)


def test_each_sample_counts_once_whatever_is_killed_or_stopped(cluster: DataCluster, socket_dir: Path) -> None:
    cluster.go_on(40)
    sleeper = cluster.workers[0]
    sleeper.send_signal(signal.SIGSTOP)
    cluster.reach(lambda status: any(one.index == 0 and one.state == "lapsed" for one in status.participants), "the end of its lease")
    sleeper.send_signal(signal.SIGCONT)
    cluster.go_on(40)
    cluster.server.kill()
    cluster.server.wait()
    cluster.server = cluster.start_server()
    cluster.reach(lambda status: status.epoch == 2, "the new epoch")
    cluster.go_on(40)
    cluster.chief.kill()
    cluster.chief.wait()
    cluster.chief = cluster.start_chief("--takeover")
    cluster.go_on(40)
    with worker_client.observe(f"unix:{socket_dir}/chief") as observer:
        assert [worker.wait(60) for worker in cluster.workers] == [0, 0]
        np.testing.assert_array_equal(observer.read()["count"], np.full(NUM_SAMPLES, NUM_EPOCHS, np.float32))
