"""A shard's memory: two copies with their steps, slots, averages, padding, and what it may cost."""

import numpy as np
import pytest

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.layout import ALIGNMENT, Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import AVERAGE_SLOT, AverageSpec
from ps_protocol.model.variables import DataType, VariableSpec
from ps_server.numbers.arena import ShardArena, arena_bytes, padding_words, word_bytes
from ps_server.numbers.memory import BufferPool, MemoryBudget
from ps_server.optimizers.rule import UpdateRule


def _optimizer(name: str, **hyperparameters: float) -> OptimizerSpec:
    return OptimizerSpec(name=name, learning_rate=constant(0.5), hyperparameters=hyperparameters)


def _slice(
    name: str, shape: tuple[int, ...], data_type: DataType = DataType.FLOAT32, optimizer: OptimizerSpec | None = None
) -> VariableSlice:
    variable = VariableSpec(name=name, data_type=data_type, shape=shape, optimizer=optimizer)
    return VariableSlice(variable=variable, start=0, stop=variable.num_rows)


MIXED = Layout([_slice("a", (3,)), _slice("b", (), DataType.FLOAT64), _slice("c", (0, 4)), _slice("d", (16,)), _slice("e", (5, 7))])
HALF = Layout([_slice("a", (3,)), _slice("h", (5,), DataType.FLOAT16), _slice("i", (), DataType.BFLOAT16), _slice("d", (17,))])
EMPTY = Layout([])
SGD, ADAM, ADAGRAD = _optimizer("sgd"), _optimizer("adam"), _optimizer("adagrad", initial_accumulator_value=0.25)


def _rules(layout: Layout, optimizer: OptimizerSpec) -> list[UpdateRule]:
    return [UpdateRule(rule or optimizer) for rule in layout.rules]


def _arena(
    layout: Layout, optimizer: OptimizerSpec = SGD, *, averages: AverageSpec | None = None, budget: MemoryBudget | None = None
) -> ShardArena:
    budget = budget or MemoryBudget(None, owner="ps 0")
    arena = ShardArena(layout, rules=_rules(layout, optimizer), averages=averages, budget=budget)
    memory = arena.begin_next().memory
    for index in range(len(layout.slices)):
        layout.view(memory, index)[...] = 3.0
    arena.fill_slots(memory)
    arena.publish_next(7)
    return arena


