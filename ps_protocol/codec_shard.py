"""Protobuf to checked values and back, for what a parameter server is told. Knows messages; no RPC, no tensor.

What it reports is in `codec_shard_status`; what is said when chiefs change, and about checkpoints, in `codec_checkpoints`.
"""

import itertools
import math
from collections.abc import Sequence

from ps_protocol import codec, codec_variables
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import InvalidSpec, LayoutMismatch, LimitExceeded, MalformedMessage, PsError
from ps_protocol.layout import Layout
from ps_protocol.shard import (
    MAX_STEP,
    ApplyReply,
    ApplyRequest,
    Metric,
    PushHeader,
    PushId,
    PushReply,
    PushResult,
    RowsRequest,
    ShardSettings,
    ShardSpec,
    SparsePart,
)
from ps_protocol.tensors import MAX_VARIABLES, check_name
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2

MAX_METRICS = 1000
_ENCODING_NAMES = {one: f"FLOAT_ENCODING_{one.name if one.value else 'UNSPECIFIED'}" for one in FloatEncoding}
_PUSH_RESULTS = {result: f"PUSH_RESULT_{result.name}" for result in PushResult}
# A shard holds a few contributions of a worker at most.
MAX_REFUSED = 100_000


def encode_shard_spec(spec: ShardSpec) -> pb.ShardSpec:
    """Encodes a shard's part of the model, with the name of its layout as we compute it."""
    return pb.ShardSpec(
        epoch=spec.epoch,
        shard=spec.shard,
        slices=[codec_variables.encode_slice(piece) for piece in (*spec.layout.slices, *spec.layout.tables)],
        optimizer=codec_variables.encode_optimizer(spec.optimizer),
        layout_hash=spec.layout.hash,
        initial_step=spec.initial_step,
        attempt=spec.attempt,
        max_staged_per_worker=spec.max_staged_per_worker,
        averages=codec_variables.encode_averages(spec.averages),
        clip=codec_variables.encode_clip(spec.clip),
    )


def decode_shard_spec(message: pb.ShardSpec) -> ShardSpec:
    """Decodes and checks a shard's part of the model; raises LayoutMismatch if the sender's layout of it is not ours."""
    codec.require(message, "optimizer")
    if len(message.slices) > MAX_VARIABLES:
        raise LimitExceeded(f"shard {message.shard}: {len(message.slices)} variables, {MAX_VARIABLES} at most")
    layout = Layout(codec.decode_each(message.slices, codec_variables.decode_slice, field="slices"))
    if layout.hash != message.layout_hash:
        raise LayoutMismatch(
            f"shard {message.shard}: the sender's layout of these variables is {message.layout_hash!r}, the server's is {layout.hash!r};"
            " install the same version of Lockstep on both"
        )
    return ShardSpec(
        epoch=message.epoch,
        shard=message.shard,
        layout=layout,
        optimizer=codec_variables.decode_optimizer(message.optimizer),
        initial_step=message.initial_step,
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        averages=codec_variables.decode_averages(message),
        clip=codec_variables.decode_clip(message),
    )


def encode_push_header(header: PushHeader) -> pb.PushHeader:
    """Encodes what a contribution is and belongs to."""
    return pb.PushHeader(
        epoch=header.epoch,
        push_id=codec.encode_push_id(header.push_id),
        step=header.step,
        layout_hash=header.layout_hash,
        sparse=[pb.SparsePart(table=part.table, num_rows=part.num_rows) for part in header.sparse],
        absent=header.absent,
        metrics={name: pb.Metric(value=metric.value, weight=metric.weight) for name, metric in header.metrics.items()},
        refused=header.refused,
        encoding=encode_encoding(header.encoding),
        encoded_bytes=header.encoded_bytes,
        memory_slot=header.memory_slot,
        life=header.life,
    )


