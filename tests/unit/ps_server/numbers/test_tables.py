"""Tables: first values, rows, slots and journal. Updating rows equals updating them in a dense variable; readers see one step only."""

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import IndexOutOfRange, LimitExceeded, StepGone
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, Initializer, InitializerKind, VariableSpec
from ps_server.numbers import tables as table_module
from ps_server.numbers.first_rows import fill_table
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.row_gradients import RowGradient, check_indices, in_order, mean_of_rows
from ps_server.numbers.tables import Table
from ps_server.optimizers.rule import NUM_SCRATCH, UpdateRule

# A table's rows, slots and journal: an update of rows is that of the same rows of a dense variable, and readers see one step only.


NUM_ROWS, WIDTH = 10, 3


def _table(
    optimizer: str = "sgd", data_type: DataType = DataType.FLOAT64, *, step: int = 0, width: int = WIDTH, is_lazy: bool = False
) -> Table:
    spec = VariableSpec(name="emb", data_type=data_type, shape=(NUM_ROWS, width), is_sparse=True)
    hyperparameters = {"lazy": 1.0} if is_lazy else {}
    rule = UpdateRule(OptimizerSpec(name=optimizer, hyperparameters=hyperparameters, learning_rate=constant(0.5)))
    table = Table(VariableSlice(variable=spec, start=0, stop=NUM_ROWS), rule, budget=MemoryBudget(None, owner="ps 0"), step=step)
    table.values[...] = np.arange(NUM_ROWS)[:, None]
    table.fill_initial(step)
    return table


def _gradient(indices: list[int], value: float = 1.0, *, dtype: Any = np.float64, width: int = WIDTH) -> RowGradient:
    return RowGradient(indices=np.array(indices, np.int64), rows=np.full((len(indices), width), value, dtype))


def _step(table: Table, gradient: RowGradient, *, step: int) -> None:
    table._rule.begin(step)
    table.apply(gradient)
    table._rule.advance()
    table.count_growth()


ALL = np.arange(NUM_ROWS)


def _dense_step(rule: UpdateRule, value: Array, slots: list[Array], gradient: Array, *, step: int) -> Array:
    rule.begin(step)
    out = np.empty_like(value)
    rule.apply(value, out=out, slots=slots, gradient=gradient, scratch=[np.empty_like(value) for _ in range(NUM_SCRATCH)])
    rule.advance()
    return out


