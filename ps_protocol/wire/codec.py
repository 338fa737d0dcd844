"""Values to messages and back: `encode(value)`, and `decode(type, message)`, which checks. Knows every pair of them; no RPC, no tensor.

PAIRS alone says which dataclass is which message; `fields` makes the code of it, and `special` has what differs. `decode` takes
messages that came from anywhere, and raises MalformedMessage, InvalidSpec or LimitExceeded with the place in its text.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.data import DataProgress, DataRange, DataSpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacedSlice, PlacementPolicy
from ps_protocol.model.variables import Constraint, Initializer, Partition, VariableSpec
from ps_protocol.roles import accumulators, chief, fence, identity, shard
from ps_protocol.roles.checkpoint import ChiefRecord, ChosenPush
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS
from ps_protocol.v1 import accumulator_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire import fields, special, step
from ps_protocol.wire.fields import Pair, decode_max_wait, encode_duration, require, write_max_wait

Value = TypeVar("Value")
AnyMessage = TypeVar("AnyMessage", bound=Message)


# Typed as anything: the type of the message follows from that of the value, which no annotation can say.
def encode(value: Any) -> Any:
    """Returns the message of a value."""
    kind = type(value)
    return (_MADE.get(kind) or _CODERS.of(kind)).encode(value)


def write(value: Any, message: Any) -> None:
    """Encodes a value into a message that is empty, as a field of another is."""
    kind = type(value)
    (_MADE.get(kind) or _CODERS.of(kind)).write(value, message)


def pack(value: Any) -> bytes:
    """Returns the message of a value as bytes."""
    packed: bytes = encode(value).SerializeToString()
    return packed


def encode_with(value: Any, **filled: Any) -> Any:
    """Returns the message of a value, with the fields that the value does not have; None leaves one out."""
    message = encode(value)
    message.MergeFrom(type(message)(**filled))
    return message


def encode_each(values: Iterable[Any]) -> list[Any]:
    """Returns the messages of values, for a repeated field."""
    return [encode(value) for value in values]


def encode_some(value: Any) -> Any:
    """Returns the message of a value; None stays out of a message."""
    return None if value is None else encode(value)


def decode(value_type: type[Value], message: Message) -> Value:
    """Returns the value of a message, checked."""
    value: Value = (_MADE.get(value_type) or _CODERS.of(value_type)).decode(message)
    return value


def decode_each(value_type: type[Value], messages: Iterable[Message], *, field: str) -> tuple[Value, ...]:
    """Returns the values of a repeated field; an error's text begins with the place, for example "variables[3]: "."""
    return fields.decode_each(messages, _CODERS.of(value_type).decode, field=field)


def decode_field(value_type: type[Value], message: Message, field: str) -> Value:
    """Returns the value of a field that must be there."""
    require(message, field)
    return decode(value_type, getattr(message, field))


def decode_some(value_type: type[Value], message: Message, field: str) -> Value | None:
    """Returns the value of a field; None if it was left out."""
    return decode(value_type, getattr(message, field)) if message.HasField(field) else None


def decode_message(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message that came as bytes; raises MalformedMessage if they are none."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes are not a {message_type.DESCRIPTOR.name}; use the same .proto on both sides") from None


def decode_short_wait(message: Any) -> float:
    """Returns how many seconds a call of a parameter server may wait: none if the field was left out, and never more than 20."""
    return decode_max_wait(message.max_wait)


def some_wait(max_wait_s: float) -> Duration | None:
    """Encodes how long a call of a parameter server may wait; none stays out of the message."""
    return encode_duration(max_wait_s) if max_wait_s else None


def pack_read_request(
    request: shard.ReadRequest, *, max_wait_s: float = 0.0, payload: parameter_service_pb2.Payload | None = None
) -> bytes:
    """Returns as bytes which variables are wanted, how long a step that is not there yet is waited for, and the data socket to use."""
    message = encode(request)
    if payload is not None:
        message.payload.CopyFrom(payload)
    if max_wait_s:
        write_max_wait(max_wait_s, message.max_wait)
    packed: bytes = message.SerializeToString()
    return packed


def unpack_read_request(data: bytes) -> tuple[shard.ReadRequest, float, parameter_service_pb2.Payload | None]:
    """Returns the checked request that bytes are, the seconds that its step may be waited for (at most 20), and the data socket to use."""
    message = decode_message(parameter_service_pb2.ReadRequest, data)
    payload = message.payload if message.HasField("payload") else None
    max_wait_s = decode_short_wait(message) if message.HasField("max_wait") else 0.0
    return decode(shard.ReadRequest, message), max_wait_s, payload


class RecordPacker:
    """Makes bytes of records that come one after the other: what seldom changes, the model above all, is encoded once. For one thread."""

    def __init__(self) -> None:
        self._lasting: tuple[ChiefRecord, bytes] | None = None

    def pack(self, record: ChiefRecord) -> bytes:
        """Returns the record as bytes, as parameter servers keep it."""
        lasting = replace(record, epoch=0, step=0, chosen=(), data=None, attached=NO_STEP_ATTACHMENTS)
        # As a rule they are the same objects, and compared as such.
        if self._lasting is None or self._lasting[0] != lasting:
            self._lasting = lasting, special.encode_lasting(lasting, encode).SerializeToString(deterministic=True)
        # A message in two parts is the message.
        return self._lasting[1] + special.encode_of_step(record, encode).SerializeToString(deterministic=True)


