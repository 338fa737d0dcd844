"""Claims about sums of sparse gradients: merging, means, and the repair of unsorted and repeated indices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import IndexOutOfRange, ShapeMismatch
from ps_protocol.model.variables import Array, DataType, SparseMean
from ps_protocol.roles.accumulators import UNKNOWN, AccumulatorSpec, Reduction
from ps_server.accumulators.rounds import ConditionalAccumulator, Gradient, SparseSum, combined


def accumulator(
    shape: tuple[int, ...] | None = (4, 1),
    *,
    reduction: Reduction = Reduction.MEAN,
    mean: SparseMean = SparseMean.PER_INDEX,
    data_type: DataType = DataType.FLOAT32,
) -> ConditionalAccumulator:
    spec = AccumulatorSpec(name="s", data_type=data_type, shape=shape, reduction=reduction, is_sparse=True, sparse_mean=mean)
    return ConditionalAccumulator(spec, SparseSum(spec))


def push(acc: ConditionalAccumulator, indices: list[int], values: object, *, whole: tuple[int, ...] | None = None, step: int = 0) -> bool:
    elements = np.asarray(values, acc.spec.data_type.dtype)
    return acc.apply(combined(Gradient(elements, np.asarray(indices, np.int64), whole), acc.spec), local_step=step)


def take(acc: ConditionalAccumulator, num_required: int = 1) -> tuple[list[int], Array, tuple[int, ...]]:
    taken = acc.take(num_required).taken
    assert taken is not None
    assert taken.values is not None
    assert taken.indices is not None
    assert taken.dense_shape is not None
    return taken.indices.tolist(), taken.values, taken.dense_shape


def test_each_row_is_divided_by_those_who_have_it() -> None:
    acc = accumulator()
    push(acc, [0], [[4.0]])
    push(acc, [1], [[8.0]])
    indices, values, shape = take(acc, 2)
    assert (indices, values.tolist(), shape) == ([0, 1], [[4.0], [8.0]], (4, 1))


def test_per_replica_divides_every_row_by_all_as_a_dense_mean_does() -> None:
    acc = accumulator(mean=SparseMean.PER_REPLICA)
    push(acc, [0], [[4.0]])
    push(acc, [1], [[8.0]])
    assert take(acc, 2)[1].tolist() == [[2.0], [4.0]]


def test_repeated_indices_of_one_gradient_are_one_row() -> None:
    acc = accumulator()
    push(acc, [1, 1], [[2.0], [4.0]])
    push(acc, [1], [[6.0]])
    assert take(acc, 2)[:2] == ([1], np.array([[6.0]]))


def test_unsorted_indices_are_merged_rightly() -> None:
    acc = accumulator()
    push(acc, [2, 1], [[2.0], [1.0]])
    push(acc, [1, 2], [[10.0], [20.0]])
    indices, values, _ = take(acc, 2)
    assert (indices, values.tolist()) == ([1, 2], [[5.5], [11.0]])


def test_empty_gradient_counts() -> None:
    acc = accumulator()
    push(acc, [], np.zeros((0, 1)))
    assert acc.count == 1
    indices, values, shape = take(acc)
    assert (indices, values.shape, shape) == ([], (0, 1), (4, 1))


@pytest.mark.parametrize(("shape", "expected"), [(None, (UNKNOWN, 2, 3)), ((UNKNOWN, 2, 3), (UNKNOWN, 2, 3)), ((), (UNKNOWN, 2, 3))])
def test_undeclared_rows_are_minus_one_in_the_shape(shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    acc = accumulator(shape)
    push(acc, [10**12], np.zeros((1, 2, 3)))
    assert take(acc)[2] == expected


@pytest.mark.parametrize("wrong", [-1, 4])
def test_index_out_of_range_is_refused_and_named(wrong: int) -> None:
    acc = accumulator()
    with pytest.raises(IndexOutOfRange, match=rf"indices\[1\] = {wrong}, want 0 to 3"):
        push(acc, [0, wrong], [[1.0], [1.0]])
    assert acc.count == 0


def test_own_shape_of_a_gradient_bounds_its_indices() -> None:
    acc = accumulator(None)
    with pytest.raises(IndexOutOfRange, match="want 0 to 2"):
        push(acc, [3], [[1.0]], whole=(3, 1))
    with pytest.raises(IndexOutOfRange, match="want >= 0"):
        push(acc, [-3], [[1.0]])


@pytest.mark.parametrize(
    ("indices", "shape", "whole"),
    [([0], (), None), ([0, 1], (1, 1), None), ([0], (1, 2), None), ([0], (1,), None), ([0], (1, 1), (4,)), ([0], (1, 1), (5, 1))],
)
def test_wrong_shapes_are_refused_without_effect(indices: list[int], shape: tuple[int, ...], whole: tuple[int, ...] | None) -> None:
    acc = accumulator()
    with pytest.raises(ShapeMismatch):
        acc.check(shape, num_indices=len(indices), dense_shape=whole)
    assert acc.count == 0


def test_first_gradient_of_a_round_fixes_the_shape_of_rows_for_that_round() -> None:
    acc = accumulator(None)
    push(acc, [0], [[1.0]])
    with pytest.raises(ShapeMismatch, match="those of this round"):
        push(acc, [0], [[1.0, 2.0]])
    take(acc)
    assert push(acc, [0], [[1.0, 2.0]], step=1)


gradients = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(-64, 64)), max_size=12), min_size=1, max_size=6)


@given(gradients=gradients, is_sum=st.booleans(), is_per_index=st.booleans())
def test_any_gradients_give_what_a_dense_table_of_them_gives(
    gradients: list[list[tuple[int, int]]], is_sum: bool, is_per_index: bool
) -> None:
    mean = SparseMean.PER_INDEX if is_per_index else SparseMean.PER_REPLICA
    acc = accumulator((10,), reduction=Reduction.SUM if is_sum else Reduction.MEAN, mean=mean, data_type=DataType.FLOAT64)
    total, having = np.zeros(10), np.zeros(10)
    for rows in gradients:
        push(acc, [index for index, _ in rows], [value for _, value in rows])
        np.add.at(total, [index for index, _ in rows], [value for _, value in rows])
        having[sorted({index for index, _ in rows})] += 1
    indices, values, _ = take(acc)
    touched = np.flatnonzero(having)
    divisor = 1 if is_sum else having[touched] if is_per_index else len(gradients)
    assert indices == touched.tolist()
    np.testing.assert_allclose(values, total[touched] / divisor, rtol=1e-12, atol=1e-12)


def test_half_precision_rows_are_summed_in_float32() -> None:
    acc = accumulator((2,), data_type=DataType.FLOAT16)
    push(acc, [0] * 4096, np.ones(4096))
    push(acc, [0], [0.0])
    values = take(acc)[1]
    assert values.tolist() == [2048.0]
    assert values.dtype == np.float16
