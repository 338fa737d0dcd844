"""Protobuf to checked values and back, for every message but the framed tensors. Knows messages; no RPC."""

import enum
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from ps_protocol import errors
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec, LayoutMismatch, LimitExceeded, MalformedMessage, PsError
from ps_protocol.model.data import DataMarks, DataProgress, DataRange, DataSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, check_optimizer_name
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.model.spec import NO_CLIP, AverageSpec, ClipSpec, ModelSpec, PlacedSlice, Placement, PlacementPolicy
from ps_protocol.model.variables import (
    MAX_VARIABLES,
    Constraint,
    ConstraintKind,
    DataType,
    Initializer,
    InitializerKind,
    Partition,
    SparseMean,
    VariableSpec,
    check_name,
)
from ps_protocol.roles.accumulators import AccumulatorSpec, AccumulatorStatus, GradientHeader, GradientReply, Reduction, Taken, TakeRequest
from ps_protocol.roles.checkpoint import ChiefRecord, ChosenPush, check_tag
from ps_protocol.roles.chief import (
    MAX_WAIT_SLICE_S,
    AgreedModel,
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
    CommitResult,
    DataStatus,
    HyperparameterChange,
    LeaseReply,
    LeaseResult,
    LedgerEntry,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    ParticipantStatus,
    PushCommit,
    PushOutcome,
    RegisterRequest,
    Registration,
    SavedCheckpoint,
    SettingsReply,
    ShardLink,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.identity import HandshakeReply, HandshakeRequest, Identity, ProtocolVersion, Role
from ps_protocol.roles.shard import (
    MAX_STEP,
    Adoption,
    AppliedPush,
    ApplyReply,
    ApplyRequest,
    CheckpointFile,
    Metric,
    MetricCell,
    PushHeader,
    PushId,
    PushReply,
    PushResult,
    RestoreProgress,
    RestoreRequest,
    RowsRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    ShardSettings,
    ShardSpec,
    ShardStatus,
    SparsePart,
    WorkerPushes,
)
from ps_protocol.v1 import accumulator_service_pb2 as accumulator_service_pb2
from ps_protocol.v1 import chief_service_pb2, error_pb2, parameter_service_pb2
from ps_protocol.v1 import handshake_service_pb2 as handshake_service_pb2
from ps_protocol.v1 import tensor_pb2 as tensor_pb2

# Protobuf to checked values and back, for what all services speak of: element types, push ids, durations, choices. Knows no RPC.
#
# `encode_…` makes a message of a value; `decode_…` checks a message that came from anywhere and raises MalformedMessage, InvalidSpec or
# LimitExceeded with the place in its text. What a model is made of is in `codec_variables`, and what is particular to one service in
# `codec_shard`, `codec_chief` and so on.


_DATA_TYPES: dict[int, DataType] = {tensor_pb2.DataType.Value(f"DATA_TYPE_{data_type.name}"): data_type for data_type in DataType}

Choice = TypeVar("Choice", bound=enum.Enum)
Encoded = TypeVar("Encoded")
Decoded = TypeVar("Decoded")
AnyMessage = TypeVar("AnyMessage", bound=Message)


def decode_message(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message that came as bytes; raises MalformedMessage if they are none."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes are not a {message_type.DESCRIPTOR.name}; send what the .proto describes") from None


def require(message: Message, field: str) -> None:
    """Raises MalformedMessage unless the message has this field."""
    if not message.HasField(field):
        raise MalformedMessage(f"{message.DESCRIPTOR.name}: {field} is missing; set it")


def decode_choice(choices: type[Choice], value: int, *, field: str) -> Choice:
    """Returns the member with this number; raises MalformedMessage if there is none (0: the field was left out)."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(f"{choice.value} ({choice.name})" for choice in choices)
        raise MalformedMessage(f"{field}: got {value}, want one of {known}") from None


def decode_each(messages: Iterable[Encoded], decode: Callable[[Encoded], Decoded], *, field: str) -> tuple[Decoded, ...]:
    """Decodes a repeated field; an error's text begins with the place, for example "variables[3]: "."""
    decoded: list[Decoded] = []
    try:
        for message in messages:
            decoded.append(decode(message))
    except PsError as error:
        raise type(error)(f"{field}[{len(decoded)}]: {error.message}", facts=error.facts) from None
    return tuple(decoded)


def encode_duration(seconds: float) -> Duration:
    """Returns the duration, to the nanosecond; a negative one counts as 0."""
    whole, nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def decode_duration(duration: Duration) -> float:
    """Returns seconds; 0 if the duration was left out."""
    return duration.seconds + duration.nanos / 1e9


def encode_data_type(data_type: DataType) -> str:
    """Encodes an element type, as a message's constructor takes it."""
    return f"DATA_TYPE_{data_type.name}"


def decode_data_type(value: int, *, what: str) -> DataType:
    """Returns the element type; raises InvalidSpec naming `what` if there is none, or none that this server knows."""
    data_type = _DATA_TYPES.get(value)
    if data_type is None:
        known = ", ".join(data_type.value for data_type in DataType)
        raise InvalidSpec(f"{what}: dtype {value} unknown; want one of {known}")
    return data_type


def encode_sparse_mean(sparse_mean: SparseMean) -> str:
    """Encodes what the rows of a sparse gradient are divided by, as a message's constructor takes it."""
    return f"SPARSE_MEAN_{sparse_mean.name}"


def decode_sparse_mean(value: int) -> SparseMean:
    """Returns what the rows of a sparse gradient are divided by; PER_INDEX if it was left out."""
    return decode_choice(SparseMean, value or SparseMean.PER_INDEX.value, field="sparse_mean")


def encode_push_id(push_id: PushId) -> tensor_pb2.PushId:
    """Encodes the name of a contribution."""
    return tensor_pb2.PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=push_id.sequence)


def decode_push_id(message: tensor_pb2.PushId) -> PushId:
    """Decodes the name of a contribution; raises MalformedMessage if a part of it was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")
    return PushId(worker=message.worker, incarnation=message.incarnation, sequence=message.sequence)


# Errors within streams that go on, and what of any error may travel: reason, text and facts, cut to fit. Knows the message; no stream.


# Text and facts travel in headers, which the peer limits; a character of the text may take 9 bytes there.
MAX_TEXT_CHARACTERS = 1_500
MAX_FACTS_BYTES = 2_048

_BY_REASON: dict[str, type[PsError]] = {
    one.reason: one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PsError) and one is not PsError
}


def encode_call_error(error: PsError) -> error_pb2.CallError:
    """Encodes an error."""
    text, facts = fitting(error)
    return error_pb2.CallError(reason=error.reason, message=text, facts=facts)


def decode_call_error(message: error_pb2.CallError) -> PsError:
    """Returns the error again, to be raised."""
    return typed_error(message.reason, message.message, dict(message.facts))


def fitting(error: PsError) -> tuple[str, dict[str, str]]:
    """Returns an error's text and facts as they may travel: cut to what fits into headers."""
    text = _encodable(error.message)
    if len(text) > MAX_TEXT_CHARACTERS:
        text = text[: MAX_TEXT_CHARACTERS - 1] + "…"
    return text, _fitting_facts(error.facts)


def typed_error(reason: str, message: str, facts: dict[str, str]) -> PsError:
    """Returns the error of a reason."""
    if reason in _BY_REASON:
        return _BY_REASON[reason](message, facts=facts)
    # A newer server's reason: its text is still the best there is, and a program may look at `reason`.
    unknown = PsError(message, facts=facts)
    unknown.reason = reason
    return unknown


def _fitting_facts(facts: dict[str, str]) -> dict[str, str]:
    room, kept = MAX_FACTS_BYTES, {}
    for name, value in ((name, _encodable(value)) for name, value in facts.items()):
        size = len(name.encode()) + len(value.encode()) + 8
        if size <= room:
            kept[name] = value
            room -= size
    return kept


def _encodable(text: str) -> str:
    # A name with a lone surrogate may be quoted in a text; it must not turn the answer into another error.
    return text.encode(errors="backslashreplace").decode()


# Protobuf to checked values and back, for what a model is made of: variables, slices, optimizers, averages, limits. Knows no RPC.


def encode_variable(variable: VariableSpec) -> tensor_pb2.VariableSpec:
    """Encodes the specification of one variable."""
    return tensor_pb2.VariableSpec(
        name=variable.name,
        data_type=encode_data_type(variable.data_type),
        shape=variable.shape,
        optimizer=None if variable.optimizer is None else encode_optimizer(variable.optimizer),
        is_sparse=variable.is_sparse,
        sparse_mean=encode_sparse_mean(variable.sparse_mean) if variable.is_sparse else None,
        initializer=None if variable.initializer is None else _encode_initializer(variable.initializer),
        constraint=None if variable.constraint is None else _encode_constraint(variable.constraint),
        partition=None if variable.partition is None else _encode_partition(variable.partition),
    )