@pytest.mark.parametrize("block_elements", [1, 7, 1 << 14])
# LAMB needs norms over variables, and refuses tables.
@pytest.mark.parametrize("optimizer", [*sorted({*GRADIENT_OPTIMIZERS} - {"lamb"}), "lazy adam", "lazy adamw"])
@np.errstate(over="ignore")  # as a shard does
def test_rows_are_updated_as_the_optimizer_updates_them(optimizer: str, block_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_BLOCK_ELEMENTS", block_elements)
    table = _table(optimizer.removeprefix("lazy "), is_lazy=optimizer.startswith("lazy"))
    reference = UpdateRule(table._rule.spec)
    value, rng = table.values.copy(), np.random.default_rng(3)
    slots = [np.full_like(value, start) for start in reference.slots.values()]
    for step in range(4):
        indices = np.sort(rng.choice(NUM_ROWS, 4, replace=False))
        rows = rng.standard_normal((4, WIDTH))
        touched = indices if reference.is_lazy else ALL
        dense = np.zeros_like(value)
        dense[indices] = rows
        parts = [slot[touched].reshape(-1) for slot in slots]
        value[touched] = _dense_step(reference, value[touched].reshape(-1), parts, dense[touched].reshape(-1), step=step).reshape(-1, WIDTH)
        for slot, part in zip(slots, parts, strict=True):
            slot[touched] = part.reshape(-1, WIDTH)
        _step(table, RowGradient(indices=indices, rows=rows), step=step)
        np.testing.assert_array_equal(table.values, value)
        for slot, expected in zip(table.slots.values(), slots, strict=True):
            np.testing.assert_array_equal(slot, expected)


@pytest.mark.parametrize("data_type", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_half_precision_rows_are_computed_in_float32(optimizer: str, data_type: DataType) -> None:
    table = _table(optimizer, data_type)
    _step(table, _gradient([2, 5], dtype=np.float32), step=0)
    assert {memory.dtype for memory in (table.values, *table.slots.values())} == {data_type.dtype}
    assert float(table.values[2, 0]) == pytest.approx(1.5, rel=1e-3)
    np.testing.assert_array_equal(table.take(np.array([2, 3]), step=0)[:, 0].astype(np.float32), [2.0, 3.0])
    assert float(table.take(np.array([3]), step=1)[0, 0]) == 3.0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_steps_can_be_read_and_no_more(optimizer: str) -> None:
    table, copies = _table(optimizer, step=5), []
    for step, indices in enumerate(([1, 2], [2, 3], [], [9]), start=5):
        copies.append(table.values.copy())
        _step(table, _gradient(indices), step=step)
        np.testing.assert_array_equal(table.take(ALL[::-1], step=step), copies[-1][::-1])
        np.testing.assert_array_equal(table.take(ALL, step=step + 1), table.values)
        if step > 5:
            with pytest.raises(StepGone, match=f"its rows of step {step - 1} were overwritten, the shard is at step {step + 1}"):
                table.take(ALL, step=step - 1)


def test_a_table_that_is_followed_can_be_taken_back_more_steps_until_half_of_it_has_changed() -> None:
    table, copies = _table(step=0), []
    table.is_followed = True
    for step in range(12):
        copies.append(table.values.copy())
        _step(table, _gradient([step % NUM_ROWS]), step=step)
    least = next(step for step in range(12) if _can_be_taken(table, step))
    for step in range(least, 12):
        np.testing.assert_array_equal(table.take(ALL, step=step), copies[step])
    assert 1 < 12 - least <= NUM_ROWS // 2
    table.is_followed = False
    _step(table, _gradient([0]), step=12)
    assert not _can_be_taken(table, 11)


def test_journals_of_a_table_that_is_followed_take_what_is_free_and_no_more() -> None:
    table = _table(step=0)
    table.is_followed = True
    for step in range(2):
        _step(table, _gradient([step]), step=step)
    table._budget.limit_bytes = table._budget.allocated_bytes
    for step in range(2, 8):
        _step(table, _gradient([step % NUM_ROWS]), step=step)
    assert table._budget.allocated_bytes <= table._budget.limit_bytes
    assert _can_be_taken(table, 7)


def _can_be_taken(table: Table, step: int) -> bool:
    try:
        table.take(ALL, step=step)
    except StepGone:
        return False
    return True


def test_step_without_a_gradient_can_be_read_as_the_one_before() -> None:
    table = _table()
    table.skip()
    for step in (0, 1):
        np.testing.assert_array_equal(table.take(ALL, step=step), table.values)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_reader_of_a_step_sees_it_while_the_next_one_overwrites_it(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_BLOCK_ELEMENTS", WIDTH)
    table = _table(optimizer)
    before, apply, seen = table.values.copy(), table._rule.apply, []

    def watched(*arguments: Array, **others: object) -> None:
        seen.append(table.take(ALL, step=0))
        apply(*arguments, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(table._rule, "apply", watched)
    _step(table, _gradient([1, 4, 8]), step=0)
    assert len(seen) == (3 if optimizer == "sgd" else NUM_ROWS)
    for rows in seen:
        np.testing.assert_array_equal(rows, before)


def test_arrivals_change_rows_in_place_and_keep_no_journal() -> None:
    table = _table()
    table._rule.begin(0)
    table.apply_on_arrival(_gradient([1]))
    table.apply_on_arrival(_gradient([1, 3]))
    np.testing.assert_array_equal(table.take(np.array([1, 3, 4]), step=None)[:, 0], [0.0, 2.5, 4.0])


def _changed(table: Table, since: int) -> list[int] | None:
    rows = table.changed_since(since)
    return None if rows is None else rows.tolist()


def test_rows_that_changed_since_any_step_are_known_from_the_first_question_on() -> None:
    table = _table(step=5)
    _step(table, _gradient([1]), step=5)
    assert _changed(table, 6) is None, "nobody had asked before"
    _step(table, _gradient([2, 7]), step=6)
    _step(table, _gradient([7, 8]), step=7)
    table.skip()
    assert [_changed(table, since) for since in (5, 6, 7, 8, 9)] == [None, [2, 7, 8], [7, 8], [], []]
    _step(table, _gradient([*range(NUM_ROWS)]), step=9)
    assert _changed(table, 8) is None, "all rows are no delta"


def test_after_slots_begin_anew_all_rows_have_changed() -> None:
    table = _table("adagrad")
    assert _changed(table, 0) is None
    _step(table, _gradient([1]), step=0)
    table.renew_slots()
    _step(table, _gradient([2]), step=1)
    assert [_changed(table, since) for since in (0, 1, 2)] == [None, None, []]
    _step(table, _gradient([3]), step=2)
    assert _changed(table, 2) == [3]


def test_an_optimizer_that_moves_every_row_leaves_no_marks() -> None:
    table = _table("adam")
    assert not table._is_lazy
    for step in range(2):
        assert _changed(table, step) is None
        _step(table, _gradient([1]), step=step)


def test_marks_for_which_there_is_no_memory_are_not_kept() -> None:
    table = _table()
    table._budget.limit_bytes = table._budget.allocated_bytes + 4 * NUM_ROWS - 1
    assert [_changed(table, 0), _changed(table, 0)] == [None, None]
    table._budget.limit_bytes += 1
    assert [_changed(table, 0), _changed(table, 0)] == [None, []]


def test_memory_is_that_of_rows_and_slots_and_of_rows_touched() -> None:
    budget = MemoryBudget(None, owner="ps 0")
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(1000, 16), is_sparse=True)
    rule = UpdateRule(OptimizerSpec(name="adam", hyperparameters={"lazy": 1.0}, learning_rate=constant(0.5)))
    table = Table(VariableSlice(variable=spec, start=0, stop=1000), rule, budget=budget, step=0)
    assert budget.allocated_bytes == 3 * spec.nbytes
    _step(table, _gradient(list(range(0, 100, 10)), dtype=np.float32, width=16), step=0)
    assert budget.allocated_bytes == 3 * spec.nbytes + 10 * (8 + 64)
    table.release()
    assert budget.allocated_bytes == 0


def test_table_that_does_not_fit_allocates_nothing() -> None:
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(1000, 16), is_sparse=True)
    rule = UpdateRule(OptimizerSpec(name="adagrad", learning_rate=constant(0.5)))
    budget = MemoryBudget(2 * spec.nbytes - 1, owner="ps 0")
    with pytest.raises(LimitExceeded, match="variable 'emb'"):
        Table(VariableSlice(variable=spec, start=0, stop=1000), rule, budget=budget, step=0)
    assert budget.allocated_bytes == 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_rows_may_have_no_elements(optimizer: str) -> None:
    table = _table(optimizer, width=0)
    _step(table, _gradient([1, 2], width=0), step=0)
    assert table.take(ALL, step=1).shape == (NUM_ROWS, 0)


# First values that a server makes: what was asked for, and the same however the table is cut.


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


@pytest.mark.parametrize("initializer", [NORMAL, UNIFORM, CONSTANT])
def test_rows_without_elements_are_filled_at_once_however_many_there_are(initializer: Initializer) -> None:
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(1 << 58, 0), is_sparse=True, initializer=initializer)
    fill_table(np.empty((1 << 58, 0), np.float32), VariableSlice(variable=spec, start=0, stop=1 << 58), initializer)


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


def test_another_seed_gives_other_values_and_no_row_repeats() -> None:
    other = Initializer(kind=InitializerKind.NORMAL, low=1.0, high=0.25, seed=6)
    assert not np.array_equal(_filled(NORMAL), _filled(other))
    assert len(np.unique(_filled(NORMAL), axis=0)) == 3000


@pytest.mark.parametrize("initializer", [NORMAL, CONSTANT])
def test_one_row_may_begin_with_zeros_however_the_table_is_cut(initializer: Initializer) -> None:
    wanted = _filled(initializer)
    wanted[1500] = 0
    with_zeros = dataclasses.replace(initializer, zero_row=1500)
    parts = [_filled(with_zeros, start, stop) for start, stop in pairwise([0, 1500, 1501, 3000])]
    np.testing.assert_array_equal(np.concatenate(parts), wanted)


def test_a_uniform_initializer_with_equal_bounds_gives_that_value() -> None:
    initializer = Initializer(kind=InitializerKind.UNIFORM, low=0.3, high=0.3)
    np.testing.assert_array_equal(_filled(initializer), np.full((3000, 50), 0.3, np.float32))


def test_table_without_elements_is_filled_with_nothing() -> None:
    assert _filled(NORMAL, width=0).size == 0
    assert _filled(NORMAL, 7, 7).size == 0


# Rows of sparse gradients put in order and averaged: the same as summing them into a dense array, whatever order they come in.


SUM = np.dtype(np.float32)


def _row_gradient(indices: list[int], rows: Any, dtype: Any = np.float32) -> RowGradient:
    return RowGradient(indices=np.array(indices, np.int64), rows=np.array(rows, dtype).reshape(len(indices), -1))


def _random(rng: np.random.Generator, num_rows: int) -> RowGradient:
    count = int(rng.integers(1, 2 * num_rows))
    return RowGradient(indices=rng.integers(0, num_rows, count), rows=rng.standard_normal((count, 3)))


def test_gradient_that_is_in_order_is_left_as_it_is() -> None:
    gradient = _row_gradient([1, 4, 9], [1.0, 2.0, 3.0])
    assert in_order(gradient, sum_dtype=SUM) is gradient


def test_rows_of_one_index_are_summed_and_indices_ascend() -> None:
    ordered = in_order(_row_gradient([4, 1, 4, 4], [1.0, 5.0, 2.0, 4.0]), sum_dtype=SUM)
    assert ordered.indices.tolist() == [1, 4]
    assert ordered.rows.tolist() == [[5.0], [7.0]]


def test_half_precision_rows_are_summed_in_float32() -> None:
    # In float16 the sum of ones stops growing at 2048.
    ordered = in_order(_row_gradient([3] * 4000, np.ones(4000), np.float16), sum_dtype=SUM)
    assert (ordered.rows.dtype, ordered.rows.tolist()) == (SUM, [[4000.0]])
    # In float16 60000 + 60000 is infinite, and 2049 is 2048.
    assert in_order(_row_gradient([3, 3], np.array([60000, 60000]), np.float16), sum_dtype=SUM).rows.tolist() == [[120000.0]]
    assert in_order(_row_gradient([3, 3], np.array([2048, 1]), np.float16), sum_dtype=SUM).rows.tolist() == [[2049.0]]


def test_empty_gradient_stays_empty() -> None:
    empty = RowGradient(indices=np.empty(0, np.int64), rows=np.empty((0, 3), np.float32))
    mean = mean_of_rows([in_order(empty, sum_dtype=SUM)], weights=[1.0], divisor=None, sum_dtype=SUM)
    assert (mean.indices.size, mean.rows.shape[0]) == (0, 0)


# Where the original gives 8 for row 1, since it pairs duplicates up.
def test_unsorted_indices_with_repetitions_give_the_right_mean() -> None:
    first, second = _row_gradient([1, 1], [2.0, 4.0]), _row_gradient([1], [6.0])
    mean = mean_of_rows([in_order(g, sum_dtype=SUM) for g in (first, second)], weights=[1.0, 1.0], divisor=None, sum_dtype=SUM)
    assert mean.rows.tolist() == [[6.0]]
    third, fourth = _row_gradient([2, 1], [2.0, 1.0]), _row_gradient([1, 2], [10.0, 20.0])
    mean = mean_of_rows([in_order(g, sum_dtype=SUM) for g in (third, fourth)], weights=[1.0, 1.0], divisor=None, sum_dtype=SUM)
    assert (mean.indices.tolist(), mean.rows.tolist()) == ([1, 2], [[5.5], [11.0]])


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("seed", range(5))
def test_mean_equals_that_of_dense_sums(seed: int, divisor: float | None) -> None:
    rng, num_rows = np.random.default_rng(seed), 12
    gradients = [_random(rng, num_rows) for _ in range(int(rng.integers(1, 5)))]
    weights = [float(weight) for weight in rng.uniform(0.1, 1.0, len(gradients))]
    total, given = np.zeros((num_rows, 3)), np.zeros(num_rows)
    for gradient, weight in zip(gradients, weights, strict=True):
        np.add.at(total, gradient.indices, gradient.rows * weight)
        given[np.unique(gradient.indices)] += weight
    float64 = DataType.FLOAT64.sum_dtype
    ordered = [in_order(gradient, sum_dtype=float64) for gradient in gradients]
    mean = mean_of_rows(ordered, weights=weights, divisor=divisor, sum_dtype=float64)
    touched = np.flatnonzero(given)
    np.testing.assert_array_equal(mean.indices, touched)
    np.testing.assert_allclose(mean.rows, total[touched] / (given[touched, None] if divisor is None else divisor), rtol=1e-12)


def test_mean_is_memory_of_its_own() -> None:
    gradient = _row_gradient([1], [2.0])
    mean = mean_of_rows([gradient], weights=[0.5], divisor=1.0, sum_dtype=SUM)
    assert (mean.rows.tolist(), gradient.rows.tolist()) == ([[1.0]], [[2.0]])


def test_index_out_of_range_is_named_with_its_position() -> None:
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(40, 1), is_sparse=True)
    first, last = VariableSlice(variable=spec, start=0, stop=10), VariableSlice(variable=spec, start=30, stop=40)
    check_indices(np.array([0, 9]), first)
    check_indices(np.empty(0, np.int64), VariableSlice(variable=spec, start=5, stop=5))
    with pytest.raises(IndexOutOfRange, match=r"^variable 'emb': indices\[2\] = 10, want 0 to 9$"):
        check_indices(np.array([0, 9, 10, 11]), first)
    with pytest.raises(IndexOutOfRange, match=r"indices\[0\] = -1, want 0 to 9, counted from row 30, the first one here"):
        check_indices(np.array([-1]), last)


