"""Keyed tables: rows are made by gradients, and behave as those of a table of a size; first values follow from seed and key alone."""

import errno
import itertools
import mmap
import os
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, LimitExceeded, StepGone
from ps_protocol.model.keys import NUM_BUCKETS, KeySpec, buckets_for, key_range, spread
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.model.spec import NO_CLIP
from ps_protocol.model.variables import ANY, Array, DataType, Initializer, InitializerKind, VariableSpec
from ps_protocol.process.history import digest
from ps_server.numbers.first_rows import rows_of_keys
from ps_server.numbers.keyed_rows import KeyedRows
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.row_gradients import RowGradient, check_indices
from ps_server.numbers.tables import SparseStep, Table, TableGroup
from ps_server.optimizers.rule import UpdateRule
from ps_server.shard.table_files import TableFile

WIDTH = 3
ONES = Initializer(kind=InitializerKind.CONSTANT, low=1.0)
UNIFORM = Initializer(kind=InitializerKind.UNIFORM, low=-1.0, high=3.0, seed=4)
NORMAL = Initializer(kind=InitializerKind.NORMAL, low=2.0, high=0.5, seed=4)
KEYS = spread(np.array([7, -7, 0, 1 << 62], np.int64))
TABLE_OPTIMIZERS = sorted(
    name for name in GRADIENT_OPTIMIZERS if not OptimizerSpec(name=name, learning_rate=constant(0.5)).needs_whole_variables
)


def _piece(initializer: Initializer = ONES, *, stop: int = NUM_BUCKETS, data_type: DataType = DataType.FLOAT64) -> VariableSlice:
    spec = VariableSpec(name="emb", data_type=data_type, shape=(ANY, WIDTH), is_sparse=True, initializer=initializer, keys=KeySpec())
    return VariableSlice(variable=spec, start=0, stop=stop)


def _bounded(max_rows: int, optimizer: str = "adagrad", *, start: int = 0, stop: int | None = None, step: int = 0, **options: Any) -> Table:
    variable = replace(_piece(UNIFORM).variable, keys=KeySpec(max_rows=max_rows or None, **options))
    piece = VariableSlice(variable=variable, start=start, stop=variable.num_rows if stop is None else stop)
    rule = UpdateRule(OptimizerSpec(name=optimizer, learning_rate=constant(0.5)))
    return Table(piece, rule, budget=MemoryBudget(None, owner="ps 0"), step=step)


def _table(optimizer: str = "sgd", *, budget: MemoryBudget | None = None, **options: Any) -> Table:
    rule = UpdateRule(OptimizerSpec(name=optimizer, learning_rate=constant(0.5)))
    table = Table(_piece(**options), rule, budget=budget or MemoryBudget(None, owner="ps 0"), step=0)
    table.fill_initial(0)
    return table


def _of_ones(keys: Array, *, width: int = WIDTH) -> RowGradient:
    return RowGradient(indices=keys, rows=np.ones((keys.size, width)))


def _step(table: Table, keys: Array, value: float = 1.0, *, step: int = 0) -> None:
    order = np.argsort(keys)
    rows = (np.arange(1, len(keys) + 1, dtype=np.float64)[:, None] * value * np.ones(WIDTH))[order]
    table._rule.begin(step)
    with np.errstate(all="ignore"):  # as in a step of a shard
        table.apply(RowGradient(indices=keys[order], rows=rows.astype(table.piece.variable.data_type.sum_dtype)))
    table._rule.advance()
    table.count_growth()


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
@pytest.mark.parametrize("data_type", [DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64])
def test_rows_become_what_those_of_a_table_of_a_size_become(optimizer: str, data_type: DataType) -> None:
    keyed = _table(optimizer, data_type=data_type)
    spec = VariableSpec(name="emb", data_type=data_type, shape=(len(KEYS), WIDTH), is_sparse=True, initializer=ONES)
    rule = OptimizerSpec(name=optimizer, learning_rate=constant(0.5))
    if "lazy" in rule.kind.hyperparameters:
        rule = OptimizerSpec(name=optimizer, learning_rate=constant(0.5), hyperparameters={"lazy": 1.0})
    fixed = Table(VariableSlice(variable=spec, start=0, stop=len(KEYS)), UpdateRule(rule), budget=MemoryBudget(None, owner="ps 0"), step=0)
    fixed.fill_initial(0)
    for step, some in enumerate(([0, 1], [1, 2, 3], [0], [3, 2, 1, 0])):
        _step(keyed, KEYS[some], step=step)
        _step(fixed, np.array(some), step=step)
    every = np.arange(len(KEYS))
    assert keyed.take(KEYS, step=None).tobytes() == fixed.take(every, step=None).tobytes()
    for name in fixed.slots:
        assert keyed.take_slot(name, KEYS).tobytes() == fixed.take_slot(name, every).tobytes()


