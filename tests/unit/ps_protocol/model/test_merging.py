"""Merging by norms: factors for each contribution, whichever shards a variable is on."""

import math

import pytest

from chief.policies.factory import check_model
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.merging import merge_of
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import NO_CLIP, ClipSpec, ModelSpec, PlacementPolicy, scales, shares
from ps_protocol.model.variables import DataType, VariableSpec

SGD = OptimizerSpec(name="sgd", learning_rate=constant(1.0))
W, B = (VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(4,)) for name in ("w", "b"))
COUNT = VariableSpec(
    name="n", data_type=DataType.FLOAT32, shape=(1,), optimizer=OptimizerSpec(name="add", learning_rate=constant(1.0), hyperparameters={})
)
# "w" on both shards.
LAYOUTS = [
    Layout([VariableSlice(variable=W, start=0, stop=2), VariableSlice(variable=COUNT, start=0, stop=1)]),
    Layout([VariableSlice(variable=W, start=2, stop=4), VariableSlice(variable=B, start=0, stop=4)]),
]
NONE = -1.0


def test_a_bound_is_on_the_norm_over_all_shards_and_leaves_updates_alone() -> None:
    # Norms: sqrt(4 + 4 + 1) = 3, 5 and 100; the third is held to 2 x 4, the others are below twice their others' median.
    sums = [[4.0, 1e9, 9.0, 1e9, 1e4, 1e9], [4.0, 1.0, 16.0, NONE, NONE, NONE]]
    factors, norms = shares(merge_of("bounded_mean:2"), layouts=LAYOUTS, sums=sums, weights=(1.0, 1.0, 1.0))
    assert norms == {}
    assert factors == ((1.0, 1.0, 1.0, 1.0, 0.08, 1.0), (1.0, 1.0, 1.0, 1.0, 0.08, 0.08))


@pytest.mark.parametrize(("square", "factor"), [(1e30, 1.0), (0.0, 1.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_one_contribution_alone_has_nothing_to_be_measured_by(square: float, factor: float) -> None:
    factors, _ = shares(merge_of("bounded_mean:2"), layouts=LAYOUTS[1:], sums=[[square, 0.0]], weights=(1.0,))
    assert factors == ((factor, factor),)


def test_a_norm_that_is_not_finite_bounds_nobody_else() -> None:
    sums = [[math.inf, 0.0, 1.0, 0.0, 9.0, 0.0]]
    factors, _ = shares(merge_of("bounded_mean:2"), layouts=LAYOUTS[1:], sums=sums, weights=(1.0,) * 3)
    assert factors[0][2:] == (1.0, 1.0, 2 / 3, 2 / 3)


def test_a_radial_mean_has_the_weighted_mean_of_norms_over_shards_and_a_zero_has_no_direction() -> None:
    sums = [[9.0, 1.0, 0.0, 1.0], [16.0, 4.0, 0.0, NONE]]
    factors, norms = shares(merge_of("radial_mean"), layouts=LAYOUTS, sums=sums, weights=(1.0, 3.0))
    assert norms == {"w": 1.25, "b": 2.0}
    assert factors == ((0.25, 1.0, 0.0, 1.0), (0.25, 1.0, 0.0, 1.0))
    # The mean that these make has a norm of its own, and is scaled to the one that is wanted, then clipped.
    means = [[0.01, 7.0], [0.0525, 4.0]]
    for limit, expected in ((0.0, 5.0), (0.5, 2.0)):
        found = scales(ClipSpec(norm=limit), layouts=LAYOUTS, sums=means, norms=norms)
        assert found[0][0] == found[1][0] == pytest.approx(expected) and found[0][1] == 1.0
    assert scales(NO_CLIP, layouts=LAYOUTS[1:], sums=[[0.0, math.nan]], norms=norms)[0][0] == 0.0


def test_squares_whose_sum_is_beyond_a_float_are_a_norm_that_is_not_finite() -> None:
    # Elements of 1e154, as float64 has them: a worker's data, of which the chief must not die.
    factors, _ = shares(merge_of("bounded_mean:2"), layouts=LAYOUTS[1:], sums=[[1.2e308, 1.2e308, 4.0, 0.0]], weights=(1.0, 1.0))
    assert factors == ((0.0, 0.0, 1.0, 1.0),)
    means = scales(ClipSpec(global_norm=1.0), layouts=LAYOUTS[1:], sums=[[1.2e308, 1.2e308]])
    assert all(math.isnan(one) for one in means[0])


@pytest.mark.parametrize("number", range(8))
def test_a_trimmed_mean_leaves_one_at_least_of_those_that_there_are(number: int) -> None:
    assert merge_of("trimmed_mean:0.49999999999").num_trimmed(number) == max(0, number - 1) // 2


def test_a_limit_on_elements_does_not_go_with_merging_by_norms() -> None:
    model = ModelSpec(variables=(W,), optimizer=SGD, placement=PlacementPolicy(), clip=ClipSpec(value=1.0))
    check_model(PolicySpec(merge=merge_of("trimmed_mean:0.25")), model)
    with pytest.raises(InvalidSpec, match="clip: by value, which changes the norms that radial_mean goes by"):
        check_model(PolicySpec(merge=merge_of("radial_mean")), model)
