"""Protobuf to checked values and back, for the named accumulators. Knows messages; no RPC, no sum."""

from ps_protocol import codec
from ps_protocol.accumulators import (
    AccumulatorSpec,
    AccumulatorStatus,
    GradientHeader,
    GradientReply,
    Reduction,
    Taken,
    TakeRequest,
)
from ps_protocol.v1 import accumulator_service_pb2 as pb


def encode_spec(spec: AccumulatorSpec) -> pb.AccumulatorSpec:
    """Encodes what an accumulator takes and gives."""
    return pb.AccumulatorSpec(
        name=spec.name,
        data_type=codec.encode_data_type(spec.data_type),
        has_shape=spec.shape is not None,
        shape=spec.shape or (),
        reduction=f"REDUCTION_{spec.reduction.name}",
        is_sparse=spec.is_sparse,
        sparse_mean=codec.encode_sparse_mean(spec.sparse_mean),
    )


def decode_spec(message: pb.AccumulatorSpec) -> AccumulatorSpec:
    """Decodes and checks what an accumulator takes and gives."""
    return AccumulatorSpec(
        name=message.name,
        data_type=codec.decode_data_type(message.data_type, what=f"accumulator {message.name!r}"),
        shape=tuple(message.shape) if message.has_shape else None,
        reduction=codec.decode_choice(Reduction, message.reduction, field="reduction"),
        is_sparse=message.is_sparse,
        sparse_mean=codec.decode_sparse_mean(message.sparse_mean),
    )


def encode_gradient_header(header: GradientHeader) -> pb.GradientHeader:
    """Encodes what a gradient is."""
    return pb.GradientHeader(
        name=header.name,
        client=header.client,
        sequence=header.sequence,
        local_step=header.local_step,
        shape=header.shape,
        num_indices=header.num_indices,
        dense_shape=header.dense_shape or (),
        has_dense_shape=header.dense_shape is not None,
    )


def decode_gradient_header(message: pb.GradientHeader) -> GradientHeader:
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


def encode_gradient_reply(reply: GradientReply) -> pb.ApplyGradientResponse:
    """Encodes what became of a gradient."""
    return pb.ApplyGradientResponse(accepted=reply.accepted, step=reply.step)


def decode_gradient_reply(message: pb.ApplyGradientResponse) -> GradientReply:
    """Decodes what became of a gradient."""
    return GradientReply(accepted=message.accepted, step=message.step)


def encode_take_request(request: TakeRequest) -> pb.TakeGradientRequest:
    """Encodes a taking."""
    return pb.TakeGradientRequest(
        name=request.name,
        client=request.client,
        sequence=request.sequence,
        num_required=request.num_required,
        max_wait=codec.encode_duration(request.max_wait_s),
    )


def decode_take_request(message: pb.TakeGradientRequest) -> TakeRequest:
    """Decodes and checks a taking."""
    return TakeRequest(
        name=message.name,
        client=message.client,
        sequence=message.sequence,
        num_required=message.num_required,
        max_wait_s=codec.decode_duration(message.max_wait),
    )


def encode_taken(taken: Taken) -> pb.TakenHeader:
    """Encodes what was taken, without its content."""
    header = pb.TakenHeader(is_ready=taken.is_ready, count=taken.count, step=taken.step)
    if taken.values is not None:
        header.shape.extend(taken.values.shape)
    if taken.indices is not None:
        header.num_indices = len(taken.indices)
        header.dense_shape.extend(taken.dense_shape or ())
    return header


def encode_accumulator_status(status: AccumulatorStatus) -> pb.GetAccumulatorResponse:
    """Encodes an accumulator at one moment."""
    return pb.GetAccumulatorResponse(
        spec=encode_spec(status.spec), num_accumulated=status.num_accumulated, step=status.step, num_waiting=status.num_waiting
    )


def decode_accumulator_status(message: pb.GetAccumulatorResponse) -> AccumulatorStatus:
    """Decodes an accumulator at one moment."""
    codec.require(message, "spec")
    return AccumulatorStatus(
        spec=decode_spec(message.spec), num_accumulated=message.num_accumulated, step=message.step, num_waiting=message.num_waiting
    )
