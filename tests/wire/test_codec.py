"""Claims about values that travel: they come back as they were, and what cannot be right is refused with its place."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import pytest

from ps_protocol import (
    chief,
    codec,
    codec_checkpoints,
    codec_chief,
    codec_handshake,
    codec_model,
    codec_settings,
    codec_shard,
    codec_shard_status,
    codec_status,
    codec_variables,
    errors,
    handshake,
    policy_spec,
    shard,
)
from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import ClipSpec
from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.model import ModelSpec, PlacedSlice, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule, constant
from ps_protocol.tensors import DataType, VariableSpec
from ps_protocol.v1 import chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.variable_options import Constraint, ConstraintKind, Initializer, InitializerKind, Partition, SparseMean
from ps_protocol.version import ProtocolVersion

W = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(10, 4))
B = VariableSpec(name="ä", data_type=DataType.FLOAT64, shape=())
# Everything that a dense variable, and a sparse one, can be given.
STATISTIC = OptimizerSpec(name="moving_average", learning_rate=constant(0.0), hyperparameters={"decay": 0.5})
DENSE = VariableSpec(
    name="dense", data_type=DataType.FLOAT16, shape=(3, 8), optimizer=STATISTIC, partition=Partition(axis=1, num_slices=4),
    constraint=Constraint(kind=ConstraintKind.CLIP, low=-1.5, high=2.0),
)  # fmt: skip
TABLE = VariableSpec(
    name="table", data_type=DataType.BFLOAT16, shape=(7, 2), is_sparse=True, sparse_mean=SparseMean.PER_REPLICA,
    initializer=Initializer(kind=InitializerKind.UNIFORM, low=-0.5, high=0.5, seed=(1 << 63) - 1),
)  # fmt: skip
MIXED = (
    VariableSlice(variable=TABLE, start=2, stop=5),
    VariableSlice(variable=DENSE, start=2, stop=4, axis=1),
    VariableSlice(variable=DENSE, start=0, stop=2, axis=1),
)
AVERAGES = AverageSpec(decay=0.99, use_num_updates=True, zero_debias=True, variables=("w", "ä"))
CLIP = ClipSpec(value=0.5, norm=1.0, global_norm=2.0)
SLICES = (VariableSlice(variable=W, start=2, stop=10), VariableSlice(variable=B, start=0, stop=1))
ADAM = OptimizerSpec(name="adam", learning_rate=constant(0.1), hyperparameters={"beta1": 0.5, "epsilon": 1e-7})
PIECEWISE = Schedule(name="piecewise_constant", boundaries=(10.0, 20.0), values=(0.1, 0.01, 0.001))
ID = shard.PushId(worker=3, incarnation=2, sequence=1 << 60)
MODEL = ModelSpec(
    variables=(W, B),
    optimizer=OptimizerSpec(name="sgd", learning_rate=PIECEWISE),
    placement=PlacementPolicy(strategy="round_robin", split_bytes=7),
)
RICH_MODEL = dataclasses.replace(
    MODEL,
    variables=(W, TABLE, DENSE, B),
    placement=PlacementPolicy(loads=(("dense", 2.5), ("table", 1.0)), pins=(("w", 3), ("ä", 0))),
    averages=AVERAGES,
    clip=CLIP,
)
POLICIES = (
    policy_spec.PolicySpec(),
    policy_spec.PolicySpec(tokens=policy_spec.TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=2, total_num_replicas=3),
    policy_spec.PolicySpec(name=policy_spec.PolicyName.SSP, staleness=4, max_staleness=0, too_stale=policy_spec.TooStale.SCALE),
    policy_spec.PolicySpec(name=policy_spec.PolicyName.ASYNC, use_locking=False),
)
PLACEMENT = tuple(PlacedSlice(slice=piece, shard=index) for index, piece in enumerate(SLICES))
SPEC = shard.ShardSpec(epoch=1, shard=2, layout=Layout(SLICES), optimizer=ADAM, initial_step=3, attempt=4, max_staged_per_worker=5)
WORKER = chief.Participant(epoch=1, kind=chief.ParticipantKind.WORKER, index=2, incarnation=3)
COMMIT = chief.PushCommit(push_id=ID, step=4, staged=True)
RESULT = chief.CommitResult(outcome=chief.PushOutcome.DUPLICATE, global_step=5, first_outcome=chief.PushOutcome.LATE)
STATUS = chief.ClusterStatus(
    cluster="job", epoch=1, state=chief.ClusterState.TRAINING, reason="because", global_step=2, max_steps=3, policy="sync",
    replicas_to_aggregate=4, total_num_replicas=5, num_contributions=6, waiting_for="worker 1", step_age_s=1.25,
    participants=(
        chief.ParticipantStatus(
            kind=chief.ParticipantKind.OBSERVER, index=1, incarnation=2, host="h", pid=3, state="lapsed", seen_ago_s=0.5,
            num_accepted=4, num_stale=5, num_late=6, is_waiting=True, failure="lost",
        ),
    ),
    shards=(chief.ShardLink(index=1, address="h:1", is_reachable=True, step=0, arena_bytes=2, num_slices=3),
            chief.ShardLink(index=2, address="h:2", is_reachable=False, step=None, arena_bytes=0, num_slices=0)),
    ledger=(
        chief.LedgerEntry(step=1, contributors=(ID,), num_stale=2, num_late=3, duration_s=0.25, apply_duration_s=0.125, last_worker=4),
    ),
    num_accepted=7, num_stale=8, num_late=9, hyperparameters_version=10, optimizer="adam", max_observed_staleness=11,
)  # fmt: skip
IDENTITY = handshake.Identity(cluster="job", role=handshake.Role.PARAMETER_SERVER, index=1, process_incarnation=(1 << 64) - 1)
VERSION = ProtocolVersion(major=1, minor=2)


def registration(message: Any) -> chief.Registration:
    return codec_chief.decode_registration(message, kind=chief.ParticipantKind.WORKER)


def encode_rows(request: shard.RowsRequest) -> Any:
    return codec_shard.encode_rows_request(request, num_rows=9)


def settings_answer(reply: chief.SettingsReply | None) -> Any:
    return chief_service_pb2.SetPolicyResponse(settings=codec_settings.encode_settings_reply(reply))


ROUND_TRIPS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    *((variable, codec_variables.encode_variable, codec_variables.decode_variable) for variable in (W, B, DENSE, TABLE)),
    *(
        (
            dataclasses.replace(DENSE, constraint=Constraint(kind=kind, high=2.0), partition=None),
            codec_variables.encode_variable,
            codec_variables.decode_variable,
        )
        for kind in ConstraintKind
    ),
    *(
        (dataclasses.replace(TABLE, initializer=Initializer(kind=kind)), codec_variables.encode_variable, codec_variables.decode_variable)
        for kind in InitializerKind
    ),
    *((piece, codec_variables.encode_slice, codec_variables.decode_slice) for piece in (*SLICES, *MIXED)),
    *((optimizer, codec_variables.encode_optimizer, codec_variables.decode_optimizer) for optimizer in (ADAM, MODEL.optimizer, STATISTIC)),
    (ID, codec.encode_push_id, codec.decode_push_id),
    (shard.Adoption(step=0, layout_hash="abc"), codec_checkpoints.encode_adoption, codec_checkpoints.decode_adoption),
    (shard.Adoption(step=None, layout_hash=""), codec_checkpoints.encode_adoption, codec_checkpoints.decode_adoption),
    (SPEC, codec_shard.encode_shard_spec, codec_shard.decode_shard_spec),
    (dataclasses.replace(SPEC, layout=Layout(())), codec_shard.encode_shard_spec, codec_shard.decode_shard_spec),
    (
        dataclasses.replace(SPEC, layout=Layout(MIXED), averages=AVERAGES, clip=CLIP),
        codec_shard.encode_shard_spec,
        codec_shard.decode_shard_spec,
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
        codec_shard.encode_push_header,
        codec_shard.decode_push_header,
    ),
    (shard.PushHeader(epoch=1, push_id=ID, step=0, layout_hash="abc"), codec_shard.encode_push_header, codec_shard.decode_push_header),
    *(
        (shard.PushReply(result=result, step=7), codec_shard.encode_push_reply, codec_shard.decode_push_reply)
        for result in shard.PushResult
    ),
    (
        shard.ApplyRequest(epoch=1, chief_incarnation=2, step=3, contributors=(shard.PushId(worker=1, incarnation=1, sequence=1), ID)),
        codec_shard.encode_apply_request,
        codec_shard.decode_apply_request,
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
        codec_shard.encode_apply_request,
        codec_shard.decode_apply_request,
    ),
    (
        shard.ShardSettings(
            epoch=1,
            chief_incarnation=2,
            version=3,
            step=4,
            accepts_stale=True,
            applies_on_arrival=True,
            optimizers=((ADAM, dataclasses.replace(ADAM, learning_rate=PIECEWISE)), (STATISTIC, STATISTIC)),
        ),
        codec_shard.encode_settings,
        codec_shard.decode_settings,
    ),
    *(
        (shard.RowsRequest(epoch=1, layout_hash="abc", table=2, step=step, slot=slot), encode_rows, codec_shard.decode_rows_request)
        for step, slot in ((None, "m"), (0, ""))
    ),
    (
        (shard.MetricCell(name="loss", worker=2, total=1.5, weight=2.0, count=1 << 40, last=-1.0),),
        codec_shard_status.encode_metric_cells,
        codec_shard_status.decode_metric_cells,
    ),
    (shard.ApplyReply(step=3, repeated_request=True), codec_shard.encode_apply_reply, codec_shard.decode_apply_reply),
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
        codec_shard_status.encode_shard_status,
        codec_shard_status.decode_shard_status,
    ),
    (
        chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=0, host="h", pid=1, request_id=(1 << 64) - 1, takeover=True),
        codec_chief.encode_register_request,
        codec_chief.decode_register_request,
    ),
    (
        chief.RegisterRequest(kind=chief.ParticipantKind.OBSERVER, index=None, host="h", pid=1, request_id=2),
        codec_chief.encode_register_request,
        codec_chief.decode_register_request,
    ),
    (
        chief.Registration(participant=WORKER, lease_s=10.5, shard_addresses=("a:1", "unix:/b"), global_step=4, may_contribute=True),
        codec_chief.encode_registration,
        registration,
    ),
    *((model, codec_model.encode_model, codec_model.decode_model) for model in (MODEL, RICH_MODEL)),
    *((policy, codec_settings.encode_policy, codec_settings.decode_policy) for policy in POLICIES),
    *(
        (change, codec_settings.encode_hyperparameter_change, codec_settings.decode_hyperparameter_change)
        for change in (
            chief.HyperparameterChange(learning_rate=PIECEWISE),
            chief.HyperparameterChange(variable="w", hyperparameters={"momentum": 0.5}),
        )
    ),
    *((reply, settings_answer, codec_settings.decode_settings_reply) for reply in (chief.SettingsReply(version=2, step=7), None)),
    *(
        (
            chief.ModelReply(
                state=state, placement=PLACEMENT, attempt=1, max_staged_per_worker=2, global_step=3, waiting_for="w", policy=POLICIES[1]
            ),
            codec_model.encode_model_reply,
            codec_model.decode_model_reply,
        )
        for state in chief.ModelState
    ),
    (
        chief.AgreedModel(state=chief.ModelState.READY, model=MODEL, placement=PLACEMENT, global_step=3),
        codec_model.encode_agreed_model,
        codec_model.decode_agreed_model,
    ),
    (
        chief.AgreedModel(state=chief.ModelState.ABSENT, model=None, placement=(), global_step=0),
        codec_model.encode_agreed_model,
        codec_model.decode_agreed_model,
    ),
    (dataclasses.replace(COMMIT, staged=False, is_applied=True), codec_chief.encode_commit, codec_chief.decode_commit),
    (
        chief.CommitResult(outcome=chief.PushOutcome.ACCEPTED, global_step=5, applied_step=0, staleness=3, weight=0.25),
        codec_chief.encode_commit_result,
        codec_chief.decode_commit_result,
    ),
    (COMMIT, codec_chief.encode_commit, codec_chief.decode_commit),
    (RESULT, codec_chief.encode_commit_result, codec_chief.decode_commit_result),
    *(
        (chief.CommitResult(outcome=outcome, global_step=0), codec_chief.encode_commit_result, codec_chief.decode_commit_result)
        for outcome in chief.PushOutcome
    ),
    *(
        (
            chief.TokenReply(result=result, step=3, commit=RESULT, waiting_for="w", global_step=4, reads_latest=True),
            codec_chief.encode_token_reply,
            codec_chief.decode_token_reply,
        )
        for result in chief.TokenResult
    ),
    (chief.TokenReply(result=chief.TokenResult.TOKEN, step=0), codec_chief.encode_token_reply, codec_chief.decode_token_reply),
    (STATUS, codec_status.encode_cluster_status, codec_status.decode_cluster_status),
    *(
        (
            dataclasses.replace(STATUS, state=state, max_steps=None, participants=()),
            codec_status.encode_cluster_status,
            codec_status.decode_cluster_status,
        )
        for state in chief.ClusterState
    ),
    (
        handshake.HandshakeRequest(cluster="job", expected_role=handshake.Role.CHIEF, expected_index=0, version=VERSION),
        codec_handshake.encode_handshake_request,
        codec_handshake.decode_handshake_request,
    ),
    (
        handshake.HandshakeRequest(cluster="", expected_role=None, expected_index=None, version=VERSION),
        codec_handshake.encode_handshake_request,
        codec_handshake.decode_handshake_request,
    ),
    (
        handshake.HandshakeReply(identity=IDENTITY, version=VERSION, epoch=3, warning="careful"),
        codec_handshake.encode_handshake_reply,
        codec_handshake.decode_handshake_reply,
    ),
]


@pytest.mark.parametrize(("value", "encode", "decode"), ROUND_TRIPS, ids=[type(value).__name__ for value, _, _ in ROUND_TRIPS])
def test_value_comes_back_as_it_was(value: Any, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    message = encode(value)
    assert decode(type(message).FromString(message.SerializeToString())) == value


def test_participant_comes_back_as_it_was() -> None:
    request = chief_service_pb2.HeartbeatRequest(participant=codec_chief.encode_participant(WORKER))
    assert codec_chief.decode_participant(request) == WORKER


@pytest.mark.parametrize(
    ("choices", "prefix", "numbers"),
    [
        (shard.PushResult, "PUSH_RESULT", parameter_service_pb2.PushResult),
        (chief.ParticipantKind, "PARTICIPANT_KIND", chief_service_pb2.ParticipantKind),
        (chief.ModelState, "MODEL_STATE", chief_service_pb2.ModelState),
        (chief.PushOutcome, "PUSH_OUTCOME", chief_service_pb2.PushOutcome),
        (chief.TokenResult, "TOKEN_RESULT", chief_service_pb2.TokenResult),
        (chief.ClusterState, "CLUSTER_STATE", chief_service_pb2.ClusterState),
        (handshake.Role, "ROLE", handshake_service_pb2.Role),
        (policy_spec.PolicyName, "NAME", chief_service_pb2.PolicySpec.Name),
        (policy_spec.TokenMode, "TOKENS", chief_service_pb2.PolicySpec.Tokens),
        (policy_spec.TooStale, "TOO_STALE", chief_service_pb2.PolicySpec.TooStale),
        (SparseMean, "SPARSE_MEAN", tensor_pb2.SparseMean),
        (ConstraintKind, "KIND", tensor_pb2.Constraint.Kind),
        (InitializerKind, "KIND", tensor_pb2.Initializer.Kind),
    ],
)
def test_choices_have_the_names_and_numbers_of_the_protos(choices: type[enum.Enum], prefix: str, numbers: Any) -> None:
    assert {f"{prefix}_{choice.name}": choice.value for choice in choices} | {f"{prefix}_UNSPECIFIED": 0} == dict(numbers.items())


def test_data_types_have_the_names_of_the_proto() -> None:
    assert {f"DATA_TYPE_{data_type.name}" for data_type in DataType} | {"DATA_TYPE_UNSPECIFIED"} == set(tensor_pb2.DataType.keys())


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1.0, 20.5, 1e6])
def test_seconds_survive_to_the_nanosecond(seconds: float) -> None:
    assert codec.decode_duration(codec.encode_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


def test_negative_seconds_count_as_none() -> None:
    assert codec.decode_duration(codec.encode_duration(-1.0)) == 0


@pytest.mark.parametrize(("max_wait_s", "expected"), [(0.0, 0.0), (2.5, 2.5), (20.0, 20.0), (1e9, 20.0), (-1.0, 0.0)])
def test_wait_is_bounded_by_20_s(max_wait_s: float, expected: float) -> None:
    request = chief_service_pb2.GetModelRequest(max_wait=codec.encode_duration(max_wait_s))
    assert codec_chief.decode_max_wait(request) == expected
    assert codec_chief.decode_max_wait(chief_service_pb2.GetModelRequest(max_wait=codec_chief.encode_max_wait(max_wait_s))) == expected


def test_wait_that_is_left_out_is_20_s() -> None:
    assert codec_chief.decode_max_wait(chief_service_pb2.DequeueTokenRequest()) == 20.0


def test_index_that_no_worker_can_have_is_refused_before_it_is_sent() -> None:
    with pytest.raises(errors.InvalidSpec, match="worker index: got -1, want 0 to"):
        chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=-1, host="h", pid=1, request_id=2)


def test_contributors_are_sorted_whatever_their_order_on_the_wire() -> None:
    ids = [shard.PushId(worker=worker, incarnation=1, sequence=1) for worker in (2, 0, 1)]
    message = parameter_service_pb2.ApplyStepRequest(contributors=[codec.encode_push_id(each) for each in ids])
    assert [each.worker for each in codec_shard.decode_apply_request(message).contributors] == [0, 1, 2]


def test_weights_stay_with_their_contributors() -> None:
    ids = [shard.PushId(worker=worker, incarnation=1, sequence=1) for worker in (2, 0, 1)]
    message = parameter_service_pb2.ApplyStepRequest(contributors=[codec.encode_push_id(each) for each in ids], weights=[0.2, 0.0, 0.1])
    assert codec_shard.decode_apply_request(message).weights == (0.0, 0.1, 0.2)


def test_what_an_older_client_leaves_out_has_its_first_meaning() -> None:
    assert codec_settings.decode_policy(chief_service_pb2.PolicySpec()) == policy_spec.PolicySpec()
    assert codec.decode_sparse_mean(0) is SparseMean.PER_INDEX
    assert codec_chief.decode_commit_result(chief_service_pb2.CommitResult(outcome=1)).weight == 1.0  # type: ignore[arg-type]


def test_a_shard_computes_the_senders_layout_however_tables_and_dense_variables_alternate() -> None:
    optimizers = (ADAM, STATISTIC, None)
    pieces = []
    for number, optimizer in enumerate((*optimizers, *reversed(optimizers), *optimizers)):
        is_sparse = number % 2 == 0 and optimizer is not STATISTIC
        spec = VariableSpec(name=f"v{number}", data_type=DataType.FLOAT32, shape=(2,), optimizer=optimizer, is_sparse=is_sparse)
        pieces.append(VariableSlice(variable=spec, start=0, stop=2))
    sent = dataclasses.replace(SPEC, layout=Layout(pieces))
    received = codec_shard.decode_shard_spec(codec_shard.encode_shard_spec(sent)).layout
    assert (received.offsets, received.tables, received.rules) == (sent.layout.offsets, sent.layout.tables, sent.layout.rules)
