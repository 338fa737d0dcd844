"""Calls that anybody may make, without a token: served without a thread, and only so many at once. Knows grpc's handlers; no method."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from ps_protocol.direct_serving import standing_method_handler
from ps_protocol.errors import LimitExceeded, MalformedMessage
from ps_protocol.standing_peer import Handler, Peer

# Of strangers, all together: what they may have a server remember, up to a message of 16 MiB each. One more ends the oldest, so that they
# keep nobody out: a question for the health is there with its call, and answered in a moment.
MAX_OPEN_CALLS = 8


class OpenCalls:
    """The calls under way that nobody had to be let in for. Thread-safe."""

    def __init__(self, *, limit: int = MAX_OPEN_CALLS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._calls: dict[Handler, Peer] = {}

    def handler_of(self, method: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Returns what serves a method of one message each way in place of its own handler, which must not wait."""
        return standing_method_handler(lambda peer, context: self._begin(method, peer, context), server_name="this server")

    def _begin(self, method: Any, peer: Peer, context: grpc.ServicerContext) -> Handler:
        call = _OpenCall(method, peer, context, on_close=self._closed)
        with self._lock:
            self._calls[call] = peer
            oldest = self._calls.pop(next(iter(self._calls))) if len(self._calls) > self._limit else None
        if oldest is not None:
            oldest.end(LimitExceeded(f"over {self._limit} calls without a token are under way; call again"))
        return call

    def _closed(self, call: Handler) -> None:
        with self._lock:
            self._calls.pop(call, None)


class _OpenCall:
    """Serves one call by the method's own handler. Implements the Handler of `standing_peer`."""

    def __init__(self, method: Any, peer: Peer, context: grpc.ServicerContext, *, on_close: Callable[[Handler], None]) -> None:
        self._method, self._peer, self._context, self._on_close = method, peer, context, on_close

    def take(self, message: bytes) -> None:
        """Answers. Raises MalformedMessage."""
        try:
            request = self._method.request_deserializer(message)
        except Exception:
            raise MalformedMessage("the request is no message of this method") from None
        answer = self._method.unary_unary(request, self._context)
        inner: Any = self._context  # `code` is no part of its type
        if inner.code() in (None, grpc.StatusCode.OK):
            self._peer.send(self._method.response_serializer(answer))
        self._peer.end()

    def close(self) -> None:
        """The call is over."""
        self._on_close(self)
