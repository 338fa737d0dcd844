"""One contract for tables without a size, in process and over gRPC: any key, on any number of servers, by every policy."""

import functools
import threading
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DtypeMismatch, IndexOutOfRange, InvalidSpec, ShapeMismatch
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Shape, Start
from tests.support.waiting import wait_until
from worker_client import EmbeddingTable, IndexedSlices, Session

ANY_KEYS = np.array([0, -1, 5, (1 << 63) - 1, -(1 << 63), 123_456_789_012_345_678], np.int64)
INITIALIZER = worker_client.uniform_initializer(-1, 1, seed=7)


def join(session: Session, *, optimizer: Any = None, **options: Any) -> Session:
    table = EmbeddingTable(2, keys="int64", initializer=INITIALIZER, **options)
    session.create_or_join({"users": table, "w": np.zeros(3, np.float32)}, optimizer=optimizer or worker_client.sgd(1.0), timeout_s=20)
    return session


def rows(keys: Any, value: float = 1.0) -> IndexedSlices:
    return IndexedSlices(np.asarray(keys), np.full((len(keys), 2), value, np.float32))


def train(session: Session, keys: Any, value: float = 1.0) -> None:
    assert session.step({"users": rows(keys, value), "w": None}, timeout_s=20).is_accepted


@also_over("shared memory")
def test_any_key_has_a_row(start: Start) -> None:
    session = join(start(Shape(num_ps=3)).session())
    first = session.read_rows("users", ANY_KEYS)
    assert np.unique(first).size == 12
    train(session, ANY_KEYS[[3, 0, 3]])
    expected = first.copy()
    expected[3] -= 2
    expected[0] -= 1
    np.testing.assert_array_equal(session.read_rows("users", ANY_KEYS), expected)
    np.testing.assert_array_equal(session.read_rows("users", ANY_KEYS[[[3, 2], [0, 3]]]), expected[[[3, 2], [0, 3]]])
    assert session.read_rows("users", []).shape == (0, 2)


def test_the_same_keys_have_the_same_rows_on_any_number_of_servers(start: Start) -> None:
    trained: list[Array] = []
    for num_ps in (1, 3):
        random = np.random.default_rng(3)
        session = join(start(Shape(num_ps=num_ps)).session(), optimizer=worker_client.adam(0.1))
        for _ in range(5):
            train(session, random.integers(0, 400, 100))
        trained.append(session.read_rows("users", np.arange(500)))
    assert trained[0].tobytes() == trained[1].tobytes()


@pytest.mark.parametrize(("sparse_mean", "expected"), [("per_index", [-1.0, -3.0, -2.0]), ("per_replica", [-0.5, -1.5, -2.0])])
def test_rows_of_several_workers_are_averaged_as_in_any_table(start: Start, sparse_mean: str, expected: list[float]) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2))
    sessions = [cluster.session(), cluster.session()]
    joining = [threading.Thread(target=join, args=(session,), kwargs={"sparse_mean": sparse_mean}) for session in sessions]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(20)
    first = sessions[0].read_rows("users", [1, 2, 3])
    steps = [
        threading.Thread(target=train, args=(sessions[0], [1, 3], 1.0)),
        threading.Thread(target=lambda: sessions[1].step({"users": rows([2, 3], 3.0), "w": None}, timeout_s=20)),
    ]
    for thread in steps:
        thread.start()
    for thread in steps:
        thread.join(20)
    np.testing.assert_allclose(sessions[0].read_rows("users", [1, 2, 3])[:, 0] - first[:, 0], expected, rtol=1e-6)


POLICIES = [worker_client.ssp_policy(1), worker_client.async_policy(), worker_client.async_policy(use_locking=False)]


@also_over("shared memory")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.text)
def test_every_policy_makes_rows(start: Start, policy: PolicySpec) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    session.set_policy(policy, timeout_s=20)
    join(session)
    first = session.read_rows("users", np.arange(300))
    for _ in range(3):
        train(session, np.arange(200))
    wait_until(lambda: np.allclose(session.read_rows("users", np.arange(200)), first[:200] - 3, atol=1e-5), what="three steps count")
    np.testing.assert_array_equal(session.read_rows("users", np.arange(200, 300)), first[200:])


