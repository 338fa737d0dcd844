"""An example of every value that travels, with every field set to a value of its own, and its encoder and decoder. Asserts nothing."""

import dataclasses
import math
from typing import Any

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model import policy
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, StepHyperparameter, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacedSlice, PlacementPolicy
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import (
    Constraint,
    ConstraintKind,
    DataType,
    Initializer,
    InitializerKind,
    Partition,
    SparseMean,
    VariableSpec,
)
from ps_protocol.roles import chief, contribution, history, identity, shard
from ps_protocol.roles.identity import ProtocolVersion
from tests.support.chief.eras import era, fence

# Values that travel, each with every field set to something that tells it from the others. Claims nothing.


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
    initializer=Initializer(kind=InitializerKind.UNIFORM, low=-0.5, high=0.5, seed=(1 << 63) - 1, zero_row=0),
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
CUSTOM = OptimizerSpec(
    name="custom", learning_rate=constant(0.1), formula="m = m + g * k; v = v - lr * m", hyperparameters={"k": 0.5}, slot_values={"m": 1.5},
    group="head",
)  # fmt: skip
FORMULAS = VariableSpec(
    name="custom", data_type=DataType.FLOAT32, shape=(2,), optimizer=CUSTOM,
    constraint=Constraint(kind=ConstraintKind.FORMULA, formula="v / max(norm(v), 1)"),
)  # fmt: skip
UPDATE = FormulaUpdate(text="s = s + g; v = v - rate * s", variables={"s": 2, "v": 0}, arrays={"g": 2}, numbers={"rate": -math.inf})
PIECEWISE = Schedule(name="piecewise_constant", boundaries=(10.0, 20.0), values=(0.1, 0.01, 0.001))
ID = contribution.PushId(worker=3, incarnation=2, sequence=1 << 60)
MODEL = ModelSpec(
    variables=(W, B),
    optimizer=OptimizerSpec(name="sgd", learning_rate=PIECEWISE),
    placement=PlacementPolicy(strategy="round_robin", split_bytes=7),
)
RICH_MODEL = dataclasses.replace(
    MODEL,
    variables=(W, TABLE, DENSE, B, FORMULAS),
    placement=PlacementPolicy(loads=(("dense", 2.5), ("table", 1.0)), pins=(("w", 3), ("ä", 0))),
    averages=AVERAGES,
    clip=CLIP,
)
POLICIES = (
    policy.PolicySpec(),
    policy.PolicySpec(tokens=policy.TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=2, total_num_replicas=3),
    policy.PolicySpec(name=policy.PolicyName.SSP, staleness=4, max_staleness=0, too_stale=policy.TooStale.SCALE),
    policy.PolicySpec(name=policy.PolicyName.ASYNC, use_locking=False),
)
PLACEMENT = tuple(PlacedSlice(slice=piece, shard=index) for index, piece in enumerate(SLICES))
SPEC = shard.ShardSpec(epoch=1, shard=2, layout=Layout(SLICES), optimizer=ADAM, initial_step=3, attempt=4, max_staged_per_worker=5)
WORKER = chief.Participant(era=era(1), kind=chief.ParticipantKind.WORKER, index=2, incarnation=3)
BETA1 = StepHyperparameter(group="g", name="beta1", value=0.5)
COMMIT = chief.PushCommit(push_id=ID, step=4, staged=True)
RESULT = chief.CommitResult(outcome=chief.PushOutcome.DUPLICATE, global_step=5, first_outcome=chief.PushOutcome.LATE)
REPORT = shard.ShardReport(
    allocated_bytes=1 << 40,
    num_staged=9,
    num_pushes=10,
    num_stale=11,
    num_duplicates=12,
    num_nonfinite=13,
    num_sharing=14,
    last_apply_s=0.5,
    variables_bytes=1 << 30,
    slots_bytes=1 << 31,
    created_bytes=1 << 29,
    cpu_s=1.5,
)
STATUS = chief.ClusterStatus(
    cluster="job", epoch=1, state=chief.ClusterState.TRAINING, reason="because", global_step=2, max_steps=3, policy=POLICIES[1],
    replicas_to_aggregate=4, total_num_replicas=5, num_contributions=6, waiting_for="worker 1", step_age_s=1.25,
    participants=(
        chief.ParticipantStatus(
            kind=chief.ParticipantKind.OBSERVER, index=1, incarnation=2, host="h", pid=3, state="lapsed", seen_ago_s=0.5,
            num_accepted=4, num_stale=5, num_late=6, is_waiting=True, failure="lost", transport="grpc",
            traffic=chief.WorkerTraffic(sent_bytes=1 << 40, received_bytes=7, num_reads=8, reading_s=0.25, cpu_s=2.5), is_silent=True,
            doing="silent",
        ),
    ),
    shards=(chief.ServerStatus(index=1, address="h:1", is_reachable=True, step=0, arena_bytes=2, num_slices=3, report=REPORT),
            chief.ServerStatus(index=2, address="h:2", is_reachable=False, step=None, arena_bytes=0, num_slices=0)),
    ledger=(
        chief.LedgerEntry(
            step=1,
            contributors=(ID,),
            num_stale=2,
            num_late=3,
            duration_s=0.25,
            apply_duration_s=0.125,
            last_worker=4,
            wait_duration_s=0.0625,
            arrivals_us=(5,),
        ),
    ),
    num_accepted=7, num_stale=8, num_late=9, hyperparameters_version=10, optimizer="adam", max_observed_staleness=11, chief_cpu_s=0.75,
    earlier=chief.ContributionCounts(accepted=12, stale=13, late=14),
    conditions=(
        chief.Condition(
            name="worker silent", level=chief.Level.AMBER, line="Waiting", advice="Look", commands=("a", "b"), is_standstill=True
        ),
    ),
)  # fmt: skip
IDENTITY = identity.Identity(cluster="job", role=identity.Role.PARAMETER_SERVER, index=1, process_incarnation=(1 << 64) - 1)
VERSION = ProtocolVersion(major=1, minor=2)


