"""The policy and the learning rate change while workers train: no step is lost, no worker hangs, and each worker gets the change."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import worker_client
from ps_protocol.model.policy import PolicySpec
from tests.support.processes.real_cluster import ThreadedCluster, real_cluster, threaded_cluster
from tests.support.sessions.clusters import Shape
from tests.support.waiting import wait_until

SYNC, SSP, ASYNC = worker_client.sync_policy(), worker_client.ssp_policy(2), worker_client.async_policy()
STEPS_A_PHASE = 10
Launch = Callable[..., ThreadedCluster]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def launch(stack: ExitStack, socket_dir: Path) -> Launch:
    """Starts two parameter servers and some workers that have joined a model of which each step takes exactly 1 away."""

    def launched(num_workers: int, model: str = "counting") -> ThreadedCluster:
        cluster = threaded_cluster(Shape(num_ps=2, total_num_replicas=num_workers, lease_s=3.0), stack, directory=socket_dir)
        cluster.all_do("join", model=model)
        return cluster

    return launched


def num_accepted(cluster: ThreadedCluster) -> list[int]:
    """Contributions that count, by worker."""
    return [one.num_accepted for one in cluster.observer.status().participants if one.kind.name == "WORKER"]


def await_everybody(cluster: ThreadedCluster) -> None:
    """Waits until every worker has made a number of contributions from now on."""
    before = num_accepted(cluster)
    wait_until(
        lambda: all(now >= then + STEPS_A_PHASE for now, then in zip(num_accepted(cluster), before, strict=True)),
        timeout_s=20,
        what=f"every worker continues under {cluster.observer.status().policy.text}",
    )


def switch(cluster: ThreadedCluster, policy: PolicySpec) -> int:
    """Changes the policy, sees that everybody continues under it, and returns the first step under it."""
    step = cluster.observer.set_policy(policy, timeout_s=20)
    assert cluster.observer.status().policy == policy
    await_everybody(cluster)
    return step


def test_workers_train_along_through_every_change_and_no_step_is_lost(launch: Launch) -> None:
    cluster = launch(3, "limited")
    outcomes = [worker.begin("train") for worker in cluster.workers]
    await_everybody(cluster)
    changes = [switch(cluster, policy) for policy in (ASYNC, SSP, SYNC)]
    assert 0 < changes[0] < changes[1] < changes[2]
    last_step = cluster.finish()
    results = [outcome() for outcome in outcomes]

    assert {result["local_step"] for result in results} == {last_step}
    assert [worker.do("read", name=name) for worker in cluster.workers for name in "ab"] == [[-last_step] * 2] * 6
    applied = Counter(record[2] for result in results for record in result["records"] if record[0] == "ACCEPTED")
    # Under sync a step is made of three contributions; else of one.
    assert {applied[step] for step in [*range(changes[0] - 1), *range(changes[2], last_step)]} == {3}
    # What was counted for the open step when sync ended has made it, also if that was less than a step takes.
    assert 1 <= applied[changes[0] - 1] <= 3
    assert {applied[step] for step in range(changes[0], changes[2])} == {1}
    assert [policy for result in results for policy in result["policies"]] == ["sync", "async", "ssp(2)", "sync"] * 3


def test_a_stuck_cluster_is_freed_by_a_change_to_async(stack: ExitStack, socket_dir: Path) -> None:
    cluster = real_cluster(Shape(num_ps=2, total_num_replicas=2, lease_s=3.0), stack, directory=socket_dir)
    cluster.all_do("join", model="counting")
    alive, dead = cluster.workers
    cluster.all_do("train", max_steps=3)
    dead.kill()
    outcome = alive.begin("train", max_steps=5)
    wait_until(lambda: "worker 1" in cluster.observer.status().waiting_for, what="the step waits for worker 1")
    assert cluster.observer.status().global_step == 3
    assert cluster.observer.set_policy(ASYNC, timeout_s=20) == 4, "the open step is made of what it has"
    result = outcome()
    assert [record[:3:2] for record in result["records"]] == [["ACCEPTED", step] for step in range(3, 8)]
    assert result["policies"] == ["sync", "async"]
    assert alive.do("read", name="b") == [-8, -8]
    text = cluster.lockstep("status")
    assert "policy async: every contribution is a step" in text and "step 8" in text


def test_a_new_learning_rate_holds_for_whole_steps_and_status_has_its_version(launch: Launch) -> None:
    cluster = launch(2)
    outcomes = [worker.begin("train") for worker in cluster.workers]
    await_everybody(cluster)
    version = cluster.observer.set_hyperparameters(learning_rate=0.25, timeout_s=20)
    status = cluster.observer.status()
    assert (status.hyperparameters_version, status.optimizer) == (version, "sgd (learning_rate 0.25)")
    assert f"), version {version}\n" in cluster.lockstep("status")
    await_everybody(cluster)
    last_step = cluster.finish()
    for outcome in outcomes:
        # The end may have come between a worker's reading and its contribution.
        assert {record[0] for record in outcome()["records"][:-1]} == {"ACCEPTED"}
    # One number for all elements on both servers: before some step each was 1, from it on each was 0.25.
    values = [value for worker in cluster.workers for name in "ab" for value in worker.do("read", name=name)]
    assert len(set(values)) == 1
    num_quarters = (last_step + values[0]) / 0.75
    assert num_quarters == int(num_quarters) >= STEPS_A_PHASE
    assert last_step - num_quarters >= STEPS_A_PHASE
