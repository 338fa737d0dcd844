"""The chief's RPCs: which event each message is, how its answer is written, and who serves one call. Decides nothing.

All methods take bytes, so that what is no message at all is refused by us, with a reason. None has a thread of its own: a message is
handled in the thread that receives for the whole server, and the answer is sent by the thread that has it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import grpc
from google.protobuf.message import Message

from chief.core import messages as ev
from chief.core.messages import LeaseRanges, SaveCheckpoint
from chief.serving.runner import Runner
from ps_protocol.errors import LimitExceeded, MalformedMessage, PermissionDenied, PsError
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import (
    CommitResult,
    HyperparameterChange,
    Participant,
    ParticipantKind,
    PushCommit,
    RegisterRequest,
    TokenReply,
)
from ps_protocol.rpc.server_stream import Handler, Peer, standing_method_handler
from ps_protocol.rpc.status import defect
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.codec import decode_message
from ps_protocol.wire.fields import require
from ps_protocol.wire.step import check_ranges

# Calls of one message each way, served without a thread that waits.


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC that is one event: its request, how to make the event of that and the call's number, and how to write the answer."""

    request: type[Message]
    event: Callable[[Any, int], ev.Event]
    answer: Callable[[Any], Message]


class SingleCall:
    """Serves one call. Implements `Handler` of `ps_protocol.rpc.server_stream`; the answer comes from any thread."""

    def __init__(self, runner: Runner, peer: Peer, method: Method, *, on_close: Callable[[Handler], None]) -> None:
        self._runner, self._peer, self._method, self._on_close = runner, peer, method, on_close
        self._lock = threading.Lock()
        self._number: int | None = None
        self._is_begun = self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call. Raises MalformedMessage."""
        if self._is_begun:
            raise MalformedMessage("a second message; this call takes one")
        self._is_begun = True
        message = decode_message(self._method.request, data)
        number = self._runner.begin(partial(self._method.event, message), self._answer)
        with self._lock:
            self._number, is_over = number, self._is_over
        if is_over:
            self._runner.cancel(number)

    def finish(self) -> None:
        """The caller has said all: nothing changes, if it has said anything. Raises MalformedMessage."""
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
            data = self._method.answer(answer.value).SerializeToString()
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


# The calls that workers make with every step, from messages to events and from answers to messages.


def heartbeat_event(message: pb.HeartbeatRequest, call: int) -> ev.Heartbeat:
    """Decodes a sign of life."""
    return ev.Heartbeat(call=call, participant=codec.decode_field(Participant, message, "participant"))


def commit_event(message: pb.CommitPushRequest, call: int) -> ev.CommitPush:
    """Decodes a contribution to be counted."""
    return ev.CommitPush(
        call=call, participant=codec.decode_field(Participant, message, "participant"), commit=codec.decode(PushCommit, message.commit)
    )


def dequeue_event(message: pb.DequeueTokenRequest, call: int) -> ev.DequeueToken:
    """Decodes the wish for a token."""
    return ev.DequeueToken(
        call=call,
        participant=codec.decode_field(Participant, message, "participant"),
        local_step=message.local_step,
        request_id=message.request_id,
        max_wait_s=codec.decode_max_wait(message),
        commit=codec.decode(PushCommit, message.commit) if message.HasField("commit") else None,
    )


def heartbeat_answer(finished: bool) -> pb.HeartbeatResponse:
    """Encodes whether training is finished."""
    return pb.HeartbeatResponse(finished=finished)


def commit_answer(result: CommitResult) -> pb.CommitPushResponse:
    """Encodes what became of a contribution."""
    return pb.CommitPushResponse(result=codec.encode(result))


def dequeue_answer(reply: TokenReply) -> pb.DequeueTokenResponse:
    """Encodes how a wait for a token ended."""
    message: pb.DequeueTokenResponse = codec.encode(reply)
    return message


# By the field that a call has in ConverseRequest, and its answer in ConverseResponse: how to read the one and to write the other.
CALLS: dict[str, tuple[Callable[[Any, int], ev.Event], Callable[[Any], Any]]] = {
    "dequeue_token": (dequeue_event, dequeue_answer),
    "commit_push": (commit_event, commit_answer),
    "heartbeat": (heartbeat_event, heartbeat_answer),
}


def encoded_answer(number: int, kind: str, value: Any) -> bytes:
    """Returns an answer on a standing stream, as it travels. `kind` is the field of its call."""
    # A message in two parts is the message; the second part is the same for all workers that get the same answer.
    return pb.ConverseResponse(call=number).SerializeToString() + _encoded(kind, value)


def encoded_error(number: int, error: PsError) -> bytes:
    """Returns the answer to a call on a standing stream that is refused."""
    return pb.ConverseResponse(call=number, error=encode_call_error(error)).SerializeToString()


@lru_cache(maxsize=16)
def _encoded(kind: str, value: CommitResult | TokenReply | bool) -> bytes:
    return pb.ConverseResponse(**{kind: CALLS[kind][1](value)}).SerializeToString()


# The standing stream of one worker: calls as they come, answers as they are ready.
#
# A call needs no thread while it waits: the runner hands its answer over, in the thread that has it, and that sends it.


class Conversation:
    """Serves one stream. Implements `Handler` of `ps_protocol.rpc.server_stream`; answers come from any thread."""

    def __init__(self, runner: Runner, peer: Peer, *, on_close: Callable[[Handler], None]) -> None:
        self._runner, self._peer, self._on_close = runner, peer, on_close
        self._lock = threading.Lock()
        self._under_way: dict[int, int | None] = {}  # the caller's number of a call -> the runner's, once known
        self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call that a message is. Raises MalformedMessage."""
        message = decode_message(pb.ConverseRequest, data)
        number, kind = message.call, message.WhichOneof("request")
        if number in self._under_way:
            raise MalformedMessage(f"call {number} is under way; give each call a number of its own")
        if kind not in CALLS:
            error = MalformedMessage(f"call {number}: it asks for nothing that this chief knows; use the calls of their own")
            self._peer.send(encoded_error(number, error))
            return
        with self._lock:
            self._under_way[number] = None
        call = self._runner.begin(partial(CALLS[kind][0], getattr(message, kind)), partial(self._answer, number, kind))
        with self._lock:
            if number in self._under_way:
                self._under_way[number] = call
            is_over = self._is_over
        if is_over:
            self._runner.cancel(call)

    def close(self) -> None:
        """The stream is over: what has no answer gets none."""
        self._on_close(self)
        with self._lock:
            self._is_over = True
            calls = [*self._under_way.values()]
            self._under_way.clear()
        for call in calls:
            if call is not None:
                self._runner.cancel(call)

    def _answer(self, number: int, kind: str, answer: ev.Reply | ev.Refuse) -> None:
        with self._lock:
            self._under_way.pop(number, None)
            if self._is_over:
                return
        if isinstance(answer, ev.Reply):
            self._peer.send(encoded_answer(number, kind, answer.value))
        else:
            self._peer.send(encoded_error(number, answer.error))


