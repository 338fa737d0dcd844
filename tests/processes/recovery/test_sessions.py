"""Sessions over killed processes: a parameter server, and a chief that restarts at another address. Their loops see no error."""

import gc
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from ps_protocol.shared_memory.segment import NAME_PREFIX, can_share
from tests.support.processes.processes import Process, start
from tests.support.waiting import wait_until
from worker_client import PushOutcome, Session

VALUES = {"w": np.zeros(1000, np.float32), "b": np.zeros(500, np.float32)}
ONES = {name: np.ones_like(value) for name, value in VALUES.items()}


class KilledCluster:
    """Two servers and a chief as processes, with checkpoints every few steps, and two workers in threads."""

    def __init__(self, directory: Path, stack: ExitStack, *, transport: str) -> None:
        self._directory, self._stack, self._transport = directory, stack, transport
        self.servers = [self.start_server(index) for index in range(2)]
        self.chief = self.start_chief("chief")
        self.sessions: dict[int, Session] = {}
        self.outcomes: list[PushOutcome] = []
        self.failures: list[BaseException] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(2)]
        for thread in self._threads:
            thread.start()

    def start_server(self, index: int) -> "subprocess.Popen[bytes]":
        return self._start("ps_server", "--index", str(index), "--address", f"unix:{self._directory}/ps{index}")

    def start_chief(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        servers = ",".join(f"unix:{self._directory}/ps{index}" for index in range(2))
        sizes = ("--workers", "2", "--checkpoint-steps", "10", *options)
        return self._start("chief", "--address", f"unix:{self._directory}/{name}", "--ps", servers, *sizes)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(10)

    def reach(self, is_there: Callable[[Session], bool], what: str) -> None:
        """Waits until that holds for both workers."""

        def has_come() -> bool:
            return bool(self.failures) or (len(self.sessions) == 2 and all(map(is_there, self.sessions.values())))

        wait_until(has_come, timeout_s=40, what=what)
        assert not self.failures, self.failures

    def go_on(self, num_steps: int) -> None:
        """Waits until both workers have made some more steps."""
        step = max((session.local_step for session in self.sessions.values()), default=0) + num_steps
        self.reach(lambda session: session.local_step >= step, f"step {step}")

    def _start(self, module: str, *options: str) -> Process:
        place = ("--checkpoint-dir", str(self._directory / "checkpoints"))
        return start(self._stack, "-m", module, *options, *place)

    def _work(self, index: int) -> None:
        try:
            address = f"unix:{self._directory}/chief"
            with worker_client.connect(address, worker_index=index, transport=self._transport, timeout_s=40) as session:
                session.create_or_join(VALUES, optimizer=worker_client.sgd(1.0))
                self.sessions[index] = session
                # One of them keeps the arrays that it is given once, over all that happens.
                gradients = session.gradient_buffers() if index else ONES
                for array in gradients.values():
                    array[...] = 1
                while not self._stopped.wait(0.002):
                    # Also after a rollback the variables are those of the step.
                    for value in session.read().values():
                        np.testing.assert_array_equal(value, np.full_like(value, -session.local_step))
                    self.outcomes.append(session.step(gradients, timeout_s=40).outcome)
                    if session.is_finished:
                        return
                session.finish("the test is over")  # releases the other one
        except BaseException as error:
            if not self._stopped.is_set():
                self.failures.append(error)


@pytest.fixture(params=["grpc", "shared_memory"])
def cluster(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[KilledCluster]:
    with ExitStack() as stack:
        cluster = KilledCluster(socket_dir, stack, transport=request.param)
        try:
            yield cluster
        finally:
            cluster.stop()


@pytest.mark.parametrize("cluster", ["shared_memory"], indirect=True)
@pytest.mark.skipif(not can_share(), reason="memory cannot be shared on this system, so there is none to let go")
def test_the_shared_memory_of_a_lost_server_is_unmapped(cluster: KilledCluster) -> None:
    """A program that makes few objects seldom looks for cycles: what they keep stays for hours."""

    def begin(epoch: int) -> set[str]:
        """Has the next process of server 1 take part; returns what this process has mapped of it."""
        earlier = mapped_segments(server=1)
        cluster.servers[1].kill()
        cluster.servers[1].wait()
        cluster.servers[1] = cluster.start_server(1)
        cluster.reach(lambda session: session.epoch == epoch, f"epoch {epoch}")
        # Sharing begins beside the steps, which go over gRPC until then.
        wait_until(lambda: mapped_segments(server=1) - earlier, what=f"memory is shared in epoch {epoch}")
        cluster.go_on(15)
        return mapped_segments(server=1) - earlier

    gc.collect()
    gc.disable()
    try:
        cluster.go_on(15)  # in the first epoch, of which one of the workers keeps arrays
        gone = begin(2) | begin(3)
        begin(4)
        wait_until(lambda: not gone & mapped_segments(server=1), what="what was shared with the servers before is not mapped any more")
    finally:
        gc.enable()


def mapped_segments(*, server: int) -> set[str]:
    """Names of a server's segments, each with the server's incarnation, in this process's address space."""
    return set(re.findall(rf"/memfd:{NAME_PREFIX}\S*-ps{server}-\w+", Path("/proc/self/maps").read_text()))


def test_workers_continue_whatever_is_killed(cluster: KilledCluster) -> None:
    cluster.go_on(15)
    cluster.servers[1].kill()
    cluster.servers[1].wait()
    cluster.start_server(1)
    cluster.reach(lambda session: session.epoch == 2, "the new epoch")
    cluster.go_on(15)
    assert {session.num_rollbacks for session in cluster.sessions.values()} == {1}
    cluster.chief.kill()
    cluster.chief.wait()
    moved = cluster.start_chief("chief-elsewhere", "--takeover")
    cluster.go_on(15)
    assert moved.poll() is None
    assert {session.epoch for session in cluster.sessions.values()} == {2}
    assert set(cluster.outcomes) <= {PushOutcome.ACCEPTED, PushOutcome.ROLLED_BACK}
    assert cluster.outcomes.count(PushOutcome.ROLLED_BACK) <= 2


@pytest.mark.parametrize("cluster", ["grpc"], indirect=True)
def test_workers_continue_in_another_life_of_the_cluster_when_all_other_processes_were_lost(cluster: KilledCluster) -> None:
    cluster.go_on(15)
    for process in (cluster.chief, *cluster.servers):
        process.kill()
        process.wait()
    for index in range(2):
        cluster.start_server(index)
    cluster.start_chief("chief")
    cluster.reach(lambda session: session.epoch == 2, "the new epoch")
    cluster.go_on(15)
    assert {session.num_rollbacks for session in cluster.sessions.values()} == {1}
    assert set(cluster.outcomes) <= {PushOutcome.ACCEPTED, PushOutcome.ROLLED_BACK}


@pytest.mark.parametrize("cluster", ["shared_memory"], indirect=True)
def test_workers_leave_a_chief_that_is_stopped_for_another(cluster: KilledCluster) -> None:
    """A stopped process breaks no connection: what hangs there is ended once another chief is known to the servers."""
    cluster.go_on(5)
    cluster.chief.send_signal(signal.SIGSTOP)
    cluster.start_chief("chief-elsewhere", "--takeover")
    cluster.go_on(15)
    cluster.chief.send_signal(signal.SIGCONT)
    assert cluster.chief.wait(20) == 1, "the one that woke has been superseded"
    cluster.go_on(5)
    assert set(cluster.outcomes) == {PushOutcome.ACCEPTED}
