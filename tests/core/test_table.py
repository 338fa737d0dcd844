"""A table's rows, slots and journal: an update of rows is that of the same rows of a dense variable, and readers see one step only."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import LimitExceeded, StepGone
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.optimizers import OPTIMIZERS, UPDATE_RULES, OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.numbers import tables as table_module
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.tables import RowGradient, Table
from ps_server.optimizers.formulas import NUM_SCRATCH
from ps_server.optimizers.rule import UpdateRule

NUM_ROWS, WIDTH = 10, 3
GRADIENT_OPTIMIZERS = sorted(OPTIMIZERS.keys() - UPDATE_RULES.keys())


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
    table.settle_journal()


ALL = np.arange(NUM_ROWS)


def _dense_step(rule: UpdateRule, value: Array, slots: list[Array], gradient: Array, *, step: int) -> Array:
    rule.begin(step)
    out = np.empty_like(value)
    rule.apply(value, out=out, slots=slots, gradient=gradient, scratch=[np.empty_like(value) for _ in range(NUM_SCRATCH)])
    rule.advance()
    return out


@pytest.mark.parametrize("block_elements", [1, 7, 1 << 14])
@pytest.mark.parametrize("optimizer", [*GRADIENT_OPTIMIZERS, "lazy adam"])
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
    table.rebase(9)
    np.testing.assert_array_equal(table.take(np.array([1]), step=9)[:, 0], [0.0])
    with pytest.raises(StepGone):
        table.take(ALL, step=8)


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