def decode_variable(message: tensor_pb2.VariableSpec) -> VariableSpec:
    """Decodes and checks the specification of one variable."""
    what = f"variable {message.name!r}"
    return VariableSpec(
        name=message.name,
        data_type=decode_data_type(message.data_type, what=what),
        shape=tuple(message.shape),
        optimizer=decode_optimizer(message.optimizer) if message.HasField("optimizer") else None,
        is_sparse=message.is_sparse,
        sparse_mean=decode_sparse_mean(message.sparse_mean),
        initializer=_decode_initializer(message.initializer, what=what) if message.HasField("initializer") else None,
        constraint=_decode_constraint(message.constraint, what=what) if message.HasField("constraint") else None,
        partition=_decode_partition(message.partition) if message.HasField("partition") else None,
    )


def encode_slice(piece: VariableSlice) -> tensor_pb2.VariableSlice:
    """Encodes a part of a variable."""
    return tensor_pb2.VariableSlice(variable=encode_variable(piece.variable), start=piece.start, stop=piece.stop, axis=piece.axis)


def decode_slice(message: tensor_pb2.VariableSlice) -> VariableSlice:
    """Decodes and checks a part of a variable."""
    require(message, "variable")
    return VariableSlice(variable=decode_variable(message.variable), start=message.start, stop=message.stop, axis=message.axis)


def encode_schedule(schedule: Schedule) -> tensor_pb2.LearningRateSchedule:
    """Encodes a learning rate."""
    return tensor_pb2.LearningRateSchedule(
        name=schedule.name, arguments=schedule.arguments, boundaries=schedule.boundaries, values=schedule.values
    )


def decode_schedule(message: tensor_pb2.LearningRateSchedule) -> Schedule:
    """Decodes and checks a learning rate."""
    return Schedule(
        name=message.name, arguments=dict(message.arguments), boundaries=tuple(message.boundaries), values=tuple(message.values)
    )


def encode_optimizer(optimizer: OptimizerSpec) -> tensor_pb2.OptimizerSpec:
    """Encodes an optimizer with its learning rate."""
    return tensor_pb2.OptimizerSpec(
        name=optimizer.name, hyperparameters=optimizer.hyperparameters, learning_rate=encode_schedule(optimizer.learning_rate)
    )


def decode_optimizer(message: tensor_pb2.OptimizerSpec) -> OptimizerSpec:
    """Decodes and checks an optimizer with its learning rate."""
    # First: an unknown optimizer explains whatever else may look odd.
    check_optimizer_name(message.name)
    require(message, "learning_rate")
    return OptimizerSpec(
        name=message.name, hyperparameters=dict(message.hyperparameters), learning_rate=decode_schedule(message.learning_rate)
    )


def encode_optimizer_change(original: OptimizerSpec, current: OptimizerSpec) -> parameter_service_pb2.OptimizerChange:
    """Encodes an optimizer as the model has it, and as it is now."""
    return parameter_service_pb2.OptimizerChange(original=encode_optimizer(original), current=encode_optimizer(current))


def decode_optimizer_change(message: parameter_service_pb2.OptimizerChange) -> tuple[OptimizerSpec, OptimizerSpec]:
    """Decodes and checks an optimizer as the model has it, and as it is now."""
    require(message, "original")
    require(message, "current")
    return decode_optimizer(message.original), decode_optimizer(message.current)


def encode_averages(averages: AverageSpec | None) -> tensor_pb2.AverageSpec | None:
    """Encodes the moving averages to keep; None stays out of the message."""
    if averages is None:
        return None
    return tensor_pb2.AverageSpec(
        decay=averages.decay,
        use_num_updates=averages.use_num_updates,
        zero_debias=averages.zero_debias,
        variables=averages.variables,
    )


def decode_averages(message: chief_service_pb2.ModelSpec | parameter_service_pb2.ShardSpec) -> AverageSpec | None:
    """Decodes and checks the moving averages to keep; None if the message has none."""
    if not message.HasField("averages"):
        return None
    averages = message.averages
    return AverageSpec(
        decay=averages.decay,
        use_num_updates=averages.use_num_updates,
        zero_debias=averages.zero_debias,
        variables=tuple(averages.variables),
    )


def encode_clip(clip: ClipSpec) -> tensor_pb2.ClipSpec | None:
    """Encodes the limits on a step's mean gradient; no limits stay out of the message."""
    return None if clip == NO_CLIP else tensor_pb2.ClipSpec(value=clip.value, norm=clip.norm, global_norm=clip.global_norm)


def decode_clip(message: chief_service_pb2.ModelSpec | parameter_service_pb2.ShardSpec) -> ClipSpec:
    """Decodes and checks the limits on a step's mean gradient."""
    return ClipSpec(value=message.clip.value, norm=message.clip.norm, global_norm=message.clip.global_norm)


def _encode_constraint(constraint: Constraint) -> tensor_pb2.Constraint:
    return tensor_pb2.Constraint(kind=f"KIND_{constraint.kind.name}", low=constraint.low, high=constraint.high)


def _decode_constraint(message: tensor_pb2.Constraint, *, what: str) -> Constraint:
    kind = decode_choice(ConstraintKind, message.kind, field=f"{what}: constraint.kind")
    return Constraint(kind=kind, low=message.low, high=message.high)


def _encode_initializer(initializer: Initializer) -> tensor_pb2.Initializer:
    return tensor_pb2.Initializer(kind=f"KIND_{initializer.kind.name}", low=initializer.low, high=initializer.high, seed=initializer.seed)


def _decode_initializer(message: tensor_pb2.Initializer, *, what: str) -> Initializer:
    kind = decode_choice(InitializerKind, message.kind, field=f"{what}: initializer.kind")
    return Initializer(kind=kind, low=message.low, high=message.high, seed=message.seed)


def _encode_partition(partition: Partition) -> tensor_pb2.Partition:
    return tensor_pb2.Partition(axis=partition.axis, num_slices=partition.num_slices)


def _decode_partition(message: tensor_pb2.Partition) -> Partition:
    return Partition(axis=message.axis, num_slices=message.num_slices)


# Protobuf to checked values and back, for what is changed while a cluster trains: policy and optimizers. Knows messages; no RPC.


def encode_policy(policy: PolicySpec) -> chief_service_pb2.PolicySpec:
    """Encodes how workers are coordinated."""
    return chief_service_pb2.PolicySpec(
        name=f"NAME_{policy.name.name}",
        tokens=f"TOKENS_{policy.tokens.name}",
        num_tokens=None if policy.num_tokens < 0 else policy.num_tokens,
        replicas_to_aggregate=policy.replicas_to_aggregate,
        total_num_replicas=policy.total_num_replicas,
        staleness=policy.staleness,
        is_unlocked=not policy.use_locking,
        max_staleness=policy.max_staleness,
        too_stale=f"TOO_STALE_{policy.too_stale.name}",
    )


def decode_policy(message: chief_service_pb2.PolicySpec) -> PolicySpec:
    """Decodes and checks how workers are coordinated; what was left out is as in PolicySpec()."""
    return PolicySpec(
        name=decode_choice(PolicyName, message.name or PolicyName.SYNC.value, field="policy.name"),
        tokens=decode_choice(TokenMode, message.tokens or TokenMode.STRICT.value, field="policy.tokens"),
        num_tokens=message.num_tokens if message.HasField("num_tokens") else -1,
        replicas_to_aggregate=message.replicas_to_aggregate if message.HasField("replicas_to_aggregate") else None,
        total_num_replicas=message.total_num_replicas if message.HasField("total_num_replicas") else None,
        staleness=message.staleness,
        use_locking=not message.is_unlocked,
        max_staleness=message.max_staleness if message.HasField("max_staleness") else None,
        too_stale=decode_choice(TooStale, message.too_stale or TooStale.DROP.value, field="policy.too_stale"),
    )


def encode_hyperparameter_change(change: HyperparameterChange) -> chief_service_pb2.SetHyperparametersRequest:
    """Encodes new values for an optimizer as a request, whose number and wait are the caller's to fill in."""
    rate = change.learning_rate
    return chief_service_pb2.SetHyperparametersRequest(
        variable=change.variable,
        learning_rate=None if rate is None else encode_schedule(rate),
        hyperparameters=change.hyperparameters,
    )


def decode_hyperparameter_change(message: chief_service_pb2.SetHyperparametersRequest) -> HyperparameterChange:
    """Decodes new values for an optimizer; whether they fit it can only be told beside the model."""
    return HyperparameterChange(
        variable=message.variable,
        learning_rate=decode_schedule(message.learning_rate) if message.HasField("learning_rate") else None,
        hyperparameters=dict(message.hyperparameters),
    )


def encode_settings_reply(reply: SettingsReply | None) -> chief_service_pb2.SettingsState | None:
    """Encodes what holds now; None (the moment has not come) stays out of the message."""
    return None if reply is None else chief_service_pb2.SettingsState(version=reply.version, step=reply.step)


def decode_settings_reply(
    message: chief_service_pb2.SetPolicyResponse | chief_service_pb2.SetHyperparametersResponse,
) -> SettingsReply | None:
    """Decodes what holds now; None if the moment has not come yet."""
    if not message.HasField("settings"):
        return None
    return SettingsReply(version=message.settings.version, step=message.settings.step)


# Protobuf to checked values and back, for the model that a cluster agrees on, and where it lies. Knows messages; no RPC.


