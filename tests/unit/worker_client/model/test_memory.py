"""The worker's memory for a model: shared bytes, segments like the shards' arenas, split variables as one array."""

import dataclasses

import numpy as np
import pytest

from ps_protocol.model.layout import ALIGNMENT, Layout, Segments, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, DataType, Partition, VariableSpec
from worker_client.model.memory import ModelMemory

SHAPES: dict[str, tuple[DataType, tuple[int, ...]]] = {
    "scalar": (DataType.FLOAT32, ()),
    "table": (DataType.FLOAT32, (37, 5)),
    "empty": (DataType.FLOAT32, (0, 4)),
    "wide": (DataType.FLOAT64, (3, 7)),
    "bias": (DataType.FLOAT32, (3,)),
    "deep": (DataType.FLOAT64, (11, 2, 3)),
    "last": (DataType.FLOAT32, (1,)),
}


def model_of(split_bytes: int) -> ModelSpec:
    variables = tuple(VariableSpec(name=name, data_type=data_type, shape=shape) for name, (data_type, shape) in SHAPES.items())
    policy = PlacementPolicy(strategy="round_robin", split_bytes=split_bytes)
    return ModelSpec(variables=variables, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)), placement=policy)


def memory_of(model: ModelSpec, *, num_shards: int, is_writable: bool = True) -> ModelMemory:
    return ModelMemory(model, layouts=layouts(place(model, num_shards=num_shards), num_shards=num_shards), is_writable=is_writable)


def as_on_a_shard(memory: ModelMemory, index: int) -> tuple[Layout, Array]:
    """Returns the shard's arena in one piece, as a server would receive it."""
    layout = memory.layouts[index]
    arena = aligned_bytes(layout.nbytes)
    Segments([arena]).copy_from(memory.segments[index])
    return layout, arena


# Cut along each of its axes, by element types of every size.
CUT = [
    VariableSpec(name="second", data_type=DataType.FLOAT64, shape=(3, 5), partition=Partition(axis=1, num_slices=4)),
    VariableSpec(name="middle", data_type=DataType.FLOAT16, shape=(3, 4, 2), partition=Partition(axis=1, num_slices=2)),
    VariableSpec(name="rows", data_type=DataType.BFLOAT16, shape=(7, 3), partition=Partition(axis=0, num_slices=3)),
    VariableSpec(name="sparse", data_type=DataType.FLOAT32, shape=(7, 3), is_sparse=True),
]


CASES = [(split, shards) for split in (0, 64, 200, 1 << 20) for shards in (1, 2, 3, 5)]


@pytest.mark.parametrize(("split_bytes", "num_shards"), CASES)
def test_every_shard_gets_its_rows_where_its_layout_wants_them(split_bytes: int, num_shards: int) -> None:
    memory = memory_of(model_of(split_bytes), num_shards=num_shards)
    for array in memory.views.values():
        array[...] = np.random.default_rng(array.size).normal(size=array.shape)
    for index in range(num_shards):
        layout, arena = as_on_a_shard(memory, index)
        covered = 0
        for position, piece in enumerate(layout.slices):
            whole = memory.views[piece.variable.name]
            rows = whole[piece.start : piece.stop] if whole.ndim else whole
            np.testing.assert_array_equal(layout.view(arena, position), rows)
            covered += piece.nbytes
        # All that is left is padding, and padding is zero.
        for position in range(len(layout.slices)):
            layout.view(arena, position)[...] = 0
        assert not arena.any()
        assert memory.segments[index].nbytes == layout.nbytes >= covered


@pytest.mark.parametrize(("split_bytes", "num_shards"), CASES)
def test_values_that_shards_send_arrive_in_the_arrays(split_bytes: int, num_shards: int) -> None:
    model = model_of(split_bytes)
    source, target = memory_of(model, num_shards=num_shards), memory_of(model, num_shards=num_shards, is_writable=False)
    for array in source.views.values():
        array[...] = np.random.default_rng(array.size + 1).normal(size=array.shape)
    for index in range(num_shards):
        _, arena = as_on_a_shard(source, index)
        target.segments[index].copy_from(Segments([arena]))
    for name, array in target.views.items():
        np.testing.assert_array_equal(array, source.views[name])
        assert array.shape == SHAPES[name][1]
        assert array.dtype == SHAPES[name][0].dtype


