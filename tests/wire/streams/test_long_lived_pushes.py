"""A parameter server's answers on Push, to good and to bad contributions, through a raw channel."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from ps_protocol.roles.shard import PushHeader, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.serving.calls import SERVICE
from ps_server.serving.streams import IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.parameter_servers import raw_shard
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import HALF, TIMEOUT_S, WHOLE, Outcome, RawShard, frame
from tests.support.parameter_servers.serving import serving_shard
from tests.support.parameter_servers.shards import MIXED, Trainer, open_server
from tests.support.waiting import wait_until

CODE = grpc.StatusCode


class Server(raw_shard.Server):
    """The same, with headers of contributions that tests send piece by piece, and apply."""

    def header(self, **changes: Any) -> pb.PushHeader:
        header: pb.PushHeader = codec.encode(self.trainer.header(3, step=self.step))
        header.MergeFrom(pb.PushHeader(**changes))
        return header

    def apply(self, header: pb.PushHeader) -> None:
        assert self.trainer.apply(codec.decode(PushHeader, header).push_id, step=self.step).repeated_request is False


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with raw_shard.trained_shard() as server:
        yield Server(server.raw, server.trainer)


def _message(header: pb.PushHeader | None = None, part: tensor_pb2.ArenaFrame | None = None) -> bytes:
    return pb.PushRequest(header=header, frame=part).SerializeToString()


def _answers(ended: Outcome) -> list[pb.PushResponse]:
    assert ended.code is CODE.OK, ended.text
    return [pb.PushResponse.FromString(message) for message in ended.messages]


Row = tuple[str, Callable[[Server], list[bytes]], str, str]

# Case, what is sent before a good contribution, reason, what the text contains.
ROWS: list[Row] = [
    ("header missing", lambda s: [_message(None, WHOLE)], "MALFORMED_MESSAGE", "belongs to no contribution"),
    ("nothing at all", lambda s: [b""], "MALFORMED_MESSAGE", "belongs to no contribution"),
    ("garbage", lambda s: [b"\xff" * 4], "MALFORMED_MESSAGE", "use the same .proto"),
    (
        "garbage in the middle",
        lambda s: [_message(s.header(), frame(0, bytes(HALF))), b"\xff" * 4, _message(None, frame(HALF, bytes(HALF)))],
        "MALFORMED_MESSAGE",
        "use the same .proto",
    ),
    (
        "frames out of order",
        lambda s: [_message(s.header(), frame(64, bytes(64))), b"\xff", _message(None, WHOLE)],
        "FRAME_OUT_OF_ORDER",
        "64",
    ),
    ("too many bytes", lambda s: [_message(s.header(), frame(0, bytes(MIXED.nbytes + 64)))], "FRAME_OUT_OF_ORDER", "beyond"),
    ("too few bytes", lambda s: [_message(s.header()), _message(None, frame(0, bytes(HALF)))], "TRUNCATED_STREAM", "next contribution"),
    ("too few are to come", lambda s: [_message(s.header(content_bytes=8), frame(0, bytes(8)))], "TRUNCATED_STREAM", "8 bytes are to come"),
    ("too many are to come", lambda s: [_message(s.header(content_bytes=1 << 60), WHOLE)], "FRAME_OUT_OF_ORDER", "bytes are to come"),
    ("unknown epoch", lambda s: [_message(s.header(era=tensor_pb2.Era(epoch=99)), WHOLE)], "EPOCH_MISMATCH", "epoch"),
    ("unknown layout", lambda s: [_message(s.header(layout_hash="x"), WHOLE)], "LAYOUT_MISMATCH", "layout"),
    ("step ahead", lambda s: [_message(s.header(step=1 << 50), WHOLE)], "STEP_AHEAD", "ahead"),
    ("header without a push id", lambda s: [_message(pb.PushHeader(era=tensor_pb2.Era(epoch=1)), WHOLE)], "MALFORMED_MESSAGE", "push_id"),
    ("unknown encoding", lambda s: [_message(s.header(encoding=77), WHOLE)], "INVALID_SPEC", "encoding"),
]


@pytest.mark.parametrize(("case", "bad", "reason", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_contribution_is_answered_in_the_stream_and_the_next_counts(
    server: Server, case: str, bad: Callable[[Server], list[bytes]], reason: str, text: str
) -> None:
    server.trainer.train(server.step)
    before = server.trainer.shard.call(ShardStatusRequest())
    messages, good = bad(server), server.header()
    answers = _answers(server.raw.call("Push", *messages, _message(good, WHOLE)))
    assert [answer.error.reason for answer in answers] == [reason, ""]
    assert text in answers[0].error.message
    assert answers[1].push_id == good.push_id and answers[1].reply.result == pb.PUSH_RESULT_STAGED
    assert server.trainer.shard.call(ShardStatusRequest()).report.num_staged == before.report.num_staged + 1
    server.apply(good)
    assert server.trainer.shard.call(ShardStatusRequest()).report.allocated_bytes == before.report.allocated_bytes


def test_header_again_in_the_middle_begins_again(server: Server) -> None:
    header = server.header()
    answers = _answers(server.raw.call("Push", _message(header, frame(0, bytes(HALF))), _message(header, WHOLE)))
    assert [answer.error.reason for answer in answers] == ["TRUNCATED_STREAM", ""]
    assert [answer.push_id for answer in answers] == [header.push_id] * 2
    server.apply(header)


def test_contribution_that_the_stream_ends_in_has_no_effect(server: Server) -> None:
    answers = _answers(server.raw.call("Push", _message(server.header(), frame(0, bytes(HALF)))))
    assert [answer.error.reason for answer in answers] == ["TRUNCATED_STREAM"]
    assert server.trainer.shard.call(ShardStatusRequest()).report.num_staged == 0


def test_an_unwanted_contribution_is_answered_before_it_is_sent_and_its_frames_are_dropped(server: Server) -> None:
    stale, good, is_answered = server.header(), server.header(), threading.Event()
    server.trainer.train(server.step)
    good.step = server.step

    def messages() -> Iterator[bytes]:
        yield _message(stale)
        assert is_answered.wait(20)
        yield _message(None, frame(0, bytes(HALF)))
        yield _message(good, frame(0, bytes(HALF)))
        yield _message(None, frame(HALF, bytes(MIXED.nbytes - HALF)))

    call = server.raw._channel.stream_stream(f"/{SERVICE}/Push")(messages(), timeout=TIMEOUT_S)
    assert pb.PushResponse.FromString(next(call)).reply.result == pb.PUSH_RESULT_STALE
    is_answered.set()
    answer = pb.PushResponse.FromString(next(call))
    assert (answer.push_id, answer.reply.result) == (good.push_id, pb.PUSH_RESULT_STAGED)
    assert not list(call)
    server.apply(good)


def test_a_message_beyond_the_limit_ends_its_stream_and_no_other(server: Server) -> None:
    ended = server.raw.call("Push", bytes(17 << 20))
    assert ended.code is CODE.RESOURCE_EXHAUSTED
    server.trainer.train(server.step)


def test_stream_may_rest_but_not_stand_still_in_a_contribution() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams(limit_s=0.2)
    idle_streams.start()
    with serving_shard(store, idle_streams) as address, RawShard(address) as raw:
        with contextlib.closing(CommandedShard(address)) as shard:
            trainer = Trainer(shard)
            trainer.create()
            trainer.train(0)
            is_over = threading.Event()

            def silent() -> Iterator[bytes]:
                yield _message(codec.encode(trainer.header(5, step=1)))
                is_over.wait(20)

            call = raw._channel.stream_stream(f"/{SERVICE}/Push")(silent(), timeout=TIMEOUT_S)
            wait_until(lambda: call.code() is CODE.CANCELLED, what="the silent stream was cut")
            is_over.set()
            # The trainer's own streams have rested all the while.
            wait_until(lambda: idle_streams.num_streams == 2, what="the server has heard of it")
            assert trainer.train(1).step == 2
            assert idle_streams.num_streams == 2
    wait_until(lambda: not idle_streams.num_streams, what="the stream has ended")
    idle_streams.stop()


def test_a_caller_that_opens_streams_without_end_is_refused() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams(max_open=2)
    is_over = threading.Event()

    def silent() -> Iterator[bytes]:
        is_over.wait(TIMEOUT_S)
        yield from ()

    with serving_shard(store, idle_streams) as address, RawShard(address) as raw:
        channel = raw._channel
        opened = [channel.stream_stream(f"/{SERVICE}/Push")(silent(), timeout=TIMEOUT_S) for _ in range(2)]
        wait_until(lambda: idle_streams.num_streams == 2, what="both streams are open")
        with pytest.raises(grpc.RpcError) as caught:
            next(channel.stream_stream(f"/{SERVICE}/Read")(iter(()), timeout=TIMEOUT_S))
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        for call in opened:
            call.cancel()
        is_over.set()
        wait_until(lambda: not idle_streams.num_streams, what="the streams have ended")


def test_server_that_ends_does_not_wait_for_streams_at_rest() -> None:
    with open_server(ParameterServerConfig(index=0)) as running, contextlib.closing(CommandedShard(running.address)) as shard:
        trainer = Trainer(shard)
        trainer.create()
        trainer.train(0)
        trainer.read()
        assert running._idle_streams.num_streams == 3
        running._idle_streams.end_long_lived()
        wait_until(lambda: not running._idle_streams.num_streams, what="the streams have ended")
