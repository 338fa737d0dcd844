"""Calls that fail in gRPC or the network: each ends in time, as a typed error that says what to do."""

import contextlib
import linecache
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol import errors
from ps_protocol.rpc.channel import CHANNEL_OPTIONS, DEFAULT_ACCESS, MAX_MESSAGE_BYTES
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.status import from_status
from ps_protocol.v1.error_pb2 import ErrorDetails
from tests.support.network.servers import downward, serving, unary, unused_address, upward
from tests.support.waiting import wait_until

SERVICE = "test.Service"
MIB = 1 << 20


@contextlib.contextmanager
def connected(address: str, service: str = SERVICE) -> Iterator[Connection]:
    connection = Connection(address, name="ps 0", service=service)
    try:
        yield connection
    finally:
        connection.close()


def call(connection: Connection, method: str = "Call", *, timeout_s: float = 10.0, text: str = "") -> str:
    return connection.unary(method, ErrorDetails(reason=text), ErrorDetails, timeout_s=timeout_s, awaited="an echo").reason


class Blocking:
    """A method of any kind that answers only when its client has gone."""

    def __init__(self) -> None:
        self.entered, self.left = threading.Event(), threading.Event()

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        gone = threading.Event()
        context.add_callback(gone.set)
        self.entered.set()
        gone.wait(30)
        self.left.set()
        return iter(())


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


@contextlib.contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A listener that speaks no gRPC: it sends `answer` on each connection and closes it; None: it never sends anything."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    if answer is None:
                        held.append(peer)
                        continue
                    with peer:
                        peer.sendall(answer)
                        peer.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for peer in held:
                peer.close()


def test_refused_connection_says_who_where_and_what_to_do() -> None:
    address = unused_address()
    with connected(address) as connection, pytest.raises(errors.Unavailable) as caught:
        call(connection)
    # gRPC does not always know why.
    causes = ("connection refused; is it started?", "no connection; is it started, and is the network to it there?")
    assert caught.value.message in [f"cannot reach ps 0 at {address}: {cause}" for cause in causes]


def test_a_missing_socket_is_reported_as_such(socket_dir: Path) -> None:
    with (
        connected(f"unix:{socket_dir}/ps.sock") as connection,
        pytest.raises(errors.Unavailable, match=r"ps\.sock: there is no such socket; is it started\?"),
    ):
        call(connection)


def test_unix_socket_serves(socket_dir: Path) -> None:
    with serving(unary(SERVICE, Call=echo), address=f"unix:{socket_dir}/ps.sock") as address, connected(address) as connection:
        assert call(connection, text="hello") == "hello"


def test_web_server_at_the_address_is_recognised() -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, connected(address) as connection:
        with pytest.raises(errors.Unavailable, match=r"speaks HTTP/1\.1, not gRPC; check the address"):
            call(connection)


def test_listener_that_hangs_up_is_lost() -> None:
    with listening(b"") as address, connected(address) as connection:
        with pytest.raises(errors.Unavailable, match="the connection was lost; did it end"):
            call(connection)


def test_silent_listener_costs_the_timeout_and_not_more() -> None:
    with listening(None) as address, connected(address) as connection:
        with pytest.raises(errors.PsError, match=r"waited for an echo, which did not come within 0\.3 s"):
            call(connection, timeout_s=0.3)


def test_slow_answer_is_a_deadline_exceeded_that_says_what_was_awaited() -> None:
    method = Blocking()
    with serving(unary(SERVICE, Call=method)) as address, connected(address) as connection:
        with pytest.raises(errors.DeadlineExceeded, match=f"ps 0 at {address}: waited for an echo, which did not come within 0.2 s"):
            call(connection, timeout_s=0.2)
        assert method.left.wait(10)


def test_server_that_ends_during_a_call_is_unavailable() -> None:
    method, outcome = Blocking(), []
    with contextlib.ExitStack() as stack:
        with serving(unary(SERVICE, Call=method)) as address:
            connection = stack.enter_context(connected(address))
            thread = threading.Thread(target=lambda: outcome.append(_caught(lambda: call(connection))))
            thread.start()
            assert method.entered.wait(10)
        thread.join(10)
    # A server that cancels its calls before it goes, or one whose connection breaks.
    assert isinstance(outcome[0], (errors.Unavailable, errors.Cancelled))


WAYS_TO_CALL: dict[str, Callable[[Connection], object]] = {
    SERVICE: call,
    "test.Up": lambda connection: connection.stream_up(
        "Call", (bytes(MIB) for _ in range(100)), ErrorDetails, timeout_s=30, awaited="an answer"
    ),
    "test.Down": lambda connection: connection.stream_down("Call", ErrorDetails(), list, timeout_s=30, awaited="an answer"),
}