def decode_push_header(message: pb.PushHeader) -> PushHeader:
    """Decodes and checks what a contribution is and belongs to; whether it fits the shard's layout is not looked at."""
    codec.require(message, "push_id")
    sparse = tuple(SparsePart(table=part.table, num_rows=part.num_rows) for part in message.sparse)
    absent = tuple(message.absent)
    _check_ascending([part.table for part in sparse], what="sparse: the tables")
    _check_ascending(absent, what="absent: the positions")
    if len(message.refused) > MAX_REFUSED:
        raise LimitExceeded(f"refused: {len(message.refused)} sequences in one contribution, {MAX_REFUSED} at most")
    return PushHeader(
        epoch=message.epoch,
        push_id=codec.decode_push_id(message.push_id),
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


def encode_push_reply(reply: PushReply) -> pb.PushGradientsResponse:
    """Encodes what became of a push."""
    return pb.PushGradientsResponse(result=_PUSH_RESULTS[reply.result], step=reply.step)


def decode_push_reply(message: pb.PushGradientsResponse) -> PushReply:
    """Decodes what became of a push."""
    return PushReply(result=codec.decode_choice(PushResult, message.result, field="result"), step=message.step)


def encode_settings(settings: ShardSettings) -> pb.ConfigureShardRequest:
    """Encodes how a shard is to work."""
    return pb.ConfigureShardRequest(
        epoch=settings.epoch,
        chief_incarnation=settings.chief_incarnation,
        version=settings.version,
        step=settings.step,
        accepts_stale=settings.accepts_stale,
        applies_on_arrival=settings.applies_on_arrival,
        optimizers=[codec_variables.encode_optimizer_change(original, current) for original, current in settings.optimizers],
        rejects_nonfinite=settings.rejects_nonfinite,
    )


def decode_settings(message: pb.ConfigureShardRequest) -> ShardSettings:
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
        optimizers=codec.decode_each(message.optimizers, codec_variables.decode_optimizer_change, field="optimizers"),
        rejects_nonfinite=message.rejects_nonfinite,
    )


def encode_apply_request(request: ApplyRequest) -> pb.ApplyStepRequest:
    """Encodes the step to apply, its contributors and what belongs to them."""
    return pb.ApplyStepRequest(
        epoch=request.epoch,
        chief_incarnation=request.chief_incarnation,
        step=request.step,
        contributors=[codec.encode_push_id(push_id) for push_id in request.contributors],
        weights=request.weights,
        scales=request.scales,
        discards=[codec.encode_push_id(push_id) for push_id in request.discards],
        ranges=request.ranges,
    )


def decode_apply_request(message: pb.ApplyStepRequest) -> ApplyRequest:
    """Decodes the step to apply and its contributors, sorted together with their weights.

    Raises MalformedMessage if there is no contributor, or one occurs twice, or the weights are not one for each.
    """
    contributors = codec.decode_each(message.contributors, codec.decode_push_id, field="contributors")
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
        discards=codec.decode_each(message.discards, _decode_discard, field="discards"),
        ranges=tuple(message.ranges),
    )


def encode_apply_reply(reply: ApplyReply) -> pb.ApplyStepResponse:
    """Encodes what became of a step."""
    return pb.ApplyStepResponse(step=reply.step, repeated_request=reply.repeated_request)


def decode_apply_reply(message: pb.ApplyStepResponse) -> ApplyReply:
    """Decodes what became of a step."""
    return ApplyReply(step=message.step, repeated_request=message.repeated_request)


def encode_rows_request(request: RowsRequest, *, num_rows: int) -> pb.RowsHeader:
    """Encodes which rows of which table are wanted, and how many."""
    return pb.RowsHeader(
        epoch=request.epoch,
        layout_hash=request.layout_hash,
        table=request.table,
        step=request.step,
        slot=request.slot,
        num_rows=num_rows,
    )


def decode_rows_request(message: pb.RowsHeader) -> RowsRequest:
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


def _decode_metrics(message: pb.PushHeader) -> dict[str, Metric]:
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
