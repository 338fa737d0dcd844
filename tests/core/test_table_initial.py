"""First values that a server makes: what was asked for, and the same however the table is cut."""

from itertools import pairwise

import numpy as np
import pytest

from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.variables import Array, DataType, Initializer, InitializerKind, VariableSpec
from ps_server.numbers.tables import fill_table

NORMAL = Initializer(kind=InitializerKind.NORMAL, low=1.0, high=0.25, seed=5)
UNIFORM = Initializer(kind=InitializerKind.UNIFORM, low=-0.5, high=1.5, seed=5)
CONSTANT = Initializer(kind=InitializerKind.CONSTANT, low=0.1)


def _filled(
    initializer: Initializer, start: int = 0, stop: int = 3000, *, data_type: DataType = DataType.FLOAT32, width: int = 50
) -> Array:
    spec = VariableSpec(name="emb", data_type=data_type, shape=(3000, width), is_sparse=True, initializer=initializer)
    values = np.empty((stop - start, width), data_type.dtype)
    fill_table(values, VariableSlice(variable=spec, start=start, stop=stop), initializer)
    return values


@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.FLOAT64, DataType.FLOAT16])
def test_values_have_the_distribution_asked_for(data_type: DataType) -> None:
    normal, uniform = (_filled(kind, data_type=data_type).astype(np.float64) for kind in (NORMAL, UNIFORM))
    assert (normal.mean(), normal.std()) == (pytest.approx(1.0, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert (uniform.mean(), uniform.std()) == (pytest.approx(0.5, abs=0.01), pytest.approx(2 / 12**0.5, abs=0.01))
    assert uniform.min() >= -0.5
    assert uniform.max() <= 1.5
    np.testing.assert_array_equal(_filled(CONSTANT, data_type=data_type), np.full((3000, 50), 0.1, data_type.dtype))


@pytest.mark.parametrize("initializer", [NORMAL, UNIFORM])
def test_values_do_not_depend_on_the_cut(initializer: Initializer) -> None:
    whole = _filled(initializer)
    for cuts in ([0, 1, 1310, 1311, 2999, 3000], [0, 1500, 1500, 3000]):
        parts = [_filled(initializer, start, stop) for start, stop in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_other_seed_gives_other_values_and_no_row_repeats() -> None:
    other = Initializer(kind=InitializerKind.NORMAL, low=1.0, high=0.25, seed=6)
    assert not np.array_equal(_filled(NORMAL), _filled(other))
    assert len(np.unique(_filled(NORMAL), axis=0)) == 3000


def test_range_of_no_width_gives_its_only_value() -> None:
    initializer = Initializer(kind=InitializerKind.UNIFORM, low=0.3, high=0.3)
    np.testing.assert_array_equal(_filled(initializer), np.full((3000, 50), 0.3, np.float32))


def test_table_without_elements_is_filled_with_nothing() -> None:
    assert _filled(NORMAL, width=0).size == 0
    assert _filled(NORMAL, 7, 7).size == 0
