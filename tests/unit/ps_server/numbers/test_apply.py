"""Mean and optimizer in blocks: the same numbers as for the whole at once, whatever the block."""

import tracemalloc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.numbers.apply import FusedApply, StepMemory
from ps_server.optimizers.rule import UpdateRule


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


def _rule(name: str, rate: float = 0.1, **hyperparameters: float) -> UpdateRule:
    return UpdateRule(OptimizerSpec(name=name, learning_rate=constant(rate), hyperparameters=hyperparameters))


def _slots(layout: Layout, rule: UpdateRule) -> Mapping[str, Array]:
    slots = {name: aligned_bytes(layout.nbytes) for name in rule.slots}
    for name, initial in rule.slots.items():
        for arena in layout.arenas:
            layout.arena(slots[name], arena).fill(initial)
    return slots


def _steps(layout: Layout, name: str, gradients: Sequence[Array], *, block_bytes: int, in_place: bool = False) -> Array:
    rule = _rule(name)
    fused = FusedApply(layout, [rule], block_bytes=block_bytes)
    value, out = _random(layout, np.random.default_rng(0)), aligned_bytes(layout.nbytes)
    slots = _slots(layout, rule)
    for step in range(3):
        target = value if in_place else out
        rule.begin(step)
        fused.run(StepMemory(value=value, out=target, slots=slots, gradients=gradients, step=step))
        rule.advance()
        if not in_place:
            value, out = out, value
    return value


EVERY_OPTIMIZER = ["sgd", "momentum", "adagrad", "adagrad_da", "adam", "rmsprop", "adadelta", "ftrl", "proximal_sgd", "proximal_adagrad"]
EVERY_OPTIMIZER += ["adamw", "nadam", "lion", "delayed_nesterov"]


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("num_gradients", [1, 2, 3, 5])
def test_block_size_does_not_change_a_bit(name: str, num_gradients: int) -> None:
    rng = np.random.default_rng(num_gradients)
    gradients = [_random(LAYOUT, rng) for _ in range(num_gradients)]
    whole, *others = (_steps(LAYOUT, name, gradients, block_bytes=block_bytes) for block_bytes in (1 << 16, 64, 256, 1024))
    for other in others:
        np.testing.assert_array_equal(other, whole)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_values_that_change_in_place_are_the_same(name: str) -> None:
    rng = np.random.default_rng(4)
    gradients = [_random(LAYOUT, rng) for _ in range(2)]
    beside, in_place = (_steps(LAYOUT, name, gradients, block_bytes=256, in_place=kind) for kind in (False, True))
    np.testing.assert_array_equal(in_place, beside)


def test_intermediate_results_of_a_formula_never_lie_in_memory_that_others_read() -> None:
    class Watched(UpdateRule):
        """Notes whether a formula is given memory that others use at the same time."""

        given: ClassVar[list[bool]] = []

        def apply(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array]) -> None:
            shared = [memory, *slot_memories.values()]
            self.given.append(any(np.may_share_memory(mine, theirs) for mine in (value, out, *slots) for theirs in shared))
            super().apply(value, out=out, slots=slots, gradient=gradient, scratch=scratch)

    rule = Watched(OptimizerSpec(name="adagrad", learning_rate=constant(0.1)))
    memory, slot_memories = _random(LAYOUT, np.random.default_rng(0)), _slots(LAYOUT, rule)
    rule.begin(0)
    gradients = [_random(LAYOUT, np.random.default_rng(1))]
    FusedApply(LAYOUT, [rule], block_bytes=256).run(StepMemory(value=memory, out=memory, slots=slot_memories, gradients=gradients, step=0))
    assert rule.given and not any(rule.given)


@pytest.mark.parametrize("num_gradients", [1, 2, 3, 4, 7])
def test_mean_is_the_sum_in_order_divided_by_their_number(num_gradients: int) -> None:
    rng = np.random.default_rng(3)
    gradients = [_random(LAYOUT, rng) for _ in range(num_gradients)]
    fused = FusedApply(LAYOUT, [_rule("sgd", 1.0)], block_bytes=256)
    value, out = _random(LAYOUT, rng), aligned_bytes(LAYOUT.nbytes)
    fused.run(StepMemory(value=value, out=out, gradients=gradients, step=0))
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
    rule = _rule("adam", 3e38)
    fused = FusedApply(LAYOUT, [rule], block_bytes=64)
    memory, slots = [aligned_bytes(LAYOUT.nbytes) for _ in range(2)], _slots(LAYOUT, rule)
    assert fused.run(StepMemory(value=memory[0], out=memory[1], slots=slots, gradients=[first, second], step=0)) == 3
    assert fused.run(StepMemory(value=memory[0], out=memory[1], slots=slots, gradients=[memory[0]], step=0)) == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_step_allocates_no_memory_for_tensors(in_place: bool) -> None:
    layout, rule = _layout(1 << 18), _rule("adam")
    fused = FusedApply(layout, [rule])
    memory = [aligned_bytes(layout.nbytes) for _ in range(4)]
    value, out = memory[0], memory[0 if in_place else 1]
    step = StepMemory(value=value, out=out, slots=_slots(layout, rule), gradients=memory[2:], step=0)
    fused.run(step)
    tracemalloc.start()
    try:
        fused.run(step)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16_384


def test_applying_a_step_to_an_empty_layout_does_nothing() -> None:
    fused = FusedApply(Layout([]), [])
    nothing = aligned_bytes(0)
    memory = StepMemory(value=nothing, out=nothing, gradients=[nothing], step=0)
    assert fused.run(memory) == 0
    assert fused.sums_of_squares(memory) == []


def test_work_does_not_grow_with_the_number_of_variables() -> None:
    """A thousand variables of 64 bytes are one arena of 64,000 bytes: one block."""
    layout, one = _layout(*[16] * 1000), _layout(16_000)
    assert layout.arenas == one.arenas
    gradient = _random(one, np.random.default_rng(1))
    np.testing.assert_array_equal(
        _steps(layout, "adam", [gradient], block_bytes=1 << 16)[:64], _steps(one, "adam", [gradient], block_bytes=1 << 16)[:64]
    )


def test_clone_shares_the_rules_and_nothing_else() -> None:
    rng = np.random.default_rng(6)
    gradient, value = _random(LAYOUT, rng), _random(LAYOUT, rng)
    rule = _rule("adam")
    first = FusedApply(LAYOUT, [rule], block_bytes=256)
    outs = []
    for fused in (first, first.clone()):
        out = aligned_bytes(LAYOUT.nbytes)
        fused.run(StepMemory(value=value, out=out, slots=_slots(LAYOUT, rule), gradients=[gradient], step=0))
        outs.append(out)
    np.testing.assert_array_equal(outs[0], outs[1])
    assert not np.may_share_memory(first._blocks[0].pair[0], first.clone()._blocks[0].pair[0])