def _constraint(kind: ConstraintKind) -> Constraint:
    return Constraint(kind=kind, formula="max(v, 0)") if kind is ConstraintKind.FORMULA else Constraint(kind=kind, high=2.0)


# Every value that travels, with what encodes and what decodes it. Claims nothing.


VALUES: list[Any] = [
    W,
    B,
    DENSE,
    TABLE,
    *(dataclasses.replace(DENSE, constraint=_constraint(kind), partition=None) for kind in ConstraintKind),
    *(dataclasses.replace(TABLE, initializer=Initializer(kind=kind)) for kind in InitializerKind),
    *SLICES,
    *MIXED,
    ADAM,
    MODEL.optimizer,
    STATISTIC,
    ID,
    shard.Adoption(step=0, layout_hash="abc"),
    shard.Adoption(step=None, layout_hash=""),
    SPEC,
    dataclasses.replace(SPEC, layout=Layout(())),
    dataclasses.replace(SPEC, layout=Layout(MIXED), averages=AVERAGES, clip=CLIP),
    shard.PushHeader(
        era=era(1),
        push_id=ID,
        step=1 << 40,
        layout_hash="abc",
        sparse=(shard.SparsePart(table=0, num_rows=0), shard.SparsePart(table=2, num_rows=1 << 40)),
        absent=(0, 3, 4),
        metrics={"loss": shard.Metric(value=-0.5, weight=0.0), "räte": shard.Metric(value=math.inf)},
        refused=(3, 1 << 60),
        encoding=FloatEncoding.FLOAT16,
        encoded_bytes=1 << 40,
        gradient_buffer=1,
        secret=(1 << 64) - 1,
        formulas=(UPDATE, dataclasses.replace(UPDATE, text="v * 2", variables={"v": 3}, arrays={}, numbers={})),
    ),
    UPDATE,
    shard.PushHeader(era=era(1), push_id=ID, step=0, layout_hash="abc"),
    history.contributed(shard.PushHeader(era=era(1), push_id=ID, step=0, layout_hash="abc", secret=9), shard=3),
    *(shard.PushReply(result=result, step=7) for result in shard.PushResult),
    shard.ApplyRequest(fence=fence(1, 2), step=3, contributors=(contribution.PushId(worker=1, incarnation=1, sequence=1), ID)),
    shard.ApplyRequest(
        fence=fence(1, 2),
        step=3,
        contributors=(ID,),
        weights=(0.5,),
        scales=(1.0, 0.25),
        discards=(contribution.PushId(worker=1, incarnation=7, sequence=0), ID),
        attached=contribution.StepAttachments(
            numbers=(contribution.GivenNumbers(push_ids=(ID,), hyperparameters=(BETA1,)),),
            user_states=(contribution.UserState(worker=3, json='{"n":1}'),),
        ),
        wants_checksums=True,
    ),
    shard.ShardSettings(
        fence=fence(1, 2),
        version=3,
        accepts_stale=True,
        rejects_nonfinite=True,
        applies_on_arrival=True,
        optimizers=((ADAM, dataclasses.replace(ADAM, learning_rate=PIECEWISE)), (STATISTIC, STATISTIC)),
    ),
    *(shard.RowsRequest(epoch=1, layout_hash="abc", table=2, step=step, slot=slot) for step, slot in ((None, "m"), (0, ""))),
    shard.MetricCell(name="loss", worker=2, total=1.5, weight=2.0, count=1 << 40, last=-1.0),
    shard.ApplyReply(step=3, repeated_request=True),
    shard.ApplyReply(step=3, repeated_request=False, checksums=(0, 2**64 - 1)),
    shard.ShardStatus(
        shard=1,
        process_incarnation=2,
        fence=fence(3, 4),
        step=5,
        report=REPORT,
        settings_version=14,
    ),
    chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=0, host="h", pid=1, request_id=(1 << 64) - 1, takeover=True),
    chief.RegisterRequest(kind=chief.ParticipantKind.OBSERVER, index=None, host="h", pid=1, request_id=2),
    chief.Registration(participant=WORKER, lease_s=10.5, shard_addresses=("a:1", "unix:/b"), global_step=4, may_contribute=True),
    MODEL,
    RICH_MODEL,
    *POLICIES,
    *(
        change
        for change in (
            chief.HyperparameterChange(learning_rate=PIECEWISE),
            chief.HyperparameterChange(variable="w", hyperparameters={"momentum": 0.5}),
        )
    ),
    chief.ChangeSettingsRequest(policy=POLICIES[2], request_id=7, max_wait_s=2.0),
    chief.ChangeSettingsRequest(
        hyperparameters=chief.HyperparameterChange(variable="w", learning_rate=PIECEWISE), request_id=8, max_wait_s=0.0
    ),
    chief.SettingsReply(version=2, step=7),
    *(
        chief.ModelReply(
            state=state,
            placement=PLACEMENT,
            attempt=1,
            max_staged_per_worker=2,
            global_step=3,
            waiting_for="w",
            policy=POLICIES[1],
            attached=contribution.Attachments(user_state='{"n":1}'),
            shards_version=4,
        )
        for state in chief.ModelState
    ),
    chief.AgreedModel(
        state=chief.ModelState.READY,
        model=MODEL,
        placement=PLACEMENT,
        global_step=3,
        optimizers=((ADAM, dataclasses.replace(ADAM, learning_rate=PIECEWISE)),),
    ),
    chief.AgreedModel(state=chief.ModelState.ABSENT, model=None, placement=(), global_step=0),
    dataclasses.replace(COMMIT, staged=False, is_applied=True, attached=contribution.Attachments(user_state='{"n":1}')),
    dataclasses.replace(COMMIT, ranges=(7,), attached=contribution.Attachments(hyperparameters=(BETA1,))),
    chief.CommitResult(outcome=chief.PushOutcome.ACCEPTED, global_step=5, applied_step=0, staleness=3, weight=0.25),
    COMMIT,
    RESULT,
    *(chief.CommitResult(outcome=outcome, global_step=0) for outcome in chief.PushOutcome),
    *(
        chief.TokenReply(result=result, step=3, commit=RESULT, waiting_for="w", global_step=4, reads_latest=True)
        for result in chief.TokenResult
    ),
    chief.TokenReply(result=chief.TokenResult.TOKEN, step=0),
    STATUS,
    *(dataclasses.replace(STATUS, state=state, max_steps=None, participants=()) for state in chief.ClusterState),
    identity.HandshakeRequest(cluster="job", expected_role=identity.Role.CHIEF, expected_index=0, version=VERSION),
    identity.HandshakeRequest(cluster="", expected_role=None, expected_index=None, version=VERSION),
    identity.HandshakeReply(identity=IDENTITY, version=VERSION, epoch=3, warning="careful"),
]
