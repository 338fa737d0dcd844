"""Claims about rounds of dense gradients: what is accepted, who takes, what the mean is."""

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec, ShapeMismatch
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.accumulators import UNKNOWN, AccumulatorSpec, Reduction, Taken
from ps_server.accumulators.rounds import ConditionalAccumulator, DenseSum, Gradient, Take


def accumulator(
    *, shape: tuple[int, ...] | None = (), data_type: DataType = DataType.FLOAT32, reduction: Reduction = Reduction.MEAN
) -> ConditionalAccumulator:
    spec = AccumulatorSpec(name="a", data_type=data_type, shape=shape, reduction=reduction)
    return ConditionalAccumulator(spec, DenseSum(spec))


def gradient(value: object, data_type: DataType = DataType.FLOAT32) -> Gradient:
    return Gradient(np.array(value, data_type.dtype))


def apply(acc: ConditionalAccumulator, value: object, step: int = 0) -> bool:
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


def test_mean_is_of_all_that_are_in_not_only_of_those_required() -> None:
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


def test_taking_raises_the_step_by_one_whatever_it_was() -> None:
    acc = accumulator()
    acc.set_step(7)
    apply(acc, 1.0, 12)
    acc.take(1)
    assert acc.step == 8


def test_later_taking_waits_behind_an_earlier_one_that_wants_more() -> None:
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


def test_withdrawn_taking_lets_the_next_one_through_and_keeps_the_gradients() -> None:
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


def test_setting_the_step_keeps_what_is_in_and_may_go_backwards() -> None:
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
    acc = ConditionalAccumulator(spec, total)
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