def encode_model(model: ModelSpec) -> chief_service_pb2.ModelSpec:
    """Encodes a model."""
    return chief_service_pb2.ModelSpec(
        variables=[encode_variable(variable) for variable in model.variables],
        optimizer=encode_optimizer(model.optimizer),
        placement=chief_service_pb2.PlacementPolicy(
            strategy=model.placement.strategy,
            split_bytes=model.placement.split_bytes,
            loads=dict(model.placement.loads),
            pins=dict(model.placement.pins),
        ),
        averages=encode_averages(model.averages),
        clip=encode_clip(model.clip),
    )


def decode_model(message: chief_service_pb2.ModelSpec) -> ModelSpec:
    """Decodes and checks a model; loads and pins come sorted by name."""
    require(message, "optimizer")
    require(message, "placement")
    placement = message.placement
    return ModelSpec(
        variables=decode_each(message.variables, decode_variable, field="variables"),
        optimizer=decode_optimizer(message.optimizer),
        placement=PlacementPolicy(
            strategy=placement.strategy,
            split_bytes=placement.split_bytes,
            loads=tuple(sorted(placement.loads.items())),
            pins=tuple(sorted(placement.pins.items())),
        ),
        averages=decode_averages(message),
        clip=decode_clip(message),
    )


def encode_model_reply(reply: ModelReply) -> chief_service_pb2.RegisterModelResponse:
    """Encodes what a worker shall do about the model."""
    return chief_service_pb2.RegisterModelResponse(
        state=f"MODEL_STATE_{reply.state.name}",
        placement=[encode_placed(placed) for placed in reply.placement],
        attempt=reply.attempt,
        max_staged_per_worker=reply.max_staged_per_worker,
        global_step=reply.global_step,
        waiting_for=reply.waiting_for,
        policy=encode_policy(reply.policy),
    )


def decode_model_reply(message: chief_service_pb2.RegisterModelResponse) -> ModelReply:
    """Decodes what a worker shall do about the model."""
    return ModelReply(
        state=decode_choice(ModelState, message.state, field="state"),
        placement=_decode_placement(message),
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        global_step=message.global_step,
        waiting_for=message.waiting_for,
        policy=decode_policy(message.policy),
    )


def encode_agreed_model(agreed: AgreedModel) -> chief_service_pb2.GetModelResponse:
    """Encodes the agreed model."""
    return chief_service_pb2.GetModelResponse(
        state=f"MODEL_STATE_{agreed.state.name}",
        model=None if agreed.model is None else encode_model(agreed.model),
        placement=[encode_placed(placed) for placed in agreed.placement],
        global_step=agreed.global_step,
    )


def decode_agreed_model(message: chief_service_pb2.GetModelResponse) -> AgreedModel:
    """Decodes the agreed model."""
    return AgreedModel(
        state=decode_choice(ModelState, message.state, field="state"),
        model=decode_model(message.model) if message.HasField("model") else None,
        placement=_decode_placement(message),
        global_step=message.global_step,
    )


def encode_placed(placed: PlacedSlice) -> chief_service_pb2.PlacedSlice:
    """Encodes where a slice lies."""
    return chief_service_pb2.PlacedSlice(slice=encode_slice(placed.slice), shard=placed.shard)


def decode_placed(message: chief_service_pb2.PlacedSlice) -> PlacedSlice:
    """Decodes where a slice lies."""
    require(message, "slice")
    return PlacedSlice(slice=decode_slice(message.slice), shard=message.shard)


def _decode_placement(message: chief_service_pb2.RegisterModelResponse | chief_service_pb2.GetModelResponse) -> Placement:
    return decode_each(message.placement, decode_placed, field="placement")


# Protobuf to checked values and back, for what a parameter server is told. Knows messages; no RPC, no tensor.
#
# What it reports is in `codec_shard_status`; what is said when chiefs change, and about checkpoints, in `codec_checkpoints`.


MAX_METRICS = 1000
_ENCODING_NAMES = {one: f"FLOAT_ENCODING_{one.name if one.value else 'UNSPECIFIED'}" for one in FloatEncoding}
_PUSH_RESULTS = {result: f"PUSH_RESULT_{result.name}" for result in PushResult}
# A shard holds a few contributions of a worker at most.
MAX_REFUSED = 100_000


def encode_shard_spec(spec: ShardSpec) -> parameter_service_pb2.ShardSpec:
    """Encodes a shard's part of the model, with the name of its layout as we compute it."""
    return parameter_service_pb2.ShardSpec(
        epoch=spec.epoch,
        shard=spec.shard,
        slices=[encode_slice(piece) for piece in (*spec.layout.slices, *spec.layout.tables)],
        optimizer=encode_optimizer(spec.optimizer),
        layout_hash=spec.layout.hash,
        initial_step=spec.initial_step,
        attempt=spec.attempt,
        max_staged_per_worker=spec.max_staged_per_worker,
        averages=encode_averages(spec.averages),
        clip=encode_clip(spec.clip),
    )


def decode_shard_spec(message: parameter_service_pb2.ShardSpec) -> ShardSpec:
    """Decodes and checks a shard's part of the model; raises LayoutMismatch if the sender's layout of it is not ours."""
    require(message, "optimizer")
    if len(message.slices) > MAX_VARIABLES:
        raise LimitExceeded(f"shard {message.shard}: {len(message.slices)} variables, {MAX_VARIABLES} at most")
    layout = Layout(decode_each(message.slices, decode_slice, field="slices"))
    if layout.hash != message.layout_hash:
        raise LayoutMismatch(
            f"shard {message.shard}: the sender's layout of these variables is {message.layout_hash!r}, the server's is {layout.hash!r};"
            " install the same version of Lockstep on both"
        )
    return ShardSpec(
        epoch=message.epoch,
        shard=message.shard,
        layout=layout,
        optimizer=decode_optimizer(message.optimizer),
        initial_step=message.initial_step,
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        averages=decode_averages(message),
        clip=decode_clip(message),
    )


def encode_push_header(header: PushHeader) -> parameter_service_pb2.PushHeader:
    """Encodes what a contribution is and belongs to."""
    return parameter_service_pb2.PushHeader(
        epoch=header.epoch,
        push_id=encode_push_id(header.push_id),
        step=header.step,
        layout_hash=header.layout_hash,
        sparse=[parameter_service_pb2.SparsePart(table=part.table, num_rows=part.num_rows) for part in header.sparse],
        absent=header.absent,
        metrics={name: parameter_service_pb2.Metric(value=metric.value, weight=metric.weight) for name, metric in header.metrics.items()},
        refused=header.refused,
        encoding=encode_encoding(header.encoding),
        encoded_bytes=header.encoded_bytes,
        memory_slot=header.memory_slot,
        life=header.life,
    )


def decode_push_header(message: parameter_service_pb2.PushHeader) -> PushHeader:
    """Decodes and checks what a contribution is and belongs to; whether it fits the shard's layout is not looked at."""
    require(message, "push_id")
    sparse = tuple(SparsePart(table=part.table, num_rows=part.num_rows) for part in message.sparse)
    absent = tuple(message.absent)
    _check_ascending([part.table for part in sparse], what="sparse: the tables")
    _check_ascending(absent, what="absent: the positions")
    if len(message.refused) > MAX_REFUSED:
        raise LimitExceeded(f"refused: {len(message.refused)} sequences in one contribution, {MAX_REFUSED} at most")
    return PushHeader(
        epoch=message.epoch,
        push_id=decode_push_id(message.push_id),
        step=message.step,
        layout_hash=message.layout_hash,
        sparse=sparse,
        absent=absent,
        metrics=_decode_metrics(message) if message.metrics else {},
        refused=tuple(message.refused),
        encoding=decode_encoding(message.encoding),
        encoded_bytes=message.encoded_bytes,
        memory_slot=message.memory_slot if message.HasField("memory_slot") else None,
        life=message.life,
    )


def encode_encoding(encoding: FloatEncoding) -> str:
    """Encodes how float32 elements travel."""
    return _ENCODING_NAMES[encoding]


def decode_encoding(value: int, *, for_variables: bool = False) -> FloatEncoding:
    """Decodes how float32 elements travel; raises InvalidSpec if there is no such encoding, or it is not for variables."""
    try:
        encoding = FloatEncoding(value)
    except ValueError:
        encoding = None
    if encoding is FloatEncoding.AS_IS:
        return encoding
    known = [one for one in FloatEncoding if not for_variables or one.is_half or one is FloatEncoding.AS_IS]
    if encoding not in known:
        what = "variables" if for_variables else "gradients"
        raise InvalidSpec(f"encoding: got {value}, {what} come as one of {', '.join(f'{one.value} ({one.name})' for one in known)}")
    return encoding


def encode_push_reply(reply: PushReply) -> parameter_service_pb2.PushGradientsResponse:
    """Encodes what became of a push."""
    return parameter_service_pb2.PushGradientsResponse(result=_PUSH_RESULTS[reply.result], step=reply.step)


def decode_push_reply(message: parameter_service_pb2.PushGradientsResponse) -> PushReply:
    """Decodes what became of a push."""
    return PushReply(result=decode_choice(PushResult, message.result, field="result"), step=message.step)


