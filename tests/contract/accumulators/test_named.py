"""What named accumulators do, in this process and over TCP and Unix sockets."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import (
    AccumulatorExists,
    AccumulatorNotFound,
    Cancelled,
    IndexOutOfRange,
    InvalidSpec,
    LimitExceeded,
    PushIdReused,
    ShapeMismatch,
)
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.accumulators import (
    Accumulators,
    AccumulatorSpec,
    DeleteAccumulatorRequest,
    GradientHeader,
    GradientReply,
    Reduction,
    SetAccumulatorStepRequest,
    Taken,
    TakeRequest,
)
from ps_protocol.rpc.accumulators import GrpcAccumulators
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.config import ParameterServerConfig
from ps_server.numbers.memory import MemoryBudget
from tests.support.parameter_servers.accumulators import create, status_of
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

LIMIT = 12 << 20


@pytest.fixture(params=["in_process", "grpc_tcp", "grpc_unix"])
def accumulators(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Accumulators]:
    with opened(request.param, socket_dir) as found:
        yield found


@contextlib.contextmanager
def opened(transport: str, socket_dir: Path) -> Iterator[Accumulators]:
    if transport == "in_process":
        yield AccumulatorRegistry(owner="ps 0", budget=MemoryBudget(LIMIT, owner="ps 0", lock=threading.Lock()))
        return
    address = f"unix:{socket_dir / 'ps'}" if transport == "grpc_unix" else "127.0.0.1:0"
    with open_server(ParameterServerConfig(index=0, address=address, max_memory_bytes=LIMIT)) as server:
        with contextlib.closing(GrpcAccumulators(server.address)) as client:
            client.handshake()
            yield client


def dense(**changes: Any) -> AccumulatorSpec:
    return AccumulatorSpec(**{"name": "a", "data_type": DataType.FLOAT32, "shape": (2,), **changes})


def push(
    accumulators: Accumulators, values: object, *, client: int = 1, sequence: int = 1, step: int = 0, indices: list[int] | None = None
) -> GradientReply:
    elements = values if isinstance(values, np.ndarray) else np.array(values, np.float32)
    rows = None if indices is None else np.array(indices, np.int64)
    header = GradientHeader(
        name="a", client=client, sequence=sequence, local_step=step, shape=elements.shape, num_indices=0 if rows is None else len(rows)
    )
    return accumulators.apply_gradient(header, elements, rows)


def take(accumulators: Accumulators, num_required: int = 1, *, client: int = 1, sequence: int = 1, max_wait_s: float = 20.0) -> Taken:
    request = TakeRequest(name="a", client=client, sequence=sequence, num_required=num_required, max_wait_s=max_wait_s)
    return accumulators.take_gradient(request)


def values_of(taken: Taken) -> Array:
    assert taken.values is not None
    return taken.values


class InThread:
    """A call under way in a thread of its own."""

    def __init__(self, call: Callable[[], Taken]) -> None:
        self._call = call
        self.result: Taken | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

    def failure(self) -> Exception:
        self._thread.join(30)
        assert self.error is not None
        return self.error

    def taken(self) -> Taken:
        self._thread.join(30)
        assert self.result is not None, self.error
        return self.result


def taking(accumulators: Accumulators, num_required: int, *, client: int, num_waiting: int) -> InThread:
    """A taking that has found its place in the queue."""
    call = InThread(lambda: take(accumulators, num_required, client=client))
    wait_until(lambda: status_of(accumulators, "a").num_waiting == num_waiting, what=f"{num_waiting} wait")
    return call


def test_creating_again_finds_the_same_and_another_specification_is_refused(accumulators: Accumulators) -> None:
    assert create(accumulators, dense()) is True
    push(accumulators, [1, 2])
    assert create(accumulators, dense()) is False
    assert status_of(accumulators, "a").num_accumulated == 1
    with pytest.raises(AccumulatorExists, match=r"shape is None, the accumulator's is \(2,\)"):
        create(accumulators, dense(shape=None))
    with pytest.raises(AccumulatorExists, match="data_type is float64, the accumulator's is float32"):
        create(accumulators, dense(data_type=DataType.FLOAT64))
    assert status_of(accumulators, "a").spec == dense()


def test_unknown_name_is_refused_by_every_call(accumulators: Accumulators) -> None:
    calls: list[Callable[[], object]] = [
        lambda: push(accumulators, [1, 2]),
        lambda: take(accumulators),
        lambda: accumulators.call(SetAccumulatorStepRequest(name="a", step=1)),
        lambda: status_of(accumulators, "a"),
    ]
    for call in calls:
        with pytest.raises(AccumulatorNotFound, match="'a'"):
            call()
    assert accumulators.call(DeleteAccumulatorRequest(name="a")) is False


def test_mean_comes_back_with_count_and_step(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    accumulators.call(SetAccumulatorStepRequest(name="a", step=3))
    assert push(accumulators, [9, 9], step=2) == GradientReply(accepted=False, step=3)
    assert push(accumulators, [1, 2], step=3).accepted
    assert push(accumulators, [3, 6], sequence=2, step=4).accepted
    taken = take(accumulators, 2)
    assert (values_of(taken).tolist(), taken.count, taken.step) == ([2.0, 4.0], 2, 4)
    assert status_of(accumulators, "a").num_accumulated == 0


@pytest.mark.parametrize("shape", [(), (0, 3), (700_000,)])
def test_gradients_of_any_size_travel(accumulators: Accumulators, shape: tuple[int, ...]) -> None:
    create(accumulators, dense(shape=shape, data_type=DataType.FLOAT64, reduction=Reduction.SUM))
    gradient = np.random.default_rng(0).normal(size=shape)
    push(accumulators, np.asarray(gradient))
    push(accumulators, np.asarray(gradient), sequence=2)
    np.testing.assert_array_equal(values_of(take(accumulators, 2)), 2 * gradient)


@pytest.mark.parametrize("data_type", list(DataType))
def test_every_element_type_comes_back_as_itself(accumulators: Accumulators, data_type: DataType) -> None:
    create(accumulators, dense(data_type=data_type))
    push(accumulators, np.array([1, 2], data_type.dtype))
    result = values_of(take(accumulators))
    assert (result.dtype, result.tolist()) == (data_type.dtype, [1.0, 2.0])


def test_sparse_rows_are_sorted_merged_and_checked(accumulators: Accumulators) -> None:
    create(accumulators, dense(shape=(4, 1), is_sparse=True))
    push(accumulators, [[2.0], [1.0], [3.0]], indices=[3, 1, 3])
    push(accumulators, [[7.0]], indices=[1], sequence=2)
    push(accumulators, np.zeros((0, 1), np.float32), indices=[], sequence=3)
    with pytest.raises(IndexOutOfRange):
        push(accumulators, [[1.0]], indices=[4], sequence=4)
    taken = take(accumulators, 3)
    assert taken.indices is not None
    assert (taken.indices.tolist(), values_of(taken).tolist(), taken.dense_shape) == ([1, 3], [[4.0], [5.0]], (4, 1))


def test_refused_gradient_has_no_effect_and_may_be_sent_rightly(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    with pytest.raises(ShapeMismatch, match=r"gradient of shape \(3,\), want \(2,\)"):
        push(accumulators, [1, 2, 3])
    assert status_of(accumulators, "a").num_accumulated == 0
    assert push(accumulators, [1, 2]).accepted


def test_repeated_gradient_counts_once_and_gets_the_first_answer(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    first = push(accumulators, [1, 2])
    take(accumulators)
    assert push(accumulators, [1, 2]) == first
    assert status_of(accumulators, "a").num_accumulated == 0
    push(accumulators, [1, 2], sequence=5, step=1)
    with pytest.raises(PushIdReused, match="came after"):
        push(accumulators, [1, 2], sequence=4, step=1)
    assert status_of(accumulators, "a").num_accumulated == 1


def test_a_repeated_take_takes_once_and_gets_the_first_result(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    push(accumulators, [1, 2])
    first = take(accumulators)
    push(accumulators, [5, 6], sequence=2, step=1)
    again = take(accumulators)
    assert (values_of(again).tolist(), again.step) == (values_of(first).tolist(), 1)
    assert status_of(accumulators, "a").num_accumulated == 1
    assert values_of(take(accumulators, sequence=2)).tolist() == [5.0, 6.0]
    with pytest.raises(PushIdReused, match="came after"):
        take(accumulators, sequence=1)


def test_deletion_cancels_waiting_takes(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    waiting = taking(accumulators, 1, client=11, num_waiting=1)
    assert accumulators.call(DeleteAccumulatorRequest(name="a")) is True
    assert isinstance(waiting.failure(), Cancelled)
    assert "TakeGrad operation was cancelled" in str(waiting.error)
    assert create(accumulators, dense(shape=(3,))) is True, "the name is free again"


def test_invalid_numbers_are_refused(accumulators: Accumulators) -> None:
    create(accumulators, dense())
    with pytest.raises(InvalidSpec, match="num_required: got 0"):
        take(accumulators, 0)
    with pytest.raises(InvalidSpec, match="local_step: got -1"):
        push(accumulators, [1, 2], step=-1)
    with pytest.raises(InvalidSpec, match="step: got -1"):
        accumulators.call(SetAccumulatorStepRequest(name="a", step=-1))


def test_memory_is_counted_and_given_back(accumulators: Accumulators) -> None:
    create(accumulators, dense(shape=None))
    third = np.ones(LIMIT // 3 // 4, np.float32)
    for sequence in range(1, 8):
        push(accumulators, third, sequence=sequence, step=sequence - 1)
        assert values_of(take(accumulators, sequence=sequence)).size == third.size
    with pytest.raises(LimitExceeded, match="needs"):
        push(accumulators, np.ones(LIMIT // 4 + 1, np.float32), sequence=8, step=7)
    assert status_of(accumulators, "a").num_accumulated == 0
    accumulators.call(DeleteAccumulatorRequest(name="a"))
    create(accumulators, dense(shape=None))
    assert push(accumulators, np.ones(LIMIT // 2 // 4 - 64, np.float32), sequence=9).accepted
