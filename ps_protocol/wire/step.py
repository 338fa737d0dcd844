"""The messages that every step has, by hand: the compiled code costs half as much again. Knows each of their fields; no RPC, no tensor."""

import functools
import itertools
import math
from collections.abc import Sequence, Sized
from typing import Any

from ps_protocol.encodings.formats import FloatEncoding
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
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import (
    MAX_WAIT_SLICE_S,
    ApplyReply,
    ApplyRequest,
    Metric,
    PushHeader,
    PushId,
    PushReply,
    PushResult,
    SparsePart,
)
from ps_protocol.v1 import chief_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire.fields import decode_choice, decode_each, decode_max_wait, encode_max_wait, require

MAX_METRICS = 1_000
MAX_RANGES_A_CALL = 10_000
# A learning rate and a few others for each of some hundred groups of variables.
MAX_STEP_HYPERPARAMETERS = 1_024
# A shard holds a few contributions of a worker at most.
MAX_REFUSED = 100_000

# Typed as anything, since the stubs want their own kind of numbers.
_ENCODINGS: dict[FloatEncoding, Any] = {one: one.value for one in FloatEncoding}
_PUSH_RESULTS: dict[PushResult, Any] = {one: one.value for one in PushResult}
_KINDS: dict[ParticipantKind, Any] = {one: one.value for one in ParticipantKind}
_OUTCOMES: dict[PushOutcome, Any] = {one: one.value for one in PushOutcome}
_RESULTS: dict[TokenResult, Any] = {one: one.value for one in TokenResult}
_ENCODING_OF = {one.value: one for one in FloatEncoding}


# A process names few eras and fences, and each with every step.
@functools.lru_cache(maxsize=64)
def encode_era(era: Era) -> tensor_pb2.Era:
    """Encodes an era; the message must not be changed."""
    return tensor_pb2.Era(life=era.life, epoch=era.epoch)


def decode_era(message: tensor_pb2.Era) -> Era:
    """Decodes an era."""
    return Era(life=message.life, epoch=message.epoch)


@functools.lru_cache(maxsize=64)
def encode_fence(fence: Fence) -> tensor_pb2.Fence:
    """Encodes what a chief commands by; the message must not be changed."""
    return tensor_pb2.Fence(era=encode_era(fence.era), chief_incarnation=fence.chief_incarnation)


def decode_fence(message: tensor_pb2.Fence) -> Fence:
    """Decodes what a chief commands by."""
    return Fence(era=decode_era(message.era), chief_incarnation=message.chief_incarnation)


def encode_push_id(push_id: PushId) -> tensor_pb2.PushId:
    """Encodes the name of a contribution."""
    return tensor_pb2.PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=push_id.sequence)


def decode_push_id(message: tensor_pb2.PushId) -> PushId:
    """Decodes the name of a contribution; raises MalformedMessage if a part of it was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")
    return PushId(worker=message.worker, incarnation=message.incarnation, sequence=message.sequence)


def encode_push_header(header: PushHeader) -> parameter_service_pb2.PushHeader:
    """Encodes what a contribution is and belongs to."""
    return parameter_service_pb2.PushHeader(
        era=encode_era(header.era),
        push_id=encode_push_id(header.push_id),
        step=header.step,
        layout_hash=header.layout_hash,
        sparse=[parameter_service_pb2.SparsePart(table=part.table, num_rows=part.num_rows) for part in header.sparse],
        absent=header.absent,
        metrics={name: parameter_service_pb2.Metric(value=metric.value, weight=metric.weight) for name, metric in header.metrics.items()},
        refused=header.refused,
        encoding=_ENCODINGS[header.encoding],
        encoded_bytes=header.encoded_bytes,
        gradient_buffer=header.gradient_buffer,
        secret=header.secret,
        formulas=[encode_formula_update(update) for update in header.formulas],
    )


def decode_push_header(message: parameter_service_pb2.PushHeader) -> PushHeader:
    """Decodes and checks what a contribution is and belongs to; whether it fits the shard's layout is not looked at."""
    require(message, "era")
    require(message, "push_id")
    sparse = tuple(SparsePart(table=part.table, num_rows=part.num_rows) for part in message.sparse)
    absent = tuple(message.absent)
    _check_ascending([part.table for part in sparse], what="sparse: the tables")
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


