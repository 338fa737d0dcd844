"""The messages that differ from their values field by field, and checks over several fields of a message. Knows no RPC and no tensor."""

import re
from collections.abc import Callable
from typing import Any

from ps_protocol.errors import InvalidSpec, LayoutMismatch, LimitExceeded, MalformedMessage
from ps_protocol.model.data import DataMarks, DataSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, check_optimizer_name
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import NO_CLIP, AverageSpec, ClipSpec, ModelSpec
from ps_protocol.model.variables import MAX_VARIABLES, DataType
from ps_protocol.roles.accumulators import Reduction, Taken
from ps_protocol.roles.checkpoint import ChiefRecord, ChosenPush, check_tag
from ps_protocol.roles.chief import MAX_INDEX, MAX_LEASE_S, MAX_SHARDS, MIN_LEASE_S
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS, StepAttachments
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.shard import MAX_STEP, SaveState, ShardSpec
from ps_protocol.v1 import accumulator_service_pb2, chief_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire.fields import decode_choice, decode_duration, decode_each, require
from ps_protocol.wire.step import check_ranges

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA_TYPES = {tensor_pb2.DataType.Value(f"DATA_TYPE_{data_type.name}") for data_type in DataType}

Encode = Callable[[Any], Any]
Decode = Callable[[type[Any], Any], Any]


def encode_shard_spec(spec: ShardSpec, encode: Encode) -> parameter_service_pb2.ShardSpec:
    """Encodes a shard's part of the model, with the name of its layout as we compute it."""
    return parameter_service_pb2.ShardSpec(
        epoch=spec.epoch,
        shard=spec.shard,
        slices=[encode(piece) for piece in (*spec.layout.slices, *spec.layout.tables)],
        optimizer=encode(spec.optimizer),
        layout_hash=spec.layout.hash,
        initial_step=spec.initial_step,
        attempt=spec.attempt,
        max_staged_per_worker=spec.max_staged_per_worker,
        averages=None if spec.averages is None else encode(spec.averages),
        clip=None if spec.clip == NO_CLIP else encode(spec.clip),
    )


def decode_shard_spec(message: parameter_service_pb2.ShardSpec, decode: Decode) -> ShardSpec:
    """Decodes and checks a shard's part of the model; raises LayoutMismatch if the sender's layout of it is not ours."""
    require(message, "optimizer")
    if len(message.slices) > MAX_VARIABLES:
        raise LimitExceeded(f"shard {message.shard}: {len(message.slices)} variables, {MAX_VARIABLES} at most")
    layout = Layout(decode_each(message.slices, lambda piece: decode(VariableSlice, piece), field="slices"))
    if layout.hash != message.layout_hash:
        raise LayoutMismatch(
            f"shard {message.shard}: the sender's layout of these variables is {message.layout_hash!r}, the server's is {layout.hash!r};"
            " install the same version of Lockstep on both"
        )
    return ShardSpec(
        epoch=message.epoch,
        shard=message.shard,
        layout=layout,
        optimizer=decode(OptimizerSpec, message.optimizer),
        initial_step=message.initial_step,
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        averages=decode(AverageSpec, message.averages) if message.HasField("averages") else None,
        clip=decode(ClipSpec, message.clip) if message.HasField("clip") else NO_CLIP,
    )


def check_optimizer(message: tensor_pb2.OptimizerSpec) -> None:
    """Raises InvalidSpec if there is no such optimizer: an unknown one explains whatever else may look odd."""
    check_optimizer_name(message.name)


def check_model(message: chief_service_pb2.ModelSpec) -> None:
    """Raises LimitExceeded if there are too many variables, or words about their placement: before any is decoded, which takes its time."""
    placement = message.placement
    for what, count in (("variables", len(message.variables)), ("loads", len(placement.loads)), ("pins", len(placement.pins))):
        if count > MAX_VARIABLES:
            raise LimitExceeded(f"the model has {count} {what}, {MAX_VARIABLES} at most")


def check_variable(message: tensor_pb2.VariableSpec) -> None:
    """Raises InvalidSpec naming the variable if there is no such element type, or none that this process knows."""
    _check_data_type(message.data_type, what=variable_place(message))


def check_accumulator(message: accumulator_service_pb2.AccumulatorSpec) -> None:
    """Raises InvalidSpec naming the accumulator if there is no such element type, MalformedMessage if the reduction was left out."""
    _check_data_type(message.data_type, what=f"accumulator {message.name!r}")
    decode_choice(Reduction, message.reduction, field="reduction")


def variable_place(message: tensor_pb2.VariableSpec) -> str:
    """Returns a description of the variable."""
    return f"variable {message.name!r}"


def check_register_request(message: chief_service_pb2.RegisterWorkerRequest) -> None:
    """Raises LimitExceeded if too many ranges are held."""
    check_ranges(message.held, field="held_ranges")


def check_registration(message: chief_service_pb2.RegisterWorkerResponse) -> None:
    """Raises MalformedMessage unless a participant can live by what it got: it opens a connection to each address, and keeps the lease."""
    participant, addresses = message.participant, message.shard_addresses
    lease_s = decode_duration(message.lease, field="lease")
    if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
        raise MalformedMessage(f"registration: a lease of {lease_s:g} s, want {MIN_LEASE_S:g} to {MAX_LEASE_S:g}")
    if not 1 <= len(addresses) <= MAX_SHARDS or len(message.standby_addresses) not in (0, len(addresses)):
        counts = f"{len(addresses)} parameter servers and {len(message.standby_addresses)} standbys"
        raise MalformedMessage(f"registration: {counts}, want 1 to {MAX_SHARDS}, and a standby for each or none")
    if len(set(addresses)) < len(addresses):
        raise MalformedMessage("registration: two parameter servers have one address")
    if participant.index > MAX_INDEX or participant.incarnation < 1:
        raise MalformedMessage(
            f"registration: index {participant.index}, incarnation {participant.incarnation}, want 0 to {MAX_INDEX}, and >= 1"
        )
    _check_step(message.global_step)


