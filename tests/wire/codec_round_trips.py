"""Every value that travels, with what encodes and what decodes it. Claims nothing."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ps_protocol.model.layout import Layout
from ps_protocol.model.variables import Constraint, ConstraintKind, Initializer, InitializerKind
from ps_protocol.roles import chief, identity, shard
from ps_protocol.v1 import chief_service_pb2
from ps_protocol.wire import codec
from tests.wire.codec_examples import (
    ADAM,
    AVERAGES,
    CLIP,
    COMMIT,
    DENSE,
    ID,
    IDENTITY,
    MIXED,
    MODEL,
    PIECEWISE,
    PLACEMENT,
    POLICIES,
    RESULT,
    RICH_MODEL,
    SLICES,
    SPEC,
    STATISTIC,
    STATUS,
    TABLE,
    VERSION,
    WORKER,
    B,
    W,
)


def registration(message: Any) -> chief.Registration:
    return codec.decode_registration(message, kind=chief.ParticipantKind.WORKER)


def encode_rows(request: shard.RowsRequest) -> Any:
    return codec.encode_rows_request(request, num_rows=9)


def settings_answer(reply: chief.SettingsReply | None) -> Any:
    return chief_service_pb2.SetPolicyResponse(settings=codec.encode_settings_reply(reply))


ROUND_TRIPS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    *((variable, codec.encode_variable, codec.decode_variable) for variable in (W, B, DENSE, TABLE)),
    *(
        (
            dataclasses.replace(DENSE, constraint=Constraint(kind=kind, high=2.0), partition=None),
            codec.encode_variable,
            codec.decode_variable,
        )
        for kind in ConstraintKind
    ),
    *(
        (dataclasses.replace(TABLE, initializer=Initializer(kind=kind)), codec.encode_variable, codec.decode_variable)
        for kind in InitializerKind
    ),
    *((piece, codec.encode_slice, codec.decode_slice) for piece in (*SLICES, *MIXED)),
    *((optimizer, codec.encode_optimizer, codec.decode_optimizer) for optimizer in (ADAM, MODEL.optimizer, STATISTIC)),
    (ID, codec.encode_push_id, codec.decode_push_id),
    (shard.Adoption(step=0, layout_hash="abc"), codec.encode_adoption, codec.decode_adoption),
    (shard.Adoption(step=None, layout_hash=""), codec.encode_adoption, codec.decode_adoption),
    (SPEC, codec.encode_shard_spec, codec.decode_shard_spec),
    (dataclasses.replace(SPEC, layout=Layout(())), codec.encode_shard_spec, codec.decode_shard_spec),
    (
        dataclasses.replace(SPEC, layout=Layout(MIXED), averages=AVERAGES, clip=CLIP),
        codec.encode_shard_spec,
        codec.decode_shard_spec,
    ),
    (
        shard.PushHeader(
            epoch=1,
            push_id=ID,
            step=0,
            layout_hash="abc",
            sparse=(shard.SparsePart(table=0, num_rows=0), shard.SparsePart(table=2, num_rows=1 << 40)),
            absent=(0, 3, 4),
            metrics={"loss": shard.Metric(value=-0.5, weight=0.0), "räte": shard.Metric(value=math.inf)},
            refused=(3, 1 << 60),
        ),
        codec.encode_push_header,
        codec.decode_push_header,
    ),
    (shard.PushHeader(epoch=1, push_id=ID, step=0, layout_hash="abc"), codec.encode_push_header, codec.decode_push_header),
    *((shard.PushReply(result=result, step=7), codec.encode_push_reply, codec.decode_push_reply) for result in shard.PushResult),
    (
        shard.ApplyRequest(epoch=1, chief_incarnation=2, step=3, contributors=(shard.PushId(worker=1, incarnation=1, sequence=1), ID)),
        codec.encode_apply_request,
        codec.decode_apply_request,
    ),
    (
        shard.ApplyRequest(
            epoch=1,
            chief_incarnation=2,
            step=3,
            contributors=(ID,),
            weights=(0.5,),
            scales=(1.0, 0.25),
            discards=(shard.PushId(worker=1, incarnation=7, sequence=0), ID),
        ),
        codec.encode_apply_request,
        codec.decode_apply_request,
    ),
    (
        shard.ShardSettings(
            epoch=1,
            chief_incarnation=2,
            version=3,
            step=4,
            accepts_stale=True,
            rejects_nonfinite=True,
            applies_on_arrival=True,
            optimizers=((ADAM, dataclasses.replace(ADAM, learning_rate=PIECEWISE)), (STATISTIC, STATISTIC)),
        ),
        codec.encode_settings,
        codec.decode_settings,
    ),
    *(
        (shard.RowsRequest(epoch=1, layout_hash="abc", table=2, step=step, slot=slot), encode_rows, codec.decode_rows_request)
        for step, slot in ((None, "m"), (0, ""))
    ),
    (
        (shard.MetricCell(name="loss", worker=2, total=1.5, weight=2.0, count=1 << 40, last=-1.0),),
        codec.encode_metric_cells,
        codec.decode_metric_cells,
    ),
    (shard.ApplyReply(step=3, repeated_request=True), codec.encode_apply_reply, codec.decode_apply_reply),
    (
        shard.ShardStatus(
            shard=1,
            process_incarnation=2,
            epoch=3,
            chief_incarnation=4,
            step=5,
            num_slices=6,
            arena_bytes=1 << 40,
            allocated_bytes=8,
            num_staged=9,
            num_pushes=10,
            num_stale=11,
            num_duplicates=12,
            num_nonfinite=13,
            last_apply_s=0.5,
            settings_version=14,
        ),
        codec.encode_shard_status,
        codec.decode_shard_status,
    ),
    (
        chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=0, host="h", pid=1, request_id=(1 << 64) - 1, takeover=True),
        codec.encode_register_request,
        codec.decode_register_request,
    ),
    (
        chief.RegisterRequest(kind=chief.ParticipantKind.OBSERVER, index=None, host="h", pid=1, request_id=2),
        codec.encode_register_request,
        codec.decode_register_request,
    ),
    (
        chief.Registration(participant=WORKER, lease_s=10.5, shard_addresses=("a:1", "unix:/b"), global_step=4, may_contribute=True),
        codec.encode_registration,
        registration,
    ),
    *((model, codec.encode_model, codec.decode_model) for model in (MODEL, RICH_MODEL)),
    *((policy, codec.encode_policy, codec.decode_policy) for policy in POLICIES),
    *(
        (change, codec.encode_hyperparameter_change, codec.decode_hyperparameter_change)
        for change in (
            chief.HyperparameterChange(learning_rate=PIECEWISE),
            chief.HyperparameterChange(variable="w", hyperparameters={"momentum": 0.5}),
        )
    ),
    *((reply, settings_answer, codec.decode_settings_reply) for reply in (chief.SettingsReply(version=2, step=7), None)),
    *(
        (
            chief.ModelReply(
                state=state, placement=PLACEMENT, attempt=1, max_staged_per_worker=2, global_step=3, waiting_for="w", policy=POLICIES[1]
            ),
            codec.encode_model_reply,
            codec.decode_model_reply,
        )
        for state in chief.ModelState
    ),
    (
        chief.AgreedModel(state=chief.ModelState.READY, model=MODEL, placement=PLACEMENT, global_step=3),
        codec.encode_agreed_model,
        codec.decode_agreed_model,
    ),
    (
        chief.AgreedModel(state=chief.ModelState.ABSENT, model=None, placement=(), global_step=0),
        codec.encode_agreed_model,
        codec.decode_agreed_model,
    ),
    (dataclasses.replace(COMMIT, staged=False, is_applied=True), codec.encode_commit, codec.decode_commit),
    (
        chief.CommitResult(outcome=chief.PushOutcome.ACCEPTED, global_step=5, applied_step=0, staleness=3, weight=0.25),
        codec.encode_commit_result,
        codec.decode_commit_result,
    ),
    (COMMIT, codec.encode_commit, codec.decode_commit),
    (RESULT, codec.encode_commit_result, codec.decode_commit_result),
    *(
        (chief.CommitResult(outcome=outcome, global_step=0), codec.encode_commit_result, codec.decode_commit_result)
        for outcome in chief.PushOutcome
    ),
    *(
        (
            chief.TokenReply(result=result, step=3, commit=RESULT, waiting_for="w", global_step=4, reads_latest=True),
            codec.encode_token_reply,
            codec.decode_token_reply,
        )
        for result in chief.TokenResult
    ),
    (chief.TokenReply(result=chief.TokenResult.TOKEN, step=0), codec.encode_token_reply, codec.decode_token_reply),
    (STATUS, codec.encode_cluster_status, codec.decode_cluster_status),
    *(
        (
            dataclasses.replace(STATUS, state=state, max_steps=None, participants=()),
            codec.encode_cluster_status,
            codec.decode_cluster_status,
        )
        for state in chief.ClusterState
    ),
    (
        identity.HandshakeRequest(cluster="job", expected_role=identity.Role.CHIEF, expected_index=0, version=VERSION),
        codec.encode_handshake_request,
        codec.decode_handshake_request,
    ),
    (
        identity.HandshakeRequest(cluster="", expected_role=None, expected_index=None, version=VERSION),
        codec.encode_handshake_request,
        codec.decode_handshake_request,
    ),
    (
        identity.HandshakeReply(identity=IDENTITY, version=VERSION, epoch=3, warning="careful"),
        codec.encode_handshake_reply,
        codec.decode_handshake_reply,
    ),
]