def encode_settings(settings: ShardSettings) -> parameter_service_pb2.ConfigureShardRequest:
    """Encodes how a shard is to work."""
    return parameter_service_pb2.ConfigureShardRequest(
        epoch=settings.epoch,
        chief_incarnation=settings.chief_incarnation,
        version=settings.version,
        step=settings.step,
        accepts_stale=settings.accepts_stale,
        applies_on_arrival=settings.applies_on_arrival,
        optimizers=[encode_optimizer_change(original, current) for original, current in settings.optimizers],
        rejects_nonfinite=settings.rejects_nonfinite,
    )


def decode_settings(message: parameter_service_pb2.ConfigureShardRequest) -> ShardSettings:
    """Decodes and checks how a shard is to work."""
    if not 0 <= message.step <= MAX_STEP:
        raise InvalidSpec(f"step: got {message.step}, want 0 to 2^62")
    return ShardSettings(
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        version=message.version,
        step=message.step,
        accepts_stale=message.accepts_stale,
        applies_on_arrival=message.applies_on_arrival,
        optimizers=decode_each(message.optimizers, decode_optimizer_change, field="optimizers"),
        rejects_nonfinite=message.rejects_nonfinite,
    )


def encode_apply_request(request: ApplyRequest) -> parameter_service_pb2.ApplyStepRequest:
    """Encodes the step to apply, its contributors and what belongs to them."""
    return parameter_service_pb2.ApplyStepRequest(
        epoch=request.epoch,
        chief_incarnation=request.chief_incarnation,
        step=request.step,
        contributors=[encode_push_id(push_id) for push_id in request.contributors],
        weights=request.weights,
        scales=request.scales,
        discards=[encode_push_id(push_id) for push_id in request.discards],
        ranges=request.ranges,
    )


def decode_apply_request(message: parameter_service_pb2.ApplyStepRequest) -> ApplyRequest:
    """Decodes the step to apply and its contributors, sorted together with their weights.

    Raises MalformedMessage if there is no contributor, or one occurs twice, or the weights are not one for each.
    """
    contributors = decode_each(message.contributors, decode_push_id, field="contributors")
    if not contributors:
        raise MalformedMessage(f"step {message.step}: no contributors; name at least one")
    if len(set(contributors)) < len(contributors):
        raise MalformedMessage(f"step {message.step}: a contributor occurs twice; name each once")
    weights = tuple(message.weights)
    _check_weights(weights, step=message.step, num_contributors=len(contributors))
    order = sorted(range(len(contributors)), key=contributors.__getitem__)
    return ApplyRequest(
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        step=message.step,
        contributors=tuple(contributors[index] for index in order),
        weights=tuple(weights[index] for index in order) if weights else (),
        scales=tuple(message.scales),
        discards=decode_each(message.discards, _decode_discard, field="discards"),
        ranges=tuple(message.ranges),
    )


def encode_apply_reply(reply: ApplyReply) -> parameter_service_pb2.ApplyStepResponse:
    """Encodes what became of a step."""
    return parameter_service_pb2.ApplyStepResponse(step=reply.step, repeated_request=reply.repeated_request)


def decode_apply_reply(message: parameter_service_pb2.ApplyStepResponse) -> ApplyReply:
    """Decodes what became of a step."""
    return ApplyReply(step=message.step, repeated_request=message.repeated_request)


def encode_rows_request(request: RowsRequest, *, num_rows: int) -> parameter_service_pb2.RowsHeader:
    """Encodes which rows of which table are wanted, and how many."""
    return parameter_service_pb2.RowsHeader(
        epoch=request.epoch,
        layout_hash=request.layout_hash,
        table=request.table,
        step=request.step,
        slot=request.slot,
        num_rows=num_rows,
    )


def decode_rows_request(message: parameter_service_pb2.RowsHeader) -> RowsRequest:
    """Decodes which rows of which table are wanted, but for their number."""
    return RowsRequest(
        epoch=message.epoch,
        layout_hash=message.layout_hash,
        table=message.table,
        step=message.step if message.HasField("step") else None,
        slot=message.slot,
    )


def _decode_discard(message: tensor_pb2.PushId) -> PushId:
    """A sequence of 0 stands for all of the incarnation."""
    if message.incarnation < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, want >= 1")
    return PushId(worker=message.worker, incarnation=message.incarnation, sequence=message.sequence)


def _decode_metrics(message: parameter_service_pb2.PushHeader) -> dict[str, Metric]:
    if len(message.metrics) > MAX_METRICS:
        raise LimitExceeded(f"metrics: {len(message.metrics)} in one contribution, {MAX_METRICS} at most")
    metrics = {}
    for name, metric in message.metrics.items():
        try:
            check_name(name)
        except PsError as error:
            raise type(error)(f"metrics: {error.message}") from None
        # The value may be anything: a loss that is not finite shall show.
        if not (math.isfinite(metric.weight) and metric.weight >= 0):
            raise InvalidSpec(f"metric {name!r}: weight = {metric.weight}, want a finite number >= 0")
        metrics[name] = Metric(value=metric.value, weight=metric.weight)
    return metrics


def _check_ascending(positions: Sequence[int], *, what: str) -> None:
    for before, position in itertools.pairwise(positions):
        if position <= before:
            raise MalformedMessage(f"{what} {before} and {position} do not ascend; name each once, in order")


def _check_weights(weights: Sequence[float], *, step: int, num_contributors: int) -> None:
    if weights and len(weights) != num_contributors:
        raise MalformedMessage(f"step {step}: {len(weights)} weights for {num_contributors} contributors; give one for each, or none")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise MalformedMessage(f"step {step}: weight {weight}, want a finite number >= 0")


# Protobuf to checked values and back, for who reads variables. Knows messages; no RPC, no tensor.


# How long a server waits for a step that is asked for before it is there.
MAX_READ_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesRequest:
    """Which variables are wanted (`step` None: the latest), how they are to travel, and which step of them the reader has already."""

    epoch: int
    step: int | None
    layout_hash: str
    encoding: FloatEncoding = FloatEncoding.AS_IS
    held_step: int | None = None


def encode_read_request(request: VariablesRequest) -> parameter_service_pb2.ReadVariablesRequest:
    """Encodes which variables are wanted."""
    return parameter_service_pb2.ReadVariablesRequest(
        epoch=request.epoch,
        step=request.step,
        layout_hash=request.layout_hash,
        encoding=encode_encoding(request.encoding),
        held_step=request.held_step,
    )


def decode_read_request(message: parameter_service_pb2.ReadVariablesRequest) -> VariablesRequest:
    """Decodes and checks which variables are wanted; raises InvalidSpec if they do not travel so."""
    return VariablesRequest(
        epoch=message.epoch,
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        encoding=decode_encoding(message.encoding, for_variables=True),
        held_step=message.held_step if message.HasField("held_step") else None,
    )


def encode_standing_request(request: VariablesRequest, *, max_wait_s: float = 0.0) -> bytes:
    """Encodes which variables are wanted on a standing stream, and how long a step that is not there yet is waited for."""
    message = parameter_service_pb2.StreamVariablesRequest(read=encode_read_request(request))
    if max_wait_s:
        message.max_wait.CopyFrom(encode_duration(max_wait_s))
    return message.SerializeToString()


def decode_standing_request(request: bytes) -> tuple[VariablesRequest, float]:
    """Decodes and checks a request of a standing stream; the seconds to wait are never more than MAX_READ_WAIT_S."""
    message = decode_message(parameter_service_pb2.StreamVariablesRequest, request)
    require(message, "read")
    wait_s = decode_duration(message.max_wait) if message.HasField("max_wait") else 0.0
    return decode_read_request(message.read), min(max(0.0, wait_s), MAX_READ_WAIT_S)


# Protobuf to values and back, for what a parameter server reports: status, and workers' metrics. Knows messages; no RPC.


def encode_shard_status(status: ShardStatus) -> parameter_service_pb2.GetShardStatusResponse:
    """Encodes a shard's step, memory and counters."""
    return parameter_service_pb2.GetShardStatusResponse(
        shard=status.shard,
        process_incarnation=status.process_incarnation,
        epoch=status.epoch,
        chief_incarnation=status.chief_incarnation,
        step=status.step,
        num_slices=status.num_slices,
        arena_bytes=status.arena_bytes,
        allocated_bytes=status.allocated_bytes,
        num_staged=status.num_staged,
        num_pushes=status.num_pushes,
        num_stale=status.num_stale,
        num_duplicates=status.num_duplicates,
        num_nonfinite=status.num_nonfinite,
        last_apply=encode_duration(status.last_apply_s),
        settings_version=status.settings_version,
        num_sharing=status.num_sharing,
        chief_address=status.chief_address,
        chief_heard_ago=None if status.chief_heard_ago_s is None else encode_duration(status.chief_heard_ago_s),
        alone=status.is_alone,
        life=status.life,
    )


