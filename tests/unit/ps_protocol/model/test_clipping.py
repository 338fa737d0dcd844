"""Factors computed from norms: over all slices of a variable, over all variables, and over all shards."""

import math

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ClipSpec, scales
from ps_protocol.model.variables import DataType, VariableSpec

ADD = OptimizerSpec(name="add", learning_rate=constant(0.0))


def variable(name: str, rows: int = 4, *, is_sparse: bool = False, optimizer: OptimizerSpec | None = None) -> VariableSpec:
    return VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(rows, 1), is_sparse=is_sparse, optimizer=optimizer)


def whole(spec: VariableSpec) -> VariableSlice:
    return VariableSlice(variable=spec, start=0, stop=spec.shape[0])


SPLIT = variable("split")
HALVES = [VariableSlice(variable=SPLIT, start=0, stop=2), VariableSlice(variable=SPLIT, start=2, stop=4)]
LAYOUTS = [Layout([HALVES[0], whole(variable("a"))]), Layout([HALVES[1], whole(variable("t", is_sparse=True))])]


def test_without_limits_nothing_is_scaled() -> None:
    assert scales(ClipSpec(), layouts=LAYOUTS, sums=[[9.0, 4.0], [16.0, 1.0]]) == ((1.0, 1.0), (1.0, 1.0))


def test_slices_of_one_variable_have_the_norm_and_the_factor_of_the_whole() -> None:
    assert scales(ClipSpec(norm=1.0), layouts=LAYOUTS, sums=[[9.0, 4.0], [16.0, 0.25]]) == ((0.2, 0.5), (0.2, 1.0))


def test_the_global_norm_is_measured_after_the_norms_of_single_variables_are_limited() -> None:
    factors = scales(ClipSpec(norm=3.0, global_norm=1.0), layouts=LAYOUTS, sums=[[9.0, 4.0], [16.0, 1.0]])
    common = 1 / math.sqrt(9 + 4 + 1)
    assert factors[0] == pytest.approx((0.6 * common, common))
    assert factors[1] == pytest.approx((0.6 * common, common))


def test_limits_do_not_scale_plain_updates() -> None:
    layouts = [Layout([whole(variable("w")), whole(variable("n", optimizer=ADD))])]
    assert scales(ClipSpec(global_norm=1.0), layouts=layouts, sums=[[4.0, 0.0]]) == ((0.5, 1.0),)


@pytest.mark.parametrize("square", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_shows_in_the_values(square: float) -> None:
    (factors, _) = scales(ClipSpec(global_norm=1.0), layouts=LAYOUTS, sums=[[square, 4.0], [0.0, 0.0]])
    assert all(math.isnan(factor) for factor in factors)


@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf])
def test_an_invalid_limit_is_refused(limit: float) -> None:
    with pytest.raises(InvalidSpec, match="clip: norm = "):
        ClipSpec(norm=limit)
