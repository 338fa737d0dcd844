"""Protobuf to checked values and back, for the chief's calls. Knows messages; no RPC.

The model is in `codec_model`, the settings in `codec_settings`, the cluster's status in `codec_status`, checkpoints and ranges of training
data in `codec_data_ranges`, what a chief leaves for its successor in `codec_record`.
"""

from collections.abc import Sized
from typing import Any

from google.protobuf.duration_pb2 import Duration

from ps_protocol import codec
from ps_protocol.chief import (
    MAX_WAIT_SLICE_S,
    CommitResult,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.errors import LimitExceeded
from ps_protocol.v1 import chief_service_pb2 as pb

MAX_RANGES_A_CALL = 10_000
# Looked up once: a name costs several times as much with every message. Typed as anything, since the stubs want their own kind of numbers.
_KINDS: dict[ParticipantKind, Any] = {kind: pb.ParticipantKind.Value(f"PARTICIPANT_KIND_{kind.name}") for kind in ParticipantKind}
_OUTCOMES: dict[PushOutcome, Any] = {outcome: pb.PushOutcome.Value(f"PUSH_OUTCOME_{outcome.name}") for outcome in PushOutcome}
_RESULTS: dict[TokenResult, Any] = {result: pb.TokenResult.Value(f"TOKEN_RESULT_{result.name}") for result in TokenResult}


def decode_max_wait(
    message: pb.RegisterModelRequest
    | pb.GetModelRequest
    | pb.DequeueTokenRequest
    | pb.SetPolicyRequest
    | pb.SetHyperparametersRequest
    | pb.SaveCheckpointRequest
    | pb.LeaseRangesRequest,
) -> float:
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
        kind=_KINDS[participant.kind],
        index=participant.index,
        incarnation=participant.incarnation,
        life=participant.life,
    )


def decode_participant(
    message: pb.HeartbeatRequest
    | pb.DeregisterWorkerRequest
    | pb.RegisterModelRequest
    | pb.CompleteInitializationRequest
    | pb.CommitPushRequest
    | pb.DequeueTokenRequest
    | pb.LeaseRangesRequest,
) -> Participant:
    """Returns who sent the request."""
    codec.require(message, "participant")
    return _decode_caller(message.participant, field="participant")


def _decode_caller(caller: pb.Participant, *, field: str) -> Participant:
    kind = codec.decode_choice(ParticipantKind, caller.kind, field=f"{field}.kind")
    return Participant(epoch=caller.epoch, kind=kind, index=caller.index, incarnation=caller.incarnation, life=caller.life)


def encode_register_request(request: RegisterRequest) -> pb.RegisterWorkerRequest:
    """Encodes the wish to take part."""
    return pb.RegisterWorkerRequest(
        kind=f"PARTICIPANT_KIND_{request.kind.name}",
        index=request.index,
        host=request.host,
        pid=request.pid,
        takeover=request.takeover,
        request_id=request.request_id,
        former=None if request.former is None else encode_participant(request.former),
        held_ranges=request.held,
    )


def decode_register_request(message: pb.RegisterWorkerRequest) -> RegisterRequest:
    """Decodes the wish to take part."""
    check_ranges(message.held_ranges, field="held_ranges")
    return RegisterRequest(
        kind=codec.decode_choice(ParticipantKind, message.kind, field="kind"),
        index=message.index if message.HasField("index") else None,
        host=message.host,
        pid=message.pid,
        takeover=message.takeover,
        request_id=message.request_id,
        former=_decode_caller(message.former, field="former") if message.HasField("former") else None,
        held=tuple(message.held_ranges),
    )


def encode_registration(registration: Registration) -> pb.RegisterWorkerResponse:
    """Encodes what a participant gets."""
    return pb.RegisterWorkerResponse(
        epoch=registration.participant.epoch,
        index=registration.participant.index,
        incarnation=registration.participant.incarnation,
        life=registration.participant.life,
        lease=codec.encode_duration(registration.lease_s),
        shard_addresses=registration.shard_addresses,
        global_step=registration.global_step,
        may_contribute=registration.may_contribute,
        chief_incarnation=registration.chief_incarnation,
        standby_addresses=registration.standby_addresses,
        shards_version=registration.shards_version,
        rejects_nonfinite=registration.rejects_nonfinite,
    )