def decode_shard_status(message: parameter_service_pb2.GetShardStatusResponse) -> ShardStatus:
    """Decodes a shard's step, memory and counters."""
    return ShardStatus(
        shard=message.shard,
        process_incarnation=message.process_incarnation,
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        step=message.step if message.HasField("step") else None,
        num_slices=message.num_slices,
        arena_bytes=message.arena_bytes,
        allocated_bytes=message.allocated_bytes,
        num_staged=message.num_staged,
        num_pushes=message.num_pushes,
        num_stale=message.num_stale,
        num_duplicates=message.num_duplicates,
        num_nonfinite=message.num_nonfinite,
        last_apply_s=decode_duration(message.last_apply),
        settings_version=message.settings_version,
        num_sharing=message.num_sharing,
        chief_address=message.chief_address,
        chief_heard_ago_s=decode_duration(message.chief_heard_ago) if message.HasField("chief_heard_ago") else None,
        is_alone=message.alone,
        life=message.life,
    )


def encode_metric_cells(cells: Sequence[MetricCell]) -> parameter_service_pb2.ReadMetricsResponse:
    """Encodes what workers have reported."""
    return parameter_service_pb2.ReadMetricsResponse(
        cells=[
            parameter_service_pb2.MetricCell(
                name=cell.name, worker=cell.worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last
            )
            for cell in cells
        ]
    )


def decode_metric_cells(message: parameter_service_pb2.ReadMetricsResponse) -> tuple[MetricCell, ...]:
    """Decodes what workers have reported."""
    return tuple(
        MetricCell(name=cell.name, worker=cell.worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)
        for cell in message.cells
    )


# Protobuf to checked values and back, for ranges of the training data, and checkpoints on demand. Knows messages; no RPC.


def encode_data(data: DataSpec) -> chief_service_pb2.DataSpec:
    """Encodes the training data as a cluster goes through it."""
    return chief_service_pb2.DataSpec(
        name=data.name,
        num_samples=data.num_samples,
        range_size=data.range_size,
        num_epochs=data.num_epochs,
        shuffle_seed=data.shuffle_seed,
    )


def decode_data(message: chief_service_pb2.DataSpec) -> DataSpec:
    """Decodes and checks the training data; raises InvalidSpec."""
    return DataSpec(
        name=message.name,
        num_samples=message.num_samples,
        range_size=message.range_size,
        num_epochs=message.num_epochs,
        shuffle_seed=message.shuffle_seed if message.HasField("shuffle_seed") else None,
    )


def encode_lease_reply(reply: LeaseReply) -> chief_service_pb2.LeaseRangesResponse:
    """Encodes how a wish for ranges ended."""
    return chief_service_pb2.LeaseRangesResponse(
        result=f"LEASE_RESULT_{reply.result.name}",
        ranges=[chief_service_pb2.DataRange(id=one.id, epoch=one.epoch, start=one.start, stop=one.stop) for one in reply.ranges],
        waiting_for=reply.waiting_for,
    )


def decode_lease_reply(message: chief_service_pb2.LeaseRangesResponse) -> LeaseReply:
    """Decodes how a wish for ranges ended."""
    return LeaseReply(
        result=decode_choice(LeaseResult, message.result, field="result"),
        ranges=tuple(DataRange(id=one.id, epoch=one.epoch, start=one.start, stop=one.stop) for one in message.ranges),
        waiting_for=message.waiting_for,
    )


def encode_progress(progress: DataProgress) -> chief_service_pb2.DataProgress:
    """Encodes how far a cluster is in its training data."""
    return chief_service_pb2.DataProgress(data=encode_data(progress.data), epoch=progress.epoch, done=progress.done)


def decode_progress(message: chief_service_pb2.DataProgress) -> DataProgress:
    """Decodes how far a cluster is in its training data."""
    require(message, "data")
    return DataProgress(data=decode_data(message.data), epoch=message.epoch, done=tuple(message.done))


def encode_saved(saved: SavedCheckpoint) -> chief_service_pb2.SaveCheckpointResponse:
    """Encodes a whole checkpoint, or what is waited for."""
    return chief_service_pb2.SaveCheckpointResponse(tag=saved.tag, step=saved.step, waiting_for=saved.waiting_for)


def decode_saved(message: chief_service_pb2.SaveCheckpointResponse) -> SavedCheckpoint:
    """Decodes a whole checkpoint, or what is waited for."""
    return SavedCheckpoint(tag=message.tag, step=message.step, waiting_for=message.waiting_for)


# Protobuf to checked values and back: what a server is told and says when chiefs change, and about checkpoints. Knows no RPC.


_SHA256 = re.compile(r"[0-9a-f]{64}")
_SAVE_STATES = {state: f"SAVE_STATE_{state.name}" for state in SaveState}


def encode_adoption(adoption: Adoption) -> parameter_service_pb2.AdoptShardResponse:
    """Encodes where a shard stands."""
    last = adoption.last_apply
    return parameter_service_pb2.AdoptShardResponse(
        step=adoption.step,
        layout_hash=adoption.layout_hash,
        record=adoption.record,
        record_version=adoption.record_version,
        last_apply=None if last is None else encode_apply_request(last),
        pushes=[encode_worker_pushes(pushes) for pushes in adoption.pushes],
    )


def decode_adoption(message: parameter_service_pb2.AdoptShardResponse) -> Adoption:
    """Decodes where a shard stands."""
    return Adoption(
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        record=message.record,
        record_version=message.record_version,
        last_apply=decode_apply_request(message.last_apply) if message.HasField("last_apply") else None,
        pushes=decode_each(message.pushes, decode_worker_pushes, field="pushes"),
    )


def encode_worker_pushes(pushes: WorkerPushes) -> parameter_service_pb2.WorkerPushes:
    """Encodes what has been applied of one worker lately."""
    applied = [parameter_service_pb2.AppliedPush(sequence=push.sequence, step=push.step) for push in pushes.applied]
    return parameter_service_pb2.WorkerPushes(worker=pushes.worker, incarnation=pushes.incarnation, applied=applied)


def decode_worker_pushes(message: parameter_service_pb2.WorkerPushes) -> WorkerPushes:
    """Decodes what has been applied of one worker lately."""
    applied = tuple(AppliedPush(sequence=push.sequence, step=push.step) for push in message.applied)
    return WorkerPushes(worker=message.worker, incarnation=message.incarnation, applied=applied)


def encode_save_request(request: SaveRequest, *, max_wait_s: float = 0.0) -> parameter_service_pb2.SaveShardRequest:
    """Encodes a step to save, and how long to wait for the end."""
    return parameter_service_pb2.SaveShardRequest(
        epoch=request.epoch,
        chief_incarnation=request.chief_incarnation,
        step=request.step,
        tag=request.tag,
        max_wait=encode_duration(max_wait_s) if max_wait_s else None,
        num_shards=request.num_shards,
    )


def decode_save_request(message: parameter_service_pb2.SaveShardRequest) -> SaveRequest:
    """Decodes and checks a step to save."""
    if not 0 <= message.step <= MAX_STEP:
        raise InvalidSpec(f"step: got {message.step}, want 0 to 2^62")
    return SaveRequest(
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        step=message.step,
        tag=check_tag(message.tag),
        num_shards=max(1, message.num_shards),
    )


def encode_save_progress(progress: SaveProgress) -> parameter_service_pb2.SaveShardResponse:
    """Encodes how far a save is."""
    return parameter_service_pb2.SaveShardResponse(
        state=_SAVE_STATES[progress.state],
        file=None if progress.file is None else encode_file(progress.file),
        failure=None if progress.failure is None else encode_call_error(progress.failure),
    )


def decode_save_progress(message: parameter_service_pb2.SaveShardResponse) -> SaveProgress:
    """Decodes how far a save is."""
    state = decode_choice(SaveState, message.state, field="state")
    if state is SaveState.DONE:
        require(message, "file")
    if state is SaveState.FAILED:
        require(message, "failure")
    return SaveProgress(
        state=state,
        file=decode_file(message.file) if state is SaveState.DONE else None,
        failure=decode_call_error(message.failure) if state is SaveState.FAILED else None,
    )


def encode_file(file: CheckpointFile) -> parameter_service_pb2.CheckpointFile:
    """Encodes one file of a checkpoint."""
    return parameter_service_pb2.CheckpointFile(name=file.name, shard=file.shard, num_bytes=file.num_bytes, sha256=file.sha256)


def decode_file(message: parameter_service_pb2.CheckpointFile) -> CheckpointFile:
    """Decodes one file of a checkpoint; whether its name is one is for the storage to say."""
    return CheckpointFile(
        name=message.name, shard=message.shard, num_bytes=message.num_bytes, sha256=_decode_sha256(message.sha256, field="sha256")
    )


def encode_restore_request(request: RestoreRequest, *, max_wait_s: float = 0.0) -> parameter_service_pb2.RestoreShardRequest:
    """Encodes a checkpoint to bring a shard back to, and how long to wait for the end."""
    return parameter_service_pb2.RestoreShardRequest(
        chief_incarnation=request.chief_incarnation,
        spec=encode_shard_spec(request.spec),
        tag=request.tag,
        manifest_sha256=request.manifest_sha256,
        settings=encode_settings(request.settings),
        max_wait=encode_duration(max_wait_s) if max_wait_s else None,
        life=request.life,
    )


def decode_restore_request(message: parameter_service_pb2.RestoreShardRequest) -> RestoreRequest:
    """Decodes and checks a checkpoint to bring a shard back to."""
    require(message, "spec")
    require(message, "settings")
    return RestoreRequest(
        chief_incarnation=message.chief_incarnation,
        spec=decode_shard_spec(message.spec),
        tag=check_tag(message.tag),
        manifest_sha256=_decode_sha256(message.manifest_sha256, field="manifest_sha256"),
        settings=decode_settings(message.settings),
        life=message.life,
    )


