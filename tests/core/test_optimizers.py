"""Each optimizer against its formula written out plainly, and against what the original's own kernels recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.optimizer_spec import OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.tensors import Array
from ps_server.optimizers import Optimizer, Scalars, initial_powers, make_optimizer, next_powers

RECORDED = json.loads((Path(__file__).parent.parent / "conformance" / "optimizer_dense.json").read_text())["cases"]
LEARNING_RATE = 0.05
State = dict[str, Any]
Formula = Callable[[Array, State, Array, int], Array]


def _sgd(value: Array, state: State, gradient: Array, t: int) -> Any:
    return value - LEARNING_RATE * gradient


def _momentum(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["momentum"] = 0.8 * state["momentum"] + gradient
    return value - LEARNING_RATE * state["momentum"]


def _nesterov(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["momentum"] = 0.8 * state["momentum"] + gradient
    return value - LEARNING_RATE * (gradient + 0.8 * state["momentum"])


def _adagrad(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["accumulator"] = state["accumulator"] + gradient**2
    return value - LEARNING_RATE * gradient / np.sqrt(state["accumulator"])


def _adam(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["m"] = 0.7 * state["m"] + 0.3 * gradient
    state["v"] = 0.95 * state["v"] + 0.05 * gradient**2
    rate = LEARNING_RATE * np.sqrt(1 - 0.95**t) / (1 - 0.7**t)
    return value - rate * state["m"] / (np.sqrt(state["v"]) + 1e-6)


ROWS: list[tuple[str, dict[str, float], Formula]] = [
    ("sgd", {}, _sgd),
    ("momentum", {"momentum": 0.8}, _momentum),
    ("momentum", {"momentum": 0.8, "use_nesterov": 1.0}, _nesterov),
    ("adagrad", {"initial_accumulator_value": 0.3}, _adagrad),
    ("adam", {"beta1": 0.7, "beta2": 0.95, "epsilon": 1e-6}, _adam),
]


def _optimizer(name: str, hyperparameters: dict[str, float]) -> Optimizer:
    return make_optimizer(OptimizerSpec(name=name, hyperparameters=hyperparameters, learning_rate=constant(LEARNING_RATE)))


class _Run:
    """A variable under an optimizer, one block at a time; keeps both copies, as a shard does."""

    def __init__(self, optimizer: Optimizer, value: Array, *, powers: Scalars | None = None) -> None:
        self.optimizer = optimizer
        self.value, self.out, self.scratch = value.copy(), np.empty_like(value), np.empty_like(value)
        self.slots = {name: np.full_like(value, initial) for name, initial in optimizer.slots.items()}
        self.powers = initial_powers(optimizer, value.dtype) if powers is None else powers

    def step(self, gradient: Array, *, learning_rate: float = LEARNING_RATE) -> None:
        constants = self.optimizer.constants(learning_rate, powers=self.powers, dtype=self.value.dtype)
        slots = list(self.slots.values())
        self.optimizer.apply_block(self.value, out=self.out, slots=slots, gradient=gradient, scratch=self.scratch, constants=constants)
        self.value, self.out = self.out, self.value
        self.powers = next_powers(self.optimizer, self.powers)


def test_every_known_optimizer_has_a_row() -> None:
    assert {name for name, _, _ in ROWS} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "hyperparameters", "formula"), ROWS, ids=["sgd", "momentum", "nesterov", "adagrad", "adam"])
def test_fifty_steps_follow_the_formula(
    name: str, hyperparameters: dict[str, float], formula: Formula, dtype: type[np.floating[Any]]
) -> None:
    rng = np.random.default_rng(1)
    run = _Run(_optimizer(name, hyperparameters), rng.standard_normal(37).astype(dtype))
    value = run.value.astype(np.float64)
    state: State = {slot: memory.astype(np.float64) for slot, memory in run.slots.items()}
    for t in range(1, 51):
        gradient = rng.standard_normal(37).astype(dtype)
        run.step(gradient)
        value = formula(value, state, gradient.astype(np.float64), t)
    tolerance = 2e-5 if dtype is np.float32 else 1e-13
    np.testing.assert_allclose(run.value, value, rtol=tolerance, atol=tolerance)
    for slot, memory in run.slots.items():
        np.testing.assert_allclose(memory, state[slot], rtol=tolerance, atol=tolerance)
    assert run.value.dtype == dtype


@pytest.mark.parametrize(("name", "hyperparameters", "formula"), ROWS, ids=["sgd", "momentum", "nesterov", "adagrad", "adam"])
def test_kernel_leaves_value_and_gradient_alone(name: str, hyperparameters: dict[str, float], formula: Formula) -> None:
    value, gradient = np.linspace(-1, 1, 9), np.linspace(2, 3, 9)
    run = _Run(_optimizer(name, hyperparameters), value)
    kept_value, kept_gradient = run.value, gradient.copy()
    run.step(gradient)
    np.testing.assert_array_equal(kept_value, value)
    np.testing.assert_array_equal(gradient, kept_gradient)


@pytest.mark.parametrize("case", RECORDED, ids=[f"{c['optimizer']}-{c['dtype']}-{i}" for i, c in enumerate(RECORDED)])
def test_recorded_case_of_the_original(case: dict[str, Any]) -> None:
    dtype = np.dtype(case["dtype"])
    # The original makes float32 tensors of hyper-parameters, and keeps Adam's powers of beta in float32, also for float64 variables.
    given = {name: value if name.startswith("initial") else float(np.float32(value)) for name, value in case["hyperparameters"].items()}
    rate = given.pop("learning_rate")
    optimizer = _optimizer(case["optimizer"], given)
    run = _Run(optimizer, np.array(case["initial"], dtype), powers=initial_powers(optimizer, np.dtype(np.float32)))
    assert sorted(run.slots) == case["slot_names"]
    tolerance = 1e-5 if dtype == np.float32 else 1e-9
    for step in case["steps"]:
        run.step(np.array(step["gradient"], dtype), learning_rate=rate)
        np.testing.assert_allclose(run.value, np.array(step["expect"], dtype), rtol=tolerance)
        for slot, expected in step["slots"].items():
            np.testing.assert_allclose(run.slots[slot], np.array(expected, dtype), rtol=tolerance)


def test_hyperparameters_have_the_precision_of_the_variable() -> None:
    run = _Run(_optimizer("sgd", {}), np.zeros(1))
    run.step(np.ones(1), learning_rate=0.1)
    assert run.value[0] == -0.1