def test_a_table_that_makes_its_own_first_values_counts_them_and_makes_the_same_ones_in_any_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    initializer = Initializer(kind=InitializerKind.UNIFORM, low=-1.0, high=1.0, seed=5, zero_row=7)
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(NUM_ROWS, WIDTH), is_sparse=True, initializer=initializer)

    def made() -> Table:
        rule = UpdateRule(OptimizerSpec(name="momentum", hyperparameters={"momentum": 0.9}, learning_rate=constant(0.5)))
        table = Table(VariableSlice(variable=spec, start=2, stop=9), rule, budget=MemoryBudget(None, owner="ps 0"), step=0)
        table.fill_initial(0)
        return table

    in_one = made()
    counts: list[int] = []
    monkeypatch.setattr("ps_server.numbers.tables._COUNTED_ELEMENTS", 2 * WIDTH)
    monkeypatch.setattr(Table, "filled_bytes", property(lambda _: 0, lambda _, number: counts.append(number)), raising=False)
    in_several = made()
    assert counts == [0, *(rows * WIDTH * 4 for rows in (2, 4, 6, 7))]
    assert np.array_equal(in_several.values, in_one.values) and not in_several.values[5].any()
    assert all(np.array_equal(in_several.slots[name], slot) for name, slot in in_one.slots.items())
