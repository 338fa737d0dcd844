"""The threads that serve a stream of contributions, and the state after its end."""

import threading
from typing import Any

import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.shard import PushHeader, PushReply, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from ps_server.serving.local import InProcessShard
from ps_server.serving.streams import IdleStreams, PushStream
from ps_server.shard import handles
from ps_server.shard.handles import OpenPush
from ps_server.shard.shard import ServedShard
from tests.support.parameter_servers.shards import MIXED, Trainer
from tests.support.waiting import wait_until

HALF = MIXED.nbytes // 2


class _Peer:
    """A worker whose messages the test gives to the stream itself."""

    num_unsent = 0

    def __init__(self) -> None:
        self.answers: list[pb.PushResponse] = []
        self.is_paused = self.has_ended = False

    def send(self, message: bytes) -> None:
        self.answers.append(pb.PushResponse.FromString(message))

    def wait_for_room(self) -> bool:
        raise AssertionError("the thread of events must not wait")

    def answer(self, message: bytes) -> None:
        self.send(message)
        self.resume()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def end(self, error: PsError | None = None) -> None:
        assert error is None
        self.has_ended = True


class _Scene:
    def __init__(self) -> None:
        shard, self.idle_streams, self.peer = InProcessShard(index=0), IdleStreams(), _Peer()
        self.store, self.trainer = shard._shard, Trainer(shard)
        self.trainer.create()
        context: Any = None
        self.stream = PushStream(self.store, self.peer, context, idle_streams=self.idle_streams, name="ps 0")

    def take_first_half(self) -> None:
        header = codec.encode(self.trainer.header(3, step=0))
        header.content_bytes = MIXED.nbytes
        frame = tensor_pb2.ArenaFrame(data=bytes(HALF))
        self.stream.take(pb.PushRequest(header=header, frame=frame).SerializeToString())

    def take_second_half(self) -> None:
        frame = tensor_pb2.ArenaFrame(offset=HALF, data=bytes(MIXED.nbytes - HALF))
        self.stream.take(pb.PushRequest(frame=frame).SerializeToString())


class _Held:
    """Holds up the end of each contribution, and knows which thread came to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.threads = threading.Event(), list[threading.Thread]()
        finish = OpenPush.finish

        def held(push: OpenPush) -> PushReply:
            self.threads.append(threading.current_thread())
            assert self.may_go_on.wait(20)
            return finish(push)

        monkeypatch.setattr(OpenPush, "finish", held)


def test_small_contribution_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, held = _Scene(), _Held(monkeypatch)
    held.may_go_on.set()
    scene.take_first_half()
    scene.take_second_half()
    assert [answer.reply.result for answer in scene.peer.answers] == [pb.PUSH_RESULT_STAGED]
    assert held.threads == [threading.current_thread()] and not scene.peer.is_paused


@pytest.mark.parametrize("large", ["model", "contribution"])
def test_end_of_a_large_contribution_is_left_to_a_thread_and_no_message_is_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    """Also for a small model: a contribution may have very many rows for a table of few."""
    if large == "model":
        monkeypatch.setattr(ServedShard, "is_quick", False)
    else:
        monkeypatch.setattr(handles, "SMALL_BYTES", MIXED.nbytes - 1)
    scene, held = _Scene(), _Held(monkeypatch)
    scene.take_first_half()
    assert not scene.peer.is_paused and not held.threads
    scene.take_second_half()
    assert scene.peer.is_paused and not scene.peer.answers
    held.may_go_on.set()
    wait_until(lambda: not scene.peer.is_paused, what="the stream takes messages again")
    assert [answer.reply.result for answer in scene.peer.answers] == [pb.PUSH_RESULT_STAGED]
    assert held.threads != [threading.current_thread()]
    scene.stream.finish()
    assert scene.peer.has_ended


def test_long_list_is_decoded_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, decode = list[threading.Thread](), codec.decode

    def decoding(value_type: type[PushHeader], message: pb.PushHeader) -> PushHeader:
        threads.append(threading.current_thread())
        return decode(value_type, message)

    monkeypatch.setattr(codec, "decode", decoding)
    scene = _Scene()
    header = codec.encode(scene.trainer.header(3, absent=tuple(range(20_000))))
    scene.stream.take(pb.PushRequest(header=header).SerializeToString())
    wait_until(lambda: bool(scene.peer.answers) and not scene.peer.is_paused, what="it is answered, and the stream takes messages again")
    assert scene.peer.answers[0].error.reason == "INVALID_SPEC"
    assert len(threads) == 1 and threads != [threading.current_thread()]


def test_stream_that_ends_in_a_contribution_leaves_nothing() -> None:
    scene = _Scene()
    scene.take_first_half()
    scene.stream.close()
    assert not scene.store.call(ShardStatusRequest()).report.num_staged and not scene.idle_streams.num_streams
    scene.take_second_half()
    assert not scene.peer.answers
    allocated_bytes = scene.store.call(ShardStatusRequest()).report.allocated_bytes
    assert scene.trainer.train(0).step == 1
    assert scene.store.call(ShardStatusRequest()).report.allocated_bytes == allocated_bytes


def test_stream_that_ends_while_its_thread_is_at_work_leaves_that_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedShard, "is_quick", False)
    scene, held = _Scene(), _Held(monkeypatch)
    scene.take_first_half()
    scene.take_second_half()
    wait_until(lambda: bool(held.threads), what="the thread has come to the end of the contribution")
    scene.stream.close()
    assert not scene.idle_streams.num_streams
    held.may_go_on.set()
    held.threads[0].join(20)
    assert not held.threads[0].is_alive() and scene.store.call(ShardStatusRequest()).report.num_staged == 1