def encode_restore_progress(progress: RestoreProgress) -> parameter_service_pb2.RestoreShardResponse:
    """Encodes how far a restoration is."""
    return parameter_service_pb2.RestoreShardResponse(
        is_done=progress.is_done, num_bytes_read=progress.num_bytes_read, num_bytes=progress.num_bytes
    )


def decode_restore_progress(message: parameter_service_pb2.RestoreShardResponse) -> RestoreProgress:
    """Decodes how far a restoration is."""
    return RestoreProgress(is_done=message.is_done, num_bytes_read=message.num_bytes_read, num_bytes=message.num_bytes)


def decode_checkpoint_wait(message: parameter_service_pb2.SaveShardRequest | parameter_service_pb2.RestoreShardRequest) -> float:
    """Returns how many seconds the call may wait: none if the field was left out, and never more than 20."""
    return min(max(0.0, decode_duration(message.max_wait)), MAX_WAIT_SLICE_S)


def _decode_sha256(text: str, *, field: str) -> str:
    if not _SHA256.fullmatch(text):
        raise MalformedMessage(f"{field}: got {text[:80]!r}, want 64 hexadecimal digits")
    return text


# Protobuf to checked values and back, for what a chief leaves for its successor. Knows messages; no RPC, no file.


def encode_record(record: ChiefRecord) -> chief_service_pb2.ChiefRecord:
    """Encodes the model and the settings, and what is of a step; no model stays out of the message."""
    message = _encode_lasting(record)
    message.MergeFrom(_encode_of_step(record))
    return message


def _encode_lasting(record: ChiefRecord) -> chief_service_pb2.ChiefRecord:
    return chief_service_pb2.ChiefRecord(
        model=None if record.model is None else encode_model(record.model),
        policy=encode_policy(record.policy),
        settings_version=record.settings_version,
        optimizers=[encode_optimizer_change(original, current) for original, current in record.optimizers],
        num_rollbacks=record.num_rollbacks,
        last_rollback=record.last_rollback,
        rejects_nonfinite=record.rejects_nonfinite,
        earlier_life=record.earlier[0],
        earlier_chief_incarnation=record.earlier[1],
    )


def _encode_of_step(record: ChiefRecord) -> chief_service_pb2.ChiefRecord:
    data = record.data
    return chief_service_pb2.ChiefRecord(
        epoch=record.epoch,
        step=record.step,
        chosen=[
            chief_service_pb2.ChosenPush(push_id=encode_push_id(one.push_id), step=one.step, weight=one.weight, ranges=one.ranges)
            for one in record.chosen
        ],
        data=None if data is None else encode_data(data.data),
        data_epoch=0 if data is None else data.epoch,
        passes=[] if data is None else [chief_service_pb2.DataPass(epoch=number, done=done) for number, done in data.passes],
    )


def decode_record(message: chief_service_pb2.ChiefRecord) -> ChiefRecord:
    """Decodes and checks the model and the settings. Raises MalformedMessage, InvalidSpec."""
    return ChiefRecord(
        model=decode_model(message.model) if message.HasField("model") else None,
        policy=decode_policy(message.policy),
        settings_version=message.settings_version,
        optimizers=decode_each(message.optimizers, decode_optimizer_change, field="optimizers"),
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        rejects_nonfinite=message.rejects_nonfinite,
        epoch=message.epoch,
        step=message.step,
        chosen=decode_each(message.chosen, _decode_chosen, field="chosen"),
        data=_decode_marks(message) if message.HasField("data") else None,
        earlier=(message.earlier_life, message.earlier_chief_incarnation),
    )


def _decode_chosen(message: chief_service_pb2.ChosenPush) -> ChosenPush:
    require(message, "push_id")
    push_id = decode_push_id(message.push_id)
    return ChosenPush(push_id=push_id, step=message.step, weight=message.weight, ranges=tuple(message.ranges))


def _decode_marks(message: chief_service_pb2.ChiefRecord) -> DataMarks:
    passes = tuple((one.epoch, one.done) for one in message.passes)
    return DataMarks(data=decode_data(message.data), epoch=message.data_epoch, passes=passes)


class RecordPacker:
    """Makes bytes of records that come one after the other: what seldom changes, the model above all, is encoded once. For one thread."""

    def __init__(self) -> None:
        self._lasting: tuple[ChiefRecord, bytes] | None = None

    def pack(self, record: ChiefRecord) -> bytes:
        """Returns the record as bytes, as parameter servers keep it."""
        lasting = replace(record, epoch=0, step=0, chosen=(), data=None)
        # As a rule they are the same objects, and compared as such.
        if self._lasting is None or self._lasting[0] != lasting:
            self._lasting = lasting, _encode_lasting(lasting).SerializeToString(deterministic=True)
        # A message in two parts is the message.
        return self._lasting[1] + _encode_of_step(record).SerializeToString(deterministic=True)


def pack_record(record: ChiefRecord) -> bytes:
    """Returns a record as bytes, as parameter servers keep it."""
    return RecordPacker().pack(record)


def unpack_record(packed: bytes) -> ChiefRecord:
    """Returns the record that bytes are. Raises MalformedMessage, InvalidSpec."""
    return decode_record(decode_message(chief_service_pb2.ChiefRecord, packed))


# Protobuf to checked values and back, for the chief's calls. Knows messages; no RPC.
#
# The model is in `codec_model`, the settings in `codec_settings`, the cluster's status in `codec_status`, checkpoints and ranges of
# training data in `codec_data_ranges`, what a chief leaves for its successor in `codec_record`.


MAX_RANGES_A_CALL = 10_000
# Looked up once: a name costs several times as much with every message. Typed as anything, since the stubs want their own kind of numbers.
_KINDS: dict[ParticipantKind, Any] = {
    kind: chief_service_pb2.ParticipantKind.Value(f"PARTICIPANT_KIND_{kind.name}") for kind in ParticipantKind
}
_OUTCOMES: dict[PushOutcome, Any] = {
    outcome: chief_service_pb2.PushOutcome.Value(f"PUSH_OUTCOME_{outcome.name}") for outcome in PushOutcome
}
_RESULTS: dict[TokenResult, Any] = {result: chief_service_pb2.TokenResult.Value(f"TOKEN_RESULT_{result.name}") for result in TokenResult}


def decode_max_wait(
    message: chief_service_pb2.RegisterModelRequest
    | chief_service_pb2.GetModelRequest
    | chief_service_pb2.DequeueTokenRequest
    | chief_service_pb2.SetPolicyRequest
    | chief_service_pb2.SetHyperparametersRequest
    | chief_service_pb2.SaveCheckpointRequest
    | chief_service_pb2.LeaseRangesRequest,
) -> float:
    """Returns how many seconds the call may block: 20 if the field was left out, and never more."""
    if not message.HasField("max_wait"):
        return MAX_WAIT_SLICE_S
    return min(max(0.0, decode_duration(message.max_wait)), MAX_WAIT_SLICE_S)


def encode_max_wait(max_wait_s: float) -> Duration:
    """Encodes how long a call may block; more than 20 s counts as 20 s."""
    return encode_duration(min(max_wait_s, MAX_WAIT_SLICE_S))


def encode_participant(participant: Participant) -> chief_service_pb2.Participant:
    """Encodes who calls."""
    return chief_service_pb2.Participant(
        epoch=participant.epoch,
        kind=_KINDS[participant.kind],
        index=participant.index,
        incarnation=participant.incarnation,
        life=participant.life,
    )


def decode_participant(
    message: chief_service_pb2.HeartbeatRequest
    | chief_service_pb2.DeregisterWorkerRequest
    | chief_service_pb2.RegisterModelRequest
    | chief_service_pb2.CompleteInitializationRequest
    | chief_service_pb2.CommitPushRequest
    | chief_service_pb2.DequeueTokenRequest
    | chief_service_pb2.LeaseRangesRequest,
) -> Participant:
    """Returns who sent the request."""
    require(message, "participant")
    return _decode_caller(message.participant, field="participant")


def _decode_caller(caller: chief_service_pb2.Participant, *, field: str) -> Participant:
    kind = decode_choice(ParticipantKind, caller.kind, field=f"{field}.kind")
    return Participant(epoch=caller.epoch, kind=kind, index=caller.index, incarnation=caller.incarnation, life=caller.life)


def encode_register_request(request: RegisterRequest) -> chief_service_pb2.RegisterWorkerRequest:
    """Encodes the wish to take part."""
    return chief_service_pb2.RegisterWorkerRequest(
        kind=f"PARTICIPANT_KIND_{request.kind.name}",
        index=request.index,
        host=request.host,
        pid=request.pid,
        takeover=request.takeover,
        request_id=request.request_id,
        former=None if request.former is None else encode_participant(request.former),
        held_ranges=request.held,
    )


