"""Elements that are not finite: found in every type and encoding, also among numbers whose squares are too large."""

import numpy as np
import pytest

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.model.layout import Layout, VariableSlice, are_finite, count_nonfinite, gradient_ranges, refuse_nonfinite
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec

BAD = np.array([np.nan, np.inf, -np.inf])
DTYPES = (np.float16, np.float32, np.float64, np.uint16)


def array(dtype: type, values: Array) -> Array:
    """As elements of the type; uint16: as the bits of bfloat16."""
    if dtype is not np.uint16:
        return values.astype(dtype)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 40_000])
def test_nonfinite_values_are_counted_at_any_position(dtype: type, size: int) -> None:
    values = np.random.default_rng(1).standard_normal(size)
    assert are_finite(array(dtype, values))
    assert count_nonfinite(array(dtype, values)) == 0
    for position in (0, size // 2, size - 1):
        changed = values.copy()
        changed[position] = BAD[position % 3]
        assert not are_finite(array(dtype, changed))
        assert count_nonfinite(array(dtype, changed)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_very_large_numbers_count_as_finite(dtype: type) -> None:
    largest = 65504.0 if dtype is np.float16 else 3e38
    values = array(dtype, np.array([largest, -largest, 0.0] * 20_000))
    assert are_finite(values)
    refuse_nonfinite("w", values, who="worker 0, step 0")


def test_an_empty_array_counts_as_finite() -> None:
    assert are_finite(np.zeros(0, np.float32))


def test_the_refusal_of_a_nonfinite_gradient_names_variable_count_and_worker() -> None:
    values = np.array([1.0, *BAD])
    with pytest.raises(NonFiniteGradient, match=r"^'w' has 3 non-finite values \(worker 2, step 88\); nothing was changed$") as caught:
        refuse_nonfinite("w", values, who="worker 2, step 88")
    assert caught.value.facts == {"variable": "w", "count": "3"}
    with pytest.raises(NonFiniteGradient, match="'b' has 1 non-finite value "):
        refuse_nonfinite("b", values[:2], who="worker 2, step 88")


def test_variables_with_plain_updates_are_not_among_the_gradient_ranges() -> None:
    state = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0))
    specs = [
        VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(3,)),
        VariableSpec(name="count", data_type=DataType.FLOAT32, shape=(3,), optimizer=state),
    ]
    layout = Layout([VariableSlice(variable=spec, start=0, stop=3) for spec in specs])
    assert [arena.start for arena in gradient_ranges(layout)] == [0]
    assert len(layout.arenas) == 2