@pytest.mark.parametrize("service", list(WAYS_TO_CALL))
def test_closing_ends_the_call_under_way_and_later_ones_with_cancelled(service: str) -> None:
    method, outcome = Blocking(), []
    with serving(unary(SERVICE, Call=method), upward("test.Up", Call=method), downward("test.Down", Call=method)) as address:
        with connected(address, service) as connection:
            thread = threading.Thread(target=lambda: outcome.append(_caught(lambda: WAYS_TO_CALL[service](connection))))
            thread.start()
            assert method.entered.wait(10)
            connection.close()
            thread.join(10)
            outcome.append(_caught(lambda: WAYS_TO_CALL[service](connection)))
    assert [type(error) for error in outcome] == [errors.Cancelled] * 2


@pytest.mark.parametrize("service", list(WAYS_TO_CALL))
def test_ctrl_c_ends_a_blocking_call_at_once_and_cancels_it_at_the_server(service: str) -> None:
    method = Blocking()

    def interrupt() -> None:
        method.entered.wait(10)
        # The server may have the call before the client has come to wait for the answer.
        wait_until(lambda: _waits_for_an_answer(threading.main_thread()))
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        with serving(unary(SERVICE, Call=method), upward("test.Up", Call=method), downward("test.Down", Call=method)) as address:
            with connected(address, service) as connection:
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    WAYS_TO_CALL[service](connection)
                assert method.left.wait(5), "the call continues at the server"
    finally:
        signal.signal(signal.SIGINT, previous)
        thread.join(10)


def test_too_large_an_answer_is_refused_with_the_limit() -> None:
    handlers = unary(SERVICE, Call=lambda request, context: bytes(MAX_MESSAGE_BYTES + 1), Echo=echo)
    with serving(handlers) as address, connected(address) as connection:
        with pytest.raises(errors.LimitExceeded, match=f"larger than max .*a message may have {MAX_MESSAGE_BYTES} bytes at most"):
            call(connection)
        assert call(connection, "Echo", text="on") == "on"


def test_too_large_a_request_is_refused_with_the_limit() -> None:
    with serving(unary(SERVICE, Call=echo)) as address, connected(address) as connection:
        with pytest.raises(errors.LimitExceeded, match=f"larger than max .*a message may have {MAX_MESSAGE_BYTES} bytes at most"):
            call(connection, text="x" * (MAX_MESSAGE_BYTES + 1))
        assert call(connection, text="on") == "on"


def test_unknown_method_says_that_versions_or_roles_differ() -> None:
    with serving(unary(SERVICE, Call=echo)) as address, connected(address) as connection:
        with pytest.raises(errors.Unimplemented, match="older version, has another role, or is no Lockstep server"):
            call(connection, "Other")


def test_proxies_of_the_environment_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{unused_address()}")
    with serving(unary(SERVICE, Call=echo)) as address, connected(address) as connection:
        assert call(connection, text="direct") == "direct"


def test_wrong_address_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(errors.InvalidSpec, match="want host:port or unix:/path"):
        DEFAULT_ACCESS.open_channel("nonsense")


def test_options_are_set_once_each() -> None:
    names = [name for name, _ in CHANNEL_OPTIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("errors resolving no.such.host:80: [… Domain name not found]", "the name is unknown"),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: No route to host", "no route to host"),
        ("keepalive watchdog timeout", "no answer any more"),
        ("Socket closed", "the connection was lost"),
        ("Secure read failed (FD shutdown)", "the connection was lost"),
        ("Timeout occurred: FD Shutdown (connect() timed out)", "no answer"),
        ("Failed to connect to remote host: Timeout occurred: FD shutdown", "no connection"),
        ("last error: UNKNOWN: ipv4:10.0.0.1:1: tcp handshaker shutdown", "no answer; is its machine up"),
        ("Connection reset by peer", "the connection was lost"),
        ("something new", "something new"),
        ("", "no cause was given"),
    ],
)
def test_unavailable_names_its_cause(details: str, words: str) -> None:
    error = from_status(grpc.StatusCode.UNAVAILABLE, details, target="ps 0 at h:1", awaited="x", timeout_s=None)
    assert isinstance(error, errors.Unavailable)
    assert error.message.startswith(f"cannot reach ps 0 at h:1: {words}")


def _waits_for_an_answer(thread: threading.Thread) -> bool:
    """Whether a thread is in the midst of what blocks in gRPC: of a call alone, of a future, or of a stream."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "next_event()" in line or frame.f_code.co_name in ("result", "_next"):
            return True
        frame = frame.f_back
    return False


def _caught(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None
