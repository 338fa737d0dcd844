"""Sessions in every wire format, over gRPC: a model with every kind of variable gets the same values, where the format does not round."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import Buffer, EmbeddingTable, IndexedSlices, Session, Variable, WireFormat, top_k

FORMATS: dict[str, str | WireFormat] = {
    "bfloat16": "bfloat16",
    "bfloat16, feedback": WireFormat(gradients="bfloat16", error_feedback=True),
    "float16": "float16",
    "int8": WireFormat(gradients="int8", variables="bfloat16"),
    "int4": "int4",
    "top_k": WireFormat(gradients=top_k(1.0), variables="float16"),
    "variables only": WireFormat(variables="bfloat16"),
}
# A multiple of the scale of int8, and of few bits.
GRADIENT = 127.0
NAMES = ("rows", "columns", "bias", "double")


def declared() -> dict[str, Any]:
    return {
        "rows": Variable(np.zeros((40, 3), np.float32), partitioner=worker_client.fixed_size_partitioner(2)),
        "columns": Variable(np.zeros((4, 6), np.float32), partitioner=worker_client.fixed_size_partitioner(2, axis=1)),
        "bias": np.zeros(5, np.float32),
        "double": np.zeros(3),
        "count": Buffer(np.zeros(2, np.float32), "add"),
        "table": EmbeddingTable((10, 2)),
    }


def gradients(session: Session, **changes: Any) -> dict[str, Any]:
    shapes = {name: view for name, view in session.gradient_buffers().items() if name in NAMES}
    return {name: np.full(view.shape, GRADIENT, view.dtype) for name, view in shapes.items()} | changes


@pytest.fixture
def sessions(socket_dir: Path, request: pytest.FixtureRequest) -> Iterator[list[Session]]:
    """Two workers of two parameter servers, one of them without a wire format."""
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2, replicas_to_aggregate=2, num_workers=2), stack, directory=socket_dir)
        opened = []
        for wire in (FORMATS[request.param], None):
            session = worker_client.connect(cluster.chief_address, timeout_s=20, transport="grpc", wire=wire)
            stack.callback(session.close)
            session.create_or_join(declared(), optimizer=worker_client.sgd(0.5), timeout_s=20)
            opened.append(session)
        yield opened


@pytest.mark.parametrize("sessions", FORMATS, indirect=True)
def test_everything_that_a_model_can_have_is_trained_in_every_format(sessions: list[Session]) -> None:
    rows = IndexedSlices(np.array([1, 4]), np.full((2, 2), 2.0, np.float32))
    for session in sessions:
        session.read()
        session.push(gradients(session, table=rows), updates={"count": np.full(2, 1001.0, np.float32)})
    for session in sessions:
        assert session.wait(timeout_s=20)
        values = session.read()
        for name in NAMES:
            np.testing.assert_array_equal(values[name], np.full_like(values[name], -0.5 * GRADIENT))
        np.testing.assert_array_equal(values["count"], [2002.0] * 2, "a state is not rounded")
        np.testing.assert_array_equal(session.read_rows("table", [1, 2]), [[-1, -1], [0, 0]])
    for session in sessions:
        session.push(gradients(session, table=None, bias=None, rows=None))
    for session in sessions:
        assert session.wait(timeout_s=20)
        values = session.read()
        for name, sum_ in (("rows", -0.5), ("columns", -1.0), ("bias", -0.5), ("double", -1.0)):
            np.testing.assert_array_equal(values[name], np.full_like(values[name], sum_ * GRADIENT))


@pytest.mark.parametrize("sessions", ["top_k"], indirect=True)
def test_the_worker_that_sends_fewer_bytes_and_the_one_that_does_not_agree_on_the_values(sessions: list[Session]) -> None:
    for _ in range(3):
        for session in sessions:
            session.push(gradients(session, table=None))
        for session in sessions:
            assert session.wait(timeout_s=20)
    one, other = (session.read() for session in sessions)
    for name in NAMES:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3)