def test_views_come_in_the_models_order_and_only_gradients_are_writable() -> None:
    model = model_of(64)
    assert list(memory_of(model, num_shards=3).views) == list(SHAPES)
    for array in memory_of(model, num_shards=3, is_writable=False).views.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_variables_cut_along_any_axis_are_packed_and_unpacked(num_shards: int) -> None:
    plain = model_of(64)
    model = dataclasses.replace(plain, variables=(*plain.variables[:3], *CUT))
    source, target = memory_of(model, num_shards=num_shards), memory_of(model, num_shards=num_shards, is_writable=False)
    assert list(source.views) == [variable.name for variable in model.variables if not variable.is_sparse]
    for array in source.views.values():
        array[...] = np.random.default_rng(array.size).integers(-8, 8, array.shape)
    source.pack()
    for index in range(num_shards):
        layout, arena = as_on_a_shard(source, index)
        for position, piece in enumerate(layout.slices):
            whole = source.views[piece.variable.name]
            part = np.take(whole, range(piece.start, piece.stop), axis=piece.axis) if whole.ndim else whole
            np.testing.assert_array_equal(layout.view(arena, position), part)
        target.segments[index].copy_from(Segments([arena]))
    target.unpack()
    for name, array in target.views.items():
        np.testing.assert_array_equal(array, source.views[name])


def test_whole_variables_are_aligned_and_lie_in_one_run_a_shard() -> None:
    memory = memory_of(model_of(0), num_shards=1)
    assert len(list(memory.segments[0].chunks(1 << 30))) == 1
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in memory.views.values() if array.size)


def test_memory_knows_its_own_bytes() -> None:
    memory, other = memory_of(model_of(64), num_shards=2), memory_of(model_of(64), num_shards=2)
    for array in memory.views.values():
        assert memory.shares(array)
        assert memory.shares(array.T[..., ::2] if array.ndim else array[...])
        assert not other.shares(array)
        assert not memory.shares(array.copy())


# Whole variables only, cut by rows, and cut along every axis: what of each shard lies in an arena that it gives.
LENT = [(1, (True,)), (2, (True, True)), (3, (True, False, True)), (5, (False, True, False, True, True))]


@pytest.mark.parametrize(("num_shards", "lent"), LENT)
def test_memory_on_given_arenas_holds_what_the_shards_have_there(num_shards: int, lent: tuple[bool, ...]) -> None:
    plain = model_of(64)
    model = dataclasses.replace(plain, variables=(*plain.variables, *CUT))
    own, expected = memory_of(model, num_shards=num_shards), memory_of(model, num_shards=num_shards)
    arenas = [aligned_bytes(layout.nbytes) if is_lent else None for layout, is_lent in zip(own.layouts, lent, strict=True)]
    memory = own.on(arenas)
    for name, array in expected.views.items():
        array[...] = memory.views[name][...] = np.random.default_rng(array.size).integers(-8, 8, array.shape)
    expected.pack()
    memory.pack()
    for index, arena in enumerate(arenas):
        layout, wanted = as_on_a_shard(expected, index)
        found = as_on_a_shard(memory, index)[1] if arena is None else arena
        assert memory.is_lent(index) is (arena is not None)
        np.testing.assert_array_equal(found, wanted, err_msg=layout.hash)
    for array in memory.views.values():
        array[...] = 0
    for index, arena in enumerate(arenas):
        memory.segments[index].copy_from(Segments([as_on_a_shard(expected, index)[1]]))
        assert arena is None or next(iter(memory.segments[index].pieces)) is arena
    memory.unpack()
    for name, array in memory.views.items():
        np.testing.assert_array_equal(array, expected.views[name])


def test_whole_variables_on_given_arenas_are_never_copied() -> None:
    own = memory_of(model_of(0), num_shards=2)
    arenas = [aligned_bytes(layout.nbytes) for layout in own.layouts]
    memory = own.on(arenas)
    assert not memory.copies
    assert all(np.shares_memory(array, arenas[0]) or np.shares_memory(array, arenas[1]) for array in memory.views.values() if array.size)
    assert all(memory.shares(array) for array in memory.views.values())


def test_memories_of_one_model_share_the_variables_that_are_cut_and_nothing_else() -> None:
    own = memory_of(model_of(64), num_shards=2)
    first, second = (own.on([aligned_bytes(layout.nbytes) for layout in own.layouts]) for _ in range(2))
    cut = {piece.variable.name for layout in own.layouts for piece in layout.slices if not piece.is_whole}
    assert cut == {"table", "wide", "deep"}
    for name, array in first.views.items():
        assert not array.size or np.shares_memory(array, second.views[name]) is (name in cut)


def test_views_on_read_only_arenas_are_read_only() -> None:
    own = memory_of(model_of(0), num_shards=1)
    arena = aligned_bytes(own.layouts[0].nbytes)
    arena.flags.writeable = False
    assert not any(view.flags.writeable for view in own.on([arena]).views.values())


def test_locked_memory_lets_no_caller_write_where_a_shard_may_read() -> None:
    own = memory_of(model_of(64), num_shards=2)
    memory = own.on([aligned_bytes(layout.nbytes) for layout in own.layouts])
    memory.lock()
    with pytest.raises(ValueError, match="read-only"):
        memory.views["bias"][...] = 1
    memory.views["table"][...] = 1  # it is copied with each push
    own.views["bias"][...] = 1
    memory.lock(False)
    memory.views["bias"][...] = 1
