"""One contract for what variables may be, in process and over gRPC: tables, state, cut along any axis; averages, limits, metrics."""

import threading
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DtypeMismatch, IndexOutOfRange, InvalidSpec, ModelMismatch, SlotNotFound, VariableNotFound
from ps_protocol.model.policy import PolicyName
from ps_protocol.model.variables import Array
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Shape, Start
from worker_client import Buffer, EmbeddingTable, IndexedSlices, Session, Variable

ROWS = np.arange(12.0).reshape(6, 2)
WIDE = np.arange(24.0).reshape(4, 6)
# Of each of two workers, while somebody reads.
NUM_STEPS_WATCHED = 15


def declared() -> dict[str, Any]:
    """Mixed on purpose: tables and dense variables, of two types and three rules, whole and cut along either axis."""
    return {
        "embedding": EmbeddingTable((10, 2)),
        "wide": Variable(np.zeros((4, 6)), partitioner=worker_client.fixed_size_partitioner(3, axis=1)),
        "bias": np.zeros(5, np.float32),
        "mean": Buffer(np.zeros(2)),
        "count": Buffer(np.zeros(()), "add"),
        "rows": EmbeddingTable(ROWS, optimizer=worker_client.adagrad(1.0), partitioner=worker_client.fixed_size_partitioner(2)),
    }


def gradients(**changes: Any) -> dict[str, Any]:
    return {"embedding": None, "wide": WIDE, "bias": np.ones(5, np.float32), "rows": None} | changes


def join(session: Session, **options: Any) -> Session:
    session.create_or_join(declared(), optimizer=worker_client.momentum(1.0, momentum=0.5), timeout_s=20, **options)
    return session


def some_rows(*indices: int, value: float = 1.0) -> IndexedSlices:
    return IndexedSlices(np.array(indices, np.int32), np.full((len(indices), 2), value, np.float32))


def table(changes: dict[int, float]) -> Array:
    values = np.zeros((10, 2), np.float32)
    for index, value in changes.items():
        values[index] = value
    return values


@also_over("shared memory")
def test_variables_of_every_kind_step_as_one(start: Start) -> None:
    session = join(start(Shape(num_ps=3)).session())
    repeated = IndexedSlices([3, 1, 3], np.array([[1, 1], [2, 2], [3, 3]], np.float32))
    updates = {"mean": np.array([2.0, 4.0]), "count": np.float64(3)}
    assert session.step(gradients(embedding=repeated), updates=updates, timeout_s=20).is_accepted
    variables = session.read()
    assert list(variables) == ["wide", "bias", "mean", "count"]
    np.testing.assert_array_equal(variables["wide"], -WIDE)
    np.testing.assert_array_equal(variables["bias"], np.full(5, -1, np.float32))
    np.testing.assert_array_equal(variables["mean"], [2, 4])
    assert variables["count"] == 3
    expected = table({3: -4, 1: -2})
    np.testing.assert_array_equal(session.read_rows("embedding"), expected)
    np.testing.assert_array_equal(session.read_rows("embedding", [[3, 0], [1, 3]]), expected[[[3, 0], [1, 3]]])
    np.testing.assert_array_equal(session.read_rows("rows"), ROWS)

    nothing = gradients(wide=None, bias=None, rows=np.ones((6, 2)))
    assert session.step(nothing, updates={"count": np.float64(2)}, timeout_s=20).is_accepted
    np.testing.assert_allclose(session.read_rows("rows"), ROWS - 1 / np.sqrt(1.1), rtol=1e-6)
    variables = session.read()
    # Without a gradient even momentum does not move a variable; without an update state stays as it is.
    np.testing.assert_array_equal(variables["wide"], -WIDE)
    np.testing.assert_array_equal(variables["mean"], [2, 4])
    assert variables["count"] == 5
    np.testing.assert_array_equal(session.read_rows("embedding"), expected)

    assert session.get_slot_names() == ["accumulator", "momentum"]
    np.testing.assert_array_equal(session.get_slot("wide", "momentum"), WIDE)
    np.testing.assert_array_equal(session.get_slot("embedding", "momentum"), -expected)
    np.testing.assert_allclose(session.get_slot("rows", "accumulator"), np.full((6, 2), 1.1), rtol=1e-6)
    with pytest.raises(SlotNotFound, match="'rows' has no slot 'momentum'; its optimizer has accumulator"):
        session.get_slot("rows", "momentum")


