"""Records of the original's own kernels, replayed: dense variables through whole steps, rows of sparse ones through the rule."""

import json
from typing import Any

import numpy as np
import pytest

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.numbers.apply import FusedApply, StepMemory
from ps_server.optimizers.formulas import NUM_SCRATCH
from ps_server.optimizers.rule import UpdateRule
from tests.support.repository import RECORDED_CASES

CASES = json.loads((RECORDED_CASES / "optimizer.json").read_text())["cases"]
# The absolute part is for values that two of about 1 have almost cancelled to: a rounding of theirs (duplicate rows are summed first here).
RELATIVE = {"float32": 1e-5, "float64": 1e-9}
ABSOLUTE = {"float32": 2e-6, "float64": 1e-14}


def _rule(case: dict[str, Any]) -> UpdateRule:
    numbers = {name: float(value) for name, value in case["hyperparameters"].items()}
    rate = numbers.pop("learning_rate")
    return UpdateRule(OptimizerSpec(name=case["optimizer"], hyperparameters=numbers, learning_rate=constant(rate)))


class _Dense:
    def __init__(self, rule: UpdateRule, initial: Array, data_type: DataType) -> None:
        variable = VariableSpec(name="dense", data_type=data_type, shape=initial.shape)
        self.layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows)])
        self.fused = FusedApply(self.layout, [rule])
        self.memories = [aligned_bytes(self.layout.nbytes) for _ in range(3)]
        self.slots = {name: aligned_bytes(self.layout.nbytes) for name in rule.slots}
        self.layout.view(self.memories[0], 0)[...] = initial
        for name, first in rule.slots.items():
            self.layout.arena(self.slots[name], self.layout.arenas[0]).fill(first)

    def apply(self, step: int, gradient: Array) -> None:
        value, out, pushed = self.memories
        self.layout.view(pushed, 0)[...] = gradient
        self.fused.run(StepMemory(value=value, out=out, slots=self.slots, gradients=[pushed], step=step))
        self.memories = [out, value, pushed]

    def all_arrays(self) -> dict[str, Array]:
        slots = {name: self.layout.view(memory, 0) for name, memory in self.slots.items()}
        return {"value": self.layout.view(self.memories[0], 0), **slots}


class _Sparse:
    def __init__(self, rule: UpdateRule, initial: Array) -> None:
        self.rule = rule
        self.value = initial.copy()
        self.slots = {name: np.full_like(initial, first) for name, first in rule.slots.items()}

    def apply(self, indices: Array, values: Array) -> None:
        """Duplicates are summed; the rows that are listed change, or all of them where the rule says so."""
        summed = np.zeros_like(self.value)
        np.add.at(summed, indices, values)
        rows = np.unique(indices) if self.rule.is_lazy else np.arange(len(self.value))
        value, gradient = self.value[rows].ravel(), summed[rows].ravel()
        slots = [slot[rows].ravel() for slot in self.slots.values()]
        out, scratch = np.empty_like(value), [np.empty_like(value) for _ in range(NUM_SCRATCH)]
        self.rule.apply(value, out=out, slots=slots, gradient=gradient, scratch=scratch)
        for array, changed in zip((self.value, *self.slots.values()), (out, *slots), strict=True):
            array[rows] = changed.reshape(array[rows].shape)

    def all_arrays(self) -> dict[str, Array]:
        return {"value": self.value, **self.slots}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['optimizer']}-{case['dtype']}-{index}" for index, case in enumerate(CASES)])
def test_recorded_case_of_the_original(case: dict[str, Any]) -> None:
    dtype, rtol, atol = np.dtype(case["dtype"]), RELATIVE[case["dtype"]], ABSOLUTE[case["dtype"]]
    rule = _rule(case)
    assert list(rule.slots) == case["slot_names"]
    dense = _Dense(rule, np.array(case["initial"]["dense"], dtype), DataType(case["dtype"]))
    sparse = _Sparse(rule, np.array(case["initial"]["sparse"], dtype))
    for name, expected in case["initial_slots"].items():
        np.testing.assert_allclose(dense.all_arrays()[name], expected[0], rtol=rtol, atol=atol)
        np.testing.assert_allclose(sparse.all_arrays()[name], expected[1], rtol=rtol, atol=atol)
    for step, recorded in enumerate(case["steps"]):
        rule.begin(step)
        rows = recorded["gradient"]["sparse"]
        dense.apply(step, np.array(recorded["gradient"]["dense"], dtype))
        sparse.apply(np.array(rows["indices"], np.int64), np.array(rows["values"], dtype))
        rule.advance()
        np.testing.assert_allclose(dense.all_arrays()["value"], recorded["expect"]["dense"], rtol=rtol, atol=atol)
        np.testing.assert_allclose(sparse.all_arrays()["value"], recorded["expect"]["sparse"], rtol=rtol, atol=atol)
        for name, expected in recorded["slots"].items():
            np.testing.assert_allclose(dense.all_arrays()[name], expected[0], rtol=rtol, atol=atol, err_msg=name)
            np.testing.assert_allclose(sparse.all_arrays()[name], expected[1], rtol=rtol, atol=atol, err_msg=name)
