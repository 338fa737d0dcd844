"""Placement: which shard holds which slice."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.layout import check_disjoint
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place, split_rows
from ps_protocol.model.variables import MAX_VARIABLES, Constraint, ConstraintKind, DataType, Partition, VariableSpec
from tests.support.examples import examples
from tests.support.repository import RECORDED_CASES

CASES = json.loads((RECORDED_CASES / "placement.json").read_text())["cases"]


def variable(name: str, *shape: int, dtype: DataType = DataType.FLOAT32, **options: Any) -> VariableSpec:
    return VariableSpec(name=name, data_type=dtype, shape=shape, **options)


def model(*variables: VariableSpec, strategy: str = "greedy_bytes", split_bytes: int = 0, rate: float = 0.1, **placement: Any) -> ModelSpec:
    optimizer = OptimizerSpec(name="sgd", learning_rate=constant(rate))
    policy = PlacementPolicy(strategy=strategy, split_bytes=split_bytes, **placement)
    return ModelSpec(variables=variables, optimizer=optimizer, placement=policy)


def shards_of(spec: ModelSpec, *, num_shards: int) -> list[int]:
    return [placed.shard for placed in place(spec, num_shards=num_shards)]


models = st.builds(
    lambda shapes, strategy, split: model(*(variable(f"v{i}", *s) for i, s in enumerate(shapes)), strategy=strategy, split_bytes=split),
    st.lists(st.lists(st.integers(0, 20), max_size=2).map(tuple), min_size=1, max_size=8),
    st.sampled_from(["greedy_bytes", "round_robin"]),
    st.integers(0, 200),
)


@settings(max_examples=examples(20))
@given(models, st.integers(1, 5))
def test_every_row_has_exactly_one_place(spec: ModelSpec, num_shards: int) -> None:
    placement = place(spec, num_shards=num_shards)
    check_disjoint([placed.slice for placed in placement])
    rows: dict[str, int] = {}
    for placed in placement:
        assert 0 <= placed.shard < num_shards
        rows[placed.slice.variable.name] = rows.get(placed.slice.variable.name, 0) + placed.slice.stop - placed.slice.start
    assert rows == {each.name: each.num_rows for each in spec.variables}


@settings(max_examples=examples(20))
@given(models, st.integers(1, 5))
def test_layouts_keep_the_order_of_the_placement(spec: ModelSpec, num_shards: int) -> None:
    placement = place(spec, num_shards=num_shards)
    result = layouts(placement, num_shards=num_shards)
    assert len(result) == num_shards
    for shard, layout in enumerate(result):
        assert layout.slices == tuple(placed.slice for placed in placement if placed.shard == shard)


def test_greedy_gives_each_variable_to_the_lightest_shard_and_ties_to_the_lowest() -> None:
    spec = model(variable("a", 10), variable("b", 4), variable("c", 4), variable("d", 3), variable("e", 100))
    assert [placed.shard for placed in place(spec, num_shards=2)] == [0, 1, 1, 1, 0]


def test_round_robin_deals_in_order() -> None:
    spec = model(*(variable(name, 3) for name in "abcde"), strategy="round_robin")
    assert [placed.shard for placed in place(spec, num_shards=3)] == [0, 1, 2, 0, 1]


def test_large_variable_is_split_by_rows_into_at_most_one_piece_a_shard() -> None:
    (small, *large) = place(model(variable("small", 10), variable("large", 1000, 4), split_bytes=8000), num_shards=4)
    assert small.slice.is_whole
    assert [(placed.slice.start, placed.slice.stop) for placed in large] == [(0, 500), (500, 1000)]
    many = place(model(variable("large", 1000, 4), split_bytes=100), num_shards=3)
    assert sorted(placed.shard for placed in many) == [0, 1, 2]
    assert len(place(model(variable("large", 2, 1000), split_bytes=100), num_shards=8)) == 2
    assert len(place(model(variable("large", 1000), split_bytes=0), num_shards=8)) == 1


def test_pieces_differ_by_one_row_at_most() -> None:
    assert split_rows(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert split_rows(0, 1) == [(0, 0)]


def test_a_placement_on_no_parameter_servers_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="no parameter servers"):
        place(model(variable("a", 3)), num_shards=0)


def test_model_must_have_variables_of_different_names() -> None:
    with pytest.raises(InvalidSpec, match="no variables"):
        model()
    with pytest.raises(InvalidSpec, match="'w' occurs twice"):
        model(variable("w", 3), variable("w", 4))
    with pytest.raises(LimitExceeded, match="100000 at most"):
        model(*[variable("w")] * (MAX_VARIABLES + 1))


def test_unknown_strategy_and_negative_threshold_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="placement strategy 'greedy'; want one of greedy_bytes, round_robin"):
        PlacementPolicy(strategy="greedy")
    with pytest.raises(InvalidSpec, match="split_bytes: got -1, want a whole number >= 0"):
        PlacementPolicy(split_bytes=-1)


def test_differences_between_models_are_described() -> None:
    a, b, c = variable("a", 3), variable("b", 4), variable("c", 5)
    assert model(a, b).differences(model(a, b)) == []
    assert model(a, b).differences(model(b, a)) == ["variables come in another order than the cluster's"]
    wrong = model(variable("a", 4), c, rate=0.2, strategy="round_robin")
    differences = model(a, b).differences(wrong)
    assert differences[:3] == [
        "variables['a'].shape is (4,), the cluster's is (3,)",
        "variables['b'] is missing",
        "variables['c'] is not among the cluster's",
    ]
    assert differences[3:] == [
        "optimizer.learning_rate.arguments['value'] is 0.2, the cluster's is 0.1",
        "placement.strategy is 'round_robin', the cluster's is 'greedy_bytes'",
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["strategy"])
def test_variables_lie_where_the_original_puts_them(case: dict[str, Any]) -> None:
    variables = [variable(each["name"], *each["shape"], dtype=DataType(each["dtype"])) for each in case["variables"]]
    assert shards_of(model(*variables, strategy=case["strategy"]), num_shards=case["ps_tasks"]) == case["expect"]


def test_pinned_variables_lie_on_their_shard_take_no_turn_and_count_as_load() -> None:
    variables = [variable(name, 10) for name in "abcde"]
    pins = (("b", 2), ("e", 2))
    assert shards_of(model(*variables, strategy="round_robin", pins=pins), num_shards=3) == [0, 2, 1, 2, 2]
    assert shards_of(model(*variables, pins=pins), num_shards=3) == [0, 2, 1, 0, 2]
    large = variable("large", 1000)
    assert len(place(model(large, split_bytes=100, pins=(("large", 1),)), num_shards=2)) == 1


def test_given_loads_replace_bytes_in_placement_and_slices_share_them() -> None:
    variables = [variable("a", 1000), variable("b", 1), variable("c", 1)]
    assert shards_of(model(*variables, loads=(("a", 1.0), ("b", 10.0), ("c", 1.0))), num_shards=2) == [0, 1, 0]
    cut = variable("cut", 4, partition=Partition(axis=0, num_slices=2))
    assert shards_of(model(cut, variable("d", 1), loads=(("cut", 4.0), ("d", 1.0))), num_shards=2) == [0, 1, 0]


def test_partition_cuts_along_its_axis_the_first_slices_larger_by_one() -> None:
    wide = variable("wide", 2, 5, partition=Partition(axis=1, num_slices=3))
    placed = place(model(wide, strategy="round_robin", split_bytes=1), num_shards=2)
    assert [(each.slice.axis, each.slice.start, each.slice.stop, each.shard) for each in placed] == [
        (1, 0, 2, 0),
        (1, 2, 4, 1),
        (1, 4, 5, 0),
    ]
    whole = variable("whole", 100, partition=Partition(axis=0, num_slices=1))
    assert len(place(model(whole, split_bytes=1), num_shards=3)) == 1


def test_variable_whose_constraint_needs_all_of_it_is_not_split() -> None:
    limited = variable("limited", 100, constraint=Constraint(kind=ConstraintKind.MAX_NORM, high=1.0))
    assert len(place(model(limited, split_bytes=1), num_shards=3)) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: place(model(variable("a", 3), pins=(("a", 2),)), num_shards=2), "'a' is pinned to ps 2; there are 2"),
        (lambda: model(variable("a", 3), pins=(("b", 0),)), "no variable 'b'"),
        (lambda: model(variable("a", 3), loads=(("b", 1.0),)), "no variable 'b'"),
        (lambda: model(variable("a", 3), pins=(("a", -1),)), "pinned to -1"),
        (lambda: model(variable("a", 3), pins=(("a", 0), ("a", 1))), "pins name a variable twice"),
        (lambda: model(variable("a", 3), loads=(("a", float("nan")),)), "the load of variable 'a' is nan"),
        (lambda: model(variable("a", 3, partition=Partition(axis=0, num_slices=2)), pins=(("a", 0),)), "pinned to one ps and cut into 2"),
    ],
)
def test_pins_and_loads_that_make_no_sense_are_refused_with_a_reason(make: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        make()
