"""Values that travel, each with every field set to something that tells it from the others. Claims nothing."""

import dataclasses

from ps_protocol.model import policy
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacedSlice, PlacementPolicy
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
from ps_protocol.roles import chief, identity, shard
from ps_protocol.roles.identity import ProtocolVersion

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
    policy.PolicySpec(),
    policy.PolicySpec(tokens=policy.TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=2, total_num_replicas=3),
    policy.PolicySpec(name=policy.PolicyName.SSP, staleness=4, max_staleness=0, too_stale=policy.TooStale.SCALE),
    policy.PolicySpec(name=policy.PolicyName.ASYNC, use_locking=False),
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
IDENTITY = identity.Identity(cluster="job", role=identity.Role.PARAMETER_SERVER, index=1, process_incarnation=(1 << 64) - 1)
VERSION = ProtocolVersion(major=1, minor=2)
