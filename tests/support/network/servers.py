"""Tiny gRPC servers for tests, on threads or on asyncio, with the product's own options. Knows no role."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import grpc.aio

from ps_protocol.errors import PsError
from ps_protocol.rpc.channel import server_options
from ps_protocol.rpc.status import set_status

Method = Callable[..., Any]


def unary(service: str, **methods: Method) -> grpc.GenericRpcHandler:
    """Returns a service of methods that take and give bytes."""
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    )


def upward(service: str, **methods: Method) -> grpc.GenericRpcHandler:
    """Returns a service of methods that take a stream of bytes."""
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.stream_unary_rpc_method_handler(method) for name, method in methods.items()}
    )


def downward(service: str, **methods: Method) -> grpc.GenericRpcHandler:
    """Returns a service of methods that give a stream of bytes."""
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.unary_stream_rpc_method_handler(method) for name, method in methods.items()}
    )


def both_ways(service: str, **methods: Method) -> grpc.GenericRpcHandler:
    """Returns a service of methods that take and give streams of bytes."""
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
    )


@contextlib.contextmanager
def answering(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call of a method of gRPC's own kind with the status of the PsError that the block raises."""
    try:
        yield
    except PsError as error:
        set_status(context, error)
        inner: Any = context
        context.abort(inner.code(), inner.details())


@contextlib.contextmanager
def serving(*handlers: grpc.GenericRpcHandler, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves on threads until the block ends; yields the address."""
    server = grpc.server(futures.ThreadPoolExecutor(16), options=server_options())
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


@contextlib.contextmanager
def serving_aio(*handlers: grpc.GenericRpcHandler) -> Iterator[str]:
    """Serves on asyncio, in a thread of its own, until the block ends; yields the address."""
    started, address, loop, stop = threading.Event(), [""], asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers(handlers)
        address[0] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(grace=None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def unused_address() -> str:
    """Returns an address where nobody listens."""
    with serving() as address:
        return address


def free_ports(count: int = 2) -> int:
    """The first of so many that are free, one after the other."""
    while True:
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for index in range(count):
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port + index if port else 0))
                    port = port or one.getsockname()[1]
            except OSError:
                continue
            return port