def test_the_same_steps_leave_the_same_rows_on_any_number_of_servers_and_no_more_than_there_may_be(start: Start) -> None:
    trained: list[Array] = []
    for num_ps in (1, 3):
        session = join(start(Shape(num_ps=num_ps)).session(), max_rows=100)
        first = session.read_rows("users", np.arange(1000))
        for begin in range(0, 1000, 20):
            train(session, np.arange(begin, begin + 20))
        trained.append(session.read_rows("users", np.arange(1000)))
        differs = (trained[-1] != first).any(axis=1)
        assert 90 <= differs.sum() <= 100
        assert differs[-10:].all()
        assert not differs[:500].any()
        wait_until(functools.partial(_has_rows, session, differs.sum()), what="the chief has asked")
    assert trained[0].tobytes() == trained[1].tobytes()


@pytest.mark.parametrize("policy", [None, worker_client.async_policy(use_locking=False)], ids=["sync", "on arrival"])
def test_rows_are_admitted_the_third_time_and_the_same_stay_on_any_number_of_servers(start: Start, policy: PolicySpec | None) -> None:
    trained: list[Array] = []
    for num_ps in (1, 3):
        session = start(Shape(num_ps=num_ps)).session()
        if policy is not None:
            session.set_policy(policy, timeout_s=20)
        join(session, admit_after=3, max_rows=100)
        first = session.read_rows("users", np.arange(400))
        train(session, np.arange(50))
        train(session, np.arange(50))
        assert session.read_rows("users", np.arange(400)).tobytes() == first.tobytes()
        train(session, np.arange(50))
        assert (session.read_rows("users", np.arange(50)) != first[:50]).all()
        for begin in range(50, 290, 30):
            for _ in range(3):
                train(session, np.arange(begin, begin + 30))
        trained.append(session.read_rows("users", np.arange(400)))
        assert 90 <= np.count_nonzero((trained[-1] != first).any(axis=1)) <= 100
    assert trained[0].tobytes() == trained[1].tobytes()


@pytest.mark.parametrize("policy", [None, worker_client.async_policy(use_locking=False)], ids=["sync", "on arrival"])
def test_rows_are_admitted_by_chance_and_gone_after_their_age(start: Start, policy: PolicySpec | None) -> None:
    trained: list[Array] = []
    for num_ps in (1, 3):
        session = start(Shape(num_ps=num_ps)).session()
        if policy is not None:
            session.set_policy(policy, timeout_s=20)
        join(session, admit_probability=0.5, max_age_steps=3)
        first = session.read_rows("users", np.arange(300))
        for begin in (0, 100, 200, 200):
            train(session, np.arange(begin, begin + 100))
        trained.append(session.read_rows("users", np.arange(300)))
        lost = np.abs(first - trained[-1]).mean(axis=1)
        if policy is None:
            assert not lost[:100].any()
            assert np.unique(np.round(lost[200:])).tolist() == [0, 1, 2]
        assert 30 <= np.count_nonzero(lost[100:200]) <= 70
    assert trained[0].tobytes() == trained[1].tobytes()


def _has_rows(session: Session, count: int) -> bool:
    return sum(one.report.num_rows for one in session.status().shards if one.report) == count