@pytest.mark.parametrize("layout", [MIXED, HALF], ids=["single and double", "half"])
def test_the_padding_of_an_arena_is_the_words_that_no_slice_covers(layout: Layout) -> None:
    is_covered = np.zeros(layout.nbytes, np.bool_)
    for offset, piece in zip(layout.offsets, layout.slices, strict=True):
        is_covered[offset : offset + piece.nbytes] = True
    is_padding = np.zeros(layout.nbytes // word_bytes(layout), np.bool_)
    is_padding[padding_words(layout)] = True
    np.testing.assert_array_equal(np.repeat(is_padding, word_bytes(layout)), ~is_covered)


@pytest.mark.parametrize("layout", [MIXED, HALF], ids=["single and double", "half"])
def test_clearing_the_padding_leaves_the_variables(layout: Layout) -> None:
    arena = _arena(layout)
    memory = arena.current.memory
    memory[:] = 255
    arena.padding.clear(memory)
    for index, piece in enumerate(layout.slices):
        assert np.isnan(layout.view(memory, index)).all(), piece.variable.name
    assert int((memory == 255).sum()) == sum(piece.nbytes for piece in layout.slices)


@pytest.mark.parametrize("layout", [EMPTY, Layout([_slice("nothing", (0, 3))])], ids=["no slices", "no elements"])
def test_an_arena_without_bytes_advances_its_step(layout: Layout) -> None:
    arena = _arena(layout, ADAM, averages=AverageSpec(decay=0.5))
    arena.begin_next()
    arena.publish_next(8)
    arena.padding.clear(arena.current.memory)
    assert (arena.current.step, arena.current.memory.nbytes, sum(slot.nbytes for slot in arena.slots.values())) == (8, 0, 0)


def test_every_buffer_is_aligned() -> None:
    arena = _arena(MIXED, ADAM)
    for memory in (arena.current.memory, arena.begin_next().memory, *arena.slots.values()):
        assert memory.ctypes.data % ALIGNMENT == 0


def test_slots_start_with_their_values_in_every_element_type() -> None:
    centered = _optimizer("rmsprop", centered=1.0)
    arena = _arena(MIXED, centered)
    assert list(arena.slots) == ["mg", "momentum", "rms"]
    for index in range(len(MIXED.slices)):
        assert (MIXED.view(arena.slots["rms"], index) == 1.0).all()
        assert (MIXED.view(arena.slots["mg"], index) == 0.0).all()


def test_slot_is_filled_only_where_the_variable_has_it() -> None:
    layout = Layout([_slice("a", (3,)), _slice("own", (4,), optimizer=ADAGRAD), _slice("count", (2,), optimizer=_optimizer("add"))])
    arena = _arena(layout, ADAM)
    assert list(arena.slots) == ["accumulator", "m", "v"]
    assert [float(layout.view(arena.slots["accumulator"], index)[0]) for index in range(3)] == [0.0, 0.25, 0.0]
    assert arena.readable_slot("accumulator") is arena.slots["accumulator"]
    assert arena.readable_slot("momentum") is None


@pytest.mark.parametrize(("zero_debias", "first"), [(False, 3.0), (True, 0.0)])
def test_averages_start_with_the_first_values_or_zero(zero_debias: bool, first: float) -> None:
    layout = Layout([_slice("a", (3,)), _slice("count", (2,), optimizer=_optimizer("add"))])
    arena = _arena(layout, averages=AverageSpec(decay=0.5, zero_debias=zero_debias))
    average = arena.readable_slot(AVERAGE_SLOT)
    assert average is not None and average is arena.average
    assert [float(layout.view(average, index)[0]) for index in range(2)] == [first, 0.0]
    assert AVERAGE_SLOT not in arena.slots


def test_averages_take_memory_only_where_there_are_any() -> None:
    budget = MemoryBudget(None, owner="ps 0")
    arena = _arena(MIXED, averages=AverageSpec(decay=0.5, variables=("elsewhere",)), budget=budget)
    assert arena.average is None and arena.readable_slot(AVERAGE_SLOT) is None
    assert budget.allocated_bytes == arena_bytes(MIXED, num_slots=0)


def test_an_arena_finds_its_last_two_steps_until_the_next_one_begins() -> None:
    arena = _arena(MIXED)
    arena.begin_next()
    arena.publish_next(8)
    assert arena.find(7) is not None and arena.find(8) is arena.current
    spare = arena.find(7)
    assert arena.begin_next() is spare
    assert arena.find(7) is None and arena.find(8) is arena.current


def test_version_of_a_copy_grows_before_it_is_overwritten() -> None:
    arena = _arena(MIXED)
    arena.begin_next()
    arena.publish_next(8)
    current, version = arena.current, arena.current.version
    arena.begin_next()
    arena.publish_next(9)
    assert current.version == version
    arena.begin_next()
    assert current.version > version


def test_replaced_initial_values_are_the_only_ones_of_their_step() -> None:
    arena = _arena(MIXED)
    replaced = arena.current
    arena.begin_next()
    arena.publish_next(7)
    assert arena.find(7) is arena.current is not replaced


def test_model_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    budget = MemoryBudget(3 * MIXED.nbytes, owner="ps 0")
    with pytest.raises(LimitExceeded, match=r"ps 0: the model's part .* needs .* free; .*--max-memory-bytes"):
        ShardArena(MIXED, rules=_rules(MIXED, ADAM), budget=budget)
    assert budget.allocated_bytes == 0


def test_released_arena_gives_its_bytes_back() -> None:
    budget = MemoryBudget(None, owner="ps 0")
    arena = _arena(MIXED, ADAGRAD, averages=AverageSpec(decay=0.5), budget=budget)
    assert budget.allocated_bytes == arena_bytes(MIXED, num_slots=2) == 4 * MIXED.nbytes
    arena.release()
    assert budget.allocated_bytes == 0


def test_memory_that_the_machine_refuses_is_a_limit() -> None:
    with pytest.raises(LimitExceeded, match="ps 0: a copy needs"):
        MemoryBudget(None, owner="ps 0").allocate(1 << 60, purpose="a copy")


def test_pool_lends_the_same_buffers_again() -> None:
    pool = BufferPool(64, budget=MemoryBudget(None, owner="ps 0"))
    first, second = (pool.lend(purpose="a push") for _ in range(2))
    for _ in range(10):
        pool.take_back(first)
        pool.take_back(second)
        pool.end_step()
        assert {id(pool.lend(purpose="a push")) for _ in range(2)} == {id(first), id(second)}


@pytest.mark.shows("F26")
def test_pool_refuses_what_the_budget_does_not_allow() -> None:
    pool = BufferPool(64, budget=MemoryBudget(100, owner="ps 3"))
    buffer = pool.lend(purpose="a push of worker 0")
    with pytest.raises(LimitExceeded, match="ps 3: a push of worker 1 needs 64 bytes, 36 bytes of 100 bytes free"):
        pool.lend(purpose="a push of worker 1")
    pool.take_back(buffer)
    assert pool.lend(purpose="a push of worker 1") is buffer


def test_a_pool_frees_buffers_that_were_unused_for_long() -> None:
    budget = MemoryBudget(None, owner="ps 0")
    pool = BufferPool(64, budget=budget)
    for buffer in [pool.lend(purpose="a push") for _ in range(5)]:
        pool.take_back(buffer)
    pool.end_step()
    for _ in range(10):
        pool.take_back(pool.lend(purpose="a push"))
        pool.end_step()
    assert pool.num_buffers == 5
    for _ in range(100):
        pool.take_back(pool.lend(purpose="a push"))
        pool.end_step()
    assert (pool.num_buffers, budget.allocated_bytes) == (1, 64)
