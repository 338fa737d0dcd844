"""Declarations of variables, and the errors for invalid ones."""

from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.model.spec import ClipSpec
from ps_protocol.model.variables import ConstraintKind, DataType, InitializerKind, Partition, SparseMean, VariableSpec
from worker_client import Buffer, EmbeddingTable, Placement, Variable
from worker_client.model.declarations import Declared, declare

SGD = worker_client.sgd(0.1)


def declared(variables: Any, *, optimizer: Any = SGD, placement: Placement | None = None, averages: Any = None) -> Declared:
    return declare(variables, optimizer=optimizer, placement=placement or Placement(), averages=averages, clip=ClipSpec())


def spec_of(declaration: Any) -> VariableSpec:
    (spec,) = declared({"v": declaration}).model.variables
    return spec


def test_plain_arrays_are_dense_variables_of_their_own_type() -> None:
    found = declared({"a": np.zeros((2, 3), np.float16), "b": [1.0, 2.0], "c": 1.0})
    assert [(s.name, s.data_type, s.shape, s.is_sparse, s.optimizer) for s in found.model.variables] == [
        ("a", DataType.FLOAT16, (2, 3), False, None),
        ("b", DataType.FLOAT64, (2,), False, None),
        ("c", DataType.FLOAT64, (), False, None),
    ]
    assert list(found.values) == ["a", "b", "c"]


def test_a_variable_has_its_own_optimizer_constraint_and_cut() -> None:
    own = worker_client.adam(0.5)
    spec = spec_of(
        Variable(
            np.zeros((4, 6)),
            optimizer=own,
            constraint=worker_client.clip_to(-1, 1),
            partitioner=worker_client.fixed_size_partitioner(3, axis=1),
        )
    )
    assert (spec.optimizer, spec.partition) == (own, Partition(axis=1, num_slices=3))
    assert spec.constraint is not None
    assert (spec.constraint.kind, spec.constraint.low, spec.constraint.high) == (ConstraintKind.CLIP, -1, 1)


def test_a_table_has_values_or_a_shape() -> None:
    values = declared({"t": EmbeddingTable(np.ones((4, 2), np.float32))})
    assert (values.model.variables[0].initializer, list(values.values)) == (None, ["t"])
    made = declared({"t": EmbeddingTable((4, 2), dtype="bfloat16", sparse_mean="per_replica")})
    (spec,) = made.model.variables
    assert (spec.is_sparse, spec.shape, spec.data_type, spec.sparse_mean) == (True, (4, 2), DataType.BFLOAT16, SparseMean.PER_REPLICA)
    assert spec.initializer == worker_client.zeros_initializer()
    assert not made.values
    normal = spec_of(EmbeddingTable([4, 2], initializer=worker_client.normal_initializer(1.0, 0.5, seed=3))).initializer
    assert normal is not None
    assert (normal.kind, normal.low, normal.high, normal.seed) == (InitializerKind.NORMAL, 1.0, 0.5, 3)


@pytest.mark.parametrize(
    ("state", "rule", "decay"),
    [
        (Buffer(np.zeros(2)), "assign_mean", {}),
        (Buffer(np.zeros(2), "add"), "add", {}),
        (Buffer(np.zeros(2), "moving_average", 0.5), "moving_average", {"decay": 0.5}),
    ],
)
def test_state_is_a_variable_with_an_update_rule(state: Buffer, rule: str, decay: dict[str, float]) -> None:
    spec = spec_of(state)
    assert spec.is_state
    assert spec.optimizer is not None
    assert (spec.optimizer.name, spec.optimizer.hyperparameters) == (rule, decay)


