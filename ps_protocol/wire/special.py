"""What differs of single messages: those written by hand, fields that are not what they seem, and checks. Knows no RPC, no tensor."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import InvalidSpec, LayoutMismatch, LimitExceeded, MalformedMessage, PsError
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import check_optimizer_name
from ps_protocol.model.updates import FormulaUpdate, check_amount, check_updates
from ps_protocol.model.variables import MAX_VARIABLES, DataType, check_name
from ps_protocol.roles.accumulators import Reduction, Taken
from ps_protocol.roles.checkpoint import check_tag
from ps_protocol.roles.chief import MAX_INDEX, MAX_LEASE_S, MAX_SHARDS, MIN_LEASE_S
from ps_protocol.roles.contribution import PushId, check_step_hyperparameters, check_user_states
from ps_protocol.roles.fence import KEY_BYTES, MAX_KEYS, Era
from ps_protocol.roles.identity import parse_address
from ps_protocol.roles.shard import MAX_METRICS, MAX_STEP, ApplyRequest, Metric, PrepareRequest, SaveState, ShardSpec
from ps_protocol.v1 import accumulator_service_pb2, chief_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire.fields import decode_choice, decode_duration, decode_each, require

MAX_RANGES_A_CALL = 10_000
# A shard holds a few contributions of a worker at most.
MAX_REFUSED = 100_000
# What chiefs count up from 1, and count on.
_MAX_COUNT = 1 << 62

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA_TYPES = {tensor_pb2.DataType.Value(f"DATA_TYPE_{data_type.name}") for data_type in DataType}
_ENCODINGS: dict[int, FloatEncoding] = {one.value: one for one in FloatEncoding}
_FOR_VARIABLES = {one.encoding.value: one.encoding for one in FORMATS.values() if one.is_for_variables}

# How values are written and messages read, by the type of the value.
Write = Mapping[type, Callable[[Any, Any], None]]
Read = Mapping[type, Callable[[Any], Any]]


def write_layout(spec: ShardSpec, message: parameter_service_pb2.ShardSpec, write: Write) -> None:
    """Encodes the slices of a shard, and the name of their layout as we compute it."""
    for piece in (*spec.layout.slices, *spec.layout.tables):
        write[VariableSlice](piece, message.slices.add())
    message.layout_hash = spec.layout.hash


def read_layout(message: parameter_service_pb2.ShardSpec, read: Read) -> Layout:
    """Decodes the slices of a shard; raises LayoutMismatch if the sender's layout of them is not ours."""
    if len(message.slices) > MAX_VARIABLES:
        raise LimitExceeded(f"shard {message.shard}: {len(message.slices)} variables, {MAX_VARIABLES} at most")
    layout = Layout(decode_each(message.slices, read[VariableSlice], field="slices"))
    if layout.hash != message.layout_hash:
        raise LayoutMismatch(
            f"shard {message.shard}: the sender's layout of these variables is {message.layout_hash!r}, the server's is {layout.hash!r};"
            " install the same version of Lockstep on both"
        )
    return layout


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
    if len(named := [*filter(None, addresses)]) > len(set(named)):
        raise MalformedMessage("registration: two parameter servers have one address")
    if participant.index > MAX_INDEX or participant.incarnation < 1:
        raise MalformedMessage(
            f"registration: index {participant.index}, incarnation {participant.incarnation}, want 0 to {MAX_INDEX}, and >= 1"
        )
    _check_step(message.global_step)


def check_lease(message: chief_service_pb2.LeaseRangesRequest) -> None:
    """Raises LimitExceeded if the caller names too many ranges."""
    check_ranges(message.held, field="held")


def check_adoption(message: parameter_service_pb2.AdoptShardRequest) -> None:
    """Raises InvalidSpec unless the chief's address is one or empty, MalformedMessage unless the keys are such."""
    if message.chief_address:
        parse_address(message.chief_address)
    keys = message.session_keys
    if len(keys) > MAX_KEYS or any(len(key) != KEY_BYTES for key in keys):
        raise MalformedMessage(f"session_keys: {len(keys)} keys, want at most {MAX_KEYS} of {KEY_BYTES} bytes each")


