"""The messages that every step has, by hand: compiled they cost half as much again (decision 26). Knows their fields; no RPC, no tensor."""

import functools
import itertools
import math
from collections.abc import Sequence, Sized
from typing import Any

from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage, PsError
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.model.updates import FormulaUpdate, check_amount, check_updates
from ps_protocol.model.variables import check_name
from ps_protocol.roles.chief import (
    CommitResult,
    DequeueTokenRequest,
    End,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import (
    NO_ATTACHMENTS,
    NO_STEP_ATTACHMENTS,
    Attachments,
    GivenNumbers,
    PushId,
    StepAttachments,
    UserState,
    check_step_hyperparameters,
    check_user_states,
)
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import (
    MAX_WAIT_SLICE_S,
    ApplyReply,
    ApplyRequest,
    Metric,
    PushHeader,
    PushReply,
    PushResult,
    ReadRequest,
    SparsePart,
)
from ps_protocol.v1 import chief_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire.fields import Coders, Pair, decode_choice, decode_each, decode_max_wait, require, write_max_wait

MAX_METRICS = 1_000
MAX_RANGES_A_CALL = 10_000
# Who calls is the same with every step: found by its bytes in a third of the time that it takes to be decoded. So many are kept, and none
# of a stranger that has added fields of his own to it.
_NUM_CALLERS, _MAX_KEPT_BYTES = 2_048, 128
# A shard holds a few contributions of a worker at most.
MAX_REFUSED = 100_000

# Typed as anything, since the stubs want their own kind of numbers.
_ENCODINGS: dict[FloatEncoding, Any] = {one: one.value for one in FloatEncoding}
_PUSH_RESULTS: dict[PushResult, Any] = {one: one.value for one in PushResult}
_KINDS: dict[ParticipantKind, Any] = {one: one.value for one in ParticipantKind}
_OUTCOMES: dict[PushOutcome, Any] = {one: one.value for one in PushOutcome}
_RESULTS: dict[TokenResult, Any] = {one: one.value for one in TokenResult}
_ENDS: dict[End, Any] = {one: one.value for one in End}
_ENCODING_OF = {one.value: one for one in FloatEncoding}
_FOR_VARIABLES = {one.encoding.value: one.encoding for one in FORMATS.values() if one.is_for_variables}


# Each is written where it belongs: a message that is made by itself is serialised and parsed again when another takes it up.


def write_era(era: Era, message: tensor_pb2.Era) -> None:
    """Encodes an era."""
    message.life, message.epoch = era


def decode_era(message: tensor_pb2.Era) -> Era:
    """Decodes an era."""
    return Era(message.life, message.epoch)


def write_fence(fence: Fence, message: tensor_pb2.Fence) -> None:
    """Encodes what a chief commands by."""
    write_era(fence.era, message.era)
    message.chief_incarnation = fence.chief_incarnation


def decode_fence(message: tensor_pb2.Fence) -> Fence:
    """Decodes what a chief commands by."""
    data = message.SerializeToString()
    return _fence_of(data) if len(data) <= _MAX_KEPT_BYTES else _new_fence(data)


def _new_fence(data: bytes) -> Fence:
    message = tensor_pb2.Fence.FromString(data)
    return Fence(era=decode_era(message.era), chief_incarnation=message.chief_incarnation)


_fence_of = functools.lru_cache(maxsize=_NUM_CALLERS)(_new_fence)


def write_push_id(push_id: PushId, message: tensor_pb2.PushId) -> None:
    """Encodes the name of a contribution."""
    message.worker, message.incarnation, message.sequence = push_id


def decode_push_id(message: tensor_pb2.PushId) -> PushId:
    """Decodes the name of a contribution; raises MalformedMessage if a part of it was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")
    return PushId(message.worker, message.incarnation, message.sequence)


def write_push_header(header: PushHeader, message: parameter_service_pb2.PushHeader) -> None:
    """Encodes what a contribution is and belongs to."""
    write_era(header.era, message.era)
    write_push_id(header.push_id, message.push_id)
    message.step = header.step
    message.layout_hash = header.layout_hash
    for part in header.sparse:
        message.sparse.add(table=part.table, num_rows=part.num_rows)
    message.absent.extend(header.absent)
    for name, metric in header.metrics.items():
        written = message.metrics[name]
        written.value, written.weight = metric.value, metric.weight
    message.refused.extend(header.refused)
    message.encoding = _ENCODINGS[header.encoding]
    message.encoded_bytes = header.encoded_bytes
    if header.gradient_buffer is not None:
        message.gradient_buffer = header.gradient_buffer
    message.secret = header.secret
    for update in header.formulas:
        _FORMULA.write(update, message.formulas.add())


def decode_push_header(message: parameter_service_pb2.PushHeader) -> PushHeader:
    """Decodes and checks the header of a contribution, but not whether it fits the shard's layout."""
    require(message, "era")
    require(message, "push_id")
    sparse = tuple([SparsePart(table=part.table, num_rows=part.num_rows) for part in message.sparse])
    absent = tuple(message.absent)
    if sparse:
        _check_ascending([part.table for part in sparse], what="sparse: the tables")
    if absent:
        _check_ascending(absent, what="absent: the positions")
    if len(message.refused) > MAX_REFUSED:
        raise LimitExceeded(f"refused: {len(message.refused)} sequences in one contribution, {MAX_REFUSED} at most")
    return PushHeader(
        era=decode_era(message.era),
        push_id=decode_push_id(message.push_id),
        step=message.step,
        layout_hash=message.layout_hash,
        sparse=sparse,
        absent=absent,
        metrics=_decode_metrics(message) if message.metrics else {},
        refused=tuple(message.refused),
        encoding=_decode_encoding(message.encoding),
        encoded_bytes=message.encoded_bytes,
        gradient_buffer=message.gradient_buffer if message.HasField("gradient_buffer") else None,
        secret=message.secret,
        formulas=_decode_formulas(message) if message.formulas else (),
    )


def write_push_reply(reply: PushReply, message: parameter_service_pb2.PushReply) -> None:
    """Encodes the outcome of a push."""
    message.result = _PUSH_RESULTS[reply.result]
    message.step = reply.step


def decode_push_reply(message: parameter_service_pb2.PushReply) -> PushReply:
    """Decodes the outcome of a push."""
    return PushReply(result=decode_choice(PushResult, message.result, field="result"), step=message.step)


def write_read_request(request: ReadRequest, message: parameter_service_pb2.ReadRequest) -> None:
    """Encodes which variables are wanted."""
    message.epoch = request.epoch
    if request.step is not None:
        message.step = request.step
    message.layout_hash = request.layout_hash
    message.encoding = _ENCODINGS[request.encoding]
    if request.held_step is not None:
        message.held_step = request.held_step
    message.slot = request.slot


def decode_read_request(message: parameter_service_pb2.ReadRequest) -> ReadRequest:
    """Decodes a request for variables. Raises InvalidSpec if variables cannot be sent as requested."""
    encoding = _FOR_VARIABLES.get(message.encoding)
    if encoding is None:
        raise no_encoding(message.encoding, tuple(_FOR_VARIABLES.values()), what="variables")
    return ReadRequest(
        epoch=message.epoch,
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        encoding=encoding,
        held_step=message.held_step if message.HasField("held_step") else None,
        slot=message.slot,
    )


def write_participant(participant: Participant, message: chief_service_pb2.Participant) -> None:
    """Encodes the caller."""
    write_era(participant.era, message.era)
    message.kind = _KINDS[participant.kind]
    message.index = participant.index
    message.incarnation = participant.incarnation
    message.secret = participant.secret


def decode_participant(message: chief_service_pb2.Participant) -> Participant:
    """Decodes the caller."""
    data = message.SerializeToString()
    return _participant_of(data) if len(data) <= _MAX_KEPT_BYTES else _new_participant(data)


def _new_participant(data: bytes) -> Participant:
    message = chief_service_pb2.Participant.FromString(data)
    kind = decode_choice(ParticipantKind, message.kind, field="participant.kind")
    require(message, "era")
    return Participant(
        era=decode_era(message.era),
        kind=kind,
        index=message.index,
        incarnation=message.incarnation,
        secret=message.secret,
    )


_participant_of = functools.lru_cache(maxsize=_NUM_CALLERS)(_new_participant)


def write_commit(commit: PushCommit, message: chief_service_pb2.PushCommit) -> None:
    """Encodes a contribution to be counted."""
    write_push_id(commit.push_id, message.push_id)
    message.step = commit.step
    message.staged = commit.staged
    message.is_applied = commit.is_applied
    message.ranges.extend(commit.ranges)
    if commit.attached is not NO_ATTACHMENTS:
        _ATTACHMENTS.write(commit.attached, message.attached)


def decode_commit(message: chief_service_pb2.PushCommit) -> PushCommit:
    """Decodes a contribution to be counted."""
    require(message, "push_id")
    ranges = tuple(message.ranges)
    if ranges:
        check_ranges(ranges, field="ranges")
    return PushCommit(
        push_id=decode_push_id(message.push_id),
        step=message.step,
        staged=message.staged,
        is_applied=message.is_applied,
        ranges=ranges,
        attached=_ATTACHMENTS.decode(message.attached) if message.HasField("attached") else NO_ATTACHMENTS,
    )


def _check_attachments(message: tensor_pb2.Attachments) -> None:
    check_step_hyperparameters(message.hyperparameters)


def _check_step_attachments(message: tensor_pb2.StepAttachments) -> None:
    for given in message.numbers:
        check_step_hyperparameters(given.hyperparameters)
    check_user_states([one.json for one in message.user_states])


# What contributions are called and bring. The latter is compiled as other messages are: most steps have none.
OF_CONTRIBUTIONS = (
    Pair(value=PushId, message=tensor_pb2.PushId, write=write_push_id, decode=decode_push_id),
    Pair(value=StepHyperparameter, message=tensor_pb2.StepHyperparameter),
    Pair(value=GivenNumbers, message=tensor_pb2.GivenNumbers),
    Pair(value=UserState, message=tensor_pb2.UserState),
    Pair(value=Attachments, message=tensor_pb2.Attachments, check=_check_attachments),
    Pair(value=StepAttachments, message=tensor_pb2.StepAttachments, check=_check_step_attachments),
    Pair(value=FormulaUpdate, message=parameter_service_pb2.FormulaUpdate),
)
_ATTACHMENTS, _STEP_ATTACHMENTS, _FORMULA = map(Coders(OF_CONTRIBUTIONS).of, (Attachments, StepAttachments, FormulaUpdate))


def write_commit_result(result: CommitResult, message: chief_service_pb2.CommitResult) -> None:
    """Encodes the outcome of a commit."""
    message.outcome = _OUTCOMES[result.outcome]
    if result.first_outcome is not None:
        message.first_outcome = _OUTCOMES[result.first_outcome]
    message.global_step = result.global_step
    if result.applied_step is not None:
        message.applied_step = result.applied_step
    message.staleness = result.staleness
    message.weight = result.weight


def decode_commit_result(message: chief_service_pb2.CommitResult) -> CommitResult:
    """Decodes the outcome of a commit."""
    first = decode_choice(PushOutcome, message.first_outcome, field="first_outcome") if message.first_outcome else None
    outcome = decode_choice(PushOutcome, message.outcome, field="outcome")
    return CommitResult(
        outcome=outcome,
        first_outcome=first,
        global_step=message.global_step,
        applied_step=message.applied_step if message.HasField("applied_step") else None,
        staleness=message.staleness,
        # No weight is 0: a message without one means the ordinary weight.
        weight=message.weight or 1.0,
    )


def write_token_request(request: DequeueTokenRequest, message: chief_service_pb2.DequeueTokenRequest) -> None:
    """Encodes the request for a token."""
    write_participant(request.participant, message.participant)
    message.local_step = request.local_step
    message.request_id = request.request_id
    write_max_wait(request.max_wait_s, message.max_wait)
    if request.commit is not None:
        write_commit(request.commit, message.commit)


def decode_token_request(message: chief_service_pb2.DequeueTokenRequest) -> DequeueTokenRequest:
    """Decodes and checks the request for a token."""
    require(message, "participant")
    return DequeueTokenRequest(
        participant=decode_participant(message.participant),
        local_step=message.local_step,
        request_id=message.request_id,
        max_wait_s=decode_max_wait(message.max_wait) if message.HasField("max_wait") else MAX_WAIT_SLICE_S,
        commit=decode_commit(message.commit) if message.HasField("commit") else None,
    )


def write_token_reply(reply: TokenReply, message: chief_service_pb2.TokenReply) -> None:
    """Encodes how a wait for a token ended."""
    message.result = _RESULTS[reply.result]
    message.step = reply.step
    if reply.commit is not None:
        write_commit_result(reply.commit, message.commit)
    message.waiting_for = reply.waiting_for
    message.global_step = reply.global_step
    message.reads_latest = reply.reads_latest
    message.settings_version = reply.settings_version
    message.shards_version = reply.shards_version
    message.end = _ENDS[reply.end]


def decode_token_reply(message: chief_service_pb2.TokenReply) -> TokenReply:
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
        end=decode_choice(End, message.end, field="end"),
    )


