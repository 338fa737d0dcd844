"""Protobuf to checked values and back, for the chief's calls. Knows messages; no RPC. The cluster's status is in `codec_status`."""

from google.protobuf.duration_pb2 import Duration

from ps_protocol import codec
from ps_protocol.chief import (
    MAX_WAIT_SLICE_S,
    AgreedModel,
    CommitResult,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.model import ModelSpec, PlacedSlice, Placement, PlacementPolicy
from ps_protocol.v1 import chief_service_pb2 as pb


def decode_max_wait(message: pb.RegisterModelRequest | pb.GetModelRequest | pb.DequeueTokenRequest) -> float:
    """Returns how many seconds the call may block: 20 if the field was left out, and never more."""
    if not message.HasField("max_wait"):
        return MAX_WAIT_SLICE_S
    return min(max(0.0, codec.decode_duration(message.max_wait)), MAX_WAIT_SLICE_S)


def encode_max_wait(max_wait_s: float) -> Duration:
    """Encodes how long a call may block; more than 20 s counts as 20 s."""
    return codec.encode_duration(min(max_wait_s, MAX_WAIT_SLICE_S))


def encode_participant(participant: Participant) -> pb.Participant:
    """Encodes who calls."""
    return pb.Participant(
        epoch=participant.epoch,
        kind=f"PARTICIPANT_KIND_{participant.kind.name}",
        index=participant.index,
        incarnation=participant.incarnation,
    )


def decode_participant(
    message: pb.HeartbeatRequest
    | pb.DeregisterWorkerRequest
    | pb.RegisterModelRequest
    | pb.CompleteInitializationRequest
    | pb.CommitPushRequest
    | pb.DequeueTokenRequest,
) -> Participant:
    """Returns who sent the request."""
    codec.require(message, "participant")
    caller = message.participant
    kind = codec.decode_choice(ParticipantKind, caller.kind, field="participant.kind")
    return Participant(epoch=caller.epoch, kind=kind, index=caller.index, incarnation=caller.incarnation)


def encode_register_request(request: RegisterRequest) -> pb.RegisterWorkerRequest:
    """Encodes the wish to take part."""
    return pb.RegisterWorkerRequest(
        kind=f"PARTICIPANT_KIND_{request.kind.name}",
        index=request.index,
        host=request.host,
        pid=request.pid,
        takeover=request.takeover,
        request_id=request.request_id,
    )


def decode_register_request(message: pb.RegisterWorkerRequest) -> RegisterRequest:
    """Decodes the wish to take part."""
    return RegisterRequest(
        kind=codec.decode_choice(ParticipantKind, message.kind, field="kind"),
        index=message.index if message.HasField("index") else None,
        host=message.host,
        pid=message.pid,
        takeover=message.takeover,
        request_id=message.request_id,
    )


def encode_registration(registration: Registration) -> pb.RegisterWorkerResponse:
    """Encodes what a participant gets."""
    return pb.RegisterWorkerResponse(
        epoch=registration.participant.epoch,
        index=registration.participant.index,
        incarnation=registration.participant.incarnation,
        lease=codec.encode_duration(registration.lease_s),
        shard_addresses=registration.shard_addresses,
        global_step=registration.global_step,
        may_contribute=registration.may_contribute,
    )


def decode_registration(message: pb.RegisterWorkerResponse, *, kind: ParticipantKind) -> Registration:
    """Decodes what a participant gets; `kind` is the one that it asked for."""
    participant = Participant(epoch=message.epoch, kind=kind, index=message.index, incarnation=message.incarnation)
    return Registration(
        participant=participant,
        lease_s=codec.decode_duration(message.lease),
        shard_addresses=tuple(message.shard_addresses),
        global_step=message.global_step,
        may_contribute=message.may_contribute,
    )


def encode_model(model: ModelSpec) -> pb.ModelSpec:
    """Encodes a model."""
    return pb.ModelSpec(
        variables=[codec.encode_variable(variable) for variable in model.variables],
        optimizer=codec.encode_optimizer(model.optimizer),
        placement=pb.PlacementPolicy(strategy=model.placement.strategy, split_bytes=model.placement.split_bytes),
    )


def decode_model(message: pb.ModelSpec) -> ModelSpec:
    """Decodes and checks a model."""
    codec.require(message, "optimizer")
    codec.require(message, "placement")
    return ModelSpec(
        variables=codec.decode_each(message.variables, codec.decode_variable, field="variables"),
        optimizer=codec.decode_optimizer(message.optimizer),
        placement=PlacementPolicy(strategy=message.placement.strategy, split_bytes=message.placement.split_bytes),
    )


def _encode_placed(placed: PlacedSlice) -> pb.PlacedSlice:
    return pb.PlacedSlice(slice=codec.encode_slice(placed.slice), shard=placed.shard)


def _decode_placed(message: pb.PlacedSlice) -> PlacedSlice:
    codec.require(message, "slice")
    return PlacedSlice(slice=codec.decode_slice(message.slice), shard=message.shard)


def _decode_placement(message: pb.RegisterModelResponse | pb.GetModelResponse) -> Placement:
    return codec.decode_each(message.placement, _decode_placed, field="placement")


def encode_model_reply(reply: ModelReply) -> pb.RegisterModelResponse:
    """Encodes what a worker shall do about the model."""
    return pb.RegisterModelResponse(
        state=f"MODEL_STATE_{reply.state.name}",
        placement=[_encode_placed(placed) for placed in reply.placement],
        attempt=reply.attempt,
        max_staged_per_worker=reply.max_staged_per_worker,
        global_step=reply.global_step,
        waiting_for=reply.waiting_for,
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
    )


def encode_agreed_model(agreed: AgreedModel) -> pb.GetModelResponse:
    """Encodes the agreed model."""
    return pb.GetModelResponse(
        state=f"MODEL_STATE_{agreed.state.name}",
        model=None if agreed.model is None else encode_model(agreed.model),
        placement=[_encode_placed(placed) for placed in agreed.placement],
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


def encode_commit(commit: PushCommit) -> pb.PushCommit:
    """Encodes a contribution to be counted."""
    return pb.PushCommit(push_id=codec.encode_push_id(commit.push_id), step=commit.step, staged=commit.staged)


def decode_commit(message: pb.PushCommit) -> PushCommit:
    """Decodes a contribution to be counted."""
    codec.require(message, "push_id")
    return PushCommit(push_id=codec.decode_push_id(message.push_id), step=message.step, staged=message.staged)


def encode_commit_result(result: CommitResult) -> pb.CommitResult:
    """Encodes what became of a commit."""
    first = None if result.first_outcome is None else f"PUSH_OUTCOME_{result.first_outcome.name}"
    return pb.CommitResult(outcome=f"PUSH_OUTCOME_{result.outcome.name}", first_outcome=first, global_step=result.global_step)


def decode_commit_result(message: pb.CommitResult) -> CommitResult:
    """Decodes what became of a commit."""
    first = codec.decode_choice(PushOutcome, message.first_outcome, field="first_outcome") if message.first_outcome else None
    outcome = codec.decode_choice(PushOutcome, message.outcome, field="outcome")
    return CommitResult(outcome=outcome, first_outcome=first, global_step=message.global_step)


def encode_token_reply(reply: TokenReply) -> pb.DequeueTokenResponse:
    """Encodes how a wait for a token ended."""
    return pb.DequeueTokenResponse(
        result=f"TOKEN_RESULT_{reply.result.name}",
        step=reply.step,
        commit=None if reply.commit is None else encode_commit_result(reply.commit),
        waiting_for=reply.waiting_for,
    )


def decode_token_reply(message: pb.DequeueTokenResponse) -> TokenReply:
    """Decodes how a wait for a token ended."""
    return TokenReply(
        result=codec.decode_choice(TokenResult, message.result, field="result"),
        step=message.step,
        commit=decode_commit_result(message.commit) if message.HasField("commit") else None,
        waiting_for=message.waiting_for,
    )
