"""Outer steps with moves of four bits over processes that are killed: the same bits as without."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster.processes import Plan, ProcessCluster

NUM_STEPS = 100


def values_after(directory: Path, kills: Sequence[Sequence[str]]) -> list[bytes]:
    """The bytes of both workers' values at the end of a training in which these processes were killed, one after the other."""
    plan = Plan(
        num_ps=2,
        num_workers=2,
        max_steps=NUM_STEPS,
        lease_s=1.5,
        durability="step",
        program=("-m", "tests.processes.training.outer_worker", str(directory), "int4"),
        transport="grpc",
    )
    with ExitStack() as stack:
        cluster = ProcessCluster(plan, stack, directory=directory).start()
        for names in kills:
            step = cluster.await_status(lambda status: status.global_step > 0, what="the first steps").global_step
            cluster.await_status(lambda status: status.global_step > step + 5, what="further steps")  # noqa: B023
            assert len(cluster.running(cluster.workers)) == 2, cluster.logs()
            cluster.kill(*names)
            cluster.restart(*names)
        cluster.await_(lambda: not cluster.running(cluster.workers), what="the end", timeout_s=120)
        assert [cluster.processes[name].returncode for name in cluster.workers] == [0, 0], cluster.logs()
    return [one for index in range(2) for one in values_in(directory / f"worker-{index}.values")]


def values_in(path: Path) -> list[bytes]:
    with np.load(path) as file:  # noqa: TID251 (our own)
        return [file[name].tobytes() for name in file.files]


@pytest.mark.timeout(300)
def test_a_kill_of_any_role_changes_no_bit(socket_dir: Path) -> None:
    expected = values_after(socket_dir / "a", [])
    kills = [("worker 0",), ("ps 1",), ("chief",), ("worker 1", "chief")]
    assert values_after(socket_dir / "b", kills) == expected
