"""Layouts: where variables lie in a shard's arena."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import ALIGNMENT, Layout, VariableSlice, aligned_bytes, check_disjoint
from ps_protocol.model.variables import DataType, VariableSpec
from tests.support.examples import examples


def piece(name: str, *shape: int, dtype: DataType = DataType.FLOAT32, rows: tuple[int, int] | None = None) -> VariableSlice:
    variable = VariableSpec(name=name, data_type=dtype, shape=shape)
    start, stop = rows or (0, variable.num_rows)
    return VariableSlice(variable=variable, start=start, stop=stop)


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
slices = st.lists(st.tuples(st.sampled_from(DataType), shapes), max_size=8).map(
    lambda rows: [piece(f"v{index}", *shape, dtype=dtype) for index, (dtype, shape) in enumerate(rows)]
)


@settings(max_examples=examples(20))
@given(slices)
def test_every_slice_has_its_own_aligned_bytes_in_the_arena_of_its_type(pieces: list[VariableSlice]) -> None:
    layout = Layout(pieces)
    memory = aligned_bytes(layout.nbytes)
    for index, each in enumerate(pieces):
        view = layout.view(memory, index)
        assert view.shape == each.shape
        assert view.dtype == each.variable.data_type.dtype
        assert view.size == 0 or view.ctypes.data % ALIGNMENT == 0
        view += index + 1
    for index in range(len(pieces)):
        assert (layout.view(memory, index) == index + 1).all(), "another slice wrote here"
    inside = [
        (a.start, a.stop) for a in layout.arenas for o, s in zip(layout.offsets, pieces, strict=True) if s.nbytes and a.start <= o < a.stop
    ]
    assert len(inside) == sum(1 for each in pieces if each.nbytes)


@settings(max_examples=examples(20))
@given(slices)
def test_arenas_cover_the_memory_float32_first_and_padding_is_zero(pieces: list[VariableSlice]) -> None:
    layout = Layout(pieces)
    memory = aligned_bytes(layout.nbytes)
    for index in range(len(pieces)):
        layout.view(memory, index)[...] = 1
    assert [arena.data_type for arena in layout.arenas] == sorted((a.data_type for a in layout.arenas), key=list(DataType).index)
    assert sum(arena.stop - arena.start for arena in layout.arenas) == layout.nbytes
    ones = sum(float(layout.arena(memory, arena).astype(float).sum()) for arena in layout.arenas)
    assert ones == sum(each.nbytes // each.variable.data_type.itemsize for each in pieces)


def test_the_hash_of_a_layout_changes_with_order_shape_type_and_rows() -> None:
    a, b = piece("a", 3), piece("b", 3)
    assert Layout([a, b]).hash == Layout([a, b]).hash
    assert Layout([a, b]) == Layout([a, b])
    others = [[b, a], [a], [piece("a", 4), b], [piece("a", 3, dtype=DataType.FLOAT64), b], [piece("a", 3, rows=(0, 2)), b], []]
    assert len({Layout([a, b]).hash, *(Layout(other).hash for other in others)}) == len(others) + 1


def test_the_hash_of_a_layout_is_the_same_in_every_release() -> None:
    layout = Layout([piece("layer1/weight", 784, 10), piece("é", dtype=DataType.FLOAT64), piece("b", 10, rows=(3, 7))])
    assert layout.hash == "ce6ed145e8b26158293818f67177022f"


def test_scalar_and_zero_size_variables_have_a_place() -> None:
    layout = Layout([piece("empty", 0, 5), piece("scalar"), piece("hollow", 5, 0)])
    memory = aligned_bytes(layout.nbytes)
    assert layout.nbytes == ALIGNMENT
    assert [layout.view(memory, index).shape for index in range(3)] == [(0, 5), (), (5, 0)]
    assert layout.slices[0].is_whole
    assert layout.slices[1].is_whole


def test_a_slice_has_the_shape_and_bytes_of_its_rows() -> None:
    rows = piece("w", 10, 4, rows=(2, 5))
    assert (rows.shape, rows.row_bytes, rows.nbytes, rows.is_whole) == ((3, 4), 16, 48, False)


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 11), (11, 11)])
def test_rows_outside_of_the_variable_are_refused(rows: tuple[int, int]) -> None:
    with pytest.raises(InvalidSpec, match=r"variable 'w': rows .* want rows within 0 to 10"):
        piece("w", 10, 4, rows=rows)


def test_a_row_has_one_place() -> None:
    check_disjoint([piece("w", 10, rows=(5, 10)), piece("v", 10), piece("w", 10, rows=(0, 5)), piece("z", 0)])
    for twice in (
        [piece("w", 10, rows=(0, 6)), piece("w", 10, rows=(5, 10))],
        [piece("w", 10), piece("w", 10)],
        [piece("w", 0), piece("w", 0)],
        [piece("w", 10, rows=(0, 5)), piece("w", 11, rows=(5, 10))],
    ):
        with pytest.raises(InvalidSpec, match=r"variable 'w'.* occurs? twice"):
            check_disjoint(twice)


def test_aligned_bytes_are_zero_and_aligned() -> None:
    for size in (0, 1, 64, 1000):
        memory = aligned_bytes(size)
        assert memory.nbytes == size
        assert not memory.any()
        assert size == 0 or memory.ctypes.data % ALIGNMENT == 0
        assert memory.dtype == np.uint8