# The chief's RPCs: which event each is, and how its answer is written.
#
# All methods take bytes, so that what is no message at all is refused by us, with a reason. None has a thread of its own: a message is
# handled in the thread that receives for the whole server, and the answer is sent by the thread that has it.


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
        """Ends all standing streams, once what is answered has been sent."""
        with self._lock:
            peers = [peer for handler, peer in self._open.items() if isinstance(handler, Conversation)]
        for peer in peers:
            peer.end()

    def begin(self, name: str, peer: Peer, context: grpc.ServicerContext) -> Handler:
        """Returns who serves one call of the method `name`. Raises LimitExceeded."""
        handler: Handler
        if name == "Converse":
            handler = Conversation(self._runner, peer, on_close=self._closed)
        elif name == "GetClusterStatus":
            handler = ImmediateCall(peer, self._status, on_close=self._closed)
        else:
            only_observes = name in _OBSERVING and not self._may_work(context)
            handler = SingleCall(self._runner, peer, (_OBSERVING if only_observes else METHODS)[name], on_close=self._closed)
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
        method.name: standing_method_handler(partial(service.begin, method.name), server_name="the chief")
        for method in pb.DESCRIPTOR.services_by_name["ChiefService"].methods
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _registration(message: pb.RegisterWorkerRequest, call: int) -> ev.Event:
    return ev.RegisterWorker(call=call, request=codec.decode(RegisterRequest, message))


def _departure(message: pb.DeregisterWorkerRequest, call: int) -> ev.Event:
    return ev.DeregisterWorker(call=call, participant=codec.decode_field(Participant, message, "participant"), failure=message.failure)


