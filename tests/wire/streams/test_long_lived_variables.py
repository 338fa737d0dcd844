"""A parameter server's answers on Read, to good and to bad requests, through a raw channel."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.roles.shard import ReadRequest, ShardStatusRequest, ShutdownRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire.fields import encode_duration
from ps_server.config import ParameterServerConfig
from ps_server.serving.calls import SERVICE
from ps_server.serving.streams import IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import TIMEOUT_S, Outcome, RawShard
from tests.support.parameter_servers.serving import serving_shard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, MIXED, Trainer, open_server
from tests.support.waiting import wait_until

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[RawShard, Trainer]]:
    """A shard at step 3."""
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            trainer = Trainer(shard)
            trainer.create(1.0)
            for step in range(3):
                trainer.train(step)
            yield raw, trainer


def _request(*, max_wait_s: float | None = None, **fields: Any) -> bytes:
    max_wait = None if max_wait_s is None else encode_duration(max_wait_s)
    return pb.ReadRequest(**{"epoch": EPOCH, "layout_hash": MIXED.hash, "max_wait": max_wait, **fields}).SerializeToString()


def _messages(ended: Outcome) -> list[pb.ReadResponse]:
    assert ended.code is CODE.OK, ended.text
    return [pb.ReadResponse.FromString(message) for message in ended.messages]


Row = tuple[str, Callable[[], bytes], str, str]
ROWS: list[Row] = [
    ("garbage", lambda: b"\xff" * 4, "MALFORMED_MESSAGE", "use the same .proto"),
    ("nothing is asked for", lambda: b"", "EPOCH_MISMATCH", "epoch"),
    ("unknown epoch", lambda: _request(epoch=99), "EPOCH_MISMATCH", "epoch"),
    ("unknown layout", lambda: _request(layout_hash="x"), "LAYOUT_MISMATCH", "layout"),
    ("step gone", lambda: _request(step=1), "STEP_GONE", "step 1 is gone"),
    ("step not there", lambda: _request(step=9), "STEP_NOT_READY", "not there yet"),
    ("step waited for in vain", lambda: _request(step=4, max_wait_s=0.01), "STEP_NOT_READY", "not there yet"),
    ("negative wait", lambda: _request(step=4, max_wait_s=-5.0), "STEP_NOT_READY", "not there yet"),
    ("encoding for gradients", lambda: _request(encoding=pb.FLOAT_ENCODING_TOP_K), "INVALID_SPEC", "encoding"),
    ("unknown encoding", lambda: _request(encoding=99), "INVALID_SPEC", "encoding"),
]


@pytest.mark.parametrize(("case", "bad", "reason", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_request_is_answered_in_the_stream_and_the_next_is_served(
    trained: tuple[RawShard, Trainer], case: str, bad: Callable[[], bytes], reason: str, text: str
) -> None:
    raw, trainer = trained
    before = trainer.shard.call(ShardStatusRequest()).report.allocated_bytes
    failed, *good = _messages(raw.call("Read", bad(), _request(step=3)))
    assert (failed.header.error.reason, failed.HasField("frame")) == (reason, False)
    assert text in failed.header.error.message
    assert (good[0].header.step, good[0].header.num_bytes) == (3, MIXED.nbytes)
    assert b"".join(message.frame.data for message in good) == bytes(trainer.read(3)[1])
    assert trainer.shard.call(ShardStatusRequest()).report.allocated_bytes == before


@pytest.mark.parametrize("fields", [{"step": 3}, {}], ids=["that step", "the newest"])
def test_step_that_the_reader_holds_is_not_sent(trained: tuple[RawShard, Trainer], fields: dict[str, int]) -> None:
    (answer,) = _messages(trained[0].call("Read", _request(held_step=3, **fields)))
    assert (answer.header.step, answer.header.num_bytes, answer.HasField("frame")) == (3, 0, False)


def test_step_that_the_reader_holds_is_sent_if_another_one_is_asked_for(trained: tuple[RawShard, Trainer]) -> None:
    answer = _messages(trained[0].call("Read", _request(step=3, held_step=2)))[0]
    assert (answer.header.step, answer.header.num_bytes) == (3, MIXED.nbytes)


@pytest.mark.parametrize("encoding", [FloatEncoding.BFLOAT16, FloatEncoding.FLOAT16])
def test_variables_are_sent_in_half_precision(encoding: FloatEncoding) -> None:
    with open_server(ParameterServerConfig(index=0)) as running:
        with contextlib.closing(CommandedShard(running.address, variables_encoding=encoding)) as shard:
            trainer = Trainer(shard)
            trainer.create(1.0)
            assert np.array_equal(trainer.read()[1], trainer.arena(1.0)), "as it is, as long as the layout is not known"
            shard.know_layout(MIXED)
            assert np.array_equal(trainer.read()[1], trainer.arena(1.0))


def test_step_that_is_expected_leaves_as_soon_as_it_is_there() -> None:
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            trainer = Trainer(shard)
            trainer.create(1.0)
            call = raw._channel.stream_stream(f"/{SERVICE}/Read")(iter([_request(step=1, max_wait_s=20.0)]), timeout=TIMEOUT_S)
            trainer.train(0)
            assert pb.ReadResponse.FromString(next(call)).header.step == 1


def test_reader_that_goes_while_it_waits_leaves_nothing_behind() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams()
    with serving_shard(store, idle_streams) as address, RawShard(address) as raw:
        with contextlib.closing(CommandedShard(address)) as shard:
            trainer = Trainer(shard)
            trainer.create()
            call = raw._channel.stream_stream(f"/{SERVICE}/Read")(iter([_request(step=1, max_wait_s=20.0)]), timeout=TIMEOUT_S)
            wait_until(lambda: store.num_listeners == 1, what="the request waits")
            call.cancel()
            wait_until(lambda: not idle_streams.num_streams, timeout_s=10, what="the stream has ended")
            assert trainer.train(0).step == 1


def test_a_waiting_reader_learns_that_the_server_ends() -> None:
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            trainer = Trainer(shard)
            trainer.create()
            call = raw._channel.stream_stream(f"/{SERVICE}/Read")(iter([_request(step=1, max_wait_s=20.0)]), timeout=TIMEOUT_S)
            wait_until(lambda: running.shard.num_listeners == 1, what="the request waits")
            shard.call(ShutdownRequest(fence=fence(EPOCH, CHIEF), reason="training is finished"))
            assert pb.ReadResponse.FromString(next(call)).header.error.reason == "SHUTTING_DOWN"


def test_a_read_takes_the_expected_step_and_no_other() -> None:
    with open_server(ParameterServerConfig(index=0)) as running, contextlib.closing(CommandedShard(running.address)) as shard:
        trainer = Trainer(shard)
        trainer.create(1.0)
        for step, expected in enumerate((1, 1, 3, 9, 5)):
            shard.expect(ReadRequest(epoch=EPOCH, step=expected, layout_hash=MIXED.hash))
            trainer.train(step)
            found, memory = trainer.read(step + 1)
            assert found == step + 1
            assert np.array_equal(MIXED.view(memory, 1), np.full(3, 1.0 - 0.5 * found, np.float32))
        assert shard.read(ReadRequest(epoch=EPOCH, step=5, layout_hash=MIXED.hash, held_step=5), Segments([aligned_bytes(0)])) == 5
        assert trainer.read(None)[0] == 5
