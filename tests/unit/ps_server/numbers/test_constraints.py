"""Constraints on variables: the formulas' results for values inside and outside the limits."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.variables import Constraint, ConstraintKind, DataType
from ps_server.numbers.apply import EPSILON, constrain

NON_NEGATIVE = Constraint(kind=ConstraintKind.NON_NEGATIVE)
CLIP = Constraint(kind=ConstraintKind.CLIP, low=-0.5, high=2.0)
MAX_NORM = Constraint(kind=ConstraintKind.MAX_NORM, high=2.0)
UNIT_NORM = Constraint(kind=ConstraintKind.UNIT_NORM)
FORMULA = Constraint(kind=ConstraintKind.FORMULA, formula="v = v / max(norm(v), 1); v = max(v, 0)")


@pytest.mark.parametrize("dtype", [data_type.dtype for data_type in DataType])
@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (NON_NEGATIVE, [[3.0, 0.0], [4.0, 0.0]]),
        (CLIP, [[2.0, -0.5], [2.0, -0.25]]),
        # Norms over axis 0 are 5 and 0.75…: the first column shrinks, the second one stays.
        (MAX_NORM, [[3 * 2 / 5, -0.75], [4 * 2 / 5, -0.25]]),
        (UNIT_NORM, [[3 / 5, -0.75 / 0.625**0.5], [4 / 5, -0.25 / 0.625**0.5]]),
        (FORMULA, [[3 / 25.625**0.5, 0.0], [4 / 25.625**0.5, 0.0]]),
    ],
    ids=["non_negative", "clip", "max_norm", "unit_norm", "formula"],
)
def test_matrix_satisfies_the_constraint(constraint: Constraint, expected: list[list[float]], dtype: np.dtype[Any]) -> None:
    value = np.array([[3.0, -0.75], [4.0, -0.25]], dtype)
    constrain(value, constraint)
    np.testing.assert_allclose(value.astype(np.float64), expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-6)


def test_vector_and_scalar_have_one_norm() -> None:
    vector, scalar = np.array([3.0, 4.0]), np.array(-8.0)
    constrain(vector, MAX_NORM)
    constrain(scalar, UNIT_NORM)
    np.testing.assert_allclose(vector, [1.2, 1.6], rtol=1e-6)
    np.testing.assert_allclose(scalar, -1.0, rtol=1e-6)


def test_zeros_have_no_direction_and_stay() -> None:
    for constraint in (MAX_NORM, UNIT_NORM, FORMULA):
        value = np.zeros((2, 2), np.float32)
        constrain(value, constraint)
        assert not value.any()


def test_the_unit_norm_constraint_divides_by_the_norm_plus_epsilon() -> None:
    value = np.array([EPSILON])
    constrain(value, UNIT_NORM)
    assert value[0] == pytest.approx(0.5)


def test_a_constraint_keeps_nan_visible() -> None:
    for constraint in (NON_NEGATIVE, CLIP, MAX_NORM, UNIT_NORM, FORMULA):
        value = np.array([np.nan, 1.0])
        constrain(value, constraint)
        assert np.isnan(value[0]), constraint


def test_a_variable_without_elements_satisfies_every_constraint() -> None:
    for constraint in (NON_NEGATIVE, CLIP, MAX_NORM, UNIT_NORM, FORMULA):
        constrain(np.zeros((0, 3), np.float32), constraint)


@pytest.mark.parametrize("constraint", [MAX_NORM, UNIT_NORM])
def test_a_variable_without_elements_takes_no_memory_for_its_norms(constraint: Constraint) -> None:
    value = np.zeros((0, 1 << 40))
    constrain(value, constraint)
    assert value.shape == (0, 1 << 40)


def test_a_formula_takes_a_few_blocks_of_memory_however_large_the_variable_is() -> None:
    text = "a = exp(v); b = sqrt(a); c = a * b + abs(v); v = where(v > 0, a + b + c, a - b - c) / norm(c)"
    constraint, value = Constraint(kind=ConstraintKind.FORMULA, formula=text), np.ones(8 << 20, np.float32)
    constrain(value[:1].copy(), constraint)
    tracemalloc.start()
    constrain(value, constraint)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < value.nbytes / 8
    assert value[0] == value[-1] > 0


def test_a_formula_that_needs_too_much_memory_is_no_constraint() -> None:
    text = "; ".join(f"x{number} = exp(v * {number})" for number in range(40)) + "; v = " + " + ".join(f"x{number}" for number in range(40))
    with pytest.raises(InvalidSpec, match=r"values at once, 16 at most"):
        Constraint(kind=ConstraintKind.FORMULA, formula=text)