def unpack_record(packed: bytes) -> ChiefRecord:
    """Returns the record that bytes are. Raises MalformedMessage, InvalidSpec."""
    return decode(ChiefRecord, decode_message(chief_service_pb2.ChiefRecord, packed))


def _with(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda one: function(one, other)


PAIRS: tuple[Pair, ...] = (
    # What a model is made of.
    Pair(value=VariableSpec, message=tensor_pb2.VariableSpec, check=special.check_variable, place=special.variable_place),
    Pair(value=Initializer, message=tensor_pb2.Initializer, label="initializer"),
    Pair(value=Constraint, message=tensor_pb2.Constraint, label="constraint"),
    Pair(value=Partition, message=tensor_pb2.Partition),
    Pair(value=VariableSlice, message=tensor_pb2.VariableSlice),
    Pair(value=Schedule, message=tensor_pb2.LearningRateSchedule),
    Pair(value=OptimizerSpec, message=tensor_pb2.OptimizerSpec, check=special.check_optimizer),
    Pair(value=AverageSpec, message=tensor_pb2.AverageSpec),
    Pair(value=ClipSpec, message=tensor_pb2.ClipSpec),
    Pair(value=PlacementPolicy, message=chief_service_pb2.PlacementPolicy),
    Pair(value=PlacedSlice, message=chief_service_pb2.PlacedSlice),
    Pair(value=ModelSpec, message=chief_service_pb2.ModelSpec, check=special.check_model),
    Pair(value=PolicySpec, message=chief_service_pb2.PolicySpec, label="policy"),
    Pair(value=DataSpec, message=chief_service_pb2.DataSpec),
    Pair(value=DataRange, message=chief_service_pb2.DataRange),
    Pair(value=DataProgress, message=chief_service_pb2.DataProgress),
    # Parameter servers.
    Pair(value=fence.Era, message=tensor_pb2.Era, write=step.write_era, decode=step.decode_era),
    Pair(value=fence.Fence, message=tensor_pb2.Fence, write=step.write_fence, decode=step.decode_fence),
    *step.OF_CONTRIBUTIONS,
    Pair(value=shard.SparsePart, message=parameter_service_pb2.SparsePart),
    Pair(value=shard.Metric, message=parameter_service_pb2.Metric),
    Pair(
        value=shard.PushHeader,
        message=parameter_service_pb2.PushHeader,
        filled=frozenset({"content_bytes", "payload"}),
        write=step.write_push_header,
        decode=step.decode_push_header,
    ),
    Pair(
        value=shard.PushReply,
        message=parameter_service_pb2.PushReply,
        write=step.write_push_reply,
        decode=step.decode_push_reply,
    ),
    Pair(
        value=shard.ShardSpec,
        message=parameter_service_pb2.ShardSpec,
        encode=_with(special.encode_shard_spec, encode),
        decode=_with(special.decode_shard_spec, decode),
    ),
    Pair(value=shard.ShardSettings, message=parameter_service_pb2.ShardSettings),
    Pair(
        value=shard.ApplyRequest,
        message=parameter_service_pb2.ApplyRequest,
        write=step.write_apply_request,
        decode=step.decode_apply_request,
    ),
    Pair(
        value=shard.ApplyReply,
        message=parameter_service_pb2.ApplyReply,
        write=step.write_apply_reply,
        decode=step.decode_apply_reply,
    ),
    Pair(
        value=shard.ReadRequest,
        message=parameter_service_pb2.ReadRequest,
        filled=frozenset({"max_wait", "payload"}),
        write=step.write_read_request,
        decode=step.decode_read_request,
    ),
    Pair(value=shard.RowsRequest, message=parameter_service_pb2.RowsHeader, filled=frozenset({"num_rows"})),
    Pair(value=shard.MetricCell, message=parameter_service_pb2.MetricCell),
    Pair(value=shard.ShardReport, message=parameter_service_pb2.ShardReport),
    Pair(value=shard.ShardStatus, message=parameter_service_pb2.GetShardStatusResponse),
    Pair(value=shard.AppliedPush, message=parameter_service_pb2.AppliedPush),
    Pair(value=shard.WorkerPushes, message=parameter_service_pb2.WorkerPushes),
    Pair(value=shard.Adoption, message=parameter_service_pb2.AdoptShardResponse),
    Pair(
        value=shard.SaveRequest,
        message=parameter_service_pb2.SaveShardRequest,
        filled=frozenset({"max_wait"}),
        check=special.check_save_request,
    ),
    Pair(value=shard.SaveProgress, message=parameter_service_pb2.SaveShardResponse, check=special.check_save_progress),
    Pair(value=shard.CheckpointFile, message=parameter_service_pb2.CheckpointFile, check=special.check_file),
    Pair(
        value=shard.RestoreRequest,
        message=parameter_service_pb2.RestoreShardRequest,
        filled=frozenset({"max_wait"}),
        check=special.check_restore_request,
    ),
    Pair(value=shard.ReplicaState, message=parameter_service_pb2.ReplicaState),
    Pair(value=shard.RestoreProgress, message=parameter_service_pb2.RestoreShardResponse),
    # The chief.
    Pair(value=chief.Participant, message=chief_service_pb2.Participant, write=step.write_participant, decode=step.decode_participant),
    Pair(value=chief.RegisterRequest, message=chief_service_pb2.RegisterWorkerRequest, check=special.check_register_request),
    Pair(value=chief.WorkerTraffic, message=chief_service_pb2.WorkerTraffic),
    Pair(value=chief.HeartbeatRequest, message=chief_service_pb2.HeartbeatRequest),
    Pair(value=chief.DeregisterRequest, message=chief_service_pb2.DeregisterWorkerRequest),
    Pair(value=chief.RegisterModelRequest, message=chief_service_pb2.RegisterModelRequest),
    Pair(value=chief.CompleteInitializationRequest, message=chief_service_pb2.CompleteInitializationRequest),
    Pair(value=chief.GetModelRequest, message=chief_service_pb2.GetModelRequest),
    Pair(value=chief.CommitPushRequest, message=chief_service_pb2.CommitPushRequest),
    Pair(
        value=chief.DequeueTokenRequest,
        message=chief_service_pb2.DequeueTokenRequest,
        write=step.write_token_request,
        decode=step.decode_token_request,
    ),
    Pair(value=chief.ChangeSettingsRequest, message=chief_service_pb2.ChangeSettingsRequest),
    Pair(value=chief.SaveCheckpointRequest, message=chief_service_pb2.SaveCheckpointRequest),
    Pair(value=chief.LeaseRangesRequest, message=chief_service_pb2.LeaseRangesRequest, check=special.check_lease),
    Pair(value=chief.FinishTrainingRequest, message=chief_service_pb2.FinishTrainingRequest),
    Pair(value=chief.Registration, message=chief_service_pb2.RegisterWorkerResponse, check=special.check_registration),
    Pair(value=chief.ModelReply, message=chief_service_pb2.RegisterModelResponse),
    Pair(value=chief.AgreedModel, message=chief_service_pb2.GetModelResponse),
    Pair(value=chief.PushCommit, message=chief_service_pb2.PushCommit, write=step.write_commit, decode=step.decode_commit),
    Pair(
        value=chief.CommitResult, message=chief_service_pb2.CommitResult, write=step.write_commit_result, decode=step.decode_commit_result
    ),
    Pair(
        value=chief.TokenReply,
        message=chief_service_pb2.TokenReply,
        write=step.write_token_reply,
        decode=step.decode_token_reply,
    ),
    Pair(value=chief.SavedCheckpoint, message=chief_service_pb2.SaveCheckpointResponse),
    Pair(value=chief.LeaseReply, message=chief_service_pb2.LeaseRangesResponse),
    Pair(value=chief.HyperparameterChange, message=chief_service_pb2.HyperparameterChange),
    Pair(value=chief.SettingsReply, message=chief_service_pb2.SettingsState),
    Pair(value=chief.ClusterStatus, message=chief_service_pb2.GetClusterStatusResponse),
    Pair(value=chief.ParticipantStatus, message=chief_service_pb2.ParticipantStatus),
    Pair(value=chief.ServerStatus, message=chief_service_pb2.ServerStatus),
    Pair(value=chief.LedgerEntry, message=chief_service_pb2.LedgerEntry),
    Pair(value=chief.CheckpointStatus, message=chief_service_pb2.CheckpointStatus),
    Pair(value=chief.DataStatus, message=chief_service_pb2.DataStatus),
    Pair(value=ChosenPush, message=chief_service_pb2.ChosenPush),
    Pair(
        value=ChiefRecord,
        message=chief_service_pb2.ChiefRecord,
        encode=_with(special.encode_record, encode),
        decode=_with(special.decode_record, decode),
    ),
    # The handshake.
    Pair(value=identity.ProtocolVersion, message=handshake_service_pb2.ProtocolVersion),
    Pair(value=identity.Identity, message=handshake_service_pb2.Identity, label="identity"),
    Pair(value=identity.HandshakeReply, message=handshake_service_pb2.HandshakeResponse),
    Pair(value=identity.HandshakeRequest, message=handshake_service_pb2.HandshakeRequest),
    # Named accumulators.
    Pair(value=accumulators.AccumulatorSpec, message=accumulator_service_pb2.AccumulatorSpec, check=special.check_accumulator),
    Pair(value=accumulators.GradientHeader, message=accumulator_service_pb2.GradientHeader),
    Pair(value=accumulators.GradientReply, message=accumulator_service_pb2.ApplyGradientResponse),
    Pair(value=accumulators.TakeRequest, message=accumulator_service_pb2.TakeGradientRequest),
    Pair(value=accumulators.AccumulatorStatus, message=accumulator_service_pb2.GetAccumulatorResponse),
)
_CODERS = fields.Coders(PAIRS)
_MADE = _CODERS.made
