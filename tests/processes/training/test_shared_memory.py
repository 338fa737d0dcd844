"""Shared memory between real processes: the same values as over gRPC, and no memory left over when a worker or a server is killed."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from ps_protocol.roles.shard import ShardStatus, ShardStatusRequest
from ps_protocol.shared_memory import segment
from ps_protocol.shared_memory.segment import NAME_PREFIX
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.processes.real_cluster import RealCluster, real_cluster
from tests.support.processes.worker_tasks import PATIENCE_VARIABLE
from tests.support.sessions.clusters import Shape
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not segment.boot_id(), reason="this system has no memory that can be shared")

Launch = Callable[..., RealCluster]
STEPS = 12
SHARED, BY_GRPC = [["shared_memory"]] * 2, [["grpc"]] * 2


@pytest.fixture
def launch(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts one parameter server and two workers that have joined the large model."""
    with ExitStack() as stack:

        def launched(name: str = "only", *, transport: str = "shared_memory", **shape: Any) -> RealCluster:
            directory = socket_dir / name
            directory.mkdir()
            monkeypatch.setenv("LOCKSTEP_TRANSPORT", transport)
            cluster = real_cluster(Shape(total_num_replicas=2, **shape), stack, directory=directory)
            cluster.all_do("join", model="large")
            return cluster

        yield launched


def status(directory: Path) -> ShardStatus:
    """What the parameter server reports."""
    with closing(CommandedShard(f"unix:{directory}/ps0")) as shard:
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


def test_values_are_those_of_grpc_to_the_bit(launch: Launch) -> None:
    in_memory, by_grpc = launch("a", transport="shared_memory"), launch("b", transport="grpc")
    assert (in_memory.all_do("transport"), by_grpc.all_do("transport")) == (SHARED, BY_GRPC)
    values = in_memory.all_do("train_randomly", times=STEPS)
    assert values == by_grpc.all_do("train_randomly", times=STEPS)
    assert values[0] == values[1] and len(set(values[0])) == STEPS


def test_killed_worker_leaves_nothing_and_the_other_continues(launch: Launch, socket_dir: Path) -> None:
    cluster = launch(replicas_to_aggregate=1)
    cluster.all_do("train_randomly", times=2)
    before = status(socket_dir / "only")
    assert before.report.num_sharing == 2 and len(mapping(before.process_incarnation)) == 3
    cluster.workers[1].kill()
    wait_until(lambda: status(socket_dir / "only").report.num_sharing == 1, timeout_s=10, what="the server has noticed")
    cluster.workers[0].do("train_randomly", times=3)
    after = status(socket_dir / "only")
    assert after.report.allocated_bytes == before.report.allocated_bytes - (4 << 20)
    assert len(mapping(before.process_incarnation)) == 2


def test_killed_server_leaves_nothing_and_the_workers_say_so(launch: Launch, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "1")
    cluster = launch()
    cluster.all_do("train_randomly", times=2)
    server = status(socket_dir / "only")
    files = set(os.listdir("/dev/shm"))
    outcomes = [worker.begin("train_randomly", times=1_000_000, timeout_s=3) for worker in cluster.workers]
    cluster.servers[0].kill()
    for outcome in outcomes:
        with pytest.raises(AssertionError, match=r"ps 0|parameter server"):
            outcome()
    for worker in cluster.workers:
        worker.kill()
    assert not mapping(server.process_incarnation)
    assert set(os.listdir("/dev/shm")) <= files