def write_apply_request(request: ApplyRequest, message: parameter_service_pb2.ApplyRequest) -> None:
    """Encodes the step to apply, its contributors and what belongs to them."""
    write_fence(request.fence, message.fence)
    message.step = request.step
    for push_id in request.contributors:
        write_push_id(push_id, message.contributors.add())
    message.weights.extend(request.weights)
    message.scales.extend(request.scales)
    for push_id in request.discards:
        write_push_id(push_id, message.discards.add())
    message.ranges.extend(request.ranges)
    for push_id in request.without:
        write_push_id(push_id, message.without.add())
    if request.attached is not NO_STEP_ATTACHMENTS:
        _STEP_ATTACHMENTS.write(request.attached, message.attached)
    if request.wants_checksums:
        message.wants_checksums = True


def decode_apply_request(message: parameter_service_pb2.ApplyRequest) -> ApplyRequest:
    """Decodes the step to apply and its contributors, sorted together with their weights.

    Raises MalformedMessage if there is no contributor, or one occurs twice, or the weights are not one for each.
    """
    contributors = decode_each(message.contributors, decode_push_id, field="contributors")
    if not contributors:
        raise MalformedMessage(f"step {message.step}: no contributors; name at least one")
    if len(set(contributors)) < len(contributors):
        raise MalformedMessage(f"step {message.step}: a contributor occurs twice; name each once")
    weights = tuple(message.weights)
    ordered = tuple(sorted(contributors))
    if weights:
        _check_weights(weights, step=message.step, num_contributors=len(contributors))
        weight_of = dict(zip(contributors, weights, strict=True))
        weights = tuple([weight_of[push_id] for push_id in ordered])
    return ApplyRequest(
        fence=decode_fence(message.fence),
        step=message.step,
        contributors=ordered,
        weights=weights,
        scales=tuple(message.scales),
        discards=decode_each(message.discards, _decode_discard, field="discards") if message.discards else (),
        ranges=tuple(message.ranges),
        without=decode_each(message.without, decode_push_id, field="without") if message.without else (),
        attached=_STEP_ATTACHMENTS.decode(message.attached) if message.HasField("attached") else NO_STEP_ATTACHMENTS,
        wants_checksums=message.wants_checksums,
    )


