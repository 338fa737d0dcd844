"""A program that trains by other means, and publishes its parameters for followers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, ModelMismatch, WorkerIndexTaken
from ps_protocol.model.variables import Array
from tests.support.cluster.here import ServedCluster, also_over
from tests.support.cluster.shape import Cluster, Shape, Start
from worker_client.following.publisher import Publisher, reader_of


class Program:
    """A program with parameters of its own, which it changes in place."""

    def __init__(self) -> None:
        self.w, self.b = np.zeros((50, 30), np.float32), np.full(3, 1.5)

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        yield "w", self.w
        yield "b", self.b

    def train(self) -> None:
        self.w += np.float32(1 / 3)
        self.b *= 1.1


def cluster_of(start: Start, **more: Any) -> Cluster:
    return start(Shape(num_ps=2, num_workers=1, **more))


@also_over("shared memory")
def test_each_published_step_is_what_followers_have_bit_by_bit(start: Start) -> None:
    cluster, program = cluster_of(start), Program()
    weights = cluster.follower("float32")
    with Publisher(reader_of(program.named_parameters()), cluster.session()) as publisher:
        for step in (1, 2, 3):
            program.train()
            assert publisher.step() == publisher.global_step == step
            assert weights.wait(step=step, timeout_s=20) == step
            for name, value in program.named_parameters():
                np.testing.assert_array_equal(weights.arrays[name], value)


@pytest.mark.parametrize("form", [dict, lambda pairs: lambda kept=[*pairs]: kept])
def test_parameters_come_as_a_dict_or_from_a_function(start: Start, form: Callable[[Any], Any]) -> None:
    cluster, program = cluster_of(start), Program()
    with Publisher(reader_of(form(program.named_parameters())), cluster.session()) as publisher:
        assert publisher.step() == 1


def test_a_publisher_that_is_started_again_goes_on_with_the_next_step(start: Start) -> None:
    cluster, program = cluster_of(start), Program()
    weights = cluster.follower("float32")
    session = cluster.session()
    first = Publisher(reader_of(program.named_parameters()), session)
    assert first.step() == 1
    program.train()
    session.membership.leave("killed")
    with Publisher(reader_of(program.named_parameters()), cluster.session()) as publisher:
        assert publisher.global_step == 1
        assert publisher.step() == 2
        assert weights.wait(step=2, timeout_s=20) == 2
        np.testing.assert_array_equal(weights.arrays["b"], program.b)


def test_a_cluster_with_other_parameters_is_refused(start: Start) -> None:
    cluster, program = cluster_of(start), Program()
    session = cluster.session()
    Publisher(reader_of(program.named_parameters()), session).step()
    session.membership.leave("killed")
    with pytest.raises(ModelMismatch), cluster.session() as session:
        Publisher(reader_of({"w": np.zeros(2)}), session)


def test_a_second_publisher_is_refused_and_the_first_goes_on(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster, program = ServedCluster(Shape(num_ps=1, num_workers=1), stack, directory=socket_dir), Program()
        with worker_client.publish(program.named_parameters(), chief=cluster.chief_address) as publisher:
            with pytest.raises(WorkerIndexTaken):
                worker_client.publish(program.named_parameters(), chief=cluster.chief_address)
            assert publisher.step() == 1


def test_a_cluster_whose_steps_take_several_contributions_is_refused(start: Start) -> None:
    session = start(Shape(num_ps=1, num_workers=2)).session()
    with pytest.raises(InvalidSpec, match="takes 2 contributions of policy sync"):
        Publisher(reader_of(Program().named_parameters()), session)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([], "there are no parameters"),
        (3, "got 3, want pairs"),
        ([np.zeros(3)], "want pairs of a name and an array"),
        ([("w", np.zeros(3)), ("w", np.zeros(3))], "'w' occurs twice"),
        ({"n": np.zeros(3, np.int64)}, "'n' has elements of type int64"),
    ],
)
def test_what_are_no_parameters_is_refused(parameters: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        reader_of(parameters)()


def test_parameters_that_change_their_shape_are_refused_and_nothing_is_published(start: Start) -> None:
    cluster, parameters = cluster_of(start), {"w": np.zeros(3)}
    with Publisher(reader_of(parameters), cluster.session()) as publisher:
        parameters["w"] = np.zeros(4)
        with pytest.raises(InvalidSpec, match=r"publish: 'w' was float64 of shape \(3,\) and is float64 of shape \(4,\) now"):
            publisher.step()
        parameters["v"] = parameters.pop("w")
        with pytest.raises(InvalidSpec, match="publish: 'v' was not there and is float64"):
            publisher.step()
        del parameters["v"]
        parameters["w"] = np.ones(3)
        assert publisher.step() == 1


class HalfTensor:
    """What a half-precision tensor of PyTorch does that is used."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def detach(self) -> "HalfTensor":
        return self

    def element_size(self) -> int:
        return 2

    def float(self) -> "HalfTensor":
        return HalfTensor(self._values.astype(np.float32))

    def cpu(self) -> "HalfTensor":
        return self

    def numpy(self) -> Array:
        return self._values


def test_half_precision_is_held_without_losing_a_bit(start: Start) -> None:
    cluster, values = cluster_of(start), np.array([0.1, 65504, 6e-8], np.float16)
    weights = cluster.follower("float16")
    with Publisher(reader_of({"t": HalfTensor(values), "n": values}), cluster.session()) as publisher:
        weights.wait(step=publisher.step(), timeout_s=20)
        np.testing.assert_array_equal(weights.arrays["t"], values.astype(np.float32))
        np.testing.assert_array_equal(weights.arrays["n"], values.astype(np.float32))
