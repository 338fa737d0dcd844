"""Formulas of a step, computed part by part: the same bits in any number of threads, and no work for variables without elements."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.numbers.apply import FusedApply, StepMemory
from ps_server.optimizers.rule import UpdateRule
from ps_server.threads import ApplyThreads

RULE = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0))


def _layout(size: int) -> Layout:
    specs = [VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(size,), optimizer=RULE) for name in ("a", "b")]
    return Layout([VariableSlice(variable=spec, start=0, stop=spec.num_rows) for spec in specs])


def _random(layout: Layout, seed: int) -> Array:
    memory = aligned_bytes(layout.nbytes)
    memory.view(np.float32)[:] = np.random.default_rng(seed).normal(size=layout.nbytes // 4)
    return memory


def _computed(layout: Layout, num_threads: int, text: str) -> bytes:
    threads = ApplyThreads(num_threads)
    try:
        fused = FusedApply(layout, [UpdateRule(RULE)], stripes=threads, block_bytes=4096)
        update = FormulaUpdate(text=text, variables={"v": 0, "w": 1}, arrays={"g": 0}, numbers={"k": 0.3})
        memory = StepMemory(
            value=_random(layout, 1),
            out=aligned_bytes(layout.nbytes),
            gradients=[_random(layout, 2)],
            absent=[(0, 1)],
            step=0,
            formulas=[(0, update)],
        )
        fused.run(memory)
        return memory.out.tobytes()
    finally:
        threads.stop()


@pytest.mark.parametrize("text", ["w = w + g * g; v = v - k * g / sqrt(w)", "v = v * norm(g) / (norm(v) + k) + sum(w * g / norm(g))"])
def test_the_number_of_threads_changes_no_bit(text: str) -> None:
    layout = _layout(100_000)
    (one, *others) = [_computed(layout, num_threads, text) for num_threads in (1, 2, 3)]
    assert others == [one] * 2


def test_a_variable_without_elements_is_left_as_it_is() -> None:
    result: Any = _computed(_layout(0), 2, "v = v / norm(g)")
    assert result == b""
