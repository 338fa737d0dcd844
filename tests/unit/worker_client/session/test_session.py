"""What a session takes as a model, what it refuses, and how it leaves, in one process; tests/contract/session has the rest."""

from collections.abc import Callable

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import InvalidSpec, NotInitialized
from ps_protocol.model.variables import Array


def initial() -> dict[str, Array]:
    return {"w": np.zeros(3), "b": np.zeros(())}


def test_worker_that_fails_is_shown_with_its_failure() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    first, second = (worker_client.local(cluster) for _ in range(2))
    for session in (first, second):
        session.create_or_join(initial(), optimizer=worker_client.sgd(0.1))
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError("division by zero")
    (gone,) = [participant for participant in second.status().participants if participant.state == "left"]
    assert gone.failure == "ZeroDivisionError: division by zero"
    assert second.status().state is worker_client.ClusterState.TRAINING


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


def test_given_cluster_takes_no_second_description() -> None:
    with pytest.raises(TypeError, match="the cluster is given"):
        worker_client.local(InProcessCluster(), num_ps=2)