def decode_registration(message: pb.RegisterWorkerResponse, *, kind: ParticipantKind) -> Registration:
    """Decodes what a participant gets; `kind` is the one that it asked for."""
    participant = Participant(epoch=message.epoch, kind=kind, index=message.index, incarnation=message.incarnation, life=message.life)
    return Registration(
        participant=participant,
        lease_s=codec.decode_duration(message.lease),
        shard_addresses=tuple(message.shard_addresses),
        global_step=message.global_step,
        may_contribute=message.may_contribute,
        chief_incarnation=message.chief_incarnation,
        standby_addresses=tuple(message.standby_addresses),
        shards_version=message.shards_version,
        rejects_nonfinite=message.rejects_nonfinite,
    )


def encode_commit(commit: PushCommit) -> pb.PushCommit:
    """Encodes a contribution to be counted."""
    return pb.PushCommit(
        push_id=codec.encode_push_id(commit.push_id),
        step=commit.step,
        staged=commit.staged,
        is_applied=commit.is_applied,
        ranges=commit.ranges,
    )


def check_ranges(ranges: Sized, *, field: str) -> None:
    """Raises LimitExceeded if a message names too many ranges of training data."""
    if len(ranges) > MAX_RANGES_A_CALL:
        raise LimitExceeded(f"{field}: {len(ranges)} in one call, {MAX_RANGES_A_CALL} at most")


def decode_commit(message: pb.PushCommit) -> PushCommit:
    """Decodes a contribution to be counted."""
    codec.require(message, "push_id")
    check_ranges(message.ranges, field="ranges")
    return PushCommit(
        push_id=codec.decode_push_id(message.push_id),
        step=message.step,
        staged=message.staged,
        is_applied=message.is_applied,
        ranges=tuple(message.ranges),
    )


def encode_commit_result(result: CommitResult) -> pb.CommitResult:
    """Encodes what became of a commit."""
    first = None if result.first_outcome is None else _OUTCOMES[result.first_outcome]
    return pb.CommitResult(
        outcome=_OUTCOMES[result.outcome],
        first_outcome=first,
        global_step=result.global_step,
        applied_step=result.applied_step,
        staleness=result.staleness,
        weight=result.weight,
    )


def decode_commit_result(message: pb.CommitResult) -> CommitResult:
    """Decodes what became of a commit."""
    first = codec.decode_choice(PushOutcome, message.first_outcome, field="first_outcome") if message.first_outcome else None
    outcome = codec.decode_choice(PushOutcome, message.outcome, field="outcome")
    return CommitResult(
        outcome=outcome,
        first_outcome=first,
        global_step=message.global_step,
        applied_step=message.applied_step if message.HasField("applied_step") else None,
        staleness=message.staleness,
        # No weight is 0: whoever sends none means the ordinary one.
        weight=message.weight or 1.0,
    )


def encode_token_reply(reply: TokenReply) -> pb.DequeueTokenResponse:
    """Encodes how a wait for a token ended."""
    return pb.DequeueTokenResponse(
        result=_RESULTS[reply.result],
        step=reply.step,
        commit=None if reply.commit is None else encode_commit_result(reply.commit),
        waiting_for=reply.waiting_for,
        global_step=reply.global_step,
        reads_latest=reply.reads_latest,
        settings_version=reply.settings_version,
        shards_version=reply.shards_version,
    )


def decode_token_reply(message: pb.DequeueTokenResponse) -> TokenReply:
    """Decodes how a wait for a token ended."""
    return TokenReply(
        result=codec.decode_choice(TokenResult, message.result, field="result"),
        step=message.step,
        commit=decode_commit_result(message.commit) if message.HasField("commit") else None,
        waiting_for=message.waiting_for,
        global_step=message.global_step,
        reads_latest=message.reads_latest,
        settings_version=message.settings_version,
        shards_version=message.shards_version,
    )
