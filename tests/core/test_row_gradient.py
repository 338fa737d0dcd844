"""Rows of sparse gradients put in order and averaged: the same as summing them into a dense array, whatever order they come in."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import IndexOutOfRange
from ps_protocol.model.variables import Array, DataType
from ps_server.numbers.tables import RowGradient, check_indices, in_order, mean_of_rows

SUM = np.dtype(np.float32)


def _gradient(indices: list[int], rows: Any, dtype: Any = np.float32) -> RowGradient:
    return RowGradient(indices=np.array(indices, np.int64), rows=np.array(rows, dtype).reshape(len(indices), -1))


def _random(rng: np.random.Generator, num_rows: int) -> RowGradient:
    count = int(rng.integers(1, 2 * num_rows))
    return RowGradient(indices=rng.integers(0, num_rows, count), rows=rng.standard_normal((count, 3)))


def test_gradient_that_is_in_order_is_left_as_it_is() -> None:
    gradient = _gradient([1, 4, 9], [1.0, 2.0, 3.0])
    assert in_order(gradient, sum_dtype=SUM) is gradient


def test_rows_of_one_index_are_summed_and_indices_ascend() -> None:
    ordered = in_order(_gradient([4, 1, 4, 4], [1.0, 5.0, 2.0, 4.0]), sum_dtype=SUM)
    assert ordered.indices.tolist() == [1, 4]
    assert ordered.rows.tolist() == [[5.0], [7.0]]


def test_half_precision_rows_are_summed_in_float32() -> None:
    # In float16 the sum of ones stops growing at 2048.
    ordered = in_order(_gradient([3] * 4000, np.ones(4000), np.float16), sum_dtype=SUM)
    assert (ordered.rows.dtype, ordered.rows.tolist()) == (SUM, [[4000.0]])
    # In float16 60000 + 60000 is infinite, and 2049 is 2048.
    assert in_order(_gradient([3, 3], np.array([60000, 60000]), np.float16), sum_dtype=SUM).rows.tolist() == [[120000.0]]
    assert in_order(_gradient([3, 3], np.array([2048, 1]), np.float16), sum_dtype=SUM).rows.tolist() == [[2049.0]]


def test_empty_gradient_stays_empty() -> None:
    empty = RowGradient(indices=np.empty(0, np.int64), rows=np.empty((0, 3), np.float32))
    mean = mean_of_rows([in_order(empty, sum_dtype=SUM)], weights=[1.0], num_contributors=None, sum_dtype=SUM)
    assert (mean.indices.size, mean.rows.shape[0]) == (0, 0)


# Where the original gives 8 for row 1, since it pairs duplicates up.
def test_unsorted_indices_with_repetitions_give_the_right_mean() -> None:
    first, second = _gradient([1, 1], [2.0, 4.0]), _gradient([1], [6.0])
    mean = mean_of_rows([in_order(g, sum_dtype=SUM) for g in (first, second)], weights=[1.0, 1.0], num_contributors=None, sum_dtype=SUM)
    assert mean.rows.tolist() == [[6.0]]
    third, fourth = _gradient([2, 1], [2.0, 1.0]), _gradient([1, 2], [10.0, 20.0])
    mean = mean_of_rows([in_order(g, sum_dtype=SUM) for g in (third, fourth)], weights=[1.0, 1.0], num_contributors=None, sum_dtype=SUM)
    assert (mean.indices.tolist(), mean.rows.tolist()) == ([1, 2], [[5.5], [11.0]])


@pytest.mark.parametrize("num_contributors", [None, 7])
@pytest.mark.parametrize("seed", range(5))
def test_mean_equals_that_of_dense_sums(seed: int, num_contributors: int | None) -> None:
    rng, num_rows = np.random.default_rng(seed), 12
    gradients = [_random(rng, num_rows) for _ in range(int(rng.integers(1, 5)))]
    weights = [float(weight) for weight in rng.uniform(0.1, 1.0, len(gradients))]
    total, counts = np.zeros((num_rows, 3)), np.zeros(num_rows)
    for gradient, weight in zip(gradients, weights, strict=True):
        np.add.at(total, gradient.indices, gradient.rows * weight)
        counts[np.unique(gradient.indices)] += 1
    float64 = DataType.FLOAT64.sum_dtype
    ordered = [in_order(gradient, sum_dtype=float64) for gradient in gradients]
    mean = mean_of_rows(ordered, weights=weights, num_contributors=num_contributors, sum_dtype=float64)
    touched = np.flatnonzero(counts)
    divisor: Array = counts[touched, None] if num_contributors is None else np.full((touched.size, 1), float(num_contributors))
    np.testing.assert_array_equal(mean.indices, touched)
    np.testing.assert_allclose(mean.rows, total[touched] / divisor, rtol=1e-12)


def test_mean_is_memory_of_its_own() -> None:
    gradient = _gradient([1], [2.0])
    mean = mean_of_rows([gradient], weights=[0.5], num_contributors=None, sum_dtype=SUM)
    assert (mean.rows.tolist(), gradient.rows.tolist()) == ([[1.0]], [[2.0]])


def test_index_out_of_range_is_named_with_its_position() -> None:
    check_indices(np.array([0, 9]), num_rows=10, name="emb")
    check_indices(np.empty(0, np.int64), num_rows=0, name="emb")
    with pytest.raises(IndexOutOfRange, match=r"^variable 'emb': indices\[2\] = 10, want 0 to 9$"):
        check_indices(np.array([0, 9, 10, 11]), num_rows=10, name="emb")
    with pytest.raises(IndexOutOfRange, match=r"indices\[0\] = -1, want 0 to 9, counted from row 30, the first one here"):
        check_indices(np.array([-1]), num_rows=10, name="emb", first_row=30)
