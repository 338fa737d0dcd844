"""Calls that begin in the thread that takes a server's events: they need no thread, and none is lost when many come at once."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from ps_protocol.rpc.channel import DEFAULT_ACCESS, MAX_CALLS_A_CONNECTION, server_options
from ps_protocol.rpc.server_stream import never_waiting

METHOD = "/test.Service/Answer"


@contextlib.contextmanager
def serving(begin: Callable[[], None]) -> Iterator[tuple[str, futures.ThreadPoolExecutor]]:
    def serve(requests: Any, context: grpc.ServicerContext, send_response: Callable[[bytes | None], None]) -> None:
        begin()
        send_response(None)

    pool = futures.ThreadPoolExecutor(8)
    server = grpc.server(pool, options=server_options())
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Answer": grpc.stream_stream_rpc_method_handler(never_waiting(serve))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", pool
    server.stop(None).wait()


def test_calls_that_never_wait_make_no_thread() -> None:
    begun_by: set[str] = set()
    with serving(lambda: begun_by.add(threading.current_thread().name)) as (address, pool), DEFAULT_ACCESS.open_channel(address) as channel:
        invoke: Any = channel.unary_stream(METHOD)
        assert {one.code() for one in [invoke(b"", timeout=60) for _ in range(50)]} == {grpc.StatusCode.OK}
        inner: Any = pool
        assert not inner._threads
    assert len(begun_by) == 1


def test_calls_that_come_all_at_once_are_all_answered() -> None:
    """As when thousands of workers start, or strangers send many: left alone, gRPC cancels some of over a thousand that wait."""
    may_begin = threading.Event()

    def begin() -> None:
        assert may_begin.wait(30)

    with serving(begin) as (address, _), contextlib.ExitStack() as stack:
        calls = []
        # No connection has more than it may: those beyond may be refused before the caller hears of the bound.
        # On a busy machine a connection may take longer than the 3 s of an attempt; these calls, which nobody repeats, wait for it.
        for _ in range(40):
            invoke: Any = stack.enter_context(DEFAULT_ACCESS.open_channel(address)).unary_stream(METHOD)
            calls += [invoke(b"", timeout=60, wait_for_ready=True) for _ in range(MAX_CALLS_A_CONNECTION)]
        may_begin.set()
        assert {(one.code(), one.details()) for one in calls} == {(grpc.StatusCode.OK, "")}