def write_apply_reply(reply: ApplyReply, message: parameter_service_pb2.ApplyReply) -> None:
    """Encodes the outcome of a step."""
    message.step = reply.step
    message.repeated_request = reply.repeated_request
    if reply.checksums:
        message.checksums.extend(reply.checksums)


def decode_apply_reply(message: parameter_service_pb2.ApplyReply) -> ApplyReply:
    """Decodes the outcome of a step."""
    return ApplyReply(step=message.step, repeated_request=message.repeated_request, checksums=tuple(message.checksums))


def _decode_discard(message: tensor_pb2.PushId) -> PushId:
    """A sequence of 0 means all of the incarnation."""
    if message.incarnation < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, want >= 1")
    return PushId(message.worker, message.incarnation, message.sequence)


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


def _decode_formulas(message: parameter_service_pb2.PushHeader) -> tuple[FormulaUpdate, ...]:
    check_amount([update.text for update in message.formulas])  # before any of them is looked at
    formulas = decode_each(message.formulas, _FORMULA.decode, field="formulas")
    check_updates(formulas)
    return formulas


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


def _decode_encoding(value: int) -> FloatEncoding:
    if value not in _ENCODING_OF:
        raise no_encoding(value, tuple(FloatEncoding), what="gradients")
    return _ENCODING_OF[value]
