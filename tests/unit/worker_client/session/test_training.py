"""Whole training loops: sessions, coordinator and stores in one thread, without a network. Every wait is bounded, so no loop can hang."""

from collections.abc import Callable

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import (
    DeadlineExceeded,
    InvalidSpec,
    ModelMismatch,
    NotInitialized,
    SlotNotFound,
    VariableNotFound,
    WorkerIndexTaken,
)
from ps_protocol.model.variables import Array
from worker_client import PushOutcome, Session

RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(64, 3))
TARGETS = INPUTS @ np.array([1.5, -2.0, 0.5]) + 0.25


def initial() -> dict[str, Array]:
    return {"w": np.zeros(3), "b": np.zeros(())}


def loss_gradients(variables: dict[str, Array], rows: slice) -> dict[str, Array]:
    """Gradients of the mean squared error of a linear model over some rows."""
    error = INPUTS[rows] @ variables["w"] + variables["b"] - TARGETS[rows]
    return {"w": 2 * INPUTS[rows].T @ error / error.size, "b": np.asarray(2 * error.mean())}


def joined(cluster: InProcessCluster, num_workers: int, *, rate: float = 0.1) -> list[Session]:
    sessions = [worker_client.local(cluster) for _ in range(num_workers)]
    for session in sessions:
        session.create_or_join(initial(), optimizer=worker_client.sgd(rate))
    return sessions


def test_single_worker_trains_until_the_last_step() -> None:
    with worker_client.local(max_steps=200) as session:
        assert session.create_or_join(initial(), optimizer=worker_client.sgd(0.1))
        steps = []
        while not session.is_finished:
            result = session.step(loss_gradients(session.read(), slice(None)))
            assert result.is_accepted
            steps.append(result.step)
        assert steps == list(range(200))
        assert (session.local_step, session.is_finished, session.wait()) == (200, True, False)
        variables = session.read()
        np.testing.assert_allclose(variables["w"], [1.5, -2.0, 0.5], atol=1e-6)
        np.testing.assert_allclose(variables["b"], 0.25, atol=1e-6)


@pytest.mark.parametrize("num_ps", [1, 3])
def test_two_workers_equal_one_on_the_union_of_their_batches(num_ps: int) -> None:
    first, second = joined(InProcessCluster(num_ps=num_ps, total_num_replicas=2), 2)
    expected = initial()
    for _ in range(30):
        assert first.push(loss_gradients(first.read(), slice(0, 32))).outcome is PushOutcome.ACCEPTED
        # The second completes the step, which is applied within its call.
        assert second.step(loss_gradients(second.read(), slice(32, 64)), timeout_s=1).is_accepted
        assert first.wait(timeout_s=1)
        gradients = loss_gradients(expected, slice(None))
        expected = {name: expected[name] - 0.1 * gradients[name] for name in expected}
    for session in (first, second):
        for name, value in session.read().items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6)


def test_a_backup_worker_that_is_too_late_is_told_so_and_continues() -> None:
    sessions = joined(InProcessCluster(replicas_to_aggregate=2, total_num_replicas=3), 3)
    for step in range(5):
        late = sessions[step % 3]
        for session in sessions:
            if session is not late:
                assert session.push(loss_gradients(session.read(), slice(None))).is_accepted
        push = late.push(loss_gradients(late.read(), slice(None)))
        assert (push.outcome, push.step, push.global_step) == (PushOutcome.STALE, step, step + 1)
        for session in sessions:
            assert session.wait(timeout_s=1)
            assert session.local_step == step + 1


def test_few_workers_contribute_several_minibatches_a_step() -> None:
    (session,) = joined(InProcessCluster(replicas_to_aggregate=3, total_num_replicas=1), 1)
    local_steps = []
    for _ in range(9):
        assert session.step(loss_gradients(session.read(), slice(None)), timeout_s=1).is_accepted
        local_steps.append(session.local_step)
    assert local_steps == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_a_wait_that_times_out_names_the_missing_worker_and_can_be_resumed() -> None:
    first, second = joined(InProcessCluster(total_num_replicas=2), 2)
    with pytest.raises(DeadlineExceeded, match=r"worker 0 wants a token after step 0: not within 0.01 s: .*1"):
        first.step(loss_gradients(first.read(), slice(0, 32)), timeout_s=0.01)
    assert second.step(loss_gradients(second.read(), slice(32, 64)), timeout_s=1).is_accepted
    assert first.wait(timeout_s=1)
    assert first.local_step == second.local_step == 1


