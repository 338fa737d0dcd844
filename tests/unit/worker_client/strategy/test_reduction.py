"""Sums and means over replicas, of arrays and of rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ps_protocol.errors import DtypeMismatch, ShapeMismatch
from worker_client import IndexedSlices
from worker_client.strategy.reduction import ReduceOp, reduce_all, reduce_op_of

ARRAYS = st.integers(1, 6).flatmap(
    lambda count: hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.just(count), st.integers(0, 3), st.integers(1, 3)),
        elements=st.floats(-100, 100, width=32),
    )
)


@given(ARRAYS)
def test_sum_and_mean_of_arrays_are_those_of_numpy_in_the_order_of_the_replicas(stacked: Any) -> None:
    # Given in another order, they are added in that of the ids.
    contributions = {replica: stacked[replica] for replica in reversed(range(len(stacked)))}
    total = stacked[0].copy()
    for array in stacked[1:]:
        total = total + array
    np.testing.assert_array_equal(reduce_all(ReduceOp.SUM, contributions), total)
    mean = reduce_all(ReduceOp.MEAN, contributions)
    np.testing.assert_array_equal(mean, total / len(stacked))
    assert mean.dtype == stacked.dtype
    assert not mean.flags.writeable


def test_a_reduced_value_shares_no_memory_with_a_contribution() -> None:
    mine = np.ones(3)
    result = reduce_all(ReduceOp.SUM, {0: mine})
    assert not np.shares_memory(result, mine)
    assert mine.flags.writeable


def test_rows_are_concatenated_and_their_mean_is_divided_by_the_replicas() -> None:
    parts = {
        1: IndexedSlices(np.array([5]), np.array([[3.0, 4.0]])),
        0: IndexedSlices(np.array([2, 2]), np.array([[1.0, 2.0], [5.0, 6.0]]), (9, 2)),
    }
    total = reduce_all(ReduceOp.SUM, parts)
    assert total.indices.tolist() == [2, 2, 5]
    assert total.values.tolist() == [[1, 2], [5, 6], [3, 4]]
    assert total.dense_shape == (9, 2)
    assert reduce_all(ReduceOp.MEAN, parts).values.tolist() == [[0.5, 1], [2.5, 3], [1.5, 2]]


def test_a_sum_of_halves_keeps_growing() -> None:
    contributions = {0: np.full(1, 2048, np.float16), **{replica: np.ones(1, np.float16) for replica in range(1, 9)}}
    total = reduce_all(ReduceOp.SUM, contributions)
    assert (total.dtype, total.tolist()) == (np.float16, [2056])


@pytest.mark.parametrize(
    ("dtype", "mean"), [("int8", "float32"), ("uint8", "float32"), ("int16", "float32"), ("int32", "float64"), ("int64", "float64")]
)
def test_the_mean_of_integers_has_the_originals_type_and_a_sum_that_has_no_room_is_refused(dtype: str, mean: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    fits = {0: np.array([high, 3], dtype), 1: np.array([low, 4], dtype)}
    total, average = (reduce_all(op, fits) for op in (ReduceOp.SUM, ReduceOp.MEAN))
    assert (total.dtype, total.tolist()) == (dtype, [low + high, 7])
    assert (average.dtype, average.tolist()) == (mean, [np.dtype(mean).type((low + high) / 2), 3.5])
    rows = {replica: IndexedSlices(np.array([replica]), np.array([[3 + 2 * replica, 4 + 2 * replica]], dtype)) for replica in range(2)}
    assert (reduce_all(ReduceOp.MEAN, rows).values.dtype, reduce_all(ReduceOp.MEAN, rows).values.tolist()) == (mean, [[1.5, 2], [2.5, 3]])
    for edge, step in ((high, 1), (low, -1)):
        if low or step > 0:
            for op in ReduceOp:
                with pytest.raises(DtypeMismatch, match=f"the sum over the replicas is beyond what {dtype} has; cast"):
                    reduce_all(op, {0: np.array([0, edge], dtype), 1: np.array([0, step], dtype)})


def test_contributions_of_other_shapes_types_and_kinds_are_refused_with_the_replica() -> None:
    ones = np.ones(2, np.float32)
    with pytest.raises(ShapeMismatch, match=r"replica 1 contributes shape \(3,\)"):
        reduce_all(ReduceOp.SUM, {0: ones, 1: np.ones(3, np.float32)})
    with pytest.raises(DtypeMismatch, match="replica 1 contributes float64"):
        reduce_all(ReduceOp.SUM, {0: ones, 1: np.ones(2)})
    for op in ReduceOp:
        with pytest.raises(DtypeMismatch, match=r"truth values have no sum or mean; cast with .astype\(np.int64\)"):
            reduce_all(op, {0: True, 1: np.False_})
    for wrong in ("text", np.array([object()]), np.datetime64("2026-01-01")):
        with pytest.raises(DtypeMismatch, match=r"replica 0 contributes .*, which has no sum or mean; want numbers"):
            reduce_all(ReduceOp.SUM, {0: wrong, 1: wrong})
    rows = IndexedSlices(np.array([0]), np.ones((1, 2)), (4, 2))
    with pytest.raises(ValueError, match="replica 0 contributes a ndarray"):
        reduce_all(ReduceOp.SUM, {0: ones, 1: rows})
    with pytest.raises(ShapeMismatch, match=r"rows of a shape \(5, 2\)"):
        reduce_all(ReduceOp.SUM, {0: rows, 1: IndexedSlices(np.array([0]), np.ones((1, 2)), (5, 2))})
    with pytest.raises(ShapeMismatch, match=r"replica 1 contributes rows of shape \(3,\)"):
        reduce_all(ReduceOp.SUM, {0: rows, 1: IndexedSlices(np.array([0]), np.ones((1, 3)))})
    with pytest.raises(ShapeMismatch, match=r"replica 1 contributes values of shape \(1, 2\) for 2 rows"):
        reduce_all(ReduceOp.SUM, {0: rows, 1: IndexedSlices(np.array([0, 1]), np.ones((1, 2)))})
    with pytest.raises(DtypeMismatch, match="replica 1 contributes rows at indices of float64; want integers"):
        reduce_all(ReduceOp.SUM, {0: rows, 1: IndexedSlices(np.array([0.7]), np.ones((1, 2)))})
    with pytest.raises(DtypeMismatch, match="replica 1 contributes rows of float32, another one float64"):
        reduce_all(ReduceOp.SUM, {0: rows, 1: IndexedSlices(np.array([0]), np.ones((1, 2), np.float32))})


def test_a_reduction_is_named_in_any_case_and_others_are_refused() -> None:
    assert reduce_op_of("mean") is ReduceOp.MEAN
    assert reduce_op_of(ReduceOp.SUM) is ReduceOp.SUM
    for wrong in ("max", 1, None):
        with pytest.raises(ValueError, match="want ReduceOp"):
            reduce_op_of(wrong)  # type: ignore[arg-type]
