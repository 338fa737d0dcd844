"""Valid optimizers and learning rates."""

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


@pytest.mark.parametrize(
    ("formula", "title"), [("# Lion\nv = v - lr * g", "Lion"), ("v = v - lr * g  # Lion", "custom"), ("#\nv = v - lr * g", "custom")]
)
def test_a_custom_optimizer_has_the_name_that_its_formula_begins_with(formula: str, title: str) -> None:
    assert OptimizerSpec(name="custom", learning_rate=constant(0.1), formula=formula).title == title


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
        ({"name": "piecewise_constant", "boundaries": (2.0, 1.0), "values": (1.0,) * 3}, "do not ascend: 1 after 2"),
        (
            {"name": "piecewise_constant", "boundaries": tuple(range(1_001)), "values": (1.0,) * 1_002},
            "1001 boundaries, want at most 1000",
        ),
        ({"name": "piecewise_constant", "boundaries": (float("nan"),), "values": (1.0,) * 2}, "want a finite number"),
    ],
)
def test_wrong_schedules_are_refused(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        Schedule(**schedule)


def custom(formula: Any, *, slots: Any = None, **hyperparameters: Any) -> OptimizerSpec:
    return OptimizerSpec(
        name="custom", learning_rate=constant(0.1), hyperparameters=hyperparameters, formula=formula, slot_values=slots or {}
    )


@pytest.mark.parametrize(
    ("formula", "slots", "hyperparameters", "words"),
    [
        ("", {}, {}, "it is empty"),
        (3, {}, {}, "formula: got a int, want a str"),
        ("v - lr * g.data", {}, {}, "line 1, column 10: attributes are not allowed: 'v - lr \\* g.data'"),
        ("m = m + g\nv = v - lr * mm", {"m": 0.0}, {}, r"line 2, column 14: unknown name 'mm'; known are g, lr, m, t, v"),
        ("v - lr * g", {}, {"b1": 0.9}, "'b1' does not occur in the formula; known are g, lr, v"),
        ("v - lr", {}, {}, "'g', the gradient, does not occur"),
        ("v - g", {}, {}, "'lr', the learning rate, does not occur"),
        ("m = m + lr * g", {"m": 0.0}, {}, "assigns nothing to 'v', the variable"),
        ("v = v - lr * (m + g)", {"m": 0.0}, {}, "assigns nothing to 'm', a slot; write m = …"),
        ("g = g * lr; v = v - g", {}, {}, "column 1: 'g' is an argument and cannot be assigned to"),
        ("v = v - lr * g; b = 1", {}, {"b": 1.0}, "'b' is an argument and cannot be assigned to"),
        ("v - lr * g ** t", {}, {}, r"column 10: only a hyper-parameter \(none\) can be raised to the power of t"),
        ("v - lr * g * b ** t", {}, {"b": 1.5}, "b = 1.5, want 0 to 1: it is raised to the power of the step"),
        ("v - lr * g * b", {}, {"b": float("nan")}, "b = nan, want a finite number"),
        ("v - lr * g * b", {}, {"b": 1e39}, r"b = 1e\+39, want at most"),
        ("v - lr * g * sqrt", {}, {"sqrt": 1.0}, "hyper-parameter 'sqrt': this name has a meaning in formulas already"),
        ("v - lr * g * t", {}, {"t": 1.0}, "hyper-parameter 't': this name has a meaning"),
        ("v - lr * g", {"a b": 0.0}, {}, "slot 'a b': want a name of letters, digits and _"),
        ("v - lr * g", {"lambda": 0.0}, {}, "slot 'lambda': want a name"),
        ("m = m + g; v = v - lr * m", {"m": float("inf")}, {}, "slot m = inf, want a finite number"),
        ("average = average + g; v = v - lr * average", {"average": 0.0}, {}, "checkpoints call the moving averages so"),
        ("m = m + g; v = v - lr * m", {"m": 0.0}, {"m": 0.0}, "'m' is a slot and a hyper-parameter"),
        ("v - lr * g", {f"m{i}": 0.0 for i in range(9)}, {}, "9 slots, 8 at most"),
    ],
)
def test_wrong_custom_optimizers_are_refused_with_the_place(formula: Any, slots: Any, hyperparameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        custom(formula, slots=slots, **hyperparameters)


def test_another_optimizer_takes_no_formula() -> None:
    with pytest.raises(InvalidSpec, match="optimizer 'sgd': it has a formula of its own; one with another is called 'custom'"):
        OptimizerSpec(name="sgd", learning_rate=constant(0.1), formula="v - lr * g")


def test_custom_optimizers_are_distinguished_by_formula_slots_and_numbers() -> None:
    text = "m = m + g; v = v - lr * m * b"
    one = custom(text, slots={"m": 0.0}, b=1.0)
    assert one.key == custom(text, slots={"m": 0}, b=1).key
    others = [custom(text, slots={"m": 0.0}, b=2.0), custom(text, slots={"m": 1.0}, b=1.0), custom(text + " ", slots={"m": 0.0}, b=1.0)]
    assert len({one.key, *(other.key for other in others)}) == 4
    assert (one.slots, one.is_lazy, one.is_update_rule, one.needs_whole_variables) == ({"m": 0.0}, True, False, False)
    assert custom("v - lr * g / norm(g)").needs_whole_variables


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beta_1", "want one of beta1, beta2, epsilon, lazy, weight_decay, l2, learning_rate; did you mean 'beta1'?"),
        ("lerning_rate", "l2, learning_rate; did you mean 'learning_rate'?"),
        ("lr", "want beta1, beta2, epsilon, lazy, weight_decay, l2, learning_rate$"),
    ],
)
def test_the_refusal_of_a_misspelt_hyper_parameter_lists_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        OptimizerSpec(name="adam", learning_rate=constant(0.1), hyperparameters={name: 0.5})