def test_worker_that_fell_behind_reads_a_newer_step_instead_of_a_torn_one() -> None:
    slow, fast = joined(InProcessCluster(replicas_to_aggregate=1, total_num_replicas=2, num_ps=2), 2)
    before = {name: value.copy() for name, value in slow.read().items()}
    for _ in range(4):
        fast.step(loss_gradients(fast.read(), slice(None)), timeout_s=1)
    # What it holds stays as it was; its contribution is stale.
    for name, value in slow.read().items():
        np.testing.assert_array_equal(value, before[name])
    assert slow.push(loss_gradients(before, slice(None))).outcome is PushOutcome.STALE
    assert slow.wait(timeout_s=1)
    assert slow.local_step == 4
    for name, value in slow.read().items():
        np.testing.assert_array_equal(value, fast.read()[name])


def test_a_step_that_is_overwritten_before_it_is_read_is_replaced_by_the_newest() -> None:
    slow, fast = joined(InProcessCluster(replicas_to_aggregate=1, total_num_replicas=2, num_ps=2), 2)
    for _ in range(5):
        fast.step(loss_gradients(fast.read(), slice(None)), timeout_s=1)
    assert slow.local_step == 0
    variables = slow.read()
    assert slow.local_step == 5
    np.testing.assert_array_equal(variables["w"], fast.read()["w"])


def test_finish_releases_all_and_leaves_the_final_variables_readable() -> None:
    first, second = joined(InProcessCluster(total_num_replicas=2), 2)
    first.push(loss_gradients(first.read(), slice(None)))
    assert second.finish("good enough") == 0
    assert not first.wait(timeout_s=1)
    assert first.is_finished and second.is_finished
    np.testing.assert_array_equal(first.read()["w"], np.zeros(3))
    assert first.status().state is worker_client.ClusterState.FINISHED
    assert "good enough" in first.status().reason


def test_last_worker_that_leaves_of_its_own_accord_ends_training() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    observer = worker_client.observe_local(cluster)
    for session in joined(cluster, 2):
        session.close()
    assert observer.status().state is worker_client.ClusterState.FINISHED
    np.testing.assert_array_equal(observer.read()["w"], np.zeros(3))


def test_worker_that_fails_is_shown_with_its_failure() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    first, second = joined(cluster, 2)
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError("division by zero")
    (gone,) = [participant for participant in second.status().participants if participant.state == "left"]
    assert gone.failure == "ZeroDivisionError: division by zero"
    assert second.status().state is worker_client.ClusterState.TRAINING


def test_gradients_written_into_the_sessions_memory_are_pushed_from_there() -> None:
    with worker_client.local() as session:
        session.create_or_join(initial(), optimizer=worker_client.sgd(1.0))
        gradients = session.gradient_buffers()
        gradients["w"][...] = [1, 2, 3]
        gradients["b"][...] = 4
        session.step(gradients)
        np.testing.assert_array_equal(session.read()["w"], [-1, -2, -3])
        assert session.read()["b"] == -4
        assert all(session.gradient_buffers()[name] is gradients[name] for name in gradients)


def test_views_are_the_sessions_own_memory_and_read_only() -> None:
    with worker_client.local() as session:
        session.create_or_join(initial(), optimizer=worker_client.sgd(1.0))
        before = session.views()
        with pytest.raises(ValueError, match="read-only"):
            before["w"][0] = 1
        session.step({"w": np.ones(3), "b": np.ones(())})
        assert session.views()["w"] is before["w"]
        np.testing.assert_array_equal(before["w"], [-1, -1, -1])


def test_variables_split_over_shards_come_as_one_array() -> None:
    values = {"table": np.arange(40.0).reshape(10, 4), "odd": np.arange(7, dtype=np.float32), "none": np.zeros((0, 3))}
    with worker_client.local(num_ps=3) as session:
        session.create_or_join(values, optimizer=worker_client.momentum(1.0), split_bytes=64)
        session.step({"table": np.full((10, 4), 2.0), "odd": np.arange(7, dtype=np.float32), "none": np.zeros((0, 3))})
        variables = session.read()
        np.testing.assert_array_equal(variables["table"], values["table"] - 2)
        np.testing.assert_array_equal(variables["odd"], np.zeros(7))
        assert variables["none"].shape == (0, 3)
        np.testing.assert_array_equal(session.get_slot("table", "momentum"), np.full((10, 4), 2.0))


def test_slots_can_be_looked_at() -> None:
    with worker_client.local(num_ps=2) as session:
        session.create_or_join(initial(), optimizer=worker_client.adam())
        session.step({"w": np.ones(3), "b": np.ones(())})
        assert session.get_slot_names() == ["m", "v"]
        np.testing.assert_allclose(session.get_slot("w", "m"), np.full(3, 0.1), rtol=1e-6)
        with pytest.raises(SlotNotFound, match="accum"):
            session.get_slot("w", "accum")
        with pytest.raises(VariableNotFound, match="did you mean"):
            session.get_slot("ww", "m")


