"""Each optimizer against its formula written out plainly, in double precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ps_protocol.model.optimizers import OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.model.variables import Array
from ps_server.optimizers.rule import UpdateRule

LEARNING_RATE = 0.0625
State = dict[str, Any]
Formula = Callable[[Array, State, Array, int], Array]


def _sgd(value: Array, state: State, gradient: Array, t: int) -> Any:
    return value - LEARNING_RATE * gradient


def _momentum(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["momentum"] = 0.75 * state["momentum"] + gradient
    return value - LEARNING_RATE * state["momentum"]


def _nesterov(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["momentum"] = 0.75 * state["momentum"] + gradient
    return value - LEARNING_RATE * (gradient + 0.75 * state["momentum"])


def _adagrad(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["accumulator"] = state["accumulator"] + gradient**2
    return value - LEARNING_RATE * gradient / np.sqrt(state["accumulator"])


def _adagrad_da(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["gradient_accumulator"] = total = state["gradient_accumulator"] + gradient
    state["gradient_squared_accumulator"] = squares = state["gradient_squared_accumulator"] + gradient**2
    size = np.maximum(np.abs(total) - t * 0.125, 0)
    return -LEARNING_RATE * np.sign(total) * size / (0.25 * t * LEARNING_RATE + np.sqrt(squares))


def _adam(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["m"] = 0.75 * state["m"] + 0.25 * gradient
    state["v"] = 0.875 * state["v"] + 0.125 * gradient**2
    rate = LEARNING_RATE * np.sqrt(1 - 0.875**t) / (1 - 0.75**t)
    return value - rate * state["m"] / (np.sqrt(state["v"]) + 2.0**-20)


def _rmsprop(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["rms"] = 0.75 * state["rms"] + 0.25 * gradient**2
    state["momentum"] = 0.5 * state["momentum"] + LEARNING_RATE * gradient / np.sqrt(state["rms"] + 2.0**-10)
    return value - state["momentum"]


def _centered(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["rms"] = 0.75 * state["rms"] + 0.25 * gradient**2
    state["mg"] = 0.75 * state["mg"] + 0.25 * gradient
    state["momentum"] = 0.5 * state["momentum"] + LEARNING_RATE * gradient / np.sqrt(state["rms"] - state["mg"] ** 2 + 2.0**-10)
    return value - state["momentum"]


def _adadelta(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["accum"] = 0.75 * state["accum"] + 0.25 * gradient**2
    update = np.sqrt(state["accum_update"] + 2.0**-10) / np.sqrt(state["accum"] + 2.0**-10) * gradient
    state["accum_update"] = 0.75 * state["accum_update"] + 0.25 * update**2
    return value - LEARNING_RATE * update


def _ftrl(value: Array, state: State, gradient: Array, t: int) -> Any:
    before, p = state["accum"], 0.25
    state["accum"] = after = before + gradient**2
    state["linear"] = z = state["linear"] + gradient + 2 * 0.125 * value - (after**p - before**p) / LEARNING_RATE * value
    l2 = 0.5 + 0.75 / (2 * LEARNING_RATE)
    return np.where(np.abs(z) > 0.25, (np.sign(z) * 0.25 - z) / (after**p / LEARNING_RATE + 2 * l2), 0)


def _proximal_sgd(value: Array, state: State, gradient: Array, t: int) -> Any:
    p = value - LEARNING_RATE * gradient
    return np.sign(p) * np.maximum(np.abs(p) - LEARNING_RATE * 0.25, 0) / (1 + LEARNING_RATE * 0.5)


def _proximal_adagrad(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["accumulator"] = state["accumulator"] + gradient**2
    rate = LEARNING_RATE / np.sqrt(state["accumulator"])
    p = value - rate * gradient
    return np.sign(p) * np.maximum(np.abs(p) - rate * 0.25, 0) / (1 + rate * 0.5)


def _moving_average(value: Array, state: State, gradient: Array, t: int) -> Any:
    return 0.75 * value + 0.25 * gradient


def _adamw(value: Array, state: State, gradient: Array, t: int) -> Any:
    gradient = gradient + 0.5 * value
    state["exp_avg"] = 0.75 * state["exp_avg"] + 0.25 * gradient
    state["exp_avg_sq"] = 0.9 * state["exp_avg_sq"] + 0.1 * gradient**2
    state["max_exp_avg_sq"] = largest = np.maximum(state["max_exp_avg_sq"], state["exp_avg_sq"])
    direction = state["exp_avg"] / (1 - 0.75**t) / (np.sqrt(largest / (1 - 0.9**t)) + 0.001)
    return value * (1 - LEARNING_RATE * 0.3) - LEARNING_RATE * direction


def _nadam(value: Array, state: State, gradient: Array, t: int) -> Any:
    mu, mu_next = (0.75 * (1 - 0.5 * 0.96 ** (step * 0.125)) for step in (t, t + 1))
    state["mu_product"] = state["mu_product"] * mu
    state["exp_avg"] = 0.75 * state["exp_avg"] + 0.25 * gradient
    state["exp_avg_sq"] = 0.9 * state["exp_avg_sq"] + 0.1 * gradient**2
    of_average = mu_next / (1 - state["mu_product"] * mu_next) * state["exp_avg"]
    of_gradient = (1 - mu) / (1 - state["mu_product"]) * gradient
    return value - LEARNING_RATE * (of_average + of_gradient) / (np.sqrt(state["exp_avg_sq"] / (1 - 0.9**t)) + 0.001)


def _delayed_nesterov(value: Array, state: State, gradient: Array, t: int) -> Any:
    """Algorithm 3 of arXiv 2401.09135 as it is written, with c = 0 and a buffer of 4."""
    state["gradient_sum"] = state["gradient_sum"] + gradient
    if t % 4:
        return value - LEARNING_RATE * gradient / 4
    state["momentum"] = 0.75 * state["momentum"] + state["gradient_sum"] / 4
    state["gradient_sum"] = 0 * gradient
    return value - LEARNING_RATE * (0.75 * state["momentum"] + gradient / 4)


def _lion(value: Array, state: State, gradient: Array, t: int) -> Any:
    direction = np.sign(0.75 * state["exp_avg"] + 0.25 * gradient) + 0.3 * value
    state["exp_avg"] = 0.9 * state["exp_avg"] + 0.1 * gradient
    return value - LEARNING_RATE * direction


def _lamb(value: Array, state: State, gradient: Array, t: int) -> Any:
    state["exp_avg"] = 0.75 * state["exp_avg"] + 0.25 * gradient
    state["exp_avg_sq"] = 0.9 * state["exp_avg_sq"] + 0.1 * gradient**2
    direction = state["exp_avg"] / (1 - 0.75**t) / (np.sqrt(state["exp_avg_sq"] / (1 - 0.9**t)) + 0.001) + 0.3 * value
    return value - LEARNING_RATE * np.linalg.norm(value) / np.linalg.norm(direction) * direction


# The numbers are exact in float32, as which the optimizers of TensorFlow take them.
_PENALTIES = {"l1_regularization_strength": 0.25, "l2_regularization_strength": 0.5}
_RMS = {"decay": 0.75, "momentum": 0.5, "epsilon": 2.0**-10}
_BETAS = {"beta1": 0.75, "beta2": 0.9}
_ADAMW = {**_BETAS, "epsilon": 0.001, "weight_decay": 0.3, "l2": 0.5, "amsgrad": 1.0}
_DA = {"initial_gradient_squared_accumulator_value": 0.25, "l1_regularization_strength": 0.125, "l2_regularization_strength": 0.25}
ROWS: list[tuple[str, str, dict[str, float], Formula]] = [
    ("sgd", "sgd", {}, _sgd),
    ("momentum", "momentum", {"momentum": 0.75}, _momentum),
    ("nesterov", "momentum", {"momentum": 0.75, "use_nesterov": 1.0}, _nesterov),
    ("adagrad", "adagrad", {"initial_accumulator_value": 0.25}, _adagrad),
    ("adagrad_da", "adagrad_da", _DA, _adagrad_da),
    ("adam", "adam", {"beta1": 0.75, "beta2": 0.875, "epsilon": 2.0**-20}, _adam),
    ("rmsprop", "rmsprop", _RMS, _rmsprop),
    ("centered", "rmsprop", {**_RMS, "centered": 1.0}, _centered),
    ("adadelta", "adadelta", {"rho": 0.75, "epsilon": 2.0**-10}, _adadelta),
    (
        "ftrl",
        "ftrl",
        {**_PENALTIES, "learning_rate_power": -0.25, "l2_shrinkage_regularization_strength": 0.125, "beta": 0.75},
        _ftrl,
    ),
    ("proximal_sgd", "proximal_sgd", _PENALTIES, _proximal_sgd),
    ("proximal_adagrad", "proximal_adagrad", _PENALTIES, _proximal_adagrad),
    ("adamw", "adamw", _ADAMW, _adamw),
    ("nadam", "nadam", {**_BETAS, "epsilon": 0.001, "momentum_decay": 0.125}, _nadam),
    ("delayed_nesterov", "delayed_nesterov", {"momentum": 0.75, "delay": 4.0}, _delayed_nesterov),
    ("lion", "lion", {**_BETAS, "weight_decay": 0.3}, _lion),
    ("lamb", "lamb", {**_BETAS, "epsilon": 0.001, "weight_decay": 0.3}, _lamb),
    ("assign_mean", "assign_mean", {}, lambda value, state, gradient, t: gradient),
    ("add", "add", {}, lambda value, state, gradient, t: value + gradient),
    ("moving_average", "moving_average", {"decay": 0.75}, _moving_average),
]
every_row = pytest.mark.parametrize(("name", "hyperparameters", "formula"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])


def _rule(name: str, hyperparameters: dict[str, float]) -> UpdateRule:
    return UpdateRule(OptimizerSpec(name=name, hyperparameters=hyperparameters, learning_rate=constant(LEARNING_RATE)))


class _Run:
    """A variable under a rule, one block at a time; keeps both copies, as a shard does."""

    def __init__(self, rule: UpdateRule, value: Array) -> None:
        self.rule = rule
        self.value, self.out = value.copy(), np.empty_like(value)
        self.scratch = [np.full_like(value, np.nan) for _ in range(rule.num_scratch)]
        self.slots = {name: np.full_like(value, initial) for name, initial in rule.slots.items()}
        self.step_number = 0

    def step(self, gradient: Array) -> None:
        self.rule.begin(self.step_number)
        slots = list(self.slots.values())
        with np.errstate(all="ignore"):  # as a shard does
            self._apply(gradient, slots)
        self.rule.advance()
        self.value, self.out = self.out, self.value
        self.step_number += 1

    def _apply(self, gradient: Array, slots: list[Array]) -> None:
        if self.rule.needs_whole_variables:
            measuring, squares = self.rule.measuring(self.value.dtype), np.empty(self.value.size)
            while not measuring.step(self.value, out=self.out, slots=slots, gradient=gradient, scratch=self.scratch, squares=squares):
                measuring.conclude()
        else:
            self.rule.apply(self.value, out=self.out, slots=slots, gradient=gradient, scratch=self.scratch)


def test_every_known_optimizer_has_a_row() -> None:
    assert {row[1] for row in ROWS} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_row
def test_thirty_steps_follow_the_formula(
    name: str, hyperparameters: dict[str, float], formula: Formula, dtype: type[np.floating[Any]]
) -> None:
    rng = np.random.default_rng(1)
    run = _Run(_rule(name, hyperparameters), rng.standard_normal(37).astype(dtype))
    value = run.value.astype(np.float64)
    state: State = {slot: memory.astype(np.float64) for slot, memory in run.slots.items()}
    for t in range(1, 31):
        gradient = rng.standard_normal(37).astype(dtype)
        run.step(gradient)
        value = formula(value, state, gradient.astype(np.float64), t)
    # In float32, centered rmsprop takes the difference of two numbers that are nearly equal. Adam's powers are float32 numbers.
    tolerance = 1e-4 if dtype is np.float32 else 1e-7 if name == "adam" else 1e-12
    np.testing.assert_allclose(run.value, value, rtol=tolerance, atol=tolerance)
    for slot, memory in run.slots.items():
        np.testing.assert_allclose(memory, state[slot], rtol=tolerance, atol=tolerance)
    assert run.value.dtype == dtype


@every_row
def test_value_and_gradient_are_left_alone(name: str, hyperparameters: dict[str, float], formula: Formula) -> None:
    value, gradient = np.linspace(-1, 1, 9), np.linspace(2, 3, 9)
    run = _Run(_rule(name, hyperparameters), value)
    kept_value, kept_gradient = run.value, gradient.copy()
    run.step(gradient)
    np.testing.assert_array_equal(kept_value, value)
    np.testing.assert_array_equal(gradient, kept_gradient)


@every_row
def test_slot_names_are_sorted(name: str, hyperparameters: dict[str, float], formula: Formula) -> None:
    names = list(_rule(name, hyperparameters).slots)
    assert names == sorted(names)


@pytest.mark.parametrize("delay", [1, 3])
def test_delayed_nesterov_gets_in_as_many_steps_to_where_nesterov_momentum_is_after_their_mean(delay: int) -> None:
    rng = np.random.default_rng(1)
    initial = rng.standard_normal(9)
    delayed = _Run(_rule("delayed_nesterov", {"momentum": 0.75, "delay": float(delay)}), initial)
    together = _Run(_rule("momentum", {"momentum": 0.75, "use_nesterov": 1.0}), initial)
    for _ in range(5):
        gradients = rng.standard_normal((delay, 9))
        for gradient in gradients:
            delayed.step(gradient)
        together.step(gradients.mean(axis=0))
        np.testing.assert_allclose(delayed.value, together.value, rtol=1e-12)
        np.testing.assert_allclose(delayed.slots["momentum"], together.slots["momentum"], rtol=1e-12)


def test_ftrl_lets_an_untouched_element_be_zero_where_there_is_nothing_to_divide() -> None:
    """0 / 0 is what the formula says with an accumulator that starts at 0; the original selects before it shows."""
    run = _Run(_rule("ftrl", {"initial_accumulator_value": 0.0}), np.ones(2))
    with np.errstate(all="ignore"):
        run.step(np.array([0.0, 1.0]))
    assert run.value[0] == 0.0
    assert run.value[1] == pytest.approx(0.9375, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.is_single])
def test_l2_is_part_of_the_gradient_and_weight_decay_is_not(name: str, dtype: type[np.floating[Any]]) -> None:
    """Each by the same optimizer without them: given the gradient with the penalty, and shrunk beside it."""
    rng = np.random.default_rng(1)
    initial = rng.standard_normal(9).astype(dtype)
    run, plain = (_Run(_rule(name, numbers), initial) for numbers in ({"l2": 0.25, "weight_decay": 0.5}, {}))
    for _ in range(4):
        gradient, before = rng.standard_normal(9).astype(dtype), run.value.copy()
        plain.value = before
        run.step(gradient)
        plain.step(gradient + dtype(0.25) * before)
        np.testing.assert_array_equal(run.value, plain.value - dtype(0.5 * LEARNING_RATE) * before)
        for slot, memory in run.slots.items():
            np.testing.assert_array_equal(memory, plain.slots[slot])


def test_penalties_make_small_variables_exactly_zero() -> None:
    for name in ("proximal_sgd", "proximal_adagrad", "ftrl", "adagrad_da"):
        run = _Run(_rule(name, {"l1_regularization_strength": 100.0}), np.full(3, 0.01))
        run.step(np.array([-0.001, 0.0, 0.001]))
        assert run.value.tolist() == [0.0, 0.0, 0.0], name
