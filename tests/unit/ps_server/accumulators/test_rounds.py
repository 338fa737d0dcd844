"""Rounds of gradients, dense and sparse: accepted gradients, the order of takers, the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, ShapeMismatch
from ps_protocol.model.variables import Array, DataType, SparseMean
from ps_protocol.roles.accumulators import UNKNOWN, AccumulatorSpec, Reduction, Taken
from ps_server.accumulators.rounds import DenseSum, Gradient, Rounds, SparseSum, Take, combined

# Claims about rounds of dense gradients: what is accepted, who takes, what the mean is.


def accumulator(
    *, shape: tuple[int, ...] | None = (), data_type: DataType = DataType.FLOAT32, reduction: Reduction = Reduction.MEAN
) -> Rounds:
    spec = AccumulatorSpec(name="a", data_type=data_type, shape=shape, reduction=reduction)
    return Rounds(spec, DenseSum(spec))


def gradient(value: object, data_type: DataType = DataType.FLOAT32) -> Gradient:
    return Gradient(np.array(value, data_type.dtype))


def apply(acc: Rounds, value: object, step: int = 0) -> bool:
    return acc.apply(gradient(value, acc.spec.data_type), local_step=step)


def taken(take: Take) -> Taken:
    assert take.taken is not None
    return take.taken


def values(take: Take) -> Array:
    result = taken(take).values
    assert result is not None
    return result


def test_gradients_of_the_step_or_later_are_accepted_and_earlier_ones_dropped() -> None:
    acc = accumulator()
    acc.set_step(2)
    assert [apply(acc, 1.0, step) for step in (0, 1, 2, 3, 99)] == [False, False, True, True, True]
    assert acc.count == 3


def test_stale_gradient_is_not_looked_at() -> None:
    acc = accumulator(shape=(2,))
    acc.set_step(1)
    assert apply(acc, [1.0, 2.0, 3.0], 0) is False


def test_a_mean_includes_all_accepted_gradients_not_only_the_required_number() -> None:
    acc = accumulator(shape=(2,))
    for value in (1, 2, 3, 4, 5):
        apply(acc, [value, 10 * value])
    take = acc.take(2)
    assert values(take).tolist() == [3.0, 30.0]
    assert (taken(take).count, taken(take).step, acc.count, acc.step) == (5, 1, 0, 1)


def test_sum_is_not_divided() -> None:
    acc = accumulator(reduction=Reduction.SUM)
    apply(acc, 1.0)
    apply(acc, 2.0)
    assert values(acc.take(1)) == 3.0


def test_a_take_raises_the_step_by_one() -> None:
    acc = accumulator()
    acc.set_step(7)
    apply(acc, 1.0, 12)
    acc.take(1)
    assert acc.step == 8


def test_a_later_take_waits_behind_an_earlier_one_that_requires_more_gradients() -> None:
    acc = accumulator()
    first, second = acc.take(3), acc.take(1)
    apply(acc, 1.0)
    assert (first.taken, second.taken, acc.num_waiting) == (None, None, 2)
    apply(acc, 2.0)
    apply(acc, 3.0)
    assert values(first) == 2.0
    assert second.taken is None
    apply(acc, 5.0, 1)
    assert values(second) == 5.0


def test_a_withdrawn_take_lets_the_next_one_through_and_keeps_the_gradients() -> None:
    acc = accumulator()
    first, second = acc.take(2), acc.take(1)
    apply(acc, 4.0)
    acc.cancel(first)
    acc.cancel(first)
    assert first.taken is None
    assert values(second) == 4.0


@pytest.mark.parametrize("num_required", [0, -1])
def test_taking_nothing_is_refused_at_once(num_required: int) -> None:
    acc = accumulator()
    with pytest.raises(InvalidSpec, match="num_required"):
        acc.take(num_required)
    assert acc.num_waiting == 0


def test_setting_the_step_keeps_accepted_gradients_and_may_go_backwards() -> None:
    acc = accumulator()
    acc.set_step(5)
    apply(acc, 2.0, 5)
    acc.set_step(1)
    assert apply(acc, 4.0, 1)
    assert values(acc.take(2)) == 3.0
    assert acc.step == 2


def test_undeclared_shape_is_fixed_by_the_first_gradient_of_a_round() -> None:
    acc = accumulator(shape=None)
    apply(acc, [1.0, 2.0])
    with pytest.raises(ShapeMismatch, match=r"those of this round have \(2,\)"):
        apply(acc, [1.0])
    assert acc.count == 1
    acc.take(1)
    assert apply(acc, [[1.0]], 1)


def test_partly_declared_shape_is_checked_where_it_is() -> None:
    acc = accumulator(shape=(UNKNOWN, 2))
    assert apply(acc, [[1.0, 2.0]])
    for wrong in ([1.0, 2.0], [[1.0]], 1.0):
        with pytest.raises(ShapeMismatch, match=r"want \(\?, 2\)"):
            apply(acc, wrong)
    assert acc.count == 1


def test_half_precision_sums_do_not_stop_growing() -> None:
    for data_type in (DataType.FLOAT16, DataType.BFLOAT16):
        acc = accumulator(data_type=data_type)
        for _ in range(4096):
            apply(acc, 1.0)
        result = values(acc.take(1))
        assert result == 1.0
        assert result.dtype == data_type.dtype


def test_failed_result_changes_nothing() -> None:
    class Broken(DenseSum):
        is_broken = True

        def result(self, *, count: int) -> Gradient:
            if self.is_broken:
                raise MemoryError
            return super().result(count=count)

    spec = AccumulatorSpec(name="a", data_type=DataType.FLOAT32)
    total = Broken(spec)
    acc = Rounds(spec, total)
    apply(acc, 2.0)
    apply(acc, 4.0)
    with pytest.raises(MemoryError):
        acc.take(2)
    assert (acc.step, acc.count) == (0, 2)
    total.is_broken = False
    apply(acc, 6.0)
    assert acc.count == 0, "the taking that is still queued was served"
    assert acc.step == 1


def test_rows_are_refused() -> None:
    acc = accumulator(shape=(2,))
    with pytest.raises(InvalidSpec, match="dense gradients"):
        acc.apply(Gradient(np.zeros((2,), np.float32), np.array([0, 1]), None), local_step=0)


def test_taken_memory_is_not_touched_again() -> None:
    acc = accumulator(shape=(1,), reduction=Reduction.SUM)
    apply(acc, [1.0])
    first = values(acc.take(1))
    apply(acc, [5.0], 1)
    assert first.tolist() == [1.0]


# Claims about sums of sparse gradients: merging, means, and the repair of unsorted and repeated indices.


def sparse_accumulator(
    shape: tuple[int, ...] | None = (4, 1),
    *,
    reduction: Reduction = Reduction.MEAN,
    mean: SparseMean = SparseMean.PER_INDEX,
    data_type: DataType = DataType.FLOAT32,
) -> Rounds:
    spec = AccumulatorSpec(name="s", data_type=data_type, shape=shape, reduction=reduction, is_sparse=True, sparse_mean=mean)
    return Rounds(spec, SparseSum(spec))


def push(acc: Rounds, indices: list[int], values: object, *, whole: tuple[int, ...] | None = None, step: int = 0) -> bool:
    elements = np.asarray(values, acc.spec.data_type.dtype)
    return acc.apply(combined(Gradient(elements, np.asarray(indices, np.int64), whole), acc.spec), local_step=step)


def take(acc: Rounds, num_required: int = 1) -> tuple[list[int], Array, tuple[int, ...]]:
    taken = acc.take(num_required).taken
    assert taken is not None
    assert taken.values is not None
    assert taken.indices is not None
    assert taken.dense_shape is not None
    return taken.indices.tolist(), taken.values, taken.dense_shape


def test_empty_gradient_counts() -> None:
    acc = sparse_accumulator()
    push(acc, [], np.zeros((0, 1)))
    assert acc.count == 1
    indices, values, shape = take(acc)
    assert (indices, values.shape, shape) == ([], (0, 1), (4, 1))


@pytest.mark.parametrize(("shape", "expected"), [(None, (UNKNOWN, 2, 3)), ((UNKNOWN, 2, 3), (UNKNOWN, 2, 3)), ((), (UNKNOWN, 2, 3))])
def test_an_undeclared_number_of_rows_is_minus_one_in_the_shape(shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    acc = sparse_accumulator(shape)
    push(acc, [10**12], np.zeros((1, 2, 3)))
    assert take(acc)[2] == expected


@pytest.mark.parametrize("wrong", [-1, 4])
def test_index_out_of_range_is_refused_and_named(wrong: int) -> None:
    acc = sparse_accumulator()
    with pytest.raises(IndexOutOfRange, match=rf"indices\[1\] = {wrong}, want 0 to 3"):
        push(acc, [0, wrong], [[1.0], [1.0]])
    assert acc.count == 0


def test_the_shape_given_with_a_gradient_bounds_its_indices() -> None:
    acc = sparse_accumulator(None)
    with pytest.raises(IndexOutOfRange, match="want 0 to 2"):
        push(acc, [3], [[1.0]], whole=(3, 1))
    with pytest.raises(IndexOutOfRange, match="want >= 0"):
        push(acc, [-3], [[1.0]])


@pytest.mark.parametrize(
    ("indices", "shape", "whole"),
    [([0], (), None), ([0, 1], (1, 1), None), ([0], (1, 2), None), ([0], (1,), None), ([0], (1, 1), (4,)), ([0], (1, 1), (5, 1))],
)
def test_wrong_shapes_are_refused_without_effect(indices: list[int], shape: tuple[int, ...], whole: tuple[int, ...] | None) -> None:
    acc = sparse_accumulator()
    with pytest.raises(ShapeMismatch):
        acc.total.check(shape, num_indices=len(indices), dense_shape=whole)
    assert acc.count == 0


def test_first_gradient_of_a_round_fixes_the_shape_of_rows_for_that_round() -> None:
    acc = sparse_accumulator(None)
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
    acc = sparse_accumulator((10,), reduction=Reduction.SUM if is_sum else Reduction.MEAN, mean=mean, data_type=DataType.FLOAT64)
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
    acc = sparse_accumulator((2,), data_type=DataType.FLOAT16)
    push(acc, [0] * 4096, np.ones(4096))
    push(acc, [0], [0.0])
    values = take(acc)[1]
    assert values.tolist() == [2048.0]
    assert values.dtype == np.float16
