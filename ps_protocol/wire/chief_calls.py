"""The chief's RPCs: what each is asked with and answered with, as values and as messages. Knows no stream and no transport."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles import chief
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.fields import decode_choice


@light_dataclass(frozen=True, slots=True)
class ChiefCall:
    """One RPC: its name, the value that asks for it, both messages, and how its answer is written and read."""

    name: str
    request: type
    request_message: type[Message]
    response_message: type[Message]
    encode_answer: Callable[[Any], Message]
    decode_answer: Callable[[Any], Any]


def _call(name: str, request: Any, encode: Callable[[Any], Any] = codec.encode, decode: Callable[[Any], Any] | None = None) -> ChiefCall:
    """Returns an RPC; its response is the answer, unless `encode` and `decode` say otherwise."""
    messages = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
    return ChiefCall(name, request, *messages, encode, decode or (lambda message: codec.decode(request.answer, message)))


_ALL = (
    _call("RegisterWorker", chief.RegisterRequest),
    _call(
        "Heartbeat",
        chief.HeartbeatRequest,
        lambda end: pb.HeartbeatResponse(end=end.value),
        lambda message: decode_choice(chief.End, message.end, field="end"),
    ),
    _call("DeregisterWorker", chief.DeregisterRequest, lambda _: pb.DeregisterWorkerResponse(), lambda message: None),
    _call("RegisterModel", chief.RegisterModelRequest),
    _call(
        "CompleteInitialization", chief.CompleteInitializationRequest, lambda _: pb.CompleteInitializationResponse(), lambda message: None
    ),
    _call("GetModel", chief.GetModelRequest),
    _call(
        "ChangeSettings",
        chief.ChangeSettingsRequest,
        lambda reply: pb.ChangeSettingsResponse(settings=codec.encode_some(reply)),
        lambda message: codec.decode_some(chief.SettingsReply, message, "settings"),
    ),
    _call("SaveCheckpoint", chief.SaveCheckpointRequest),
    _call("LeaseRanges", chief.LeaseRangesRequest),
    _call(
        "FinishTraining",
        chief.FinishTrainingRequest,
        lambda step: pb.FinishTrainingResponse(global_step=step),
        lambda message: message.global_step,
    ),
)
CALLS: Mapping[str, ChiefCall] = {call.name: call for call in _ALL}
BY_REQUEST: Mapping[type, ChiefCall] = {call.request: call for call in _ALL}
# What Converse is asked with, by its fields; the answer has the field of the same name.
CONVERSED: Mapping[str, type] = {"token": chief.DequeueTokenRequest, "commit": chief.CommitPushRequest}
FIELDS: Mapping[type, str] = {request: field for field, request in CONVERSED.items()}