def test_reading_unknown_keys_gives_their_first_values_and_makes_no_row() -> None:
    table = _table("adagrad", initializer=UNIFORM)
    expected = rows_of_keys(UNIFORM, KEYS, width=WIDTH, dtype=np.dtype(np.float64))
    np.testing.assert_array_equal(table.take(KEYS, step=0), expected)
    np.testing.assert_array_equal(table.take_slot("accumulator", KEYS), np.full((4, WIDTH), 0.1))
    assert table.num_rows == 0
    _step(table, KEYS[:1])
    assert table.num_rows == 1
    np.testing.assert_array_equal(table.take(KEYS[1:], step=1), expected[1:])


def test_readers_of_the_step_before_see_it_though_rows_were_made_since() -> None:
    table = _table()
    _step(table, KEYS[:2])
    _step(table, KEYS[1:3], step=1)
    np.testing.assert_array_equal(table.take(KEYS, step=1)[:, 0], [0.5, 0.0, 1.0, 1.0])
    np.testing.assert_array_equal(table.take(KEYS, step=2)[:, 0], [0.5, -0.5, 0.0, 1.0])
    with pytest.raises(StepGone):
        table.take(KEYS, step=0)


def test_on_arrival_rows_are_made_before_they_are_changed() -> None:
    table = _table()
    order = np.sort(KEYS)
    table.make_rows(_of_ones(order), step=0)
    table.apply_on_arrival(RowGradient(indices=order, rows=np.ones((4, WIDTH))))
    np.testing.assert_array_equal(table.take(KEYS, step=None), np.full((4, WIDTH), 0.5))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=30), st.sampled_from([UNIFORM, NORMAL, ONES]), st.integers(1, 9))