def check_lease(message: chief_service_pb2.LeaseRangesRequest) -> None:
    """Raises LimitExceeded if the caller names too many ranges."""
    check_ranges(message.held, field="held")


def check_save_request(message: parameter_service_pb2.SaveShardRequest) -> None:
    """Raises InvalidSpec unless step, tag and number of shards can be such."""
    _check_step(message.step)
    check_tag(message.tag)
    if message.HasField("num_shards") and message.num_shards < 1:
        raise InvalidSpec("num_shards: got 0, want >= 1")


def check_save_progress(message: parameter_service_pb2.SaveShardResponse) -> None:
    """Raises MalformedMessage unless the message has what belongs to its state."""
    if message.state == SaveState.DONE.value:
        require(message, "file")
    if message.state == SaveState.FAILED.value:
        require(message, "failure")


def check_file(message: parameter_service_pb2.CheckpointFile) -> None:
    """Raises MalformedMessage unless the hash is one; whether the name is one is for the storage to say."""
    _check_sha256(message.sha256, field="sha256")


def check_restore_request(message: parameter_service_pb2.RestoreShardRequest) -> None:
    """Raises InvalidSpec unless the tag is one, MalformedMessage unless the manifest's hash is one."""
    require(message, "spec")
    require(message, "settings")
    check_tag(message.tag)
    _check_sha256(message.manifest_sha256, field="manifest_sha256")


def encode_taken(taken: Taken) -> accumulator_service_pb2.TakenHeader:
    """Encodes what was taken from an accumulator, without its content."""
    header = accumulator_service_pb2.TakenHeader(is_ready=taken.is_ready, count=taken.count, step=taken.step)
    if taken.values is not None:
        header.shape.extend(taken.values.shape)
    if taken.indices is not None:
        header.num_indices = len(taken.indices)
        header.dense_shape.extend(taken.dense_shape or ())
    return header


def _check_data_type(value: int, *, what: str) -> None:
    if value not in _DATA_TYPES:
        raise InvalidSpec(f"{what}: dtype {value} unknown; want one of {', '.join(data_type.value for data_type in DataType)}")


def _check_step(step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        raise InvalidSpec(f"step: got {step}, want 0 to 2^62")


def _check_sha256(text: str, *, field: str) -> None:
    if not _SHA256.fullmatch(text):
        raise MalformedMessage(f"{field}: got {text[:80]!r}, want 64 hexadecimal digits")


def encode_record(record: ChiefRecord, encode: Encode) -> chief_service_pb2.ChiefRecord:
    """Encodes what a chief leaves for its successor: the model and the settings, and what is of a step."""
    message = encode_lasting(record, encode)
    message.MergeFrom(encode_of_step(record, encode))
    return message


def encode_lasting(record: ChiefRecord, encode: Encode) -> chief_service_pb2.ChiefRecord:
    """Encodes the part of a record that seldom changes; no model stays out of the message."""
    return chief_service_pb2.ChiefRecord(
        model=None if record.model is None else encode(record.model),
        policy=encode(record.policy),
        settings_version=record.settings_version,
        optimizers=[
            parameter_service_pb2.OptimizerChange(original=encode(original), current=encode(current))
            for original, current in record.optimizers
        ],
        num_rollbacks=record.num_rollbacks,
        last_rollback=record.last_rollback,
        rejects_nonfinite=record.rejects_nonfinite,
        earlier=None if record.earlier == NOBODY else encode(record.earlier),
    )


def encode_of_step(record: ChiefRecord, encode: Encode) -> chief_service_pb2.ChiefRecord:
    """Encodes the part of a record that is of a step."""
    data = record.data
    return chief_service_pb2.ChiefRecord(
        epoch=record.epoch,
        step=record.step,
        chosen=[encode(one) for one in record.chosen],
        data=None if data is None else encode(data.data),
        data_epoch=0 if data is None else data.epoch,
        passes=[] if data is None else [chief_service_pb2.DataPass(epoch=number, done=done) for number, done in data.passes],
        attached=None if record.attached == NO_STEP_ATTACHMENTS else encode(record.attached),
    )


def decode_record(message: chief_service_pb2.ChiefRecord, decode: Decode) -> ChiefRecord:
    """Decodes and checks what a chief has left for its successor."""

    def change(pair: parameter_service_pb2.OptimizerChange) -> tuple[OptimizerSpec, OptimizerSpec]:
        require(pair, "original")
        require(pair, "current")
        return decode(OptimizerSpec, pair.original), decode(OptimizerSpec, pair.current)

    return ChiefRecord(
        model=decode(ModelSpec, message.model) if message.HasField("model") else None,
        policy=decode(PolicySpec, message.policy),
        settings_version=message.settings_version,
        optimizers=decode_each(message.optimizers, change, field="optimizers"),
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        rejects_nonfinite=message.rejects_nonfinite,
        epoch=message.epoch,
        step=message.step,
        chosen=decode_each(message.chosen, lambda one: decode(ChosenPush, one), field="chosen"),
        data=_decode_marks(message, decode) if message.HasField("data") else None,
        attached=decode(StepAttachments, message.attached),
        earlier=decode(Fence, message.earlier),
    )


def _decode_marks(message: chief_service_pb2.ChiefRecord, decode: Decode) -> DataMarks:
    passes = tuple((one.epoch, one.done) for one in message.passes)
    return DataMarks(data=decode(DataSpec, message.data), epoch=message.data_epoch, passes=passes)