def decode_register_request(message: chief_service_pb2.RegisterWorkerRequest) -> RegisterRequest:
    """Decodes the wish to take part."""
    check_ranges(message.held_ranges, field="held_ranges")
    return RegisterRequest(
        kind=decode_choice(ParticipantKind, message.kind, field="kind"),
        index=message.index if message.HasField("index") else None,
        host=message.host,
        pid=message.pid,
        takeover=message.takeover,
        request_id=message.request_id,
        former=_decode_caller(message.former, field="former") if message.HasField("former") else None,
        held=tuple(message.held_ranges),
    )


def encode_registration(registration: Registration) -> chief_service_pb2.RegisterWorkerResponse:
    """Encodes what a participant gets."""
    return chief_service_pb2.RegisterWorkerResponse(
        epoch=registration.participant.epoch,
        index=registration.participant.index,
        incarnation=registration.participant.incarnation,
        life=registration.participant.life,
        lease=encode_duration(registration.lease_s),
        shard_addresses=registration.shard_addresses,
        global_step=registration.global_step,
        may_contribute=registration.may_contribute,
        chief_incarnation=registration.chief_incarnation,
        standby_addresses=registration.standby_addresses,
        shards_version=registration.shards_version,
        rejects_nonfinite=registration.rejects_nonfinite,
    )


def decode_registration(message: chief_service_pb2.RegisterWorkerResponse, *, kind: ParticipantKind) -> Registration:
    """Decodes what a participant gets; `kind` is the one that it asked for."""
    participant = Participant(epoch=message.epoch, kind=kind, index=message.index, incarnation=message.incarnation, life=message.life)
    return Registration(
        participant=participant,
        lease_s=decode_duration(message.lease),
        shard_addresses=tuple(message.shard_addresses),
        global_step=message.global_step,
        may_contribute=message.may_contribute,
        chief_incarnation=message.chief_incarnation,
        standby_addresses=tuple(message.standby_addresses),
        shards_version=message.shards_version,
        rejects_nonfinite=message.rejects_nonfinite,
    )


def encode_commit(commit: PushCommit) -> chief_service_pb2.PushCommit:
    """Encodes a contribution to be counted."""
    return chief_service_pb2.PushCommit(
        push_id=encode_push_id(commit.push_id),
        step=commit.step,
        staged=commit.staged,
        is_applied=commit.is_applied,
        ranges=commit.ranges,
    )


def check_ranges(ranges: Sized, *, field: str) -> None:
    """Raises LimitExceeded if a message names too many ranges of training data."""
    if len(ranges) > MAX_RANGES_A_CALL:
        raise LimitExceeded(f"{field}: {len(ranges)} in one call, {MAX_RANGES_A_CALL} at most")


def decode_commit(message: chief_service_pb2.PushCommit) -> PushCommit:
    """Decodes a contribution to be counted."""
    require(message, "push_id")
    check_ranges(message.ranges, field="ranges")
    return PushCommit(
        push_id=decode_push_id(message.push_id),
        step=message.step,
        staged=message.staged,
        is_applied=message.is_applied,
        ranges=tuple(message.ranges),
    )


def encode_commit_result(result: CommitResult) -> chief_service_pb2.CommitResult:
    """Encodes what became of a commit."""
    first = None if result.first_outcome is None else _OUTCOMES[result.first_outcome]
    return chief_service_pb2.CommitResult(
        outcome=_OUTCOMES[result.outcome],
        first_outcome=first,
        global_step=result.global_step,
        applied_step=result.applied_step,
        staleness=result.staleness,
        weight=result.weight,
    )


def decode_commit_result(message: chief_service_pb2.CommitResult) -> CommitResult:
    """Decodes what became of a commit."""
    first = decode_choice(PushOutcome, message.first_outcome, field="first_outcome") if message.first_outcome else None
    outcome = decode_choice(PushOutcome, message.outcome, field="outcome")
    return CommitResult(
        outcome=outcome,
        first_outcome=first,
        global_step=message.global_step,
        applied_step=message.applied_step if message.HasField("applied_step") else None,
        staleness=message.staleness,
        # No weight is 0: whoever sends none means the ordinary one.
        weight=message.weight or 1.0,
    )


def encode_token_reply(reply: TokenReply) -> chief_service_pb2.DequeueTokenResponse:
    """Encodes how a wait for a token ended."""
    return chief_service_pb2.DequeueTokenResponse(
        result=_RESULTS[reply.result],
        step=reply.step,
        commit=None if reply.commit is None else encode_commit_result(reply.commit),
        waiting_for=reply.waiting_for,
        global_step=reply.global_step,
        reads_latest=reply.reads_latest,
        settings_version=reply.settings_version,
        shards_version=reply.shards_version,
    )


def decode_token_reply(message: chief_service_pb2.DequeueTokenResponse) -> TokenReply:
    """Decodes how a wait for a token ended."""
    return TokenReply(
        result=decode_choice(TokenResult, message.result, field="result"),
        step=message.step,
        commit=decode_commit_result(message.commit) if message.HasField("commit") else None,
        waiting_for=message.waiting_for,
        global_step=message.global_step,
        reads_latest=message.reads_latest,
        settings_version=message.settings_version,
        shards_version=message.shards_version,
    )


# Protobuf to values and back, for the cluster's status. Knows messages; no RPC.


def encode_cluster_status(status: ClusterStatus) -> chief_service_pb2.GetClusterStatusResponse:
    """Encodes the cluster at one moment."""
    return chief_service_pb2.GetClusterStatusResponse(
        cluster=status.cluster,
        epoch=status.epoch,
        state=f"CLUSTER_STATE_{status.state.name}",
        reason=status.reason,
        global_step=status.global_step,
        max_steps=status.max_steps,
        policy=status.policy,
        replicas_to_aggregate=status.replicas_to_aggregate,
        total_num_replicas=status.total_num_replicas,
        num_contributions=status.num_contributions,
        waiting_for=status.waiting_for,
        step_age=encode_duration(status.step_age_s),
        participants=[_encode_participant(participant) for participant in status.participants],
        shards=[_encode_shard(shard) for shard in status.shards],
        ledger=[_encode_entry(entry) for entry in status.ledger],
        num_accepted=status.num_accepted,
        num_stale=status.num_stale,
        num_late=status.num_late,
        hyperparameters_version=status.hyperparameters_version,
        optimizer=status.optimizer,
        max_observed_staleness=status.max_observed_staleness,
        chief_incarnation=status.chief_incarnation,
        checkpoint=None if status.checkpoint is None else _encode_checkpoint(status.checkpoint),
        num_rollbacks=status.num_rollbacks,
        last_rollback=status.last_rollback,
        min_replicas=status.min_replicas,
        data=None if status.data is None else _encode_data(status.data),
    )


def decode_cluster_status(message: chief_service_pb2.GetClusterStatusResponse) -> ClusterStatus:
    """Decodes the cluster at one moment."""
    return ClusterStatus(
        cluster=message.cluster,
        epoch=message.epoch,
        state=decode_choice(ClusterState, message.state, field="state"),
        reason=message.reason,
        global_step=message.global_step,
        max_steps=message.max_steps if message.HasField("max_steps") else None,
        policy=message.policy,
        replicas_to_aggregate=message.replicas_to_aggregate,
        total_num_replicas=message.total_num_replicas,
        num_contributions=message.num_contributions,
        waiting_for=message.waiting_for,
        step_age_s=decode_duration(message.step_age),
        participants=decode_each(message.participants, _decode_participant, field="participants"),
        shards=decode_each(message.shards, _decode_shard, field="shards"),
        ledger=decode_each(message.ledger, _decode_entry, field="ledger"),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        hyperparameters_version=message.hyperparameters_version,
        optimizer=message.optimizer,
        max_observed_staleness=message.max_observed_staleness,
        chief_incarnation=message.chief_incarnation,
        checkpoint=_decode_checkpoint(message.checkpoint) if message.HasField("checkpoint") else None,
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        min_replicas=message.min_replicas,
        data=_decode_data(message.data) if message.HasField("data") else None,
    )


def _encode_participant(status: ParticipantStatus) -> chief_service_pb2.ParticipantStatus:
    return chief_service_pb2.ParticipantStatus(
        kind=f"PARTICIPANT_KIND_{status.kind.name}",
        index=status.index,
        incarnation=status.incarnation,
        host=status.host,
        pid=status.pid,
        state=status.state,
        seen_ago=encode_duration(status.seen_ago_s),
        num_accepted=status.num_accepted,
        num_stale=status.num_stale,
        num_late=status.num_late,
        is_waiting=status.is_waiting,
        failure=status.failure,
    )


def _decode_participant(message: chief_service_pb2.ParticipantStatus) -> ParticipantStatus:
    return ParticipantStatus(
        kind=decode_choice(ParticipantKind, message.kind, field="kind"),
        index=message.index,
        incarnation=message.incarnation,
        host=message.host,
        pid=message.pid,
        state=message.state,
        seen_ago_s=decode_duration(message.seen_ago),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        is_waiting=message.is_waiting,
        failure=message.failure,
    )


def _encode_shard(link: ShardLink) -> chief_service_pb2.ShardLink:
    return chief_service_pb2.ShardLink(
        index=link.index,
        address=link.address,
        is_reachable=link.is_reachable,
        step=link.step,
        arena_bytes=link.arena_bytes,
        num_slices=link.num_slices,
        standby=link.standby,
        standby_missing=link.standby_missing,
    )