def test_the_mean_is_over_workers_with_a_gradient_and_their_metrics_count(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    first, second = join(cluster.session()), join(cluster.session())
    observer = cluster.observer()
    first.push(
        gradients(embedding=some_rows(1, 9, value=4)), updates={"mean": np.array([1.0, 3.0])}, metrics={"loss": 3, "accuracy": (0.5, 1)}
    )
    only_rows = gradients(wide=None, bias=np.full(5, 3, np.float32), embedding=some_rows(9, value=2))
    # What is late counts in nothing.
    assert not first.push(gradients(), updates={"count": np.float64(100)}, metrics={"loss": 1000}).is_accepted
    assert second.step(only_rows, metrics={"loss": 5, "accuracy": (1.0, 3)}, timeout_s=20).is_accepted
    variables = observer.read(timeout_s=20)
    np.testing.assert_array_equal(variables["wide"], -WIDE)
    np.testing.assert_array_equal(variables["bias"], np.full(5, -2, np.float32))
    np.testing.assert_array_equal(variables["mean"], [1, 3])
    np.testing.assert_array_equal(observer.read_rows("embedding"), table({1: -4, 9: -3}))
    reports = observer.read_metrics()
    assert list(reports) == ["accuracy", "loss"]
    assert (reports["accuracy"].mean, reports["loss"].sum, reports["loss"].count) == (0.875, 8, 2)
    assert {index: worker.last for index, worker in reports["loss"].by_worker.items()} == {0: 3, 1: 5}


def test_rows_of_a_workers_own_step_are_kept_while_the_next_is_there(start: Start) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    fast, slow = join(cluster.session()), join(cluster.session())
    slow.read()
    everything = some_rows(*range(10))
    fast.step(gradients(embedding=everything, rows=ROWS), timeout_s=20)
    np.testing.assert_array_equal(slow.read_rows("embedding", [9, 2]), np.zeros((2, 2)))
    np.testing.assert_array_equal(slow.read_rows("rows"), ROWS)
    np.testing.assert_array_equal(fast.read_rows("embedding", [9, 2]), np.full((2, 2), -1))
    fast.step(gradients(embedding=everything), timeout_s=20)
    # Now they are gone, and so is the worker's step: it gets the newest, and is told that its contribution came too late.
    np.testing.assert_array_equal(slow.read_rows("embedding", [9]), np.full((1, 2), -2.5))
    assert slow.push(gradients(embedding=some_rows(9))).outcome is worker_client.PushOutcome.STALE
    assert slow.wait(timeout_s=20)
    assert slow.local_step == 2


def test_averages_follow_the_variables_in_the_same_step(start: Start) -> None:
    cluster = start(Shape(num_ps=2))
    session = join(cluster.session(), averages=worker_client.moving_average(0.5))
    for _ in range(2):
        session.step(gradients(), timeout_s=20)
    # The variable is 0, -1, -2.5; its average 0, -0.5, -1.5.
    averages = cluster.observer().read_averages(timeout_s=20)
    assert list(averages) == ["wide", "bias"]
    np.testing.assert_array_equal(averages["wide"], -1.5 * WIDE)
    np.testing.assert_array_equal(session.read_averages(["bias"])["bias"], np.full(5, -1.5, np.float32))
    with pytest.raises(SlotNotFound, match="'mean' has no moving average"):
        session.read_averages(["mean"])


def test_limit_on_the_global_norm_holds_over_all_shards_and_tables(start: Start) -> None:
    session = join(start(Shape(num_ps=3)).session(), clip_value=10.0, clip_global_norm=1.0)
    session.step(gradients(embedding=some_rows(0, 9, value=100)), updates={"count": np.float64(50)}, timeout_s=20)
    variables = session.read()
    squares = sum((variables[name] ** 2).sum() for name in ("wide", "bias")) + (session.read_rows("embedding") ** 2).sum()
    np.testing.assert_allclose(squares, 1, rtol=1e-5)
    np.testing.assert_allclose(session.read_rows("embedding", [0])[0, 0], variables["wide"][1, 4], rtol=1e-5)
    assert variables["count"] == 50


def test_hyperparameters_change_at_a_step_for_all(start: Start) -> None:
    cluster = start(Shape(num_ps=2))
    session, observer = join(cluster.session()), cluster.observer()
    first = session.set_hyperparameters(learning_rate=0.5, momentum=0.0, timeout_s=20)
    assert observer.set_hyperparameters(variable="rows", learning_rate=0.25, timeout_s=20) > first
    for _ in range(2):
        session.step(gradients(rows=np.ones((6, 2))), timeout_s=20)
    np.testing.assert_array_equal(session.read()["bias"], np.full(5, -1, np.float32))
    np.testing.assert_allclose(session.read_rows("rows"), ROWS - 0.25 * (1 / np.sqrt(1.1) + 1 / np.sqrt(2.1)), rtol=1e-6)
    with pytest.raises(InvalidSpec, match="momentun"):
        session.set_hyperparameters(momentun=0.5, timeout_s=20)
    with pytest.raises(VariableNotFound, match="'rws'"):
        session.set_hyperparameters(variable="rws", learning_rate=0.5, timeout_s=20)
    with pytest.raises(InvalidSpec, match="nothing to change"):
        session.set_hyperparameters()


def test_large_table_is_made_by_the_servers_and_read_by_rows(start: Start) -> None:
    session = start(Shape(num_ps=2)).session()
    halves = worker_client.fixed_size_partitioner(2)
    big = EmbeddingTable((200_000, 8), initializer=worker_client.uniform_initializer(-1, 1, seed=7), partitioner=halves)
    other = EmbeddingTable((200_000, 8), initializer=worker_client.uniform_initializer(-1, 1, seed=7))
    session.create_or_join({"big": big, "other": other}, optimizer=worker_client.adam(0.01, lazy=True), timeout_s=20)
    indices = np.array([199_999, 0, 100_000, 99_999])
    before = session.read_rows("big", indices)
    np.testing.assert_array_equal(before, session.read_rows("other", indices))
    assert np.unique(before).size == 32
    rows = IndexedSlices(indices, np.ones((4, 8), np.float32))
    assert session.step({"big": rows, "other": None}, timeout_s=20).is_accepted
    np.testing.assert_allclose(session.read_rows("big", indices), before - 0.01, rtol=1e-5)
    np.testing.assert_array_equal(session.read_rows("big", [1, 100_001]), session.read_rows("other", [1, 100_001]))
    assert session.read_rows("big").shape == (200_000, 8)


def test_an_invalid_row_is_refused_with_a_reason_and_changes_nothing(start: Start) -> None:
    session = join(start(Shape(num_ps=2)).session())
    with pytest.raises(IndexOutOfRange, match=r"indices\[1\] = 10, want 0..9"):
        session.step(gradients(embedding=some_rows(0, 10)))
    with pytest.raises(IndexOutOfRange, match=r"rows of 'embedding': indices\[0\] = -1"):
        session.read_rows("embedding", [-1])
    with pytest.raises(DtypeMismatch, match="indices are float64, want integers"):
        session.read_rows("embedding", [0.5])
    with pytest.raises(InvalidSpec, match="'bias' is dense: read"):
        session.read_rows("bias", [0])
    with pytest.raises(InvalidSpec, match=r"No gradients provided for any variable: \['embedding', 'wide', 'bias', 'rows'\]"):
        session.push(gradients(wide=None, bias=None))
    assert session.read_rows("embedding", []).shape == (0, 2)
    assert session.step(gradients(embedding=some_rows()), timeout_s=20).is_accepted
    np.testing.assert_array_equal(session.read_rows("embedding"), np.zeros((10, 2)))


def test_a_worker_that_must_not_create_waits_for_the_one_that_may(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    second, first = cluster.session(), cluster.session()
    with pytest.raises(worker_client.PsError, match="not within"):
        second.create_or_join(declared(), optimizer=worker_client.sgd(0.5), create=False, timeout_s=0.3)
    join(first)
    with pytest.raises(ModelMismatch):
        second.create_or_join(declared(), optimizer=worker_client.sgd(0.5), create=False, timeout_s=20)
    join(second, create=False)
    np.testing.assert_array_equal(second.read_rows("rows"), ROWS)


def test_half_precision_rows_of_one_index_are_summed_before_anything_is_rounded(start: Start) -> None:
    session = start(Shape(num_ps=2)).session()
    session.create_or_join({"t": EmbeddingTable((3, 1), dtype="float16")}, optimizer=worker_client.sgd(0.1), timeout_s=20)
    assert session.step({"t": IndexedSlices([2, 0, 2], np.array([[60000], [1], [60000]], np.float16))}, timeout_s=20).is_accepted
    np.testing.assert_array_equal(session.read_rows("t"), np.array([[-0.1], [0], [-12000]], np.float16))


@also_over("shared memory")
@pytest.mark.parametrize("policy", [worker_client.sync_policy(), worker_client.async_policy()], ids=lambda policy: policy.text)
def test_newest_rows_and_slots_are_of_one_step_over_all_slices(start: Start, policy: worker_client.PolicySpec) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    sessions = [cluster.session() for _ in range(2)]
    sessions[0].set_policy(policy, timeout_s=20)
    values = {"t": EmbeddingTable((40, 2), partitioner=worker_client.fixed_size_partitioner(20))}
    for session in sessions:
        session.create_or_join(values, optimizer=worker_client.momentum(1.0, momentum=0.0), timeout_s=20)
    observer, torn = cluster.observer(), 0

    def train(session: Session) -> None:
        every_row = IndexedSlices(np.arange(40), -np.ones((40, 2), np.float32))
        for _ in range(NUM_STEPS_WATCHED):
            session.step({"t": every_row}, timeout_s=20)
        session.close()

    threads = [threading.Thread(target=train, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        torn += len(np.unique(observer.read_rows("t"))) > 1
        observer.get_slot("t", "momentum")
    assert not torn
    np.testing.assert_array_equal(
        observer.read_rows("t"), np.full((40, 2), NUM_STEPS_WATCHED * (1 if policy.name is PolicyName.SYNC else 2))
    )