@also_over("shared memory")
def test_unsigned_keys_and_texts_are_keys(start: Start) -> None:
    session = start(Shape(num_ps=2)).session()
    tables = {
        "unsigned": EmbeddingTable((2,), keys="uint64", initializer=INITIALIZER),
        "words": EmbeddingTable(2, keys="int64", initializer=INITIALIZER),
    }
    session.create_or_join(tables, optimizer=worker_client.sgd(1.0), timeout_s=20)
    large = [(1 << 64) - 1, 1 << 63, 3]
    words = worker_client.text_keys(["red", "green"])
    first = session.read_rows("unsigned", large), session.read_rows("words", words)
    assert session.step({"unsigned": rows(large[:1]), "words": rows(words)}, timeout_s=20).is_accepted
    np.testing.assert_allclose(session.read_rows("unsigned", large) - first[0], [[-1, -1], [0, 0], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(session.read_rows("words", words) - first[1], -np.ones((2, 2)), atol=1e-6)


def test_what_is_no_key_is_refused_with_a_reason_and_changes_nothing(start: Start) -> None:
    session = join(start(Shape(num_ps=2)).session())
    with pytest.raises(IndexOutOfRange, match=rf"indices\[1\] = {1 << 63}, want -{1 << 63}..{(1 << 63) - 1}"):
        session.read_rows("users", np.array([1, 1 << 63], np.uint64))
    with pytest.raises(DtypeMismatch, match="indices are float64, want integers"):
        session.read_rows("users", [0.5])
    with pytest.raises(InvalidSpec, match="'users' has no size: name the keys"):
        session.read_rows("users")
    with pytest.raises(InvalidSpec, match="takes IndexedSlices\\(keys, rows\\)"):
        session.push({"users": np.zeros((4, 2), np.float32), "w": None})
    with pytest.raises(ShapeMismatch, match="has no size; leave it out"):
        session.push({"users": IndexedSlices([1], np.zeros((1, 2), np.float32), dense_shape=(10, 2)), "w": None})
    train(session, [1])


def test_to_read_ahead_changes_and_makes_nothing(start: Start) -> None:
    session = join(start(Shape(num_ps=2)).session(), admit_after=2)
    first = session.read_rows("users", ANY_KEYS)
    train(session, ANY_KEYS[:3])
    for _ in range(3):
        session.prefetch("users", ANY_KEYS)
        session.prefetch("users", [])
    assert session.read_rows("users", ANY_KEYS).tobytes() == first.tobytes()
    train(session, ANY_KEYS)
    assert (session.read_rows("users", ANY_KEYS) != first).any(axis=1).tolist() == [True] * 3 + [False] * 3
    with pytest.raises(DtypeMismatch, match="indices are float64, want integers"):
        session.prefetch("users", [0.5])
    with pytest.raises(InvalidSpec, match="'w' is dense: it lies in memory"):
        session.prefetch("w", [1])


def test_only_a_row_is_declared_of_a_table_with_keys(start: Start) -> None:
    session = start(Shape()).session()
    with pytest.raises(InvalidSpec, match="'a': a table with keys begins without rows; give the length of a row"):
        session.create_or_join({"a": EmbeddingTable(np.zeros((3, 2)), keys="int64")}, optimizer=worker_client.sgd(1.0))
    for wrong in (0, -1, "many", True):
        with pytest.raises(InvalidSpec, match="want a whole number from 1 to 68719476736, or None for no bound"):
            session.create_or_join({"a": EmbeddingTable(2, keys="int64", max_rows=wrong)}, optimizer=worker_client.sgd(1.0))  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="of a table with keys only"):
        session.create_or_join({"a": EmbeddingTable((9, 2), max_rows=9)}, optimizer=worker_client.sgd(1.0))
    for chance in (0.0, 1.5, float("nan"), "often", True):
        with pytest.raises(InvalidSpec, match="want more than 0 and at most 1"):
            table = EmbeddingTable(2, keys="int64", admit_probability=chance)  # type: ignore[arg-type]
            session.create_or_join({"a": table}, optimizer=worker_client.sgd(1.0))
    with pytest.raises(InvalidSpec, match="max_age_steps is of a table with keys only"):
        session.create_or_join({"a": EmbeddingTable((9, 2), max_age_steps=5)}, optimizer=worker_client.sgd(1.0))
    with pytest.raises(InvalidSpec, match="admit_after = 33, want a whole number from 1 to 32"):
        session.create_or_join({"a": EmbeddingTable(2, keys="int64", admit_after=33)}, optimizer=worker_client.sgd(1.0))
    with pytest.raises(InvalidSpec, match=r"admit_probability = 0.5 and admit_after = 2; give one of them"):
        table = EmbeddingTable(2, keys="int64", admit_after=2, admit_probability=0.5)
        session.create_or_join({"a": table}, optimizer=worker_client.sgd(1.0))
    with pytest.raises(InvalidSpec, match="split by their hashes, evenly; leave out the partitioner"):
        table = EmbeddingTable(2, keys="int64", partitioner=worker_client.fixed_size_partitioner(2))
        session.create_or_join({"a": table}, optimizer=worker_client.sgd(1.0))
    with pytest.raises(InvalidSpec, match="keys = 'text', want one of int64, uint64"):
        session.create_or_join({"a": EmbeddingTable(2, keys="text")}, optimizer=worker_client.sgd(1.0))
