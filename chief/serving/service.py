"""The chief's RPCs: the handlers of single calls and of long-lived streams. Decides nothing.

All methods take bytes, so that malformed messages are refused here, with a reason. No method has a thread of its own: the thread that
receives for the whole server handles the message, and the thread that has the answer sends it.
"""

import logging
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import grpc
from google.protobuf.message import Message

from chief.core import messages as ev
from chief.serving.runner import Runner
from ps_protocol.errors import LimitExceeded, MalformedMessage, PermissionDenied, PsError
from ps_protocol.roles.chief import CommitResult, DeregisterRequest, HeartbeatRequest, ParticipantKind, RegisterRequest, TokenReply
from ps_protocol.roles.request import requests_of, requests_on
from ps_protocol.rpc.server_stream import Handler, Peer, stream_handler
from ps_protocol.rpc.status import defect
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.codec import decode_message

log = logging.getLogger("lockstep.chief")

# What single calls are asked with, by their names; and calls on a long-lived stream, by the fields of its messages.
_REQUESTS, _CONVERSED = requests_of("ChiefService"), requests_on("ChiefService", "Converse")


class SingleCall:
    """Serves one call. Implements `Handler` of `ps_protocol.rpc.server_stream`; the answer comes from any thread."""

    def __init__(
        self, runner: Runner, peer: Peer, request_type: type, *, check: Callable[[Any], None], on_close: Callable[[Handler], None]
    ) -> None:
        self._runner, self._peer, self._request_type, self._check, self._on_close = runner, peer, request_type, check, on_close
        self._lock = threading.Lock()
        self._number: int | None = None
        self._is_begun = self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call. Raises PsError for an invalid message."""
        if self._is_begun:
            raise MalformedMessage("a second message; this call takes one")
        self._is_begun = True
        request = codec.decode_request(self._request_type, data)
        self._check(request)
        number = self._runner.begin(request, self._answer)
        with self._lock:
            self._number, is_over = number, self._is_over
        if is_over:
            self._runner.cancel(number)

    def finish(self) -> None:
        """Takes the end of the caller's messages: changes nothing if there was any. Raises MalformedMessage."""
        if not self._is_begun:
            raise MalformedMessage("no message; this call takes one")

    def close(self) -> None:
        """The call is answered, or the caller has gone away."""
        self._on_close(self)
        with self._lock:
            self._is_over, number = True, self._number
        if number is not None:
            self._runner.cancel(number)

    def _answer(self, answer: ev.Reply | ev.Refuse) -> None:
        if isinstance(answer, ev.Refuse):
            self._peer.end(answer.error)
            return
        try:
            data = codec.encode_answer(self._request_type, answer.value).SerializeToString()
        except Exception:
            self._peer.end(defect("the chief"))
            return
        self._peer.send(data)
        self._peer.end()


class ImmediateCall:
    """Serves one call whose answer is ready at once. Implements `Handler` of `ps_protocol.rpc.server_stream`."""

    def __init__(self, peer: Peer, answer: Callable[[bytes], Message], *, on_close: Callable[[Handler], None]) -> None:
        self._peer, self._compute, self._on_close = peer, answer, on_close

    def take(self, data: bytes) -> None:
        """Answers. Raises PsError."""
        self._peer.send(self._compute(data).SerializeToString())
        self._peer.end()

    def close(self) -> None:
        """The call is over."""
        self._on_close(self)


def encoded_answer(number: int, kind: str, value: Any) -> bytes:
    """Returns an answer on a long-lived stream, as it travels. `kind` is the field of its call."""
    # A message in two parts is the message; the second part is the same for all workers that get the same answer.
    return pb.ConverseResponse(call=number).SerializeToString() + _encoded(kind, value)


def encoded_error(number: int, error: PsError) -> bytes:
    """Returns the answer to a call on a long-lived stream that is refused."""
    return pb.ConverseResponse(call=number, error=encode_call_error(error)).SerializeToString()


@lru_cache(maxsize=16)
def _encoded(kind: str, value: CommitResult | TokenReply) -> bytes:
    response: Any = {kind: codec.encode(value)}
    return pb.ConverseResponse(**response).SerializeToString()