def test_first_values_follow_from_seed_and_key_alone(keys: list[int], initializer: Initializer, width: int) -> None:
    spread_keys = spread(np.array(keys, np.int64))
    together = rows_of_keys(initializer, spread_keys, width=width, dtype=np.dtype(np.float32))
    apart = [rows_of_keys(initializer, spread_keys[at : at + 1], width=width, dtype=np.dtype(np.float32)) for at in range(len(keys))]
    np.testing.assert_array_equal(together, np.concatenate([np.empty((0, width), np.float32), *apart]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_first_values_have_the_distribution_that_was_asked_for(dtype: Any) -> None:
    keys = spread(np.arange(20_000))
    uniform = rows_of_keys(UNIFORM, keys, width=5, dtype=np.dtype(dtype))
    normal = rows_of_keys(NORMAL, keys, width=5, dtype=np.dtype(dtype))
    assert (uniform.dtype, normal.dtype) == (dtype, dtype)
    assert -1.0 <= uniform.min() < -0.999 and 2.999 < uniform.max() <= 3.0
    np.testing.assert_allclose(np.quantile(uniform, [0.25, 0.5, 0.75]), [0, 1, 2], atol=0.03)
    assert (normal.mean(), normal.std()) == (pytest.approx(2.0, abs=0.01), pytest.approx(0.5, abs=0.01))
    # Neither elements of a row nor rows of keys that follow each other have anything in common.
    for values in (uniform, normal):
        assert np.abs(np.corrcoef(values.T) - np.eye(5)).max() < 0.03
        assert abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.03
    other = rows_of_keys(Initializer(kind=InitializerKind.UNIFORM, low=-1.0, high=3.0, seed=5), keys, width=5, dtype=np.dtype(dtype))
    assert abs(np.corrcoef(uniform.reshape(-1), other.reshape(-1))[0, 1]) < 0.03


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("width", [16, 64])
def test_a_row_takes_at_most_a_quarter_more_than_key_values_and_slots(optimizer: str, width: int) -> None:
    spec = VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(ANY, width), is_sparse=True, initializer=ONES, keys=KeySpec())
    rule = UpdateRule(OptimizerSpec(name=optimizer, learning_rate=constant(0.5)))
    table = Table(VariableSlice(variable=spec, start=0, stop=NUM_BUCKETS), rule, budget=MemoryBudget(None, owner="ps 0"), step=0)
    needed = 8 + (1 + len(table.slots)) * 4 * width
    table.make_rows(_of_ones(np.sort(spread(np.arange(300_000))), width=0), step=0)
    assert isinstance(table.rows, KeyedRows)
    places = table.rows._index._places
    at_seventy_percent = needed + places.nbytes / (0.7 * places.num_places)
    assert at_seventy_percent <= 1.25 * needed


def test_rows_that_were_not_used_lately_make_room_and_begin_anew() -> None:
    table, keys = _bounded(100), spread(np.arange(300))
    first = rows_of_keys(UNIFORM, keys, width=WIDTH, dtype=np.dtype(np.float64))
    for step in range(20):
        # Some are used in every step, others only in the beginning.
        _step(table, np.concatenate([keys[:30], keys[30 + 3 * step : 33 + 3 * step]]), step=step)
    for step in range(20, 60):
        _step(table, np.concatenate([keys[:30], keys[100 + 5 * (step - 20) : 105 + 5 * (step - 20)]]), step=step)
    assert (table.num_rows, table.rows.num_evicted, table.rows.num_refused) == (100, 90 + 200 - 100, 0)
    assert table.rows.num_found == 59 * 30, "of every step but the first"
    assert isinstance(table.rows, KeyedRows)
    known = table.rows.find(keys, step=60)
    assert (known[:30] >= 0).all(), "what every step uses stays"
    assert (known[-20:] >= 0).all(), "what was used last stays"
    np.testing.assert_array_equal(table.take(keys, step=60)[known < 0], first[known < 0])
    np.testing.assert_array_equal(table.take_slot("accumulator", keys)[known < 0], np.full(((known < 0).sum(), WIDTH), 0.1))
    _step(table, keys[40:41], step=60)
    np.testing.assert_allclose(table.take(keys[40:41], step=61), first[40:41] - 0.5 / np.sqrt(1.1))


def test_readers_of_the_step_before_have_the_rows_that_made_room_since() -> None:
    table, keys = _bounded(50, "sgd"), spread(np.arange(400))
    for step in range(7):
        before, expected = table.rows.num_evicted, table.take(keys, step=step)
        _step(table, keys[50 * step : 50 * step + 50], step=step)
        assert (table.rows.num_evicted > before) == (step > 0)
        assert table.take(keys, step=step).tobytes() == expected.tobytes()


def test_the_same_steps_evict_the_same_keys() -> None:
    random = np.random.default_rng(2)
    batches = [np.unique(spread(random.zipf(1.3, 60) % 5000)) for _ in range(100)]
    tables = [_bounded(300) for _ in range(2)]
    for table in tables:
        for step, keys in enumerate(batches):
            _step(table, keys, step=step)
    contents = [[part.tobytes() for part in table.parts.values()] for table in tables]
    assert tables[0].rows.num_evicted > 100
    assert contents[0] == contents[1]


def test_keys_that_find_no_room_at_all_are_refused_and_counted() -> None:
    table, keys = _bounded(10), np.sort(spread(np.arange(25)))
    first = table.take(keys, step=0)
    _step(table, keys)
    assert (table.num_rows, table.rows.num_refused) == (10, 15)
    changed = (table.take(keys, step=1) != first).any(axis=1)
    assert changed.tolist() == [True] * 10 + [False] * 15
    _step(table, keys, step=1)
    assert (table.num_rows, table.rows.num_evicted, table.rows.num_refused) == (10, 0, 30)


def test_on_arrival_what_finds_no_room_is_left_out() -> None:
    table, keys = _bounded(4, "sgd"), np.sort(spread(np.arange(9)))
    first = table.take(keys, step=None)
    table.make_rows(_of_ones(keys), step=0)
    table.apply_on_arrival(RowGradient(indices=keys, rows=np.ones((9, WIDTH))))
    np.testing.assert_allclose((first - table.take(keys, step=None))[:, 0], [0.5] * 4 + [0] * 5)


def test_on_arrival_a_row_in_use_does_not_age_while_the_process_lives_nor_when_another_continues() -> None:
    table, restored = (_bounded(0, "sgd", max_age_steps=5, step=step) for step in (0, 20))
    keys = np.sort(spread(np.arange(2)))
    first = table.take(keys, step=None)
    for step in range(20):
        # The second key has a gradient once.
        some = keys[: 2 if step == 0 else 1]
        table.make_rows(_of_ones(some), step=step)
        table.apply_on_arrival(_of_ones(some))
    np.testing.assert_allclose((first - table.take(keys, step=None))[:, 0], [10, 0.5])
    parts = table.parts
    begin, chosen = restored.extend(parts["row keys"])
    for name in parts.keys() - {"row keys"}:
        restored.memory_of(name)[begin : begin + chosen.size] = parts[name][chosen]
    np.testing.assert_allclose((first - restored.take(keys, step=None))[:, 0], [10, 0])


def _rows_of(tables: list[Table]) -> dict[int, bytes]:
    """All rows of the slices of a table, by key."""
    return {
        int(key): row.tobytes()
        for table in tables
        for key, row in zip(table.parts["row keys"], np.hstack([table.parts[""], table.parts["accumulator"]]), strict=True)
    }


BOUNDS: list[dict[str, Any]] = [
    {},
    {"max_age_steps": 4},
    {"admit_probability": 0.3},
    {"max_age_steps": 9, "admit_probability": 0.5},
    {"admit_after": 2},
    {"max_age_steps": 9, "admit_after": 2},
]


@pytest.mark.parametrize("options", BOUNDS)
@pytest.mark.parametrize("cut", [(1,), (2, 3), (1, 2, 3, 4, 5, 6, 7)])
def test_the_same_keys_are_admitted_and_evicted_however_the_table_is_cut(cut: tuple[int, ...], options: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    bounds = [0, *cut, buckets_for(150)]
    whole = _bounded(150, **options)
    parts = [_bounded(150, start=start, stop=stop, **options) for start, stop in itertools.pairwise(bounds)]
    for step in range(60):
        keys = np.unique(spread(random.zipf(1.2, 80) % 2000))
        # A row's gradient follows from its key, for `_step` would give it one by its place.
        for table in (whole, *parts):
            least, greatest = table.piece.index_range
            here = keys[(keys >= least) & (keys <= greatest)]
            table._rule.begin(step)
            gradient = RowGradient(indices=here, rows=np.repeat((here % 7)[:, None].astype(np.float64), WIDTH, axis=1))
            table.apply(table.admitted(gradient, counts=True))
            table._rule.advance()
    assert _rows_of(parts) == _rows_of([whole])
    assert sum(table.rows.num_evicted for table in parts) == whole.rows.num_evicted > 0
    assert sum(table.rows.num_refused for table in parts) == whole.rows.num_refused
    assert whole.num_rows <= 150


@pytest.mark.parametrize("max_rows", [1, 7, 40])
def test_in_a_full_bucket_the_row_used_longest_ago_makes_room(max_rows: int) -> None:
    random, table = np.random.default_rng(max_rows), _bounded(max_rows, "sgd")
    num_buckets = buckets_for(max_rows)
    used: list[dict[int, int]] = [{} for _ in range(num_buckets)]
    for step in range(200):
        keys = np.unique(spread(random.integers(0, 3 * max_rows, random.integers(0, max_rows + 3))))
        _step(table, keys, step=step)
        for bucket, rows in enumerate(used):
            here = [int(key) for key in keys if (int(key) + (1 << 63)) * num_buckets >> 64 == bucket]
            limit = max_rows // num_buckets + (bucket < max_rows % num_buckets)
            rows |= {key: step for key in here if key in rows}
            for key in (key for key in here if key not in rows):
                if len(rows) == limit:
                    oldest = max(rows, key=lambda one: (-rows[one], one % (1 << 32)))
                    if rows[oldest] == step:
                        break
                    del rows[oldest]
                rows[key] = step
        assert isinstance(table.rows, KeyedRows)
        assert sorted(table.parts["row keys"]) == sorted(key for rows in used for key in rows)


@pytest.mark.parametrize("max_rows", [0, 40])
@pytest.mark.parametrize("chance", [1.0, 0.4])
def test_a_row_that_no_step_used_for_its_age_is_gone_and_its_memory_goes_to_others(max_rows: int, chance: float) -> None:
    """Against a model in plain Python: what each key has, and what readers of the step before see meanwhile."""
    random, age = np.random.default_rng(3), 5
    table = _bounded(max_rows, "adagrad", max_age_steps=age, admit_probability=chance)
    every = np.sort(spread(np.arange(200)))
    first = rows_of_keys(UNIFORM, every, width=WIDTH, dtype=np.dtype(np.float64))
    rows, sums, used = first.copy(), np.full_like(first, 0.1), np.full(every.size, -1000)
    for step in range(120):
        at = np.flatnonzero(random.random(every.size) < (0.0 if step % 7 == 3 else 0.04))
        before = rows.copy()
        given = table.admitted(RowGradient(indices=every[at], rows=np.ones((at.size, WIDTH))))
        at = np.searchsorted(every, given.indices)
        table._rule.begin(step)
        table.apply(given)
        table._rule.advance()
        known = set(table.parts["row keys"].tolist())
        at = at[[int(key) in known for key in every[at]]]
        sums[at] += 1
        rows[at] -= 0.5 / np.sqrt(sums[at])
        used[at] = step + 1
        anew = (used <= step + 1 - age) | np.array([int(key) not in known for key in every])
        rows[anew], sums[anew] = first[anew], 0.1
        np.testing.assert_allclose(table.take(every, step=step), before, err_msg=f"as of the step before, at {step}")
        np.testing.assert_allclose(table.take(every, step=step + 1), rows, err_msg=f"at {step}")
        np.testing.assert_allclose(table.take_slot("accumulator", every), sums)
    assert table.rows.num_evicted > 50
    assert table.num_rows < 150


def test_a_row_that_begins_anew_by_its_age_counts_as_evicted_and_made() -> None:
    table, keys = _bounded(0, "sgd", max_age_steps=3), np.sort(spread(np.arange(4)))
    for step, some in enumerate((keys, keys[:1], keys[:1], keys[:1], keys)):
        _step(table, some, step=step)
    assert (table.num_rows, table.rows.num_made, table.rows.num_evicted) == (4, 4 + 3, 3)
    assert table.rows.num_found == 4, "of the key that each step used"


@pytest.mark.parametrize("step", [0, (1 << 32) - 5])
def test_rows_are_counted_by_powers_of_two_of_the_steps_since_their_last_use(step: int) -> None:
    table, keys = _bounded(200_000, "sgd", step=step), np.sort(spread(np.arange(100_000)))
    # Also more rows than are counted at once.
    for at, count in enumerate((100_000, 5000, 5000, 600, 70, 8)):
        _step(table, keys[:count], step=step + at)
    assert table.rows.counts_by_age(step=step + 6) == [8, 62 + 530, 4400 + 95_000] + [0] * 29
    assert sum(table.rows.counts_by_age(step=step + 3)[:1]) >= 5000, "of steps that came since, the newest"
    assert _bounded(0, "sgd").rows.counts_by_age(step=0) == []


def test_a_key_is_admitted_with_its_probability_in_each_step_that_has_it() -> None:
    table, keys = _bounded(0, "sgd", admit_probability=0.1), np.sort(spread(np.arange(20_000)))
    known = []
    for step in range(20):
        _step(table, table.admitted(RowGradient(indices=keys, rows=np.empty((keys.size, 0)))).indices, step=step)
        known.append(table.num_rows)
    np.testing.assert_allclose(known, 20_000 * (1 - 0.9 ** np.arange(1, 21)), rtol=0.06)
    again = _bounded(0, "sgd", admit_probability=0.1)
    first = RowGradient(indices=keys, rows=np.empty((keys.size, 0)))
    assert set(again.admitted(first).indices) == set(table.parts["row keys"][: known[0]])


@pytest.mark.parametrize("admit_after", [2, 3, 5])
def test_a_key_is_admitted_the_nth_time_on_whichever_server_and_also_after_a_restoration(admit_after: int) -> None:
    def parts_of(step: int = 0) -> list[Table]:
        return [_bounded(0, "sgd", start=start, stop=stop, step=step, admit_after=admit_after) for start, stop in ((0, 9999), (9999, None))]

    keys, tables, random = np.sort(spread(np.arange(500))), parts_of(), np.random.default_rng(admit_after)
    times, first = np.zeros(keys.size, int), np.concatenate([table.take(keys, step=None) for table in tables[:1]])
    for step in range(12):
        given = np.flatnonzero(random.random(keys.size) < 0.4)
        times[given] += 1
        for table in tables:
            least, greatest = table.piece.index_range
            here = keys[given][(keys[given] >= least) & (keys[given] <= greatest)]
            table._rule.begin(step)
            table.apply(table.admitted(_of_ones(here), counts=True))
            table._rule.advance()
        if step in (3, 6):
            saved, tables = tables, parts_of(step + 1)[:: -1 if step == 3 else 1]
            for table in tables:
                for other in saved:
                    begin, chosen = table.extend(other.parts["row keys"])
                    table.memory_of("")[begin : begin + chosen.size] = other.parts[""][chosen]
                    table.take_counters(other.piece, other.parts["row occurrences"], where="a file")
    lost = sum(np.where(table.rows.find(keys, step=12)[:, None] >= 0, first - table.take(keys, step=None), 0) for table in tables)
    expected = np.maximum(times - admit_after + 1, 0) * 0.5
    np.testing.assert_allclose(lost, np.repeat(expected[:, None], WIDTH, axis=1))
    assert sum(table.num_rows for table in tables) == (times >= admit_after).sum() > 100


@pytest.mark.parametrize("option", [{"admit_probability": 0.5}, {"admit_after": 2}], ids=str)
def test_what_is_not_admitted_changes_no_row_and_no_norm(option: dict[str, Any]) -> None:
    variable = replace(_piece().variable, keys=KeySpec(**option))
    layout = Layout([VariableSlice(variable=variable, start=0, stop=NUM_BUCKETS)])
    rule = UpdateRule(OptimizerSpec(name="sgd", learning_rate=constant(0.5)))
    tables = TableGroup(layout, [rule], clip=NO_CLIP, budget=MemoryBudget(None, owner="ps 0"), step=0)
    table, keys = tables.table(0), np.sort(spread(np.arange(1000)))
    if "admit_after" in option:
        first = SparseStep(gradients=[{0: _of_ones(keys[::2])}], weights=[1.0], scales=[])
        assert tables.sums_of_squares(first) == [0]
        table.admitted(_of_ones(keys[::2]), counts=True)
        table.rows.num_unadmitted = 0
    step = SparseStep(gradients=[{0: _of_ones(keys)}], weights=[1.0], scales=[])
    norms = tables.sums_of_squares(step)
    rule.begin(0)
    tables.apply(step, on_arrival=False)
    assert 400 < table.num_rows < 600
    assert norms == [table.num_rows * WIDTH]
    assert (table.rows.num_made, table.rows.num_unadmitted) == (table.num_rows, 1000 - table.num_rows)
    changed = (table.take(keys, step=1) != table.take(keys, step=0)).all(axis=1)
    assert changed.sum() == table.num_rows


def test_rows_are_counted_in_the_budget_and_given_back() -> None:
    budget = MemoryBudget(1 << 20, owner="ps 0")
    table = _table("momentum", budget=budget)
    before = budget.allocated_bytes
    _step(table, np.sort(spread(np.arange(3000))))
    rows_bytes = 3000 * (8 + 2 * 8 * WIDTH)
    assert rows_bytes < budget.allocated_bytes - before < 3 * rows_bytes
    assert 0 < before < 1 << 15, "an empty index"
    assert table.slots_bytes == 3000 * 8 * WIDTH
    with pytest.raises(LimitExceeded, match="9000000 rows of variable 'emb'"):
        table.extend(spread(np.arange(9_000_000)))
    table.release()
    assert budget.allocated_bytes == 0


def test_a_slice_takes_only_the_keys_of_its_buckets() -> None:
    piece = _piece(stop=NUM_BUCKETS // 2)
    least, greatest = key_range(0, NUM_BUCKETS // 2, num_buckets=NUM_BUCKETS)
    check_indices(np.array([least, greatest]), piece)
    for key in (least - 1 if least > -(1 << 63) else greatest + 1, greatest + 1):
        with pytest.raises(IndexOutOfRange, match=f"indices\\[1\\] = {key}"):
            check_indices(np.array([least, key]), piece)


def test_only_tables_that_make_their_own_rows_have_keys() -> None:
    for changes in ({"is_sparse": False}, {"initializer": None}, {"shape": (10, 2)}):
        options: dict[str, Any] = {"is_sparse": True, "initializer": ONES, "shape": (ANY, 2)} | changes
        with pytest.raises(InvalidSpec):
            VariableSpec(name="emb", data_type=DataType.FLOAT32, keys=KeySpec(), **options)
    zero_row = Initializer(kind=InitializerKind.UNIFORM, high=1.0, zero_row=3)
    with pytest.raises(InvalidSpec, match="rows with keys have no number"):
        VariableSpec(name="emb", data_type=DataType.FLOAT32, shape=(ANY, 2), is_sparse=True, initializer=zero_row, keys=KeySpec())


def _steps(table: Table, *, num_steps: int = 30) -> bytes:
    random = np.random.default_rng(6)
    table.fill_initial(0)
    for step in range(num_steps):
        keys = np.unique(spread(random.zipf(1.2, 200) % 5000))
        table.await_rows(keys.size)
        _step(table, keys, step=step)
        table.await_rows(-keys.size)
        table.prefetch(np.unique(spread(np.arange(5000))))
    return b"".join(part.tobytes() for part in table.parts.values())


def test_rows_in_files_are_those_that_rows_in_memory_are_and_take_no_memory_of_the_budget(tmp_path: Path) -> None:
    budgets = [
        MemoryBudget(None, owner="ps 0"),
        MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")),
    ]
    tables = [_table("adagrad", budget=budget, initializer=UNIFORM) for budget in budgets]
    assert _steps(tables[0]) == _steps(tables[1])
    per_row = [table.bytes_per_new_row for table in tables]
    assert per_row[0] - per_row[1] == 2 * 8 * WIDTH
    assert budgets[0].allocated_bytes - budgets[1].allocated_bytes == tables[0].num_rows * 2 * 8 * WIDTH
    assert tables[1].slots_bytes == tables[0].files_bytes == 0
    assert tables[1].files_bytes == tables[0].num_rows * 2 * 8 * WIDTH
    of_values, of_slots = (memory.ctypes.data for memory in (tables[1].values, tables[1].slots["accumulator"]))
    assert of_slots - of_values == 8 * WIDTH, "a row and its slots are beside each other"
    assert not [*tmp_path.iterdir()], "nothing stays behind"
    tables[1].release()


def test_a_digest_of_rows_in_files_copies_few_of_them_at_a_time(tmp_path: Path) -> None:
    budgets = [
        MemoryBudget(None, owner="ps 0"),
        MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")),
    ]
    tables = [_table("adagrad", budget=budget, initializer=UNIFORM) for budget in budgets]
    keys = spread(np.arange(40_000))
    for table in tables:
        table.extend(keys)
        table.values[: keys.size] = np.arange(keys.size)[:, None]
    arena = np.empty(0, np.uint8)
    in_memory = digest(arena, tables[0].contents)
    tracemalloc.start()
    in_file = digest(arena, tables[1].contents)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert in_file == in_memory
    assert peak_bytes < keys.size * tables[1].row_bytes / 4
    tables[1].release()


def test_a_disk_without_room_refuses_rows_before_any_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table("adagrad", budget=MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")))
    before = _steps(table)

    def full(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        LimitExceeded, match=r"^ps 0: .* its disk has no room for .* MiB more of tables \(No space left on device\); make room"
    ):
        table.await_rows(1_000_000)
    table.await_rows(10)
    table.release()
    assert b"".join(part.tobytes() for part in table.parts.values()) == before
    with pytest.raises(LimitExceeded, match="its disk has no room"):
        # Else a reader of a key without a row would end the process on a disk in memory.
        _table(budget=MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")))


def test_a_disk_keeps_no_room_for_rows_that_a_file_could_not_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table("adagrad", budget=MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")))
    asked = list[int]()
    monkeypatch.setattr(table.rows.file, "reserve", asked.append)
    with monkeypatch.context() as patch:
        patch.setattr(table.rows, "max_rows", 100)
        with pytest.raises(LimitExceeded, match="100 at most on one parameter server"):
            table.extend(spread(np.arange(101)))
    table.await_rows(7)
    assert asked[-1] == 7 * 2 * 8 * WIDTH
    table.release()


def test_every_page_of_a_row_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = TableFile(40 * mmap.PAGESIZE, directory=tmp_path, owner="ps 0"), []
    monkeypatch.setattr(file, "_mapping", SimpleNamespace(madvise=lambda advice, start, nbytes: asked.append((start, nbytes))))
    file.prefetch(np.array([0, 20 * mmap.PAGESIZE]), 4 * mmap.PAGESIZE + 1)
    assert asked == [(start * mmap.PAGESIZE, 5 * mmap.PAGESIZE) for start in (0, 20)]
    file.close()


def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match=r"^ps 0: --table-dir .*gone: no file for rows of tables \(No such file or directory\); give a"):
        _table(budget=MemoryBudget(None, owner="ps 0", make_file=partial(TableFile, directory=tmp_path / "gone", owner="ps 0")))