def encode_formula_update(update: FormulaUpdate) -> parameter_service_pb2.FormulaUpdate:
    """Encodes new values that a formula gives."""
    return parameter_service_pb2.FormulaUpdate(text=update.text, variables=update.variables, arrays=update.arrays, numbers=update.numbers)


def decode_formula_update(message: parameter_service_pb2.FormulaUpdate) -> FormulaUpdate:
    """Decodes and checks new values that a formula gives; whether they fit the shard's layout is not looked at."""
    # Maps come in any order, and the bits of a result must not depend on it.
    return FormulaUpdate(
        text=message.text,
        variables=dict(sorted(message.variables.items())),
        arrays=dict(sorted(message.arrays.items())),
        numbers=dict(sorted(message.numbers.items())),
    )


def encode_push_reply(reply: PushReply) -> parameter_service_pb2.PushReply:
    """Encodes what became of a push."""
    return parameter_service_pb2.PushReply(result=_PUSH_RESULTS[reply.result], step=reply.step)


def decode_push_reply(message: parameter_service_pb2.PushReply) -> PushReply:
    """Decodes what became of a push."""
    return PushReply(result=decode_choice(PushResult, message.result, field="result"), step=message.step)


def encode_participant(participant: Participant) -> chief_service_pb2.Participant:
    """Encodes who calls."""
    return chief_service_pb2.Participant(
        era=encode_era(participant.era),
        kind=_KINDS[participant.kind],
        index=participant.index,
        incarnation=participant.incarnation,
        secret=participant.secret,
    )


def decode_participant(message: chief_service_pb2.Participant) -> Participant:
    """Decodes who calls."""
    kind = decode_choice(ParticipantKind, message.kind, field="participant.kind")
    require(message, "era")
    return Participant(
        era=decode_era(message.era),
        kind=kind,
        index=message.index,
        incarnation=message.incarnation,
        secret=message.secret,
    )


def encode_commit(commit: PushCommit) -> chief_service_pb2.PushCommit:
    """Encodes a contribution to be counted."""
    message = chief_service_pb2.PushCommit(
        push_id=encode_push_id(commit.push_id),
        step=commit.step,
        staged=commit.staged,
        is_applied=commit.is_applied,
        ranges=commit.ranges,
    )
    if commit.hyperparameters:
        message.hyperparameters.extend(_encode_hyperparameters(commit.hyperparameters))
    return message


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
        hyperparameters=_decode_hyperparameters(message.hyperparameters) if message.hyperparameters else (),
    )


def _encode_hyperparameters(given: Sequence[StepHyperparameter]) -> list[tensor_pb2.StepHyperparameter]:
    return [tensor_pb2.StepHyperparameter(group=one.group, name=one.name, value=one.value) for one in given]


def _decode_hyperparameters(messages: Sequence[tensor_pb2.StepHyperparameter]) -> tuple[StepHyperparameter, ...]:
    if len(messages) > MAX_STEP_HYPERPARAMETERS:
        raise LimitExceeded(f"hyperparameters: {len(messages)} for one step, {MAX_STEP_HYPERPARAMETERS} at most")
    return tuple(StepHyperparameter(group=one.group, name=one.name, value=one.value) for one in messages)


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
        # No weight is 0: a message without one means the ordinary weight.
        weight=message.weight or 1.0,
    )


def encode_token_request(request: DequeueTokenRequest) -> chief_service_pb2.DequeueTokenRequest:
    """Encodes the wish for a token."""
    return chief_service_pb2.DequeueTokenRequest(
        participant=encode_participant(request.participant),
        local_step=request.local_step,
        request_id=request.request_id,
        max_wait=encode_max_wait(request.max_wait_s),
        commit=None if request.commit is None else encode_commit(request.commit),
    )


