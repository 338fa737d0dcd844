"""One contract for how workers are coordinated, in process and over gRPC: bounded staleness, no waiting, and merging."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DeadlineExceeded, InvalidSpec
from ps_protocol.model.policy import PolicySpec
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Cluster, Shape, Start
from worker_client import EmbeddingTable, IndexedSlices, PushOutcome, Session

ONES = {"a": np.ones(3), "b": np.ones(40), "t": IndexedSlices([1, 8], np.ones((2, 2), np.float32))}
POLICIES = [worker_client.ssp_policy(1), worker_client.async_policy(), worker_client.async_policy(use_locking=False)]


def joined(cluster: Cluster, policy: PolicySpec | None = None) -> Session:
    session = cluster.session()
    if policy is not None:
        session.set_policy(policy, timeout_s=20)
    values = {"a": np.zeros(3), "b": np.zeros(40), "t": EmbeddingTable((10, 2))}
    session.create_or_join(values, optimizer=worker_client.sgd(1.0), timeout_s=20)
    return session


def assert_all(session: Session, value: float) -> None:
    variables = session.read()
    np.testing.assert_array_equal(variables["a"], np.full(3, value))
    np.testing.assert_array_equal(variables["b"], np.full(40, value))
    np.testing.assert_array_equal(session.read_rows("t", [8, 0]), [[value, value], [0, 0]])


def test_workers_learn_how_many_inner_steps_to_make_so_that_all_come_together(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    sessions = [joined(cluster, worker_client.async_policy()), joined(cluster)]
    assert [session.inner_steps(100) for session in sessions] == [100, 100], "nothing is known"
    for pace_s in (1.0, 4.0), (1.0, 4.0):  # a worker hears of the others with its next token
        for session, seconds in zip(sessions, pace_s, strict=True):
            session.inner_steps(100, made=(100, 100 * seconds))
            session.step(ONES, timeout_s=20)
    assert [session.inner_steps(100) for session in sessions] == [100, 25]
    assert [session.inner_steps(2) for session in sessions] == [2, 1], "at least one"
    with pytest.raises(InvalidSpec, match="inner steps: got 0 in 1 s"):
        sessions[0].inner_steps(100, made=(0, 1.0))
    wrong: tuple[Any, ...] = (100, (100,), (100, 1.0, 2.0), (1.5, 1.0), ("many", 1.0), (100, "long"), (100, None))
    for made in wrong:
        with pytest.raises(InvalidSpec, match=r"inner_steps\(\): made .*, want how many and in how many seconds, for example"):
            sessions[0].inner_steps(100, made=made)
    with pytest.raises(InvalidSpec, match=f"inner steps: got {2**70} in 1 s, want 1 to 1000000000"):
        sessions[0].inner_steps(100, made=(2**70, 1.0))
    with pytest.raises(InvalidSpec, match=r"inner_steps\(\): got 0, want how many at most"):
        sessions[0].inner_steps(0)


def test_staleness_is_reported_and_its_bound_drops_or_scales(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    fast = joined(cluster, worker_client.async_policy(max_staleness=1))
    slow = joined(cluster)
    for _ in range(3):
        fast.step(ONES, timeout_s=20)
    push = slow.push(ONES)
    assert (push.outcome, push.step, push.staleness) == (PushOutcome.STALE, 0, 3)
    assert_all(slow, -3)
    slow.set_policy(worker_client.async_policy(max_staleness=1, too_stale="scale"), timeout_s=20)
    for _ in range(3):
        fast.step(ONES, timeout_s=20)
    result = slow.step(ONES, timeout_s=20)
    assert (result.outcome, result.step, result.applied_step, result.staleness) == (PushOutcome.ACCEPTED, 3, 6, 3)
    np.testing.assert_allclose(result.factor, 1 / 3)
    np.testing.assert_allclose(slow.read()["a"], np.full(3, -6 - 1 / 3))


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda policy: policy.text)
def test_a_worker_that_never_waits_may_push_without_limit(start: Start, policy: PolicySpec) -> None:
    session = joined(start(Shape(num_ps=2, num_workers=1)), policy)
    pushes = [session.push(ONES) for _ in range(12)]
    assert all(push.is_accepted for push in pushes)
    assert [push.applied_step for push in pushes] == list(range(12))
    assert session.wait(timeout_s=20)
    assert_all(session, -12)


def test_a_worker_too_far_ahead_waits_for_the_slowest(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    fast, slow = joined(cluster, worker_client.ssp_policy(2)), joined(cluster)
    for _ in range(2):
        fast.step(ONES, timeout_s=20)
    with pytest.raises(DeadlineExceeded, match="worker 1"):
        fast.step(ONES, timeout_s=0.3)
    assert slow.step(ONES, timeout_s=20).is_accepted
    assert fast.wait(timeout_s=20)
    assert_all(fast, -4)


@also_over("shared memory")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.text)
def test_workers_in_threads_lose_nothing_where_updates_are_locked(start: Start, policy: PolicySpec) -> None:
    cluster = start(Shape(num_ps=2, num_workers=3))
    observer = cluster.observer()
    sessions = [joined(cluster, policy if index == 0 else None) for index in range(3)]
    accepted: list[bool] = []

    def work(session: Session) -> None:
        for _ in range(15):
            session.read()
            accepted.append(session.step(ONES, timeout_s=30).is_accepted)
        session.close()

    threads = [threading.Thread(target=work, args=(session,), daemon=True) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert accepted == [True] * 45
    assert observer.status().global_step == 45
    values = observer.read(timeout_s=20)["b"]
    if policy.use_locking:
        np.testing.assert_array_equal(values, np.full(40, -45))
    else:
        assert -45 <= values.min() <= values.max() < 0


def test_a_late_contribution_is_in_the_next_outer_step_by_its_weight(start: Start) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    fast, slow = joined(cluster, worker_client.outer_policy(grace_s=0.0)), joined(cluster)
    assert fast.step(ONES, timeout_s=20).is_accepted
    result = slow.step({"a": np.full(3, 5.0), "b": np.full(40, 5.0), "t": None}, timeout_s=20)
    assert (result.outcome, result.step, result.applied_step, result.staleness) == (PushOutcome.ACCEPTED, 0, 1, 1)
    assert slow.read()["a"].tolist() == [-6.0] * 3
    fast.set_policy(worker_client.outer_policy(2), timeout_s=20)
    for session in (fast, slow):
        session.read()
    thread = threading.Thread(target=fast.step, args=(ONES,), kwargs={"weight": 3, "timeout_s": 20})
    thread.start()
    assert slow.step({"a": np.full(3, 5.0), "b": None, "t": None}, weight=1.0, timeout_s=20).is_accepted
    thread.join(20)
    values = slow.read()
    assert values["a"].tolist() == [-8.0] * 3
    assert values["b"].tolist() == [-7.0] * 40
    with pytest.raises(InvalidSpec, match="weight: got 0, want a number from 1e-12"):
        slow.push(ONES, weight=0)


@pytest.mark.parametrize("num_ps", [1, 3])
@pytest.mark.parametrize("make", [worker_client.sync_policy, worker_client.outer_policy])
def test_a_trimmed_step_leaves_out_what_is_largest_and_smallest_in_each_element(
    start: Start, make: Callable[..., PolicySpec], num_ps: int
) -> None:
    cluster, policy = start(Shape(num_ps=num_ps, num_workers=3)), make(merge="trimmed_mean:0.34")
    sessions = [joined(cluster, policy if index == 0 else None) for index in range(3)]
    given = [(1.0, 1e30), (np.inf, 2.0), (3.0, -1e30)]
    step_together(
        sessions, [{"a": np.full(3, a), "b": np.full(40, b), "t": IndexedSlices([8], np.full((1, 2), a, np.float32))} for a, b in given]
    )
    values = sessions[0].read()
    assert values["a"].tolist() == [-3.0] * 3 and values["b"].tolist() == [-2.0] * 40
    np.testing.assert_array_equal(sessions[0].read_rows("t", [8]), [[-3, -3]])


@pytest.mark.parametrize("num_ps", [1, 3])
def test_a_contribution_counts_at_most_so_often_as_the_median_norm_of_the_others(start: Start, num_ps: int) -> None:
    cluster = start(Shape(num_ps=num_ps, num_workers=3))
    sessions = [joined(cluster, worker_client.sync_policy(merge="bounded_mean:2") if index == 0 else None) for index in range(3)]
    # Norms of all variables together: 5, 10 and 1000; the last is limited to 2 x 7.5, and counts with weight 2.
    given = [(3.0, 4.0), (6.0, 8.0), (600.0, 800.0)]
    step_together(sessions, [_along_axes(a, b) for a, b in given], weights=(1.0, 1.0, 2.0))
    values = sessions[0].read()
    np.testing.assert_allclose(values["a"], [-(3 + 6 + 2 * 9) / 4, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(values["b"], [-(4 + 8 + 2 * 12) / 4, *[0] * 39], rtol=1e-6)


@pytest.mark.parametrize("num_ps", [1, 3])
@pytest.mark.parametrize("limits", [{}, {"clip_norm": 2.0}])
def test_a_radial_step_has_the_mean_of_the_norms_and_of_the_directions_of_each_variable(
    start: Start, limits: dict[str, Any], num_ps: int
) -> None:
    cluster = start(Shape(num_ps=num_ps, num_workers=3))
    sessions = [cluster.session() for _ in range(3)]
    sessions[0].set_policy(worker_client.outer_policy(merge="radial_mean"), timeout_s=20)
    split = worker_client.Variable(np.zeros((3, 2), np.float32), partitioner=worker_client.fixed_size_partitioner(num_ps))
    for session in sessions:
        values = {"w": split, "b": np.zeros(2), "t": EmbeddingTable((10, 2))}
        session.create_or_join(values, optimizer=worker_client.sgd(1.0), timeout_s=20, **limits)
    rng = np.random.default_rng(5)
    given: list[dict[str, Any]] = [
        {"w": rng.standard_normal((3, 2)).astype(np.float32) * 10**power, "b": None, "t": None} for power in (0, 1, 3)
    ]
    given[1]["b"], given[2]["b"] = np.array([3.0, 4.0]), np.zeros(2)
    given[0]["t"], given[2]["t"] = (IndexedSlices([row], np.full((1, 2), value, np.float32)) for row, value in ((1, 1.0), (8, 3.0)))
    step_together(sessions, given, weights=(1.0, 2.0, 5.0))
    read = sessions[0].read()
    most = limits.get("clip_norm", np.inf)
    np.testing.assert_allclose(-read["w"], _radial([one["w"] for one in given], (1, 2, 5), most), rtol=1e-5)
    np.testing.assert_allclose(-read["b"], _radial([given[1]["b"], given[2]["b"]], (2, 5), most), rtol=1e-5)
    # A row's mean is of those that have it, so the two keep their unit vectors.
    norm = min(most, (1 * 2**0.5 + 5 * 18**0.5) / 6)
    np.testing.assert_allclose(-sessions[0].read_rows("t", [1, 8]), np.full((2, 2), norm / 2), rtol=1e-5)


def _radial(gradients: Sequence[Any], weights: Sequence[float], most: float) -> Any:
    norms = [float(np.linalg.norm(one)) for one in gradients]
    direction = sum(weight * one / norm for weight, one, norm in zip(weights, gradients, norms, strict=True) if norm)
    norm = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights)
    return min(norm, most) * direction / np.linalg.norm(direction)


def _along_axes(a: float, b: float) -> dict[str, Any]:
    return {"a": np.array([a, 0, 0]), "b": np.array([b, *[0] * 39]), "t": None}


def step_together(sessions: Sequence[Session], gradients: Sequence[dict[str, Any]], *, weights: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
    with ThreadPoolExecutor(len(sessions)) as threads:
        steps = [
            threads.submit(session.step, given, weight=weight, timeout_s=20)
            for session, given, weight in zip(sessions, gradients, weights, strict=True)
        ]
    assert all(step.result().is_accepted for step in steps)


@also_over("shared memory")
def test_policy_changes_under_way_and_other_workers_hear_of_it(start: Start) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    session, other, observer = joined(cluster), joined(cluster), cluster.observer()
    num_accepted = 0
    sync, fifo = worker_client.sync_policy(), worker_client.sync_policy(tokens="fifo")
    for policy in [worker_client.ssp_policy(5), sync, worker_client.async_policy(), fifo, worker_client.async_policy(), sync]:
        observer.set_policy(policy, timeout_s=20)
        # In sync, one worker makes the steps; what the first step after a change becomes is the chief's affair.
        for worker in (session,) if policy in (sync, fifo) else (session, other):
            num_accepted += sum(worker.step(ONES, timeout_s=20).is_accepted for _ in range(4))
        assert session.policy.reads_latest == policy.reads_latest
    assert num_accepted == observer.status().global_step >= 25
    assert_all(session, -num_accepted)


@pytest.mark.parametrize("policy", [worker_client.async_policy(), worker_client.sync_policy(tokens="fifo")], ids=lambda policy: policy.text)
def test_worker_whose_step_is_gone_under_another_policy_takes_the_newest_and_no_token(start: Start, policy: PolicySpec) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    fast, slow = joined(cluster), joined(cluster)
    fast.set_policy(policy, timeout_s=20)
    num_accepted = sum(fast.step(ONES, timeout_s=20).is_accepted for _ in range(5))
    assert_all(slow, -num_accepted)
    assert (slow.policy.reads_latest, slow.local_step) == (True, num_accepted)
    assert slow.push(ONES).is_accepted


def test_whether_servers_apply_on_arrival_cannot_change_once_there_is_a_model(start: Start) -> None:
    session = joined(start(Shape(num_ps=2, num_workers=1)))
    with pytest.raises(InvalidSpec, match="choose it when the cluster is started"):
        session.set_policy(POLICIES[2], timeout_s=20)
    assert session.step(ONES, timeout_s=20).is_accepted
    assert_all(session, -1)
