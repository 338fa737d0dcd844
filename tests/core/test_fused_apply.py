"""Mean and optimizer in blocks: the same numbers as for the whole at once, whatever the block."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from ps_protocol.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.tensors import Array, DataType, VariableSpec
from ps_server.fused_apply import FusedApply, StepMemory
from ps_server.optimizers import make_optimizer


def _layout(*sizes: int, doubles: int = 0) -> Layout:
    variables = [VariableSpec(name=f"v{index}", data_type=DataType.FLOAT32, shape=(size,)) for index, size in enumerate(sizes)]
    if doubles:
        variables.append(VariableSpec(name="d", data_type=DataType.FLOAT64, shape=(doubles,)))
    return Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])


LAYOUT = _layout(100, 1, 257, doubles=130)


def _random(layout: Layout, rng: np.random.Generator) -> Array:
    memory = aligned_bytes(layout.nbytes)
    for index, piece in enumerate(layout.slices):
        layout.view(memory, index)[...] = rng.standard_normal(piece.shape)
    return memory


def _steps(layout: Layout, name: str, gradients: Sequence[Array], *, block_bytes: int) -> Array:
    optimizer = make_optimizer(OptimizerSpec(name=name, learning_rate=constant(0.1)))
    fused = FusedApply(layout, optimizer, block_bytes=block_bytes)
    value, out = _random(layout, np.random.default_rng(0)), aligned_bytes(layout.nbytes)
    slots = [aligned_bytes(layout.nbytes) for _ in optimizer.slots]
    for memory, initial in zip(slots, optimizer.slots.values(), strict=True):
        for arena in layout.arenas:
            layout.arena(memory, arena).fill(initial)
    for _ in range(3):
        fused.run(StepMemory(value=value, out=out, slots=slots, gradients=gradients), learning_rate=0.1)
        fused.advance_powers()
        value, out = out, value
    return value


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
@pytest.mark.parametrize("num_gradients", [1, 2, 3, 5])
def test_block_size_does_not_change_a_bit(name: str, num_gradients: int) -> None:
    rng = np.random.default_rng(num_gradients)
    gradients = [_random(LAYOUT, rng) for _ in range(num_gradients)]
    whole, *others = (_steps(LAYOUT, name, gradients, block_bytes=block_bytes) for block_bytes in (1 << 16, 64, 256, 1024))
    for other in others:
        np.testing.assert_array_equal(other, whole)


@pytest.mark.parametrize("num_gradients", [1, 2, 3, 4, 7])
def test_mean_is_the_sum_in_order_divided_by_their_number(num_gradients: int) -> None:
    rng = np.random.default_rng(3)
    gradients = [_random(LAYOUT, rng) for _ in range(num_gradients)]
    fused = FusedApply(LAYOUT, make_optimizer(OptimizerSpec(name="sgd", learning_rate=constant(1.0))), block_bytes=256)
    value, out = _random(LAYOUT, rng), aligned_bytes(LAYOUT.nbytes)
    fused.run(StepMemory(value=value, out=out, slots=[], gradients=gradients), learning_rate=1.0)
    for index in range(len(LAYOUT.slices)):
        first, *others = (LAYOUT.view(gradient, index) for gradient in gradients)
        total = first.copy()
        for other in others:
            total = total + other
        np.testing.assert_array_equal(LAYOUT.view(out, index), LAYOUT.view(value, index) - total / total.dtype.type(num_gradients))


def test_nonfinite_elements_of_the_mean_are_counted() -> None:
    first, second = _random(LAYOUT, np.random.default_rng(1)), _random(LAYOUT, np.random.default_rng(2))
    LAYOUT.view(first, 0)[[1, 5]] = np.inf, np.nan
    LAYOUT.view(second, 0)[1] = -np.inf
    LAYOUT.view(second, 3)[129] = np.nan
    fused = FusedApply(LAYOUT, make_optimizer(OptimizerSpec(name="adam", learning_rate=constant(1e300))), block_bytes=64)
    memory = [aligned_bytes(LAYOUT.nbytes) for _ in range(4)]
    step = StepMemory(value=memory[0], out=memory[1], slots=memory[2:], gradients=[first, second])
    assert fused.run(step, learning_rate=1e300) == 3
    assert fused.run(StepMemory(value=memory[0], out=memory[1], slots=memory[2:], gradients=[memory[0]]), learning_rate=0.1) == 0


def test_step_allocates_no_memory_for_tensors() -> None:
    layout = _layout(1 << 18)
    fused = FusedApply(layout, make_optimizer(OptimizerSpec(name="adam", learning_rate=constant(0.1))))
    memory = [aligned_bytes(layout.nbytes) for _ in range(6)]
    step = StepMemory(value=memory[0], out=memory[1], slots=memory[2:4], gradients=memory[4:])
    fused.run(step, learning_rate=0.1)
    tracemalloc.start()
    try:
        fused.run(step, learning_rate=0.1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384


def test_empty_layout_has_nothing_to_do() -> None:
    fused = FusedApply(Layout([]), make_optimizer(OptimizerSpec(name="adam", learning_rate=constant(0.1))))
    nothing = aligned_bytes(0)
    assert fused.run(StepMemory(value=nothing, out=nothing, slots=[nothing, nothing], gradients=[nothing]), learning_rate=0.1) == 0


def test_work_does_not_grow_with_the_number_of_variables() -> None:
    """A thousand variables of 64 bytes are one arena of 64,000 bytes: one block."""
    layout, one = _layout(*[16] * 1000), _layout(16_000)
    assert layout.arenas == one.arenas
    gradient = _random(one, np.random.default_rng(1))
    np.testing.assert_array_equal(
        _steps(layout, "adam", [gradient], block_bytes=1 << 16)[:64], _steps(one, "adam", [gradient], block_bytes=1 << 16)[:64]
    )