def _model(message: pb.RegisterModelRequest, call: int) -> ev.Event:
    return ev.RegisterModel(
        call=call,
        participant=codec.decode_field(Participant, message, "participant"),
        model=codec.decode(ModelSpec, message.model),
        max_wait_s=codec.decode_max_wait(message),
        may_initialize=not message.joins_only,
    )


def _initialization(message: pb.CompleteInitializationRequest, call: int) -> ev.Event:
    return ev.CompleteInitialization(
        call=call, participant=codec.decode_field(Participant, message, "participant"), attempt=message.attempt
    )


def _model_wish(message: pb.GetModelRequest, call: int) -> ev.Event:
    return ev.GetModel(call=call, max_wait_s=codec.decode_max_wait(message))


def _change(message: pb.ChangeSettingsRequest, call: int) -> ev.Event:
    request_id, max_wait_s = message.request_id, codec.decode_max_wait(message)
    if message.HasField("hyperparameters"):
        change = codec.decode(HyperparameterChange, message.hyperparameters)
        return ev.SetHyperparameters(call=call, change=change, request_id=request_id, max_wait_s=max_wait_s)
    policy = codec.decode_field(PolicySpec, message, "policy")
    return ev.SetPolicy(call=call, policy=policy, request_id=request_id, max_wait_s=max_wait_s)


def _checkpoint(message: pb.SaveCheckpointRequest, call: int) -> ev.Event:
    return SaveCheckpoint(call=call, request_id=message.request_id, max_wait_s=codec.decode_max_wait(message))


def _lease(message: pb.LeaseRangesRequest, call: int) -> ev.Event:
    require(message, "data")
    check_ranges(message.returned, field="returned")
    return LeaseRanges(
        call=call,
        participant=codec.decode_field(Participant, message, "participant"),
        data=codec.decode(DataSpec, message.data),
        max_ranges=message.max_ranges,
        request_id=message.request_id,
        max_wait_s=codec.decode_max_wait(message),
        returned=tuple(message.returned),
    )


def _finish(message: pb.FinishTrainingRequest, call: int) -> ev.Event:
    return ev.FinishTraining(call=call, reason=message.reason)


def _as_observer(name: str) -> Method:
    """The method as callers have it that may only observe: in a worker's name, which anybody can give, they may not even say goodbye."""
    method = METHODS[name]

    def event(message: Any, call: int) -> ev.Event:
        made = method.event(message, call)
        caller = made.request if isinstance(made, ev.RegisterWorker) else getattr(made, "participant", None)
        if caller is None or caller.kind is not ParticipantKind.OBSERVER:
            raise PermissionDenied(f"{name} as a worker needs role worker, the caller may only observe")
        return made

    return Method(method.request, event, method.answer)


METHODS: dict[str, Method] = {
    "RegisterWorker": Method(pb.RegisterWorkerRequest, _registration, codec.encode),
    "Heartbeat": Method(pb.HeartbeatRequest, heartbeat_event, heartbeat_answer),
    "DeregisterWorker": Method(pb.DeregisterWorkerRequest, _departure, lambda nothing: pb.DeregisterWorkerResponse()),
    "RegisterModel": Method(pb.RegisterModelRequest, _model, codec.encode),
    "CompleteInitialization": Method(
        pb.CompleteInitializationRequest, _initialization, lambda nothing: pb.CompleteInitializationResponse()
    ),
    "GetModel": Method(pb.GetModelRequest, _model_wish, codec.encode),
    "CommitPush": Method(pb.CommitPushRequest, commit_event, commit_answer),
    "DequeueToken": Method(pb.DequeueTokenRequest, dequeue_event, dequeue_answer),
    "ChangeSettings": Method(pb.ChangeSettingsRequest, _change, lambda reply: pb.ChangeSettingsResponse(settings=codec.encode_some(reply))),
    "SaveCheckpoint": Method(pb.SaveCheckpointRequest, _checkpoint, codec.encode),
    "LeaseRanges": Method(pb.LeaseRangesRequest, _lease, codec.encode),
    "FinishTraining": Method(pb.FinishTrainingRequest, _finish, lambda step: pb.FinishTrainingResponse(global_step=step)),
}
_OBSERVING = {name: _as_observer(name) for name in ("RegisterWorker", "Heartbeat", "DeregisterWorker")}
