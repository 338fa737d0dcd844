"""A shard's memory: two copies with their steps, slots, padding, and what it may cost."""

from collections.abc import Mapping

import numpy as np
import pytest

from ps_protocol.errors import LimitExceeded
from ps_protocol.layout import ALIGNMENT, Layout, VariableSlice
from ps_protocol.tensors import DataType, VariableSpec
from ps_server.arena import ShardArena, arena_bytes, padding_words
from ps_server.memory import BufferPool, MemoryBudget, format_bytes


def _slice(name: str, shape: tuple[int, ...], data_type: DataType = DataType.FLOAT32) -> VariableSlice:
    variable = VariableSpec(name=name, data_type=data_type, shape=shape)
    return VariableSlice(variable=variable, start=0, stop=variable.num_rows)


MIXED = Layout([_slice("a", (3,)), _slice("b", (), DataType.FLOAT64), _slice("c", (0, 4)), _slice("d", (16,)), _slice("e", (5, 7))])
EMPTY = Layout([])


def _arena(layout: Layout, *, slots: Mapping[str, float] | None = None, limit_bytes: int | None = None) -> ShardArena:
    arena = ShardArena(layout, slots=slots or {}, budget=MemoryBudget(limit_bytes, owner="ps 0"))
    arena.begin_next()
    arena.fill_slots()
    arena.publish_next(7)
    return arena


def test_padding_is_what_no_slice_covers() -> None:
    is_covered = np.zeros(MIXED.nbytes, np.bool_)
    for offset, piece in zip(MIXED.offsets, MIXED.slices, strict=True):
        is_covered[offset : offset + piece.nbytes] = True
    is_padding = np.zeros(MIXED.nbytes // 4, np.bool_)
    is_padding[padding_words(MIXED)] = True
    np.testing.assert_array_equal(np.repeat(is_padding, 4), ~is_covered)


def test_clearing_the_padding_leaves_the_variables() -> None:
    arena = _arena(MIXED)
    memory = arena.current.memory
    memory[:] = 255
    arena.clear_padding(memory)
    for index, piece in enumerate(MIXED.slices):
        assert np.isnan(MIXED.view(memory, index)).all(), piece.variable.name
    assert int((memory == 255).sum()) == sum(piece.nbytes for piece in MIXED.slices)


@pytest.mark.parametrize("layout", [EMPTY, Layout([_slice("nothing", (0, 3))])], ids=["no slices", "no elements"])
def test_arena_without_bytes_steps_along(layout: Layout) -> None:
    arena = _arena(layout, slots={"m": 0.5})
    arena.begin_next()
    arena.publish_next(8)
    arena.clear_padding(arena.current.memory)
    assert (arena.current.step, arena.current.memory.nbytes, arena.slots["m"].nbytes) == (8, 0, 0)


def test_every_buffer_is_aligned() -> None:
    arena = _arena(MIXED, slots={"m": 0.0})
    for memory in (arena.current.memory, arena.begin_next().memory, arena.slots["m"]):
        assert memory.ctypes.data % ALIGNMENT == 0


def test_slots_start_with_their_values_in_every_element_type() -> None:
    arena = _arena(MIXED, slots={"accumulator": 0.25, "m": 0.0})
    for index in range(len(MIXED.slices)):
        assert (MIXED.view(arena.slots["accumulator"], index) == 0.25).all()
        assert (MIXED.view(arena.slots["m"], index) == 0.0).all()


def test_the_last_two_steps_are_found_until_the_next_one_is_begun() -> None:
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
        ShardArena(MIXED, slots={"m": 0.0, "v": 0.0}, budget=budget)
    assert budget.allocated_bytes == 0


def test_released_arena_gives_its_bytes_back() -> None:
    budget = MemoryBudget(None, owner="ps 0")
    arena = ShardArena(MIXED, slots={"m": 0.0}, budget=budget)
    assert budget.allocated_bytes == arena_bytes(MIXED, num_slots=1) == 3 * MIXED.nbytes
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


def test_pool_refuses_what_the_budget_does_not_allow() -> None:
    pool = BufferPool(64, budget=MemoryBudget(100, owner="ps 3"))
    buffer = pool.lend(purpose="a push of worker 0")
    with pytest.raises(LimitExceeded, match="ps 3: a push of worker 1 needs 64 bytes, 36 bytes of 100 bytes free"):
        pool.lend(purpose="a push of worker 1")
    pool.take_back(buffer)
    assert pool.lend(purpose="a push of worker 1") is buffer


def test_pool_lets_go_of_what_it_has_not_needed_for_long() -> None:
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


def test_sizes_are_told_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 12 << 30)] == ["0 bytes", "1023 bytes", "1.5 KiB", "12.0 GiB"]