def test_placement_is_agreed_on_in_numbers() -> None:
    where = Placement("greedy_bytes", pins={"b": 1}, load=lambda spec: spec.size * 2, split_bytes=100)
    policy = declared({"a": np.zeros(3), "b": np.zeros(4)}, placement=where).model.placement
    assert (policy.loads, policy.pins, policy.split_bytes) == ((("a", 6.0), ("b", 8.0)), (("b", 1),), 100)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"v": Variable(np.zeros(3), optimizer="adam")}, "variable 'v': optimizer: got 'adam', want what lockstep.sgd"),  # type: ignore[arg-type]
        ({"v": Variable(np.zeros(3, np.int64))}, "'v': its initial value is int64"),
        ({"v": Variable(1.0, partitioner=worker_client.fixed_size_partitioner(2))}, "'v': its partitioner is for a scalar"),
        ({"v": EmbeddingTable(np.zeros((2, 2)), initializer=worker_client.zeros_initializer())}, "'v': has values and an initializer"),
        ({"v": EmbeddingTable((2, 2), initializer=np.zeros)}, "'v': initializer: got <built-in function zeros>, want what"),  # type: ignore[arg-type]
        ({"v": Variable(np.zeros(3), constraint="positive")}, "'v': constraint: got 'positive', want what non_negative"),  # type: ignore[arg-type]
        ({"v": Variable(np.zeros(3), partitioner=2)}, "'v': its partitioner is 2, want what fixed_size_partitioner"),  # type: ignore[arg-type]
        ({"v": EmbeddingTable((2, 2), dtype="float33")}, "'v': dtype = 'float33' is not a type"),
        ({"v": EmbeddingTable((2, 2), sparse_mean=["mean"])}, "'v': sparse_mean = \\['mean'\\], want one of"),  # type: ignore[arg-type]
        ({"v": EmbeddingTable((2, 2), sparse_mean="mean")}, "'v': sparse_mean = 'mean', want one of per_index, per_replica"),
        (
            {"v": EmbeddingTable((2, 2), partitioner=worker_client.fixed_size_partitioner(2, axis=1))},
            "'v': a sparse variable can only be cut along",
        ),
        ({"v": EmbeddingTable(1.0)}, "'v': a scalar has no rows"),
        ({"v": EmbeddingTable((2, 2), dtype="int32")}, "'v': dtype int32 is not supported"),
        ({"v": Buffer(np.zeros(2), "sum")}, "'v': update = 'sum', want one of mean, add, moving_average"),
        ({"v": Buffer(np.zeros(2), "moving_average", 2)}, "decay = 2, want 0 to 1"),
        ([("v", np.zeros(2))], "initial_values: got a list, want a dict"),
        ({}, "no variables"),
    ],
)
def test_declarations_that_no_cluster_accepts_are_refused_with_a_reason(variables: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        declared(variables)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"averages": 0.99}, "averages: got 0.99, want what lockstep.moving_average"),
        ({"averages": worker_client.moving_average(0.9, variables=["z"])}, "averages: there is no variable 'z'"),
        ({"averages": worker_client.moving_average(0.9, variables=["t"])}, "averages: variable 't' is a table"),
        ({"averages": worker_client.moving_average(0.9, variables=["n"])}, "averages: variable 'n' is a table or takes plain updates"),
        ({"placement": Placement(pins={"z": 0})}, "placement: there is no variable 'z'"),
        ({"placement": Placement(load=lambda spec: -1.0)}, "the load of variable 't' is -1.0"),
        ({"placement": Placement(load=lambda spec: "x")}, "the load of variable 't' is 'x', want a finite number"),  # type: ignore[arg-type,return-value]
        ({"placement": Placement(load=3)}, "placement: load = 3, want a function"),  # type: ignore[arg-type]
        ({"placement": Placement(pins=["t"])}, "placement: pins = \\['t'\\], want a dict"),  # type: ignore[arg-type]
        ({"optimizer": None}, "optimizer: got None"),
    ],
)
def test_options_that_fit_no_variable_are_refused_with_a_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        declared({"t": EmbeddingTable((2, 2)), "n": Buffer(np.zeros(2)), "w": np.zeros(2)}, **options)


def test_policies_and_placements_are_checked_where_they_are_declared() -> None:
    for make in (
        lambda: worker_client.sync_policy(tokens="lifo"),
        lambda: worker_client.ssp_policy(-1),
        lambda: worker_client.async_policy(use_locking=False, max_staleness=3),
        lambda: worker_client.async_policy(too_stale="forget"),
        lambda: worker_client.async_policy(too_stale=["drop"]),  # type: ignore[arg-type]
        lambda: worker_client.async_policy(use_locking="no"),  # type: ignore[arg-type]
        lambda: worker_client.ssp_policy(1.5),  # type: ignore[arg-type]
        lambda: worker_client.moving_average(1.5),
        lambda: worker_client.moving_average("0.9"),  # type: ignore[arg-type]
        lambda: worker_client.moving_average(0.9, variables="w"),  # type: ignore[arg-type]
        lambda: worker_client.clip_to("-1", 1),  # type: ignore[arg-type]
        lambda: worker_client.max_norm(True),
        lambda: worker_client.uniform_initializer(0, 1, seed=1.5),  # type: ignore[arg-type]
        lambda: worker_client.local(policy="async"),  # type: ignore[arg-type]
        lambda: worker_client.local(num_ps="2"),  # type: ignore[arg-type]
        lambda: worker_client.clip_to(1, -1),
        lambda: worker_client.max_norm(0),
        lambda: worker_client.uniform_initializer(0, 1, seed=-1),
    ):
        with pytest.raises(PsError):
            make()
    assert worker_client.ssp_policy(2, max_staleness=4, too_stale="scale").text == "ssp(2), scales beyond staleness 4"


def test_numbers_of_numpy_are_numbers() -> None:
    two: Any = np.int64(2)
    assert worker_client.ssp_policy(two, max_staleness=two) == worker_client.ssp_policy(2, max_staleness=2)
    assert worker_client.normal_initializer(0, 1, seed=two) == worker_client.normal_initializer(0, 1, seed=2)
    assert worker_client.moving_average(np.float64(0.5)) == worker_client.moving_average(0.5)
    where = Placement(pins={"w": np.int64(0)}, load=lambda spec: np.float32(2))  # type: ignore[dict-item,arg-type,return-value]
    policy = declared({"w": np.zeros(3)}, placement=where).model.placement
    assert (policy.pins, policy.loads) == ((("w", 0),), (("w", 2.0),))