def test_values_may_be_lists_and_scalars_of_floats() -> None:
    with worker_client.local() as session:
        session.create_or_join({"a": [1.0, 2.0], "b": 3.0, "c": np.float32(4)}, optimizer=worker_client.sgd(0.1))
        assert {name: (value.dtype.name, value.shape) for name, value in session.read().items()} == {
            "a": ("float64", (2,)),
            "b": ("float64", ()),
            "c": ("float32", ()),
        }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": [1, 2]}, r"'a': its initial value is int64; want float32 or float64"),
        ({"a": True}, "'a': its initial value is bool"),
        ({"a": None}, "'a': its initial value is None"),
        ({"a": [[1.0], [1.0, 2.0]]}, "'a': its initial value, a list, cannot be read as an array"),
        ({"a": np.zeros(2, np.complex128)}, "'a': dtype complex128 is not supported"),
        ({"a": np.zeros(2, ">f4")}, "'a': byte order: little-endian only"),
        ({"": np.zeros(2)}, "name is empty"),
        ({3: np.zeros(2)}, "name: got int, want a str"),
        ({}, "the model has no variables"),
        ([("a", 1.0)], "want a dict"),
    ],
)
def test_values_that_make_no_model_are_refused_and_a_good_model_is_taken_afterwards(values: object, words: str) -> None:
    with worker_client.local() as session:
        with pytest.raises(InvalidSpec, match=words):
            session.create_or_join(values, optimizer=worker_client.sgd(0.1))  # type: ignore[arg-type]
        assert session.create_or_join(initial(), optimizer=worker_client.sgd(0.1))


def test_an_argument_that_is_no_optimizer_is_refused() -> None:
    with worker_client.local() as session:
        with pytest.raises(InvalidSpec, match=r"optimizer: got 'sgd', want what lockstep\.sgd"):
            session.create_or_join(initial(), optimizer="sgd")  # type: ignore[arg-type]
        with pytest.raises(InvalidSpec, match=r"learning_rate = '0\.1'"):
            worker_client.sgd("0.1")  # type: ignore[arg-type]


def test_another_model_is_refused_with_all_differences() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    first, second = worker_client.local(cluster), worker_client.local(cluster)
    assert first.create_or_join(initial(), optimizer=worker_client.sgd(0.1))
    with pytest.raises(ModelMismatch) as raised:
        second.create_or_join({"w": np.zeros(4), "c": np.zeros(())}, optimizer=worker_client.sgd(0.2))
    for fragment in ("variables['w'].shape is (4,)", "['b'] is missing", "['c'] is not among", "learning_rate.arguments['value'] is 0.2"):
        assert fragment in str(raised.value)
    assert not second.create_or_join(initial(), optimizer=worker_client.sgd(0.1))


def test_session_says_what_to_call_first_and_what_not_to_call_any_more() -> None:
    session = worker_client.local()
    calls: list[Callable[[], object]] = [
        session.read,
        session.gradient_buffers,
        session.wait,
        session.get_slot_names,
        lambda: session.step({}),
    ]
    for call in calls:
        with pytest.raises(NotInitialized, match=r"call create_or_join\(\) first"):
            call()
    session.create_or_join(initial(), optimizer=worker_client.sgd(0.1))
    session.close()
    session.close()
    for call in [*calls, session.status, session.finish, lambda: session.push({})]:
        with pytest.raises(RuntimeError, match="session of worker 0 is closed"):
            call()


def test_index_belongs_to_one_worker() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    assert worker_client.local(cluster, worker_index=1).worker_index == 1
    assert worker_client.local(cluster).worker_index == 0
    with pytest.raises(WorkerIndexTaken):
        worker_client.local(cluster, worker_index=1)


def test_given_cluster_takes_no_second_description() -> None:
    with pytest.raises(TypeError, match="the cluster is given"):
        worker_client.local(InProcessCluster(), num_ps=2)


def test_an_observer_reads_whole_steps_while_training_continues() -> None:
    cluster = InProcessCluster(num_ps=2)
    (session,) = joined(cluster, 1)
    with worker_client.observe_local(cluster) as observer:
        for step in range(4):
            np.testing.assert_array_equal(observer.read()["w"], session.read()["w"])
            assert observer.step == step
            session.step(loss_gradients(session.read(), slice(None)))
        assert observer.read(3)["w"].shape == (3,)
        with pytest.raises(worker_client.PsError) as raised:
            observer.read(1)
        assert raised.value.reason == "STEP_GONE"
        assert [entry.step for entry in observer.status(max_ledger_entries=2).ledger] == [3, 2]
