"""Moving averages of variables: the recorded cases of the original, and cases that it has not."""

import json
from typing import Any

import numpy as np
import pytest

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import AverageSpec
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.numbers.apply import AverageKeeper, averaged_slices, move
from tests.support.repository import RECORDED_CASES

CASES = json.loads((RECORDED_CASES / "moving_average.json").read_text())["cases"]
COUNTER = OptimizerSpec(name="add", learning_rate=constant(0.0))


def _layout(*names: str, data_type: DataType = DataType.FLOAT64, size: int = 3) -> Layout:
    variables = [
        VariableSpec(name=name, data_type=data_type, shape=(size,), optimizer=COUNTER if name.startswith("count") else None)
        for name in names
    ]
    return Layout([VariableSlice(variable=variable, start=0, stop=size) for variable in variables])


class _Averages:
    def __init__(self, layout: Layout, spec: AverageSpec, initial: list[float], *, block_bytes: int = 64, initial_step: int = 0) -> None:
        self.layout = layout
        self.keeper = AverageKeeper(layout, spec, initial_step=initial_step)
        self.values, self.average = aligned_bytes(layout.nbytes), aligned_bytes(layout.nbytes)
        self.scratch = np.empty(block_bytes, np.uint8), np.empty(block_bytes, np.uint8)
        self._set(initial)
        self.keeper.start(self.average, self.values)

    def _set(self, value: list[float]) -> None:
        for index in range(len(self.layout.slices)):
            self.layout.view(self.values, index)[...] = value

    def update(self, value: list[float], *, step: int) -> Array:
        self._set(value)
        rate = self.keeper.rate(step)
        for part in self.keeper.parts(self.scratch[0].nbytes):
            move(self.average, self.values, part, rate, scratch=self.scratch)
        return self.layout.view(self.average, 0).astype(np.float64)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_recorded_case_of_the_original(case: dict[str, Any]) -> None:
    spec = AverageSpec(decay=case["decay"], use_num_updates=case["use_num_updates"])
    averages = _Averages(_layout("v"), spec, case["initial"])
    for recorded in case["steps"]:
        # The number of updates is the step after the update.
        average = averages.update(recorded["value"], step=recorded["num_updates"] - 1)
        np.testing.assert_allclose(average, recorded["expect"], rtol=1e-9)


def test_debiased_average_is_the_weighted_mean_of_the_values_so_far() -> None:
    spec, rng = AverageSpec(decay=0.75, zero_debias=True), np.random.default_rng(1)
    averages = _Averages(_layout("v"), spec, [9.0, 9.0, 9.0], initial_step=5)
    biased = np.zeros(3)
    for n in range(1, 8):
        value = rng.standard_normal(3)
        biased -= 0.25 * (biased - value)
        np.testing.assert_allclose(averages.update(value.tolist(), step=4 + n), biased / (1 - 0.75**n), rtol=1e-12)


def test_debiased_average_that_never_moves_is_zero_and_no_error() -> None:
    averages = _Averages(_layout("v"), AverageSpec(decay=1.0, zero_debias=True), [1.0] * 3)
    assert averages.update([5.0] * 3, step=0).tolist() == [0.0] * 3


@pytest.mark.parametrize("data_type", [DataType.FLOAT16, DataType.BFLOAT16])
def test_half_precision_is_averaged_in_single_precision(data_type: DataType) -> None:
    averages = _Averages(_layout("v", data_type=data_type, size=3), AverageSpec(decay=0.75), [1.0, 2.0, 4.0])
    average = averages.update([2.0, 2.0, 8.0], step=0)
    np.testing.assert_allclose(average, [1.25, 2.0, 5.0], rtol=1e-2)


def test_block_size_does_not_change_a_bit() -> None:
    rng, spec = np.random.default_rng(2), AverageSpec(decay=0.9)
    initial, values = rng.standard_normal(300).tolist(), [rng.standard_normal(300).tolist() for _ in range(3)]
    found = []
    for block_bytes in (64, 512, 1 << 16):
        averages = _Averages(_layout("v", size=300), spec, initial, block_bytes=block_bytes)
        found.append([averages.update(value, step=step) for step, value in enumerate(values)])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_variables_that_are_not_averaged_are_left_alone() -> None:
    layout = _layout("a", "b", "count")
    assert averaged_slices(layout, AverageSpec(decay=0.5)) == (0, 1)
    assert averaged_slices(layout, AverageSpec(decay=0.5, variables=("b", "count"))) == (1, 2)
    averages = _Averages(layout, AverageSpec(decay=0.5, variables=("b",)), [1.0] * 3)
    averages.update([3.0] * 3, step=0)
    assert [layout.view(averages.average, index)[0] for index in range(3)] == [0.0, 2.0, 0.0]
