"""ConditionalAccumulator and SparseConditionalAccumulator as a program uses them, through sessions and by address."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import (
    AccumulatorExists,
    AccumulatorNotFound,
    DeadlineExceeded,
    DtypeMismatch,
    InvalidSpec,
    ShapeMismatch,
    Unavailable,
)
from ps_protocol.roles.accumulators import Accumulators, TakeRequest, shard_of
from ps_server.config import ParameterServerConfig
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until
from worker_client import ConditionalAccumulator, IndexedSlices, Session, SparseConditionalAccumulator

Target = Session | str
NOTHING: Any = None


@pytest.fixture(params=["local_session", "session", "address"])
def target(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        if request.param == "local_session":
            yield stack.enter_context(worker_client.local(num_ps=3))
        elif request.param == "session":
            yield ServedCluster(Shape(num_ps=2), stack, directory=socket_dir).session()
        else:
            yield stack.enter_context(open_server(ParameterServerConfig(index=0))).address


def test_mean_of_gradients_by_the_originals_calls(target: Target) -> None:
    with ConditionalAccumulator(target, np.float32, (2,), shared_name="a") as accumulator:
        assert accumulator.apply_grad([1, 2])
        assert accumulator.apply_grad(np.array([3, 6], np.float32), local_step=1)
        assert accumulator.num_accumulated() == 2
        assert accumulator.take_grad(1).tolist() == [2.0, 4.0]
        assert not accumulator.apply_grad([1, 2], local_step=0)
        accumulator.set_global_step(0)
        assert accumulator.apply_grad([1, 2], local_step=np.int64(0))
        assert accumulator.status().step == 0


def test_numbers_that_are_no_whole_ones_are_refused_with_a_reason(target: Target) -> None:
    fraction: Any = 1.5
    with ConditionalAccumulator(target, np.float32, (2,), shared_name="w") as accumulator:
        for call, words in (
            (lambda: accumulator.take_grad(fraction), "num_required: got 1.5, want a whole number"),
            (lambda: accumulator.apply_grad([1, 2], local_step=fraction), "local_step: got 1.5, want a whole number"),
            (lambda: accumulator.set_global_step(fraction), "new_global_step: got 1.5"),
            (lambda: ConditionalAccumulator(target, np.float32, (fraction,), shared_name="v"), "shape: got 1.5"),
        ):
            with pytest.raises(InvalidSpec, match=words):
                call()
        assert accumulator.num_accumulated() == 0


def test_same_name_is_the_same_accumulator(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(ConditionalAccumulator(target, "float64", [None], shared_name="b", reduction_type="SUM")) for _ in range(2)
        )
        first.apply_grad([1.0])
        second.apply_grad([2.0])
        assert first.take_grad(2).tolist() == [3.0]
        with pytest.raises(AccumulatorExists, match="'b'"):
            ConditionalAccumulator(target, "float32", [None], shared_name="b", reduction_type="SUM")
        with pytest.raises(AccumulatorExists, match="is_sparse"):
            SparseConditionalAccumulator(target, "float64", [None], shared_name="b", reduction_type="SUM")


def test_sparse_gradients_by_the_originals_calls(target: Target) -> None:
    with SparseConditionalAccumulator(target, "float32", (5, 2), shared_name="s") as accumulator:
        assert accumulator.apply_grad([3, 1], [[2, 2], [1, 1]], grad_shape=(5, 2))
        assert accumulator.apply_indexed_slices_grad(IndexedSlices(np.array([1, 1], np.int32), np.ones((2, 2), np.float32)))
        assert accumulator.apply_grad([], np.zeros((0, 2), np.float32))
        indices, values, shape = accumulator.take_grad(3)
        assert (indices.tolist(), values.tolist(), shape.tolist()) == ([1, 3], [[1.5, 1.5], [2.0, 2.0]], [5, 2])
        accumulator.apply_grad([4], [[8, 8]], local_step=1)
        taken = accumulator.take_indexed_slices_grad(1)
        assert (taken.indices.tolist(), taken.dense_shape) == ([4], (5, 2))


def test_taking_waits_for_gradients_of_others(target: Target) -> None:
    results: list[float] = []
    with ConditionalAccumulator(target, "float32", (), shared_name="w") as accumulator:
        thread = threading.Thread(target=lambda: results.append(float(accumulator.take_grad(2, timeout_s=30))))
        thread.start()
        wait_until(lambda: accumulator.status().num_waiting == 1)
        assert accumulator.apply_grad(1.0), "one object serves several threads"
        accumulator.apply_grad(3.0)
        thread.join(30)
        assert results == [2.0]


def test_an_abandoned_take_takes_nothing(target: Target) -> None:
    with ConditionalAccumulator(target, "float32", (), shared_name="t") as accumulator:
        accumulator.apply_grad(1.0)
        with pytest.raises(DeadlineExceeded, match="1 of 2 gradients are in"):
            accumulator.take_grad(2, timeout_s=0.05)
        assert accumulator.status().num_waiting == 0
        accumulator.apply_grad(3.0)
        assert accumulator.num_accumulated() == 2
        assert accumulator.take_grad(2) == 2.0


class LosesAnswers:
    """Accumulators each of whose first answers to a gradient or a taking is lost on the way."""

    def __init__(self, accumulators: Accumulators) -> None:
        self._accumulators = accumulators
        self.num_lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accumulators, name)

    def apply_gradient(self, *arguments: Any) -> Any:
        return self._lose_every_second(self._accumulators.apply_gradient(*arguments))

    def take_gradient(self, request: TakeRequest) -> Any:
        return self._lose_every_second(self._accumulators.take_gradient(request))

    def _lose_every_second(self, answer: Any) -> Any:
        self.num_lost += 1
        if self.num_lost % 2:
            raise Unavailable("the connection was lost")
        return answer


def test_an_accumulator_call_repeated_after_a_lost_answer_counts_once() -> None:
    cluster: Any = InProcessCluster()
    lossy = cluster.shards[0].accumulators = LosesAnswers(cluster.shards[0].accumulators)
    with worker_client.local(cluster) as session, ConditionalAccumulator(session, "float64", (), shared_name="l") as accumulator:
        for value in (1.0, 2.0, 6.0):
            assert accumulator.apply_grad(value)
        assert accumulator.num_accumulated() == 3
        assert accumulator.take_grad(1) == 3.0
        assert accumulator.status().step == 1
        assert lossy.num_lost == 8


def test_every_accepted_gradient_is_in_exactly_one_sum(target: Target) -> None:
    num_threads, num_each = 4, 25
    sums: list[float] = []
    with ConditionalAccumulator(target, "float64", (), shared_name="c", reduction_type="SUM") as accumulator:

        def push() -> None:
            for _ in range(num_each):
                assert accumulator.apply_grad(1.0, local_step=10**6)

        def take() -> None:
            while sum(sums) < num_threads * num_each:
                # Giving up again and again must lose nothing either.
                with contextlib.suppress(DeadlineExceeded):
                    sums.append(float(accumulator.take_grad(1, timeout_s=0.01)))

        threads = [threading.Thread(target=call) for call in (*[push] * num_threads, *[take] * 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sum(sums) == num_threads * num_each
        assert accumulator.num_accumulated() == 0
        assert accumulator.status().step == len(sums)


def _dense(target: Target) -> ConditionalAccumulator:
    return ConditionalAccumulator(target, "float32", (2,), shared_name="x")


def _sparse(target: Target) -> SparseConditionalAccumulator:
    return SparseConditionalAccumulator(target, "float32", (4, 1), shared_name="y")


WRONG: list[tuple[str, Callable[[Target], object], type[Exception], str]] = [
    ("reduction", lambda t: ConditionalAccumulator(t, "float32", shared_name="z", reduction_type="MAX"), ValueError, "MAX"),
    ("sparse mean", lambda t: SparseConditionalAccumulator(t, "float32", shared_name="z", sparse_mean="all"), ValueError, "all"),
    ("element type", lambda t: ConditionalAccumulator(t, "int32", shared_name="z"), InvalidSpec, "int32"),
    ("name", lambda t: ConditionalAccumulator(t, "float32", shared_name=""), InvalidSpec, "name is empty"),
    ("type of a gradient", lambda t: _dense(t).apply_grad(np.zeros(2)), DtypeMismatch, "float64, want float32"),
    ("shape of a gradient", lambda t: _dense(t).apply_grad([1.0]), ShapeMismatch, "want (2,)"),
    ("no gradient", lambda t: _dense(t).apply_grad(NOTHING), InvalidSpec, "None"),
    ("step", lambda t: _dense(t).apply_grad([1.0, 2.0], -1), InvalidSpec, "local_step"),
    ("number", lambda t: _dense(t).take_grad(0), InvalidSpec, "num_required"),
    ("matrix of indices", lambda t: _sparse(t).apply_grad([[1]], [[1.0]]), ShapeMismatch, "vector"),
    ("fractional indices", lambda t: _sparse(t).apply_grad([1.5], [[1.0]]), DtypeMismatch, "integers"),
    ("values without rows", lambda t: _sparse(t).apply_grad([1], 1.0), ShapeMismatch, "0-dimensional"),
    ("fewer rows than indices", lambda t: _sparse(t).apply_grad([1, 2], [[1.0]]), ShapeMismatch, "2 indices, 1 rows"),
]


@pytest.mark.parametrize(("call", "error", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_arguments_of_accumulators_are_refused_with_a_reason(
    call: Callable[[Target], object], error: type[Exception], text: str
) -> None:
    with worker_client.local() as session, pytest.raises(error) as caught:
        call(session)
    assert text in str(caught.value)


def test_calls_of_a_deleted_accumulator_are_refused(target: Target) -> None:
    with ConditionalAccumulator(target, "float32", shared_name="d") as accumulator:
        assert accumulator.delete() is True
        assert accumulator.delete() is False
        with pytest.raises(AccumulatorNotFound, match="'d'"):
            accumulator.apply_grad(1.0)


def test_several_parameter_servers_share_the_accumulators_by_name() -> None:
    assert [shard_of(f"v{index}/grad_accum", num_shards=3) for index in range(6)] == [2, 1, 2, 1, 1, 0]
