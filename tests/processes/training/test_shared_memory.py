"""Shared memory between real processes: no memory is left over when a worker or a server is killed."""

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import psutil
import pytest

import worker_client
from ps_protocol.roles.shard import ShardStatus, ShardStatusRequest
from ps_protocol.shared_memory import segment
from ps_protocol.shared_memory.segment import NAME_PREFIX
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.cluster.task_workers import TaskWorker, all_do
from tests.support.cluster.tasks import PATIENCE_VARIABLE
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.waiting import wait_until
from worker_client import Session

pytestmark = pytest.mark.skipif(not segment.boot_id(), reason="this system has no memory that can be shared")

Launch = Callable[..., tuple[ProcessCluster, list[TaskWorker]]]


@pytest.fixture
def launch(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts one parameter server and two workers that have joined."""
    with ExitStack() as stack:

        def launched(*, required: int = 2) -> tuple[ProcessCluster, list[TaskWorker]]:
            monkeypatch.setenv("LOCKSTEP_TRANSPORT", "shared_memory")
            plan = Plan(num_workers=2, replicas_to_aggregate=required)
            cluster = ProcessCluster(plan, stack, directory=socket_dir).start()
            workers = [TaskWorker(cluster.chief_address, index, stack) for index in range(2)]
            all_do(workers, "join")
            return cluster, workers

        yield launched


def status(cluster: ProcessCluster) -> ShardStatus:
    """What the parameter server reports."""
    with closing(CommandedShard(cluster.address("ps 0"))) as shard:
        return shard.call(ShardStatusRequest())


def mapping(process_incarnation: int) -> set[int]:
    """Processes that map, or hold open, memory of a start of a parameter server."""
    found = set()
    for process in psutil.process_iter():
        own = Path(f"/proc/{process.pid}")
        try:
            names = [os.readlink(path) for path in (own / "fd").iterdir()]
            names += (own / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it has ended meanwhile, or is not ours
        if any(f"memfd:{NAME_PREFIX}" in name and f"-{process_incarnation:x}-" in name for name in names):
            found.add(process.pid)
    return found


def test_killed_worker_leaves_nothing_and_the_other_continues(launch: Launch) -> None:
    cluster, workers = launch(required=1)
    all_do(workers, "train_randomly", times=2)
    before = status(cluster)
    assert before.report.num_sharing == 2 and len(mapping(before.process_incarnation)) == 3
    workers[1].kill()
    wait_until(lambda: status(cluster).report.num_sharing == 1, timeout_s=10, what="the server has noticed")
    workers[0].do("train_randomly", times=3)
    after = status(cluster)
    assert after.report.allocated_bytes == before.report.allocated_bytes - (4 << 20)
    assert len(mapping(before.process_incarnation)) == 2


def test_killed_server_leaves_nothing_and_the_workers_say_so(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "5")  # also how long a worker waits for a chief that starts beside it
    cluster, workers = launch()
    all_do(workers, "train_randomly", times=2)
    server = status(cluster)
    files = named_files()
    outcomes = [worker.begin("train_randomly", times=1_000_000, timeout_s=3) for worker in workers]
    cluster.kill("ps 0")
    for outcome in outcomes:
        with pytest.raises(AssertionError, match=r"ps 0|parameter server"):
            outcome()
    for worker in workers:
        worker.kill()
    assert not mapping(server.process_incarnation)
    assert named_files() <= files


def named_files() -> set[str]:
    """Names of shared memory on this machine, but of semaphores of Python's own, which a program of another test may have just now."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def mapped_segments(*, server: int) -> set[str]:
    """Names of a server's segments, each with the server's incarnation, in this process's address space."""
    return set(re.findall(rf"/memfd:{NAME_PREFIX}\S*-ps{server}-\w+", Path("/proc/self/maps").read_text()))


def test_the_shared_memory_of_a_lost_server_is_unmapped(socket_dir: Path) -> None:
    """A program that makes few objects seldom looks for cycles: what they keep stays for hours."""
    stopped, sessions = threading.Event(), dict[int, Session]()

    def work(index: int) -> None:
        session = sessions[index] = cluster.session(index)
        session.create_or_join({"w": np.zeros(1000, np.float32)}, optimizer=worker_client.sgd(1.0))
        # One of them keeps the arrays that it is given once, over all that happens.
        gradients = session.gradient_buffers() if index else {"w": np.empty(1000, np.float32)}
        gradients["w"][...] = 1
        while not session.is_finished and not stopped.wait(0.002):
            np.testing.assert_array_equal(session.read()["w"], np.full(1000, -session.local_step))
            session.step(gradients, timeout_s=40)
        session.finish("the test is over")  # releases the other one

    def reach(*, epoch: int, step: int = 0) -> None:
        cluster.await_(
            lambda: any(one.done() for one in working) or all(one.epoch == epoch and one.local_step >= step for one in sessions.values()),
            what=f"step {step} of epoch {epoch}",
        )
        assert not any(one.done() for one in working)

    def begin(epoch: int) -> set[str]:
        """Has the next process of server 1 take part; returns what this process has mapped of it."""
        earlier = mapped_segments(server=1)
        cluster.kill("ps 1")
        cluster.restart("ps 1")
        reach(epoch=epoch)
        # Sharing begins beside the steps, which go over gRPC until then.
        wait_until(lambda: mapped_segments(server=1) - earlier, what=f"memory is shared in epoch {epoch}")
        reach(epoch=epoch, step=sessions[0].local_step + 15)
        return mapped_segments(server=1) - earlier

    plan = Plan(num_ps=2, num_workers=2, durability="interval", checkpoint_steps=10, transport="shared_memory")
    gc.collect()
    gc.disable()
    with ExitStack() as stack:
        stack.callback(gc.enable)
        cluster = ProcessCluster(plan, stack, directory=socket_dir).start()
        pool = stack.enter_context(ThreadPoolExecutor(2))
        stack.callback(stopped.set)
        working = [pool.submit(work, index) for index in range(2)]
        wait_until(lambda: len(sessions) == 2, what="both workers have come")
        reach(epoch=1, step=15)  # in the first epoch, of which one of the workers keeps arrays
        gone = begin(2) | begin(3)
        begin(4)
        wait_until(lambda: not gone & mapped_segments(server=1), what="what was shared with the servers before is not mapped any more")