def decode_token_request(message: chief_service_pb2.DequeueTokenRequest) -> DequeueTokenRequest:
    """Decodes and checks the wish for a token."""
    require(message, "participant")
    return DequeueTokenRequest(
        participant=decode_participant(message.participant),
        local_step=message.local_step,
        request_id=message.request_id,
        max_wait_s=decode_max_wait(message.max_wait) if message.HasField("max_wait") else MAX_WAIT_SLICE_S,
        commit=decode_commit(message.commit) if message.HasField("commit") else None,
    )


def encode_end(end: End) -> Any:
    """Encodes whether training has ended, and how."""
    return end.value


def decode_end(number: int) -> End:
    """Decodes whether training has ended, and how."""
    return decode_choice(End, number, field="end")


def encode_token_reply(reply: TokenReply) -> chief_service_pb2.TokenReply:
    """Encodes how a wait for a token ended."""
    return chief_service_pb2.TokenReply(
        result=_RESULTS[reply.result],
        step=reply.step,
        commit=None if reply.commit is None else encode_commit_result(reply.commit),
        waiting_for=reply.waiting_for,
        global_step=reply.global_step,
        reads_latest=reply.reads_latest,
        settings_version=reply.settings_version,
        shards_version=reply.shards_version,
        end=encode_end(reply.end),
    )


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
        end=decode_end(message.end),
    )


def encode_apply_request(request: ApplyRequest) -> parameter_service_pb2.ApplyRequest:
    """Encodes the step to apply, its contributors and what belongs to them."""
    message = parameter_service_pb2.ApplyRequest(
        fence=encode_fence(request.fence),
        step=request.step,
        contributors=[encode_push_id(push_id) for push_id in request.contributors],
        weights=request.weights,
        scales=request.scales,
        discards=[encode_push_id(push_id) for push_id in request.discards],
        ranges=request.ranges,
        without=[encode_push_id(push_id) for push_id in request.without],
    )
    if request.hyperparameters:
        message.hyperparameters.extend(_encode_hyperparameters(request.hyperparameters))
    return message


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
    _check_weights(weights, step=message.step, num_contributors=len(contributors))
    order = sorted(range(len(contributors)), key=contributors.__getitem__)
    return ApplyRequest(
        fence=decode_fence(message.fence),
        step=message.step,
        contributors=tuple(contributors[index] for index in order),
        weights=tuple(weights[index] for index in order) if weights else (),
        scales=tuple(message.scales),
        discards=decode_each(message.discards, _decode_discard, field="discards"),
        ranges=tuple(message.ranges),
        without=decode_each(message.without, decode_push_id, field="without"),
        hyperparameters=_decode_hyperparameters(message.hyperparameters) if message.hyperparameters else (),
    )


def encode_apply_reply(reply: ApplyReply) -> parameter_service_pb2.ApplyReply:
    """Encodes what became of a step."""
    return parameter_service_pb2.ApplyReply(step=reply.step, repeated_request=reply.repeated_request)


def decode_apply_reply(message: parameter_service_pb2.ApplyReply) -> ApplyReply:
    """Decodes what became of a step."""
    return ApplyReply(step=message.step, repeated_request=message.repeated_request)


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


def _decode_formulas(message: parameter_service_pb2.PushHeader) -> tuple[FormulaUpdate, ...]:
    check_amount([update.text for update in message.formulas])  # before any of them is looked at
    formulas = decode_each(message.formulas, decode_formula_update, field="formulas")
    check_updates(formulas)
    return formulas


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


def check_ranges(ranges: Sized, *, field: str) -> None:
    """Raises LimitExceeded if a message names too many ranges of training data."""
    if len(ranges) > MAX_RANGES_A_CALL:
        raise LimitExceeded(f"{field}: {len(ranges)} in one call, {MAX_RANGES_A_CALL} at most")


def no_encoding(value: int, known: Sequence[FloatEncoding], *, what: str) -> InvalidSpec:
    """Returns the error for a number that stands for no encoding of `what`."""
    return InvalidSpec(f"encoding: got {value}, {what} come as one of {', '.join(f'{one.value} ({one.name})' for one in known)}")


def _decode_encoding(value: int) -> FloatEncoding:
    if value not in _ENCODING_OF:
        raise no_encoding(value, tuple(FloatEncoding), what="gradients")
    return _ENCODING_OF[value]
