"""Claims about which optimizers and learning rates are taken."""

from typing import Any

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import OPTIMIZERS, OptimizerSpec, Schedule, constant


def optimizer(name: str, rate: Schedule | None = None, **hyperparameters: Any) -> OptimizerSpec:
    return OptimizerSpec(name=name, learning_rate=rate or constant(0.1), hyperparameters=hyperparameters)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_is_complete_by_its_defaults(name: str) -> None:
    spec = optimizer(name)
    values = {key: spec.hyperparameter(key) for key in OPTIMIZERS[name].hyperparameters}
    spelled_out = OptimizerSpec(name=name, learning_rate=constant(0.1), hyperparameters=values)
    assert all(spelled_out.hyperparameter(key) == spec.hyperparameter(key) for key in OPTIMIZERS[name].hyperparameters)


def test_given_hyperparameters_win_over_defaults() -> None:
    assert optimizer("adam", beta1=0.5).hyperparameter("beta1") == 0.5
    assert optimizer("adam", beta1=0.5).hyperparameter("beta2") == 0.999
    assert optimizer("adam", beta1=0, epsilon=0).hyperparameter("beta1") == 0


@pytest.mark.parametrize(
    ("name", "hyperparameters", "words"),
    [
        ("adamm", {}, "'adamm'; want one of sgd, momentum, .*; did you mean 'adam'"),
        ("rmsdrop", {}, "'rmsdrop'; want .* did you mean 'rmsprop'"),
        ("momentum", {"momentun": 0.9}, "unknown hyper-parameter 'momentun'; .* did you mean 'momentum'"),
        ("sgd", {"momentum": 0.9}, "unknown hyper-parameter 'momentum'; want weight_decay"),
        ("momentum", {"momentum": float("nan")}, "momentum = nan, want a finite number"),
        ("momentum", {"momentum": float("inf")}, "momentum = inf, want a finite number"),
        ("momentum", {"momentum": 10**400}, "want a finite number"),
        ("momentum", {"momentum": "0.9"}, "momentum = '0.9', want a finite number"),
        ("momentum", {"momentum": True}, "momentum = True, want a finite number"),
        ("momentum", {"momentum": -0.1}, "momentum = -0.1, want >= 0"),
        ("momentum", {"use_nesterov": 0.5}, "use_nesterov = 0.5, want 0 or 1"),
        ("adagrad", {"initial_accumulator_value": 0.0}, "initial_accumulator_value = 0.0, want > 0"),
        ("adam", {"beta1": 1.0}, "beta1 = 1.0, want >= 0 and < 1"),
        ("adam", {"beta2": 1.5}, "beta2 = 1.5, want >= 0 and < 1"),
        ("adam", {"epsilon": -1e-8}, "epsilon = -1e-08, want >= 0"),
        ("sgd", {"weight_decay": 1e39}, r"weight_decay = 1e\+39, want at most 3.403e\+38"),
    ],
)
def test_wrong_optimizers_are_refused(name: str, hyperparameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        optimizer(name, **hyperparameters)


def test_learning_rate_that_is_infinite_in_single_precision_is_refused() -> None:
    for rate in (constant(1e39), Schedule(name="piecewise_constant", boundaries=(10,), values=(0.1, 1e39))):
        with pytest.raises(InvalidSpec, match=r"learning_rate = 1e\+39, want at most 3.403e\+38: a larger one is infinite in float32"):
            optimizer("sgd", rate)
    assert optimizer("sgd", constant(3.4e38)).learning_rate == constant(3.4e38)


def test_learning_rate_must_not_be_negative_anywhere() -> None:
    for rate in (
        constant(-0.1),
        Schedule(name="piecewise_constant", boundaries=(10,), values=(0.1, -0.1)),
        Schedule(name="polynomial_decay", arguments={"initial": 0.1, "decay_steps": 10, "final": -0.1}),
    ):
        with pytest.raises(InvalidSpec, match=r"learning_rate = -0.1, want >= 0"):
            optimizer("sgd", rate)
    assert optimizer("sgd", constant(0)).learning_rate.argument("value") == 0


def test_schedule_arguments_have_defaults() -> None:
    schedule = Schedule(name="polynomial_decay", arguments={"initial": 1.0, "decay_steps": 10, "power": 2.0})
    assert (schedule.argument("power"), schedule.argument("final"), schedule.argument("cycle")) == (2.0, 0.0001, 0.0)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"name": "exponential"}, "schedule 'exponential'; want .* did you mean 'exponential_decay'"),
        ({"name": "constant"}, "argument 'value' is missing"),
        ({"name": "constant", "arguments": {"value": float("nan")}}, "value = nan, want a finite number"),
        ({"name": "constant", "arguments": {"value": 1, "valeu": 1}}, "unknown argument 'valeu'; .* did you mean 'value'"),
        ({"name": "constant", "arguments": {"value": 1}, "values": (1.0,)}, "takes no boundaries and no values"),
        ({"name": "cosine_decay", "arguments": {"initial": 1, "decay_steps": 0}}, "decay_steps = 0, want > 0"),
        ({"name": "exponential_decay", "arguments": {"initial": 1, "decay_steps": 1, "decay_rate": -1}}, "decay_rate = -1, want >= 0"),
        ({"name": "polynomial_decay", "arguments": {"initial": 1, "decay_steps": 1, "power": -1}}, "power = -1, want >= 0"),
        ({"name": "polynomial_decay", "arguments": {"initial": 1, "decay_steps": 1, "cycle": 2}}, "cycle = 2, want 0 or 1"),
        ({"name": "piecewise_constant", "boundaries": (1.0,), "values": (1.0,)}, "1 boundaries want 2 values, got 1"),
        ({"name": "piecewise_constant", "boundaries": (2.0, 1.0), "values": (1.0,) * 3}, "do not ascend"),
        ({"name": "piecewise_constant", "boundaries": (float("nan"),), "values": (1.0,) * 2}, "want a finite number"),
    ],
)
def test_wrong_schedules_are_refused(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        Schedule(**schedule)