class Conversation:
    """Serves one stream. Implements `Handler` of `ps_protocol.rpc.server_stream`; answers come from any thread.

    The next call is taken when the one before it is answered.
    """

    def __init__(self, runner: Runner, peer: Peer, *, on_close: Callable[[Handler], None]) -> None:
        self._runner, self._peer, self._on_close = runner, peer, on_close
        self._call: int | None = None  # the runner's number of the last call
        self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call that a message is. Raises MalformedMessage."""
        message = decode_message(pb.ConverseRequest, data)
        number, kind = message.call, message.WhichOneof("request")
        self._peer.pause()
        try:
            if kind is None:
                raise MalformedMessage(f"call {number}: it asks for nothing that this chief knows")
            request: Any = codec.decode(_CONVERSED[kind], getattr(message, kind))
        except PsError as error:
            self._peer.answer(encoded_error(number, error))
            return
        self._call = self._runner.begin(request, partial(self._answer, number, kind))
        if self._is_over:
            self._runner.cancel(self._call)

    def close(self) -> None:
        """The stream is over: a call that has no answer gets none."""
        self._on_close(self)
        # In this order: `take` looks after it has begun a call.
        self._is_over = True
        if self._call is not None:
            self._runner.cancel(self._call)

    def _answer(self, number: int, kind: str, answer: ev.Reply | ev.Refuse) -> None:
        if isinstance(answer, ev.Reply):
            self._peer.answer(encoded_answer(number, kind, answer.value))
        else:
            self._peer.answer(encoded_error(number, answer.error))


SERVICE: str = pb.DESCRIPTOR.services_by_name["ChiefService"].full_name
# Two for each of ten thousand workers; a caller that opens calls without end is refused.
_MAX_OPEN_CALLS = 20_000


class ChiefService:
    """Serves one runner. Thread-safe. `may_work`: whether a caller may be a worker, and not only observe."""

    def __init__(self, runner: Runner, *, may_work: Callable[[grpc.ServicerContext], bool] = lambda context: True) -> None:
        self._runner, self._may_work = runner, may_work
        self._lock = threading.Lock()
        self._open: dict[Handler, Peer] = {}

    def end_conversations(self) -> None:
        """Ends all long-lived streams, once their answers have been sent."""
        with self._lock:
            peers = [peer for handler, peer in self._open.items() if isinstance(handler, Conversation)]
        for peer in peers:
            peer.end()

    def begin(self, name: str, peer: Peer, context: grpc.ServicerContext) -> Handler:
        """Returns the handler of one call of the method `name`. Raises LimitExceeded."""
        handler: Handler
        if name == "FinishTraining":
            log.info("asked to finish training peer=%s", context.peer())
        if name == "Converse":
            handler = Conversation(self._runner, peer, on_close=self._closed)
        elif name == "GetClusterStatus":
            handler = ImmediateCall(peer, self._status, on_close=self._closed)
        else:
            check = partial(_check_observes, name) if name in _OBSERVING and not self._may_work(context) else _allow
            handler = SingleCall(self._runner, peer, _REQUESTS[name], check=check, on_close=self._closed)
        with self._lock:
            if len(self._open) >= _MAX_OPEN_CALLS:
                raise LimitExceeded(f"{_MAX_OPEN_CALLS} calls are open at the chief; end some of them")
            self._open[handler] = peer
        return handler

    def _closed(self, handler: Handler) -> None:
        with self._lock:
            self._open.pop(handler, None)

    def _status(self, data: bytes) -> Message:
        message = decode_message(pb.GetClusterStatusRequest, data)
        status: Message = codec.encode(self._runner.status(max_ledger_entries=message.max_ledger_entries))
        return status


def chief_service_handler(service: ChiefService) -> grpc.GenericRpcHandler:
    """Returns the handler of every RPC of the service's descriptor, for `server.add_generic_rpc_handlers((handler,))`."""
    handlers: dict[str, Any] = {
        method.name: stream_handler(partial(service.begin, method.name), server_name="the chief")
        for method in pb.DESCRIPTOR.services_by_name["ChiefService"].methods
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


# What callers may ask for, each in its own name, that may only observe.
_OBSERVING = frozenset({"RegisterWorker", "Heartbeat", "DeregisterWorker"})


def _check_observes(name: str, request: RegisterRequest | HeartbeatRequest | DeregisterRequest) -> None:
    """Raises PermissionDenied in a worker's name, which any caller can give: observers may not even leave in it."""
    kind = request.kind if isinstance(request, RegisterRequest) else request.participant.kind
    if kind is not ParticipantKind.OBSERVER:
        raise PermissionDenied(f"{name} as a worker needs role worker, the caller may only observe")


def _allow(request: object) -> None:
    """Allows every admitted caller."""
