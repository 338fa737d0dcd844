"""Protobuf to checked values and back, for the model that a cluster agrees on, and where it lies. Knows messages; no RPC."""

from ps_protocol import codec, codec_variables
from ps_protocol.chief import AgreedModel, ModelReply, ModelState
from ps_protocol.codec_settings import decode_policy, encode_policy
from ps_protocol.model import ModelSpec, PlacedSlice, Placement, PlacementPolicy
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_model(model: ModelSpec) -> pb.ModelSpec:
    """Encodes a model."""
    return pb.ModelSpec(
        variables=[codec_variables.encode_variable(variable) for variable in model.variables],
        optimizer=codec_variables.encode_optimizer(model.optimizer),
        placement=pb.PlacementPolicy(
            strategy=model.placement.strategy,
            split_bytes=model.placement.split_bytes,
            loads=dict(model.placement.loads),
            pins=dict(model.placement.pins),
        ),
        averages=codec_variables.encode_averages(model.averages),
        clip=codec_variables.encode_clip(model.clip),
    )


def decode_model(message: pb.ModelSpec) -> ModelSpec:
    """Decodes and checks a model; loads and pins come sorted by name."""
    codec.require(message, "optimizer")
    codec.require(message, "placement")
    placement = message.placement
    return ModelSpec(
        variables=codec.decode_each(message.variables, codec_variables.decode_variable, field="variables"),
        optimizer=codec_variables.decode_optimizer(message.optimizer),
        placement=PlacementPolicy(
            strategy=placement.strategy,
            split_bytes=placement.split_bytes,
            loads=tuple(sorted(placement.loads.items())),
            pins=tuple(sorted(placement.pins.items())),
        ),
        averages=codec_variables.decode_averages(message),
        clip=codec_variables.decode_clip(message),
    )


def encode_model_reply(reply: ModelReply) -> pb.RegisterModelResponse:
    """Encodes what a worker shall do about the model."""
    return pb.RegisterModelResponse(
        state=f"MODEL_STATE_{reply.state.name}",
        placement=[encode_placed(placed) for placed in reply.placement],
        attempt=reply.attempt,
        max_staged_per_worker=reply.max_staged_per_worker,
        global_step=reply.global_step,
        waiting_for=reply.waiting_for,
        policy=encode_policy(reply.policy),
    )


def decode_model_reply(message: pb.RegisterModelResponse) -> ModelReply:
    """Decodes what a worker shall do about the model."""
    return ModelReply(
        state=codec.decode_choice(ModelState, message.state, field="state"),
        placement=_decode_placement(message),
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        global_step=message.global_step,
        waiting_for=message.waiting_for,
        policy=decode_policy(message.policy),
    )


def encode_agreed_model(agreed: AgreedModel) -> pb.GetModelResponse:
    """Encodes the agreed model."""
    return pb.GetModelResponse(
        state=f"MODEL_STATE_{agreed.state.name}",
        model=None if agreed.model is None else encode_model(agreed.model),
        placement=[encode_placed(placed) for placed in agreed.placement],
        global_step=agreed.global_step,
    )


def decode_agreed_model(message: pb.GetModelResponse) -> AgreedModel:
    """Decodes the agreed model."""
    return AgreedModel(
        state=codec.decode_choice(ModelState, message.state, field="state"),
        model=decode_model(message.model) if message.HasField("model") else None,
        placement=_decode_placement(message),
        global_step=message.global_step,
    )


def encode_placed(placed: PlacedSlice) -> pb.PlacedSlice:
    """Encodes where a slice lies."""
    return pb.PlacedSlice(slice=codec_variables.encode_slice(placed.slice), shard=placed.shard)


def decode_placed(message: pb.PlacedSlice) -> PlacedSlice:
    """Decodes where a slice lies."""
    codec.require(message, "slice")
    return PlacedSlice(slice=codec_variables.decode_slice(message.slice), shard=message.shard)


def _decode_placement(message: pb.RegisterModelResponse | pb.GetModelResponse) -> Placement:
    return codec.decode_each(message.placement, decode_placed, field="placement")