def _decode_shard(message: chief_service_pb2.ShardLink) -> ShardLink:
    return ShardLink(
        index=message.index,
        address=message.address,
        is_reachable=message.is_reachable,
        step=message.step if message.HasField("step") else None,
        arena_bytes=message.arena_bytes,
        num_slices=message.num_slices,
        standby=message.standby,
        standby_missing=message.standby_missing,
    )


def _encode_entry(entry: LedgerEntry) -> chief_service_pb2.LedgerEntry:
    return chief_service_pb2.LedgerEntry(
        step=entry.step,
        contributors=[encode_push_id(push_id) for push_id in entry.contributors],
        num_stale=entry.num_stale,
        num_late=entry.num_late,
        duration=encode_duration(entry.duration_s),
        apply_duration=encode_duration(entry.apply_duration_s),
        last_worker=entry.last_worker,
    )


def _decode_entry(message: chief_service_pb2.LedgerEntry) -> LedgerEntry:
    return LedgerEntry(
        step=message.step,
        contributors=decode_each(message.contributors, decode_push_id, field="contributors"),
        num_stale=message.num_stale,
        num_late=message.num_late,
        duration_s=decode_duration(message.duration),
        apply_duration_s=decode_duration(message.apply_duration),
        last_worker=message.last_worker,
    )


def _encode_checkpoint(status: CheckpointStatus) -> chief_service_pb2.CheckpointStatus:
    return chief_service_pb2.CheckpointStatus(
        durability=status.durability,
        tag=status.tag,
        step=status.step,
        age=encode_duration(status.age_s) if status.tag else None,
        saving=status.saving,
        failure=status.failure,
    )


def _decode_checkpoint(message: chief_service_pb2.CheckpointStatus) -> CheckpointStatus:
    return CheckpointStatus(
        durability=message.durability,
        tag=message.tag,
        step=message.step,
        age_s=decode_duration(message.age),
        saving=message.saving,
        failure=message.failure,
    )


def _encode_data(status: DataStatus) -> chief_service_pb2.DataStatus:
    return chief_service_pb2.DataStatus(
        name=status.name,
        epoch=status.epoch,
        num_done=status.num_done,
        num_leased=status.num_leased,
        num_ranges=status.num_ranges,
    )


def _decode_data(message: chief_service_pb2.DataStatus) -> DataStatus:
    return DataStatus(
        name=message.name,
        epoch=message.epoch,
        num_done=message.num_done,
        num_leased=message.num_leased,
        num_ranges=message.num_ranges,
    )


# Protobuf to checked values and back, for the handshake. Knows messages; no RPC.


def encode_handshake_request(request: HandshakeRequest) -> handshake_service_pb2.HandshakeRequest:
    """Encodes what the caller believes to be at the address."""
    return handshake_service_pb2.HandshakeRequest(
        cluster=request.cluster,
        expected_role="ROLE_UNSPECIFIED" if request.expected_role is None else f"ROLE_{request.expected_role.name}",
        expected_index=request.expected_index,
        version=_encode_version(request.version),
    )


def decode_handshake_request(message: handshake_service_pb2.HandshakeRequest) -> HandshakeRequest:
    """Decodes what the caller believes to be at the address."""
    require(message, "version")
    return HandshakeRequest(
        cluster=message.cluster,
        expected_role=decode_choice(Role, message.expected_role, field="expected_role") if message.expected_role else None,
        expected_index=message.expected_index if message.HasField("expected_index") else None,
        version=_decode_version(message.version),
    )


def encode_handshake_reply(reply: HandshakeReply) -> handshake_service_pb2.HandshakeResponse:
    """Encodes what is at the address."""
    return handshake_service_pb2.HandshakeResponse(
        cluster=reply.identity.cluster,
        role=f"ROLE_{reply.identity.role.name}",
        index=reply.identity.index,
        version=_encode_version(reply.version),
        process_incarnation=reply.identity.process_incarnation,
        epoch=reply.epoch,
        warning=reply.warning,
    )


def decode_handshake_reply(message: handshake_service_pb2.HandshakeResponse) -> HandshakeReply:
    """Decodes what is at the address."""
    identity = Identity(
        cluster=message.cluster,
        role=decode_choice(Role, message.role, field="role"),
        index=message.index,
        process_incarnation=message.process_incarnation,
    )
    return HandshakeReply(identity=identity, version=_decode_version(message.version), epoch=message.epoch, warning=message.warning)


def _encode_version(version: ProtocolVersion) -> handshake_service_pb2.ProtocolVersion:
    return handshake_service_pb2.ProtocolVersion(major=version.major, minor=version.minor)


def _decode_version(message: handshake_service_pb2.ProtocolVersion) -> ProtocolVersion:
    return ProtocolVersion(major=message.major, minor=message.minor)


# Protobuf to checked values and back, for the named accumulators. Knows messages; no RPC, no sum.


def encode_spec(spec: AccumulatorSpec) -> accumulator_service_pb2.AccumulatorSpec:
    """Encodes what an accumulator takes and gives."""
    return accumulator_service_pb2.AccumulatorSpec(
        name=spec.name,
        data_type=encode_data_type(spec.data_type),
        has_shape=spec.shape is not None,
        shape=spec.shape or (),
        reduction=f"REDUCTION_{spec.reduction.name}",
        is_sparse=spec.is_sparse,
        sparse_mean=encode_sparse_mean(spec.sparse_mean),
    )


def decode_spec(message: accumulator_service_pb2.AccumulatorSpec) -> AccumulatorSpec:
    """Decodes and checks what an accumulator takes and gives."""
    return AccumulatorSpec(
        name=message.name,
        data_type=decode_data_type(message.data_type, what=f"accumulator {message.name!r}"),
        shape=tuple(message.shape) if message.has_shape else None,
        reduction=decode_choice(Reduction, message.reduction, field="reduction"),
        is_sparse=message.is_sparse,
        sparse_mean=decode_sparse_mean(message.sparse_mean),
    )


def encode_gradient_header(header: GradientHeader) -> accumulator_service_pb2.GradientHeader:
    """Encodes what a gradient is."""
    return accumulator_service_pb2.GradientHeader(
        name=header.name,
        client=header.client,
        sequence=header.sequence,
        local_step=header.local_step,
        shape=header.shape,
        num_indices=header.num_indices,
        dense_shape=header.dense_shape or (),
        has_dense_shape=header.dense_shape is not None,
    )


def decode_gradient_header(message: accumulator_service_pb2.GradientHeader) -> GradientHeader:
    """Decodes and checks what a gradient is."""
    return GradientHeader(
        name=message.name,
        client=message.client,
        sequence=message.sequence,
        local_step=message.local_step,
        shape=tuple(message.shape),
        num_indices=message.num_indices,
        dense_shape=tuple(message.dense_shape) if message.has_dense_shape else None,
    )


def encode_gradient_reply(reply: GradientReply) -> accumulator_service_pb2.ApplyGradientResponse:
    """Encodes what became of a gradient."""
    return accumulator_service_pb2.ApplyGradientResponse(accepted=reply.accepted, step=reply.step)


def decode_gradient_reply(message: accumulator_service_pb2.ApplyGradientResponse) -> GradientReply:
    """Decodes what became of a gradient."""
    return GradientReply(accepted=message.accepted, step=message.step)


def encode_take_request(request: TakeRequest) -> accumulator_service_pb2.TakeGradientRequest:
    """Encodes a taking."""
    return accumulator_service_pb2.TakeGradientRequest(
        name=request.name,
        client=request.client,
        sequence=request.sequence,
        num_required=request.num_required,
        max_wait=encode_duration(request.max_wait_s),
    )


def decode_take_request(message: accumulator_service_pb2.TakeGradientRequest) -> TakeRequest:
    """Decodes and checks a taking."""
    return TakeRequest(
        name=message.name,
        client=message.client,
        sequence=message.sequence,
        num_required=message.num_required,
        max_wait_s=decode_duration(message.max_wait),
    )


def encode_taken(taken: Taken) -> accumulator_service_pb2.TakenHeader:
    """Encodes what was taken, without its content."""
    header = accumulator_service_pb2.TakenHeader(is_ready=taken.is_ready, count=taken.count, step=taken.step)
    if taken.values is not None:
        header.shape.extend(taken.values.shape)
    if taken.indices is not None:
        header.num_indices = len(taken.indices)
        header.dense_shape.extend(taken.dense_shape or ())
    return header


def encode_accumulator_status(status: AccumulatorStatus) -> accumulator_service_pb2.GetAccumulatorResponse:
    """Encodes an accumulator at one moment."""
    return accumulator_service_pb2.GetAccumulatorResponse(
        spec=encode_spec(status.spec), num_accumulated=status.num_accumulated, step=status.step, num_waiting=status.num_waiting
    )


def decode_accumulator_status(message: accumulator_service_pb2.GetAccumulatorResponse) -> AccumulatorStatus:
    """Decodes an accumulator at one moment."""
    require(message, "spec")
    return AccumulatorStatus(
        spec=decode_spec(message.spec), num_accumulated=message.num_accumulated, step=message.step, num_waiting=message.num_waiting
    )
