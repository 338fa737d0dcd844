"""Examples of every value that travels, made from its types: each field something of its own, and each choice once. Asserts nothing."""

import dataclasses
import enum
import itertools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ps_protocol import errors
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model import policy
from ps_protocol.model.data import DataMarks, DataPass, DataSpec
from ps_protocol.model.keys import KeyKind, KeySpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.merging import MEAN, MergeSpec, merge_of
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacedSlice, PlacementPolicy
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import (
    ANY,
    Constraint,
    ConstraintKind,
    DataType,
    Initializer,
    InitializerKind,
    Partition,
    SparseMean,
    VariableSpec,
)
from ps_protocol.roles import chief, contribution, shard
from ps_protocol.roles.accumulators import AccumulatorSpec, Reduction
from ps_protocol.roles.fence import KEY_BYTES
from ps_protocol.wire.pairs import PAIRS
from tests.support.chief.eras import era

# Values with rules of their own, which their types do not say.

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
ANOTHER_UPDATE = dataclasses.replace(UPDATE, text="v * 2", variables={"v": 3}, arrays={}, numbers={})
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
    policy.PolicySpec(name=policy.PolicyName.OUTER, grace_s=1.5, merge=merge_of("trimmed_mean:0.25")),
)
PLACEMENT = tuple(PlacedSlice(slice=piece, shard=index) for index, piece in enumerate(SLICES))
SPEC = shard.ShardSpec(epoch=1, shard=2, layout=Layout(SLICES), optimizer=ADAM, initial_step=3, attempt=4, max_staged_per_worker=5)
WORKER = chief.Participant(era=era(1), kind=chief.ParticipantKind.WORKER, index=2, incarnation=3)
COMMIT = chief.PushCommit(push_id=ID, step=4, staged=True)
RESULT = chief.CommitResult(outcome=chief.PushOutcome.DUPLICATE, global_step=5, first_outcome=chief.PushOutcome.LATE)
_OF_KIND: dict[ConstraintKind, Any] = {ConstraintKind.FORMULA: {"formula": "max(v, 0)"}, ConstraintKind.CLIP: {"low": -1.5, "high": 2.0}}
DATA = DataSpec(name="train", num_samples=100, range_size=32, num_epochs=2, shuffle_seed=7)
KEYED = [
    VariableSpec(
        name="keyed", data_type=DataType.FLOAT32, shape=(ANY, 2), is_sparse=True, keys=keys,
        initializer=Initializer(kind=InitializerKind.NORMAL, high=1.0),
    )
    for keys in (KeySpec(admit_after=3), KeySpec(kind=KeyKind.UINT64, max_rows=1 << 30, max_age_steps=9, admit_probability=0.25))
]  # fmt: skip
LIKE_TABLE = {kind: dataclasses.replace(TABLE, initializer=Initializer(kind=kind)) for kind in InitializerKind}
# By a type, or by the name of a field: all that stands for it.
KNOWN: dict[Any, tuple[Any, ...]] = {
    DataSpec: (DATA, dataclasses.replace(DATA, num_epochs=0, shuffle_seed=None)),
    DataMarks: (DataMarks(data=DATA, epoch=1, position=1, passes=(DataPass(epoch=1, done=b"\x01"), DataPass(epoch=2, done=b"\x00"))),),
    errors.PsError: (errors.StorageFull("no room", facts={"free": "0"}),),
    Constraint: tuple(Constraint(kind=kind, **_OF_KIND.get(kind, {"high": 2.0})) for kind in ConstraintKind),
    VariableSpec: (DENSE, TABLE, W, B, FORMULAS, *LIKE_TABLE.values(), *KEYED),
    VariableSlice: (*MIXED, *SLICES),
    Layout: (Layout(MIXED), Layout(())),
    OptimizerSpec: (ADAM, CUSTOM, STATISTIC, MODEL.optimizer),
    Schedule: (PIECEWISE, constant(0.1)),
    shard.ShardSpec: (
        dataclasses.replace(SPEC, layout=Layout(MIXED), averages=AVERAGES, clip=CLIP),
        SPEC,
        dataclasses.replace(SPEC, layout=Layout(())),
    ),
    AccumulatorSpec: (
        AccumulatorSpec(
            name="a", data_type=DataType.FLOAT16, shape=(2, 3), is_sparse=True, reduction=Reduction.SUM, sparse_mean=SparseMean.PER_REPLICA
        ),
    ),
    AverageSpec: (AVERAGES,),
    ClipSpec: (CLIP,),
    MergeSpec: (merge_of("trimmed_mean:0.25"), MEAN),
    PlacementPolicy: (RICH_MODEL.placement, MODEL.placement),
    chief.ChangeSettingsRequest: (
        chief.ChangeSettingsRequest(policy=POLICIES[2], request_id=7, max_wait_s=2.0),
        chief.ChangeSettingsRequest(
            hyperparameters=chief.HyperparameterChange(variable="w", learning_rate=PIECEWISE), request_id=8, max_wait_s=0.0
        ),
    ),
    FloatEncoding: (FloatEncoding.FLOAT16, FloatEncoding.AS_IS),
    FormulaUpdate: (UPDATE, ANOTHER_UPDATE),
    shard.SaveProgress: (
        shard.SaveProgress(state=shard.SaveState.FAILED, failure=errors.StorageFull("no room")),
        shard.SaveProgress(state=shard.SaveState.WRITING),
        shard.SaveProgress(
            state=shard.SaveState.DONE, file=shard.CheckpointFile(name="n", shard=3, num_bytes=1 << 40, sha256="0123456789abcdef" * 4)
        ),
    ),
    policy.PolicySpec: POLICIES,
    ModelSpec: (RICH_MODEL, MODEL),
    shard.Metric: (shard.Metric(value=-0.5, weight=0.0), shard.Metric(value=math.inf)),
    "sha256": ("0123456789abcdef" * 4,),
    "manifest_sha256": ("fedcba9876543210" * 4,),
    "max_wait_s": (2.5, 0.0),
    "sparse": ((shard.SparsePart(table=0, num_rows=0), shard.SparsePart(table=2, num_rows=1 << 40)), ()),
    "process_incarnation": ((1 << 64) - 1,),
    "formulas": ((UPDATE, ANOTHER_UPDATE), ()),
    "contributors": ((contribution.PushId(worker=1, incarnation=1, sequence=1), ID),),
    "shard_addresses": (("a:1", "unix:/b"),),
    "chief_address": ("host:5000", ""),
    "session_keys": ((b"k" * KEY_BYTES, b"l" * KEY_BYTES), ()),
}
_NUMBERS = itertools.count(3)


