"""A parameter server without a model: creations that are not whole or do not fit, and calls that come too early."""

from collections.abc import Iterator

import grpc
import pytest

from ps_protocol.roles.shard import ShardStatusRequest, ShutdownRequest
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from tests.support.chief.eras import fence
from tests.support.parameter_servers.raw_shard import HALF, WHOLE, Server, frame, fresh_shard, push_stream
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of, variable

CODE = grpc.StatusCode


@pytest.fixture
def fresh() -> Iterator[Server]:
    with fresh_shard() as running:
        yield running


def test_the_refusal_of_a_push_before_initialisation_says_what_is_missing(fresh: Server) -> None:
    ended = fresh.raw.push(*push_stream(fresh.trainer.header(), WHOLE))
    assert (ended.code, ended.reason) == (CODE.FAILED_PRECONDITION, "NOT_INITIALIZED")
    assert "waiting for a worker to initialise the model" in ended.text


@pytest.mark.parametrize(
    ("frames", "reason"),
    [((), "TRUNCATED_STREAM"), ((frame(0, bytes(HALF)),), "TRUNCATED_STREAM"), ((frame(64, bytes(64)),), "FRAME_OUT_OF_ORDER")],
    ids=["no values", "half of the values", "a gap"],
)
def test_creation_that_is_not_whole_creates_nothing(fresh: Server, frames: tuple[tensor_pb2.ArenaFrame, ...], reason: str) -> None:
    assert fresh.create(fresh.encoded_spec(), *frames).reason == reason
    assert fresh.trainer.shard.call(ShardStatusRequest()).report.allocated_bytes == 0
    assert fresh.trainer.create()


def test_model_beyond_the_memory_is_refused_before_it_is_allocated(fresh: Server) -> None:
    layout = layout_of(*(variable(f"v{index}", (1 << 34,)) for index in range(64)))
    ended = fresh.create(codec.encode(fresh.trainer.spec(layout)))
    assert (ended.code, ended.reason) == (CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert "needs 8.0 TiB" in ended.text and "--max-memory-bytes" in ended.text
    assert fresh.trainer.create()


def test_any_values_of_no_elements_are_fine(fresh: Server) -> None:
    trainer = Trainer(fresh.trainer.shard, layout_of(variable("none", (0, 3))))
    assert trainer.create()
    assert trainer.train(0).step == 1


def test_scalar_is_not_a_vector_of_one(fresh: Server) -> None:
    assert Trainer(fresh.trainer.shard, layout_of(variable("scale"))).create()
    ended = fresh.create(codec.encode(fresh.trainer.spec(layout_of(variable("scale", (1,))))))
    assert (ended.code, ended.reason) == (CODE.ALREADY_EXISTS, "VARIABLE_EXISTS")
    assert "slices[0].variable.shape is (1,), the shard's is ()" in ended.text


def test_a_shard_that_shuts_down_refuses_pushes_and_says_why(fresh: Server) -> None:
    fresh.trainer.create()
    fresh.trainer.shard.call(ShutdownRequest(fence=fence(EPOCH, CHIEF), reason="training is finished"))
    ended = fresh.raw.push(*push_stream(fresh.trainer.header(), WHOLE))
    assert (ended.code, ended.reason) == (CODE.UNAVAILABLE, "SHUTTING_DOWN")
    assert ended.text == "ps 0 is shutting down: training is finished"