def check_status(message: parameter_service_pb2.GetShardStatusResponse) -> None:
    """Raises MalformedMessage unless the fence and the version of the settings are such as a chief gives."""
    fence = message.fence
    if max(fence.era.epoch, fence.chief_incarnation, message.settings_version) > _MAX_COUNT or bool(fence.era.life) != bool(
        fence.era.epoch
    ):
        numbers = fence.era.life, fence.era.epoch, fence.chief_incarnation, message.settings_version
        raise MalformedMessage(f"life, epoch, chief incarnation and version of the settings {numbers} are no chief's")


def write_prepare(request: PrepareRequest, message: parameter_service_pb2.ApplyRequest, write: Write) -> None:
    """The step whose norms are wanted travels as it does when it is to be applied."""
    write[ApplyRequest](request.of, message)


def read_prepare(message: parameter_service_pb2.ApplyRequest, read: Read) -> ApplyRequest:
    """Decodes the step whose norms are wanted."""
    found: ApplyRequest = read[ApplyRequest](message)
    return found


def check_save_request(message: parameter_service_pb2.SaveShardRequest) -> None:
    """Raises InvalidSpec unless step, tag and number of shards can be such."""
    _check_step(message.step)
    check_tag(message.tag)
    if message.HasField("num_shards") and message.num_shards < 1:
        raise InvalidSpec("num_shards: got 0, want >= 1")
    if not -1 <= message.since <= MAX_STEP:
        raise InvalidSpec(f"since: got {message.since}, want -1 to 2^62")


def check_save_progress(message: parameter_service_pb2.SaveShardResponse) -> None:
    """Raises MalformedMessage unless the message has what belongs to its state."""
    if message.state == SaveState.DONE.value:
        require(message, "file")
    if message.state == SaveState.FAILED.value:
        require(message, "failure")


def check_file(message: parameter_service_pb2.CheckpointFile) -> None:
    """Raises MalformedMessage unless the hash is one, InvalidSpec unless the tag is; whether the name is one is for the storage to say."""
    _check_sha256(message.sha256, field="sha256")
    if message.HasField("tag"):
        check_tag(message.tag)


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


# The messages of every step.


def check_push_id(message: tensor_pb2.PushId) -> None:
    """Raises MalformedMessage if a part of a contribution's name was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")


def check_push_header(message: parameter_service_pb2.PushHeader) -> None:
    """Raises MalformedMessage or LimitExceeded for lists that cannot be; whether they fit the shard's layout is for the shard to say."""
    if message.sparse:
        _check_ascending([part.table for part in message.sparse], what="sparse: the tables")
    if message.absent:
        _check_ascending(message.absent, what="absent: the positions")
    if len(message.refused) > MAX_REFUSED:
        raise LimitExceeded(f"refused: {len(message.refused)} sequences in one contribution, {MAX_REFUSED} at most")


def check_commit(message: chief_service_pb2.PushCommit) -> None:
    """Raises LimitExceeded if a contribution names too many ranges."""
    check_ranges(message.ranges, field="ranges")


def check_attachments(message: tensor_pb2.Attachments) -> None:
    """Raises LimitExceeded if there are too many hyper-parameters."""
    check_step_hyperparameters(message.hyperparameters)


def check_step_attachments(message: tensor_pb2.StepAttachments) -> None:
    """Raises LimitExceeded if there are too many hyper-parameters, or too much state of programs."""
    for given in message.numbers:
        check_step_hyperparameters(given.hyperparameters)
    check_user_states([one.json for one in message.user_states])


def read_metrics(message: parameter_service_pb2.PushHeader, _: Read) -> dict[str, Metric]:
    """Decodes what a worker reports, in the order in which it came."""
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


def read_formulas(message: parameter_service_pb2.PushHeader, read: Read) -> tuple[FormulaUpdate, ...]:
    """Decodes updates by formulas, checked together."""
    if not message.formulas:
        return ()
    check_amount([update.text for update in message.formulas])  # before any of them is looked at
    formulas = decode_each(message.formulas, read[FormulaUpdate], field="formulas")
    check_updates(formulas)
    return formulas