def made(hint: Any, name: str = "") -> list[Any]:
    """Values of this type: the first has something of its own in every field, each other one is another choice in one of them."""
    for known in (name, hint):
        if isinstance(hint, type) and known in KNOWN and isinstance(KNOWN[known][0], hint):
            return list(KNOWN[known])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if name in KNOWN:
        return list(KNOWN[name])
    if origin in (typing.Union, types.UnionType):
        absent = [None] if type(None) in arguments else []
        # A zero that is given is not one that is absent.
        zero = [0] if absent and int in arguments else []
        return [value for one in arguments if one is not type(None) for value in made(one, name)] + zero + absent
    if origin is tuple:
        if ... in arguments:
            return [tuple(made(arguments[0])[0] for _ in range(2)), ()]
        return [tuple(made(one)[0] for one in arguments)]
    if origin is Mapping:
        return [{made(arguments[0])[0]: made(arguments[1])[0]}, {}]
    if dataclasses.is_dataclass(hint):
        fields = [field.name for field in dataclasses.fields(hint) if field.init]
        return _with_fields(hint, {field: one for field, one in typing.get_type_hints(hint).items() if field in fields})
    if issubclass(hint, tuple):
        return _with_fields(hint, typing.get_type_hints(hint))
    if issubclass(hint, enum.Enum):
        return list(reversed(hint))
    number = next(_NUMBERS)
    plain: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [number],
        float: [number / 4],
        str: [f"text-{number}"],
        bytes: [b"%d" % number],
    }
    return plain[hint]


def _with_fields(hint: Any, fields: Mapping[str, Any]) -> list[Any]:
    choices = {field: made(one, field) for field, one in fields.items()}
    first = {field: values[0] for field, values in choices.items()}
    found = []
    for changed in [{}, *({field: value} for field, values in choices.items() for value in values[1:])]:
        try:
            found.append(hint(**{**first, **changed}))
        except errors.InvalidSpec:
            assert changed, f"{hint.__name__} needs an example"
    return found


EXAMPLES: dict[type, list[Any]] = {pair.value: made(pair.value) for pair in PAIRS}
STATUS: chief.ClusterStatus = EXAMPLES[chief.ClusterStatus][0]
