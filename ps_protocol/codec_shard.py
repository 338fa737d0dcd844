"""Protobuf to checked values and back, for the parameter server's service. Knows messages; no RPC, no tensor."""

from ps_protocol import codec
from ps_protocol.errors import LayoutMismatch, LimitExceeded, MalformedMessage
from ps_protocol.layout import Layout
from ps_protocol.shard import Adoption, ApplyReply, ApplyRequest, PushHeader, PushReply, PushResult, ShardSpec, ShardStatus
from ps_protocol.tensors import MAX_VARIABLES
from ps_protocol.v1 import parameter_service_pb2 as pb


def encode_adoption(adoption: Adoption) -> pb.AdoptShardResponse:
    """Encodes where a shard stands."""
    return pb.AdoptShardResponse(step=adoption.step, layout_hash=adoption.layout_hash)


def decode_adoption(message: pb.AdoptShardResponse) -> Adoption:
    """Decodes where a shard stands."""
    return Adoption(step=message.step if message.HasField("step") else None, layout_hash=message.layout_hash)


def encode_shard_spec(spec: ShardSpec) -> pb.ShardSpec:
    """Encodes a shard's part of the model, with the name of its layout as we compute it."""
    return pb.ShardSpec(
        epoch=spec.epoch,
        shard=spec.shard,
        slices=[codec.encode_slice(piece) for piece in spec.layout.slices],
        optimizer=codec.encode_optimizer(spec.optimizer),
        layout_hash=spec.layout.hash,
        initial_step=spec.initial_step,
        attempt=spec.attempt,
        max_staged_per_worker=spec.max_staged_per_worker,
    )


def decode_shard_spec(message: pb.ShardSpec) -> ShardSpec:
    """Decodes and checks a shard's part of the model; raises LayoutMismatch if the sender's layout of it is not ours."""
    codec.require(message, "optimizer")
    if len(message.slices) > MAX_VARIABLES:
        raise LimitExceeded(f"shard {message.shard}: {len(message.slices)} variables, {MAX_VARIABLES} at most")
    layout = Layout(codec.decode_each(message.slices, codec.decode_slice, field="slices"))
    if layout.hash != message.layout_hash:
        raise LayoutMismatch(
            f"shard {message.shard}: the sender's layout of these variables is {message.layout_hash!r}, the server's is {layout.hash!r};"
            " install the same version of Lockstep on both"
        )
    return ShardSpec(
        epoch=message.epoch,
        shard=message.shard,
        layout=layout,
        optimizer=codec.decode_optimizer(message.optimizer),
        initial_step=message.initial_step,
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
    )


def encode_push_header(header: PushHeader) -> pb.PushHeader:
    """Encodes what a contribution is and belongs to."""
    return pb.PushHeader(epoch=header.epoch, push_id=codec.encode_push_id(header.push_id), step=header.step, layout_hash=header.layout_hash)


def decode_push_header(message: pb.PushHeader) -> PushHeader:
    """Decodes and checks what a contribution is and belongs to."""
    codec.require(message, "push_id")
    return PushHeader(
        epoch=message.epoch, push_id=codec.decode_push_id(message.push_id), step=message.step, layout_hash=message.layout_hash
    )


def encode_push_reply(reply: PushReply) -> pb.PushGradientsResponse:
    """Encodes what became of a push."""
    return pb.PushGradientsResponse(result=f"PUSH_RESULT_{reply.result.name}", step=reply.step)


def decode_push_reply(message: pb.PushGradientsResponse) -> PushReply:
    """Decodes what became of a push."""
    return PushReply(result=codec.decode_choice(PushResult, message.result, field="result"), step=message.step)


def encode_apply_request(request: ApplyRequest) -> pb.ApplyStepRequest:
    """Encodes the step to apply and its contributors."""
    contributors = [codec.encode_push_id(push_id) for push_id in request.contributors]
    return pb.ApplyStepRequest(
        epoch=request.epoch, chief_incarnation=request.chief_incarnation, step=request.step, contributors=contributors
    )


def decode_apply_request(message: pb.ApplyStepRequest) -> ApplyRequest:
    """Decodes the step to apply and its contributors, sorted; raises MalformedMessage if there is none, or one occurs twice."""
    contributors = codec.decode_each(message.contributors, codec.decode_push_id, field="contributors")
    if not contributors:
        raise MalformedMessage(f"step {message.step}: no contributors; name at least one")
    if len(set(contributors)) < len(contributors):
        raise MalformedMessage(f"step {message.step}: a contributor occurs twice; name each once")
    return ApplyRequest(
        epoch=message.epoch, chief_incarnation=message.chief_incarnation, step=message.step, contributors=tuple(sorted(contributors))
    )


def encode_apply_reply(reply: ApplyReply) -> pb.ApplyStepResponse:
    """Encodes what became of a step."""
    return pb.ApplyStepResponse(step=reply.step, repeated_request=reply.repeated_request)


def decode_apply_reply(message: pb.ApplyStepResponse) -> ApplyReply:
    """Decodes what became of a step."""
    return ApplyReply(step=message.step, repeated_request=message.repeated_request)


def encode_shard_status(status: ShardStatus) -> pb.GetShardStatusResponse:
    """Encodes a shard's step, memory and counters."""
    return pb.GetShardStatusResponse(
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
        last_apply=codec.encode_duration(status.last_apply_s),
    )


def decode_shard_status(message: pb.GetShardStatusResponse) -> ShardStatus:
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
        last_apply_s=codec.decode_duration(message.last_apply),
    )
