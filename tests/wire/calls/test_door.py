"""How a server serves calls of every kind: one message or many, answered at once or by threads, of which there are only so many."""

import contextlib
import threading
from collections.abc import Generator, Iterator
from typing import Any

import grpc
import pytest

from ps_protocol.errors import Cancelled
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.rpc.door import Blocking, CallThreads, Door, at_once, by_thread
from ps_protocol.rpc.server_stream import Call, Peer
from tests.support.network.servers import serving
from tests.support.waiting import wait_until

CODE = grpc.StatusCode


class Scene:
    """A server of three methods, and how its calls went."""

    def __init__(self, threads: CallThreads) -> None:
        self.may_answer = threading.Event()
        self.taken: list[bytes] = []
        self.ended_by: list[BaseException] = []
        self.methods = {"/test/Now": at_once(self._echo), "/test/Later": by_thread(self._wait, threads), "/test/Many": self._begin}
        self._threads = threads

    def call(self, method: str, *messages: bytes) -> tuple[grpc.StatusCode, str, list[bytes]]:
        """Sends the messages, and returns how the call ended, and its answers."""
        call, answers = self.begin(method, iter(messages)), []
        with contextlib.suppress(grpc.RpcError):
            answers += list(call)
        return call.code(), call.details(), answers

    def begin(self, method: str, messages: Iterator[bytes]) -> Any:
        begin: Any = self.channel.stream_stream(f"/test/{method}")
        return begin(messages, timeout=20)

    def _echo(self, message: bytes, call: Call) -> bytes:
        return message

    def _wait(self, message: bytes, call: Call) -> bytes:
        assert self.may_answer.wait(20)
        return message

    def _begin(self, peer: Peer, call: Call) -> Blocking:
        return Blocking(peer, self._serve, threads=self._threads)

    def _serve(self, messages: Iterator[bytes]) -> Generator[bytes, None, None]:
        try:
            for message in messages:
                self.taken.append(message)
                assert self.may_answer.wait(20)
                yield message
        except BaseException as error:
            self.ended_by.append(error)
            raise

    channel: grpc.Channel


@pytest.fixture
def scene() -> Iterator[Scene]:
    threads = CallThreads(server_name="the server", max_calls=2)
    scene = Scene(threads)
    with serving(Door(scene.methods, server_name="the server")) as address, DEFAULT_ACCESS.open_channel(address) as scene.channel:
        yield scene
        scene.may_answer.set()
    threads.close()


@pytest.mark.parametrize("method", ["Now", "Later", "Many"])
def test_each_kind_of_call_is_answered(scene: Scene, method: str) -> None:
    scene.may_answer.set()
    assert scene.call(method, b"x") == (CODE.OK, "", [b"x"])


@pytest.mark.parametrize("method", ["Now", "Later"])
def test_call_of_one_message_needs_it(scene: Scene, method: str) -> None:
    code, text, answers = scene.call(method)
    assert (code, answers) == (CODE.INVALID_ARGUMENT, []) and "no message" in text


def test_second_message_of_a_call_of_one_is_refused(scene: Scene) -> None:
    code, text, answers = scene.call("Later", b"x", b"y")
    assert (code, answers) == (CODE.INVALID_ARGUMENT, []) and "a second message" in text


def test_messages_are_asked_for_one_by_one(scene: Scene) -> None:
    """Else a caller could have the server hold as many as it likes."""
    call = scene.begin("Many", iter([b"a", b"b", b"c"]))
    wait_until(lambda: scene.taken == [b"a"], what="the first message")
    assert scene.call("Now", b"x")[0] is CODE.OK, "others are served meanwhile"
    assert scene.taken == [b"a"]
    scene.may_answer.set()
    assert list(call) == [b"a", b"b", b"c"]


def test_thread_that_waits_for_a_caller_hears_that_it_has_gone(scene: Scene) -> None:
    scene.may_answer.set()
    is_over = threading.Event()

    def silent() -> Iterator[bytes]:
        yield b"a"
        is_over.wait(20)

    call = scene.begin("Many", silent())
    assert next(call) == b"a"
    call.cancel()
    is_over.set()
    # While it waits for a message, or, if it had not come so far, before it did.
    wait_until(lambda: [type(error) for error in scene.ended_by] in ([Cancelled], [GeneratorExit]), what="the thread has heard of it")


def test_more_calls_at_once_than_a_server_serves_by_threads_are_refused(scene: Scene) -> None:
    held = [scene.begin(method, iter([b"x"])) for method in ("Later", "Many")]
    wait_until(lambda: scene.taken == [b"x"], what="the threads are at work")
    wait_until(lambda: scene._threads._num_calls == 2, what="the threads are at work")
    for method in ("Later", "Many"):
        code, text, _ = scene.call(method, b"y")
        assert code is CODE.RESOURCE_EXHAUSTED and "2 calls are under way" in text
    assert scene.call("Now", b"y") == (CODE.OK, "", [b"y"]), "what needs no thread is answered"
    scene.may_answer.set()
    assert [list(call) for call in held] == [[b"x"], [b"x"]]
    wait_until(lambda: scene.call("Later", b"y") == (CODE.OK, "", [b"y"]), what="there is room again")
