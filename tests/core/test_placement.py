"""Claims about which shard holds what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.layout import check_disjoint
from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.placement import layouts, place, split_rows
from ps_protocol.tensors import MAX_VARIABLES, DataType, VariableSpec


def variable(name: str, *shape: int, dtype: DataType = DataType.FLOAT32) -> VariableSpec:
    return VariableSpec(name=name, data_type=dtype, shape=shape)


def model(*variables: VariableSpec, strategy: str = "greedy_bytes", split_bytes: int = 0, rate: float = 0.1) -> ModelSpec:
    optimizer = OptimizerSpec(name="sgd", learning_rate=constant(rate))
    return ModelSpec(variables=variables, optimizer=optimizer, placement=PlacementPolicy(strategy=strategy, split_bytes=split_bytes))


models = st.builds(
    lambda shapes, strategy, split: model(*(variable(f"v{i}", *s) for i, s in enumerate(shapes)), strategy=strategy, split_bytes=split),
    st.lists(st.lists(st.integers(0, 20), max_size=2).map(tuple), min_size=1, max_size=8),
    st.sampled_from(["greedy_bytes", "round_robin"]),
    st.integers(0, 200),
)


@settings(max_examples=20)
@given(models, st.integers(1, 5))
def test_every_row_has_exactly_one_place(spec: ModelSpec, num_shards: int) -> None:
    placement = place(spec, num_shards=num_shards)
    check_disjoint([placed.slice for placed in placement])
    rows: dict[str, int] = {}
    for placed in placement:
        assert 0 <= placed.shard < num_shards
        rows[placed.slice.variable.name] = rows.get(placed.slice.variable.name, 0) + placed.slice.stop - placed.slice.start
    assert rows == {each.name: each.num_rows for each in spec.variables}


@settings(max_examples=20)
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


def test_there_must_be_a_shard() -> None:
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


def test_differences_between_models_are_told_in_words() -> None:
    a, b, c = variable("a", 3), variable("b", 4), variable("c", 5)
    assert model(a, b).differences(model(a, b)) == []
    assert model(a, b).differences(model(b, a)) == ["the variables come in another order"]
    wrong = model(variable("a", 4), c, rate=0.2, strategy="round_robin")
    differences = model(a, b).differences(wrong)
    assert differences[:3] == [
        "variable 'a' has shape (4,) float32, the cluster's has (3,) float32",
        "variable 'b' is missing",
        "variable 'c' is not in the cluster's model",
    ]
    assert differences[3:] == [
        "optimizer 'sgd': learning_rate is 0.2, the cluster's is 0.1",
        "placement: strategy is 'round_robin', the cluster's is 'greedy_bytes'",
    ]
