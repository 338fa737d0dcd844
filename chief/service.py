"""The chief's RPCs: which event each is, and how its answer is written. Knows messages; decides nothing.

All methods take bytes, so that what is no message at all is refused by us, with a reason. None has a thread of its own: a message is
handled in the thread that receives for the whole server, and the answer is sent by the thread that has it.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from chief import events as ev
from chief import worker_calls as calls
from chief.conversation import Conversation
from chief.recovery_events import LeaseRanges, SaveCheckpoint
from chief.runner import Runner
from chief.single_call import ImmediateCall, Method, SingleCall
from ps_protocol import codec_chief as codec
from ps_protocol import codec_data_ranges, codec_model, codec_settings
from ps_protocol.chief import ParticipantKind
from ps_protocol.codec import decode_message, require
from ps_protocol.codec_status import encode_cluster_status
from ps_protocol.direct_serving import standing_method_handler
from ps_protocol.errors import LimitExceeded, PermissionDenied
from ps_protocol.standing_peer import Handler, Peer
from ps_protocol.v1 import chief_service_pb2 as pb

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
        return encode_cluster_status(self._runner.status(max_ledger_entries=message.max_ledger_entries))


def chief_service_handler(service: ChiefService) -> grpc.GenericRpcHandler:
    """Returns the handler of every RPC of the service's descriptor, for `server.add_generic_rpc_handlers((handler,))`."""
    handlers: dict[str, Any] = {
        method.name: standing_method_handler(partial(service.begin, method.name), server_name="the chief")
        for method in pb.DESCRIPTOR.services_by_name["ChiefService"].methods
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _registration(message: pb.RegisterWorkerRequest, call: int) -> ev.Event:
    return ev.RegisterWorker(call=call, request=codec.decode_register_request(message))


def _departure(message: pb.DeregisterWorkerRequest, call: int) -> ev.Event:
    return ev.DeregisterWorker(call=call, participant=codec.decode_participant(message), failure=message.failure)


def _model(message: pb.RegisterModelRequest, call: int) -> ev.Event:
    return ev.RegisterModel(
        call=call,
        participant=codec.decode_participant(message),
        model=codec_model.decode_model(message.model),
        max_wait_s=codec.decode_max_wait(message),
        may_initialize=not message.joins_only,
    )


def _initialization(message: pb.CompleteInitializationRequest, call: int) -> ev.Event:
    return ev.CompleteInitialization(call=call, participant=codec.decode_participant(message), attempt=message.attempt)


def _model_wish(message: pb.GetModelRequest, call: int) -> ev.Event:
    return ev.GetModel(call=call, max_wait_s=codec.decode_max_wait(message))


def _policy(message: pb.SetPolicyRequest, call: int) -> ev.Event:
    require(message, "policy")
    policy, max_wait_s = codec_settings.decode_policy(message.policy), codec.decode_max_wait(message)
    return ev.SetPolicy(call=call, policy=policy, request_id=message.request_id, max_wait_s=max_wait_s)


def _hyperparameters(message: pb.SetHyperparametersRequest, call: int) -> ev.Event:
    change, max_wait_s = codec_settings.decode_hyperparameter_change(message), codec.decode_max_wait(message)
    return ev.SetHyperparameters(call=call, change=change, request_id=message.request_id, max_wait_s=max_wait_s)


def _checkpoint(message: pb.SaveCheckpointRequest, call: int) -> ev.Event:
    return SaveCheckpoint(call=call, request_id=message.request_id, max_wait_s=codec.decode_max_wait(message))


def _lease(message: pb.LeaseRangesRequest, call: int) -> ev.Event:
    require(message, "data")
    codec.check_ranges(message.returned, field="returned")
    return LeaseRanges(
        call=call,
        participant=codec.decode_participant(message),
        data=codec_data_ranges.decode_data(message.data),
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
    "RegisterWorker": Method(pb.RegisterWorkerRequest, _registration, codec.encode_registration),
    "Heartbeat": Method(pb.HeartbeatRequest, calls.heartbeat_event, calls.heartbeat_answer),
    "DeregisterWorker": Method(pb.DeregisterWorkerRequest, _departure, lambda nothing: pb.DeregisterWorkerResponse()),
    "RegisterModel": Method(pb.RegisterModelRequest, _model, codec_model.encode_model_reply),
    "CompleteInitialization": Method(
        pb.CompleteInitializationRequest, _initialization, lambda nothing: pb.CompleteInitializationResponse()
    ),
    "GetModel": Method(pb.GetModelRequest, _model_wish, codec_model.encode_agreed_model),
    "CommitPush": Method(pb.CommitPushRequest, calls.commit_event, calls.commit_answer),
    "DequeueToken": Method(pb.DequeueTokenRequest, calls.dequeue_event, calls.dequeue_answer),
    "SetPolicy": Method(
        pb.SetPolicyRequest, _policy, lambda reply: pb.SetPolicyResponse(settings=codec_settings.encode_settings_reply(reply))
    ),
    "SetHyperparameters": Method(
        pb.SetHyperparametersRequest,
        _hyperparameters,
        lambda reply: pb.SetHyperparametersResponse(settings=codec_settings.encode_settings_reply(reply)),
    ),
    "SaveCheckpoint": Method(pb.SaveCheckpointRequest, _checkpoint, codec_data_ranges.encode_saved),
    "LeaseRanges": Method(pb.LeaseRangesRequest, _lease, codec_data_ranges.encode_lease_reply),
    "FinishTraining": Method(pb.FinishTrainingRequest, _finish, lambda step: pb.FinishTrainingResponse(global_step=step)),
}
_OBSERVING = {name: _as_observer(name) for name in ("RegisterWorker", "Heartbeat", "DeregisterWorker")}