def read_encoding(message: parameter_service_pb2.PushHeader, _: Read) -> FloatEncoding:
    """Decodes how gradients travel; raises InvalidSpec if there is no such way."""
    if message.encoding not in _ENCODINGS:
        raise no_encoding(message.encoding, tuple(FloatEncoding), what="gradients")
    return _ENCODINGS[message.encoding]


def read_encoding_for_variables(message: Any, _: Read) -> FloatEncoding:
    """Decodes how variables are wanted; raises InvalidSpec if they cannot be sent like that."""
    if message.encoding not in _FOR_VARIABLES:
        raise no_encoding(message.encoding, tuple(_FOR_VARIABLES.values()), what="variables")
    return _FOR_VARIABLES[message.encoding]


def read_encoding_of_read(message: Any, read: Read) -> FloatEncoding:
    """Decodes the same for a reader who may have the values before, and can be told how they moved."""
    if message.encoding == FloatEncoding.INT4_BLOCKS.value:
        return FloatEncoding.INT4_BLOCKS
    return read_encoding_for_variables(message, read)


def read_era(message: tensor_pb2.Fence, read: Read) -> Era:
    """A fence without an era is nobody's."""
    era: Era = read[Era](message.era)
    return era


def read_factor(message: chief_service_pb2.CommitResult, _: Read) -> float:
    """No factor is 0: a message without one means 1."""
    return message.factor or 1.0


def read_discards(message: parameter_service_pb2.ApplyRequest, _: Read) -> tuple[PushId, ...]:
    """A sequence of 0 means all of the incarnation."""
    return decode_each(message.discards, _read_discard, field="discards") if message.discards else ()


def read_given_up(message: parameter_service_pb2.AdoptShardResponse, _: Read) -> tuple[PushId, ...]:
    """Each with a sequence of 0."""
    return decode_each(message.given_up, _read_discard, field="given_up") if message.given_up else ()


def _read_discard(message: tensor_pb2.PushId) -> PushId:
    if message.incarnation < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, want >= 1")
    return PushId(message.worker, message.incarnation, message.sequence)


def in_order(request: ApplyRequest) -> ApplyRequest:
    """Returns the step to apply with its contributors sorted together with their weights.

    Raises MalformedMessage if there is no contributor, or one occurs twice, the weights are not one for each, or shares would have to be
    sorted, too.
    """
    contributors, weights = request.contributors, request.weights
    if not contributors:
        raise MalformedMessage(f"step {request.step}: no contributors; name at least one")
    if len(set(contributors)) < len(contributors):
        raise MalformedMessage(f"step {request.step}: a contributor occurs twice; name each once")
    if weights:
        _check_weights(weights, step=request.step, num_contributors=len(contributors))
    ordered = tuple(sorted(contributors))
    if ordered == contributors:
        return request
    if request.shares:
        raise MalformedMessage(f"step {request.step}: shares for contributors that do not ascend; name these in order")
    weight_of = dict(zip(contributors, weights, strict=True)) if weights else {}
    return dataclasses.replace(request, contributors=ordered, weights=tuple(weight_of[push_id] for push_id in ordered if weights))


def _check_ascending(positions: Sequence[int], *, what: str) -> None:
    for before, position in itertools.pairwise(positions):
        if position <= before:
            raise MalformedMessage(f"{what} {before} and {position} do not ascend; name each once, in order")


def _check_weights(weights: Sequence[float], *, step: int, num_contributors: int) -> None:
    if len(weights) != num_contributors:
        raise MalformedMessage(f"step {step}: {len(weights)} weights for {num_contributors} contributors; give one for each, or none")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise MalformedMessage(f"step {step}: weight {weight}, want a finite number >= 0")


def check_ranges(ranges: Sized, *, field: str) -> None:
    """Raises LimitExceeded if a message names too many ranges of training data."""
    if len(ranges) > MAX_RANGES_A_CALL:
        raise LimitExceeded(f"{field}: {len(ranges)} in one call, {MAX_RANGES_A_CALL} at most")


def no_encoding(value: int, known: Sequence[FloatEncoding], *, what: str) -> InvalidSpec:
    """Returns the error for a number that is no encoding of `what`."""
    return InvalidSpec(f"encoding: got {value}, {what} come as one of {', '.join(f'{one.value} ({one.name})' for one in known)}")
