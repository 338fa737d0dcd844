"""Streams served by gRPC's events, or by threads where gRPC's internals are not as expected: callers see no difference."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.rpc import server_stream
from ps_protocol.rpc.door import Door
from ps_protocol.rpc.server_stream import Peer, StreamThread
from tests.support.network.servers import serving
from tests.support.waiting import wait_until

METHOD = "/test.Service/Talk"
CODE = grpc.StatusCode
TIMEOUT_S = 20.0


@dataclass
class Talk:
    """Answers each message with itself, but for some that ask for something else."""

    peer: Peer
    taken: list[bytes] = field(default_factory=list)
    num_closed: int = 0

    def take(self, message: bytes) -> None:
        self.taken.append(message)
        match message:
            case b"refuse":
                raise InvalidSpec("no such thing")
            case b"break":
                raise ZeroDivisionError
            case b"end":
                self.peer.send(b"last words")
                self.peer.end()
                self.peer.send(b"never sent")
            case b"twice":
                self.peer.send(message)
                self.peer.send(message)
            case b"pause":
                self.peer.pause()
            case b"ask":
                self.peer.pause()
                self.peer.answer(message)
            case b"flood":
                for _ in range(server_stream._MAX_UNSENT + 1_000):
                    self.peer.send(bytes(16_384))
            case _:
                self.peer.send(message)

    def close(self) -> None:
        self.num_closed += 1


class Scene:
    """A server of that method, the talks that it has had, and calls to it."""

    def __init__(self) -> None:
        self.talks: list[Talk] = []
        self.is_full = self.is_broken = False

    def begin(self, peer: Peer, context: grpc.ServicerContext) -> Talk:
        if self.is_full:
            raise LimitExceeded("too many")
        if self.is_broken:
            raise ZeroDivisionError
        self.talks.append(Talk(peer))
        return self.talks[-1]

    def open(self, *messages: bytes, is_open: bool = False) -> Any:
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for message in messages:
            outgoing.put(message)
        if not is_open:
            outgoing.put(None)
        begin: Any = self.channel.stream_stream(METHOD)
        return begin(iter(outgoing.get, None), timeout=TIMEOUT_S)

    def ended(self, *messages: bytes) -> tuple[grpc.StatusCode, str, list[bytes]]:
        call, answers = self.open(*messages), []
        with contextlib.suppress(grpc.RpcError):
            answers += list(call)
        return call.code(), call.details(), answers

    def is_closed_once(self) -> bool:
        return [talk.num_closed for talk in self.talks] == [1] * len(self.talks)

    channel: grpc.Channel


@pytest.fixture(params=["events", "threads"])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    if request.param == "threads":
        monkeypatch.setattr(server_stream, "_EventPeer", _unavailable)
    scene = Scene()
    with serving(_handler(scene.begin)) as address, grpc.insecure_channel(address) as scene.channel:
        yield scene


def _unavailable(*_: object, **__: object) -> object:
    raise AttributeError("gRPC's inner part is another one")


def _handler(begin: Any) -> grpc.GenericRpcHandler:
    return Door({METHOD: begin}, server_name="ps 0")


def test_messages_are_answered_in_order(scene: Scene) -> None:
    messages = [str(number).encode() for number in range(200)]
    assert scene.ended(*messages) == (CODE.OK, "", messages)
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")


def test_answers_leave_one_after_the_other(scene: Scene) -> None:
    assert scene.ended(b"twice", b"x", b"twice") == (CODE.OK, "", [b"twice"] * 2 + [b"x"] + [b"twice"] * 2)


def test_streams_do_not_mix(scene: Scene) -> None:
    first, second = scene.open(b"a", is_open=True), scene.open(b"b", is_open=True)
    assert (next(second), next(first)) == (b"b", b"a")
    first.cancel(), second.cancel()


def test_error_ends_the_stream_with_its_status(scene: Scene) -> None:
    code, text, _ = scene.ended(b"x", b"refuse", b"y")
    assert code is CODE.INVALID_ARGUMENT and "no such thing" in text
    assert scene.talks[0].taken == [b"x", b"refuse"]
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")


def test_defect_ends_its_stream_and_no_other(scene: Scene) -> None:
    other = scene.open(b"a", b"b", is_open=True)
    assert next(other) == b"a"
    code, text, _ = scene.ended(b"break")
    assert code is CODE.INTERNAL and "ps 0" in text
    assert next(other) == b"b"
    assert scene.ended(b"x")[2] == [b"x"]
    other.cancel()


def test_the_server_ends_the_stream_after_its_last_answer(scene: Scene) -> None:
    assert scene.ended(b"x", b"end", b"y") == (CODE.OK, "", [b"x", b"last words"])


def test_stream_that_is_refused_ends_with_the_reason(scene: Scene) -> None:
    scene.is_full = True
    code, text, answers = scene.ended(b"x")
    assert (code, answers) == (CODE.RESOURCE_EXHAUSTED, [])
    assert "too many" in text


def test_stream_that_a_defect_keeps_from_beginning_ends(scene: Scene) -> None:
    scene.is_broken = True
    code, text, answers = scene.ended(b"x")
    assert (code, answers) == (CODE.INTERNAL, []) and "ps 0" in text


def test_peer_that_goes_away_closes_its_handler(scene: Scene) -> None:
    call = scene.open(b"x", is_open=True)
    assert next(call) == b"x"
    call.cancel()
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")
    scene.talks[0].peer.send(b"to nobody")
    scene.talks[0].peer.end()
    assert not scene.talks[0].peer.wait_for_room()


def test_nothing_is_taken_while_the_handler_has_paused(scene: Scene) -> None:
    call = scene.open(b"pause", b"x", is_open=True)
    wait_until(lambda: bool(scene.talks) and scene.talks[0].taken == [b"pause"], what="the first message")
    assert scene.ended(b"y")[2] == [b"y"], "others are served meanwhile"
    assert scene.talks[0].taken == [b"pause"]
    scene.talks[0].peer.resume()
    assert next(call) == b"x"
    call.cancel()


def test_answers_that_ask_for_the_next_message_come_in_order_among_others(scene: Scene) -> None:
    messages = [b"ask", b"x", b"ask", b"ask", b"twice", b"ask"]
    assert scene.ended(*messages) == (CODE.OK, "", [*messages[:4], b"twice", b"twice", b"ask"])
    assert scene.talks[0].taken == messages
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")


def test_answer_comes_from_another_thread_and_what_follows_it_is_not_lost(scene: Scene) -> None:
    call = scene.open(b"pause", b"x", is_open=True)
    wait_until(lambda: bool(scene.talks) and scene.talks[0].taken == [b"pause"], what="the first message")
    scene.talks[0].peer.answer(b"answer")
    assert [next(call), next(call)] == [b"answer", b"x"]
    call.cancel()


def test_stream_whose_answer_asks_for_the_next_message_ends_at_once_and_after_the_answer(scene: Scene) -> None:
    call = scene.open(b"ask", is_open=True)
    assert next(call) == b"ask"
    scene.talks[0].peer.end()
    assert list(call) == []
    assert call.code() is CODE.OK
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")
    call = scene.open(b"pause", is_open=True)
    wait_until(lambda: len(scene.talks) == 2 and scene.talks[1].taken == [b"pause"], what="the message")
    scene.talks[1].peer.answer(b"last words")
    scene.talks[1].peer.end()
    assert (list(call), call.code()) == ([b"last words"], CODE.OK)


def test_answer_and_the_next_message_have_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("_sent", "_received"):
        monkeypatch.setattr(server_stream._EventPeer, name, _counting(events, name))
    scene = Scene()
    with serving(_handler(scene.begin)) as address, grpc.insecure_channel(address) as scene.channel:
        call = scene.open(*[b"ask"] * 10, is_open=True)
        assert [next(call) for _ in range(10)] == [b"ask"] * 10
        assert events == ["_received"] * 10
        call.cancel()


def _counting(events: list[str], name: str) -> Any:
    there = getattr(server_stream._EventPeer, name)

    def counted(peer: object, event: object) -> object:
        events.append(name)
        return there(peer, event)

    return counted


def test_peer_that_asks_on_and_does_not_listen_is_cut() -> None:
    scene = Scene()
    with serving(_handler(scene.begin)) as address, grpc.insecure_channel(address) as scene.channel:
        call = scene.open(b"flood", is_open=True)
        wait_until(lambda: bool(scene.talks) and scene.is_closed_once(), timeout_s=TIMEOUT_S, what="the stream is over")
        assert scene.talks[0].peer.num_unsent == 0
        assert scene.ended(b"x")[2] == [b"x"]
        call.cancel()


def test_stop_of_the_server_ends_streams(scene: Scene) -> None:
    handler, stopped = _handler(scene.begin), Scene()
    with serving(handler) as address:
        channel = stopped.channel = grpc.insecure_channel(address)
        call = stopped.open(b"x", is_open=True)
        assert next(call) == b"x"
    with pytest.raises(grpc.RpcError):
        next(call)
    wait_until(scene.is_closed_once, what="the handler is told of the end, once")
    channel.close()


def _threaded(answers: Callable[[bytes], Iterator[bytes]]) -> Any:
    class Starting:
        """Leaves everything to a thread, from the first message on."""

        def __init__(self, peer: Peer, _: grpc.ServicerContext) -> None:
            self._peer, self._thread = peer, StreamThread(peer, server_name="ps 0")

        def take(self, message: bytes) -> None:
            self._peer.pause()
            self._thread.do(partial(self._answer, message))

        def finish(self) -> None:
            self._thread.do(self._peer.end)

        def close(self) -> None:
            self._thread.end()

        def _answer(self, message: bytes) -> None:
            self._peer.resume()
            for answer in answers(message):
                if not self._peer.wait_for_room():
                    return
                self._peer.send(answer)

    return Starting


@pytest.fixture(params=["events", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads":
        monkeypatch.setattr(server_stream, "_EventPeer", _unavailable)


@pytest.mark.usefixtures("way")
def test_thread_answers_all_that_came_before_the_peer_had_no_more() -> None:
    def answers(message: bytes) -> Iterator[bytes]:
        yield message + b"1"
        yield message + b"2"

    scene = Scene()
    with serving(_handler(_threaded(answers))) as address, grpc.insecure_channel(address) as scene.channel:
        assert scene.ended(b"a", b"b") == (CODE.OK, "", [b"a1", b"a2", b"b1", b"b2"])


@pytest.mark.usefixtures("way")
def test_thread_makes_few_answers_for_a_peer_that_does_not_take_them() -> None:
    num_made, is_over = [0], threading.Event()

    def answers(message: bytes) -> Iterator[bytes]:
        try:
            while True:
                num_made[0] += 1
                yield bytes(1 << 20)
        finally:
            is_over.set()

    scene = Scene()
    with serving(_handler(_threaded(answers))) as address, grpc.insecure_channel(address) as scene.channel:
        call = scene.open(b"a", is_open=True)
        assert len(next(call)) == 1 << 20
        call.cancel()
        assert is_over.wait(TIMEOUT_S)
        assert num_made[0] < 64


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("error", "code"), [(InvalidSpec("no"), CODE.INVALID_ARGUMENT), (ZeroDivisionError(), CODE.INTERNAL)])
def test_an_exception_in_a_thread_ends_the_stream_and_no_further_message_is_taken(error: Exception, code: grpc.StatusCode) -> None:
    taken: list[bytes] = []

    def answers(message: bytes) -> Iterator[bytes]:
        taken.append(message)
        yield message
        raise error

    scene = Scene()
    with serving(_handler(_threaded(answers))) as address, grpc.insecure_channel(address) as scene.channel:
        assert scene.ended(b"a", b"b")[0] is code
    assert taken == [b"a"]
