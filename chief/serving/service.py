"""The chief's RPCs: single calls and long-lived streams. Decides nothing.

All methods take bytes, so that malformed messages are refused here, with a reason. No method has a thread of its own: the thread that
receives for the whole server handles the message, and the thread that has the answer sends it.
"""

import logging
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from chief.core import messages as ev
from chief.serving.runner import Runner
from ps_protocol.errors import LimitExceeded, MalformedMessage, PermissionDenied, PsError
from ps_protocol.roles.chief import (
    ClusterStatus,
    ClusterStatusRequest,
    CommitResult,
    DeregisterRequest,
    HeartbeatRequest,
    ParticipantKind,
    RegisterRequest,
    TokenReply,
)
from ps_protocol.roles.request import requests_of, requests_on
from ps_protocol.rpc.door import Methods, OneAnswer, answer, at_once, plain
from ps_protocol.rpc.server_stream import Begin, Call, Handler, Peer
from ps_protocol.rpc.status import defect
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.codec import decode_message

log = logging.getLogger("lockstep.chief")

# What single calls are asked with, by their names; and calls on a long-lived stream, by the fields of its messages.
_REQUESTS, _CONVERSED = requests_of("ChiefService"), requests_on("ChiefService", "Converse")


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

    def __init__(self, runner: Runner, peer: Peer) -> None:
        self._runner, self._peer = runner, peer
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

    def __init__(self, runner: Runner, *, may_work: Callable[[Call], bool] = lambda call: True) -> None:
        self._runner, self._may_work = runner, may_work
        self._lock = threading.Lock()
        self._open: dict[Peer, Handler] = {}
        kinds: dict[str, Begin] = {"Converse": self._converse, "GetClusterStatus": at_once(plain(ClusterStatusRequest, self._status))}
        self.methods: Methods = {
            f"/{SERVICE}/{name}": partial(self._begin, kinds.get(name) or partial(self._ask, name))
            for name in pb.DESCRIPTOR.services_by_name["ChiefService"].methods_by_name
        }

    def end_conversations(self) -> None:
        """Ends all long-lived streams, once their answers have been sent."""
        with self._lock:
            peers = [peer for peer, handler in self._open.items() if isinstance(handler, Conversation)]
        for peer in peers:
            peer.end()

    def _begin(self, begin: Begin, peer: Peer, call: Call) -> Handler:
        """Begins a call, and counts it as long as it is open. Raises LimitExceeded."""
        handler = begin(peer, call)
        with self._lock:
            if len(self._open) >= _MAX_OPEN_CALLS:
                raise LimitExceeded(f"{_MAX_OPEN_CALLS} calls are open at the chief; end some of them")
            self._open[peer] = handler
        if not call.add_callback(partial(self._closed, peer)):
            self._closed(peer)
        return handler

    def _closed(self, peer: Peer) -> None:
        with self._lock:
            self._open.pop(peer, None)

    def _converse(self, peer: Peer, call: Call) -> Handler:
        return Conversation(self._runner, peer)

    def _ask(self, name: str, peer: Peer, call: Call) -> Handler:
        """Begins a call that the core answers, now or later."""
        if name == "FinishTraining":
            log.info("asked to finish training peer=%s", call.peer())
        may_only_observe = name in _OBSERVING and not self._may_work(call)
        request_type = _REQUESTS[name]

        def ask(message: bytes) -> Callable[[], None]:
            request = codec.decode_request(request_type, message)
            if may_only_observe:
                _check_observes(name, request)
            return partial(self._runner.cancel, self._runner.begin(request, partial(_answer, request_type, peer)))

        return OneAnswer(ask)

    def _status(self, request: ClusterStatusRequest, call: Call) -> ClusterStatus:
        return self._runner.status(max_ledger_entries=request.max_ledger_entries)


def _answer(request_type: type, peer: Peer, found: ev.Reply | ev.Refuse) -> None:
    if isinstance(found, ev.Refuse):
        peer.end(found.error)
        return
    try:
        data = codec.encode_answer(request_type, found.value).SerializeToString()
    except Exception:
        peer.end(defect("the chief"))
        return
    answer(peer, data)


# What callers may ask for, each in its own name, that may only observe.
_OBSERVING = frozenset({"RegisterWorker", "Heartbeat", "DeregisterWorker"})


def _check_observes(name: str, request: RegisterRequest | HeartbeatRequest | DeregisterRequest) -> None:
    """Raises PermissionDenied in a worker's name, which any caller can give: observers may not even leave in it."""
    kind = request.kind if isinstance(request, RegisterRequest) else request.participant.kind
    if kind is not ParticipantKind.OBSERVER:
        raise PermissionDenied(f"{name} as a worker needs role worker, the caller may only observe")
