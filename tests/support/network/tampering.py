"""A server between a caller and the real one that changes the answers. Knows bytes and methods; no meaning, no role."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc

from ps_protocol.rpc.channel import CHANNEL_OPTIONS, server_options

# Takes a method's last name, an answer and its number, from 1, within its call; gives what continues in its place.
Change = Callable[[str, bytes, int], Iterable[bytes]]


class Tampering(grpc.GenericRpcHandler):
    """Passes every call on to the server at `target`, and each answer through `change`. `address` is where it listens."""

    def __init__(self, target: str, change: Change) -> None:
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._change = change
        # Each call holds a thread, the long-lived streams too.
        self._server = grpc.server(futures.ThreadPoolExecutor(64), options=server_options())
        self._server.add_generic_rpc_handlers([self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> "Tampering":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(grace=None).wait(5)
        self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._forward(method, requests, context)

        # On the wire, a call of one message each way is a stream of one.
        return grpc.stream_stream_rpc_method_handler(forward)

    def _forward(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        open_call: Any = self._channel.stream_stream(method)
        call = open_call(requests)
        context.add_callback(call.cancel)
        try:
            for number, answer in enumerate(call, start=1):
                yield from self._change(method.rpartition("/")[2], answer, number)
        except grpc.RpcError:
            context.set_trailing_metadata(call.trailing_metadata() or ())
            with contextlib.suppress(Exception):  # raised to end the call, which is what the caller shall see
                context.abort(call.code(), call.details() or "")
