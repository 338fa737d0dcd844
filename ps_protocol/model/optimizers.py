"""Which optimizers and learning-rate schedules exist, with their arguments, defaults and limits, and the formula of each optimizer.

A formula is a text in the language of `ps_protocol/model/expressions.py`, which `ps_protocol/model/programs.py` compiles; custom optimizers
bring their own. Never change the order of operations in one: the bits are promised.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.expressions import MAX_NAME, VARIABLE, Formula, check_own_name
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.misspelling import known_names
from ps_protocol.model.programs import Names, Program, compiled, parsed
from ps_protocol.model.shown import shown


@light_dataclass(frozen=True, slots=True)
class _Domain:
    """The values that an argument may have, as a test and as a text."""

    allows: Callable[[float], bool]
    want: str


_NOT_NEGATIVE = _Domain(lambda value: value >= 0, ">= 0")
_POSITIVE = _Domain(lambda value: value > 0, "> 0")
# At 1 the correction of Adam's moments would divide by zero.
_DECAY = _Domain(lambda value: 0 <= value < 1, ">= 0 and < 1")
# A power of a larger one would be infinite some day.
_RAISED = _Domain(lambda value: 0 <= value <= 1, "0 to 1: it is raised to the power of the step")
_COUNT = _Domain(lambda value: value >= 1 and value == int(value), "a whole number >= 1")
_FLAG = _Domain(lambda value: value in (0, 1), "0 or 1")

# Servers compute float32 variables in float32, and all learning rates: what is larger would be infinite there.
_LARGEST = (2 - 2**-23) * 2.0**127

# What an optimizer's formula calls the variable's gradient, the learning rate, and the step after the update.
GRADIENT, LEARNING_RATE, STEP = "g", "lr", "t"

_NOT_POSITIVE = _Domain(lambda value: value <= 0, "<= 0")

_PENALTIES: dict[str, tuple[float, _Domain]] = {
    "l1_regularization_strength": (0.0, _NOT_NEGATIVE),
    "l2_regularization_strength": (0.0, _NOT_NEGATIVE),
}
_INITIAL_ACCUMULATOR: dict[str, tuple[float, _Domain]] = {"initial_accumulator_value": (0.1, _POSITIVE)}

_DECAYS: dict[str, tuple[float, _Domain]] = {"weight_decay": (0.0, _NOT_NEGATIVE), "l2": (0.0, _NOT_NEGATIVE)}


def _no_slots(spec: "OptimizerSpec") -> Mapping[str, float]:
    return {}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """One optimizer: its hyper-parameters, each with its default and the values that it may have, and its slots.

    `slots`: names, and the value that each starts with; one whose name has another meaning in the formula is called NAME_slot there.
    `is_single`: rates, hyper-parameters and powers are rounded to float32, and numbers computed in the variable's type, as TensorFlow does;
    else in double precision, rounded where they meet an array: in float32, 1 - 0.999 is wrong in the fifth digit.
    `at_rate`: numbers in place of hyper-parameters, from the learning rate in double precision. `is_update_rule`: it is for variables that
    take plain updates (statistics, counters), not gradients; learning rates mean nothing to it. `sums`: it wants the sum of the
    contributions, not their mean.
    """

    hyperparameters: Mapping[str, tuple[float, _Domain]]
    formula: Callable[["OptimizerSpec"], str]
    slots: Callable[["OptimizerSpec"], Mapping[str, float]] = _no_slots
    is_single: bool = False
    at_rate: Callable[["OptimizerSpec", float], Mapping[str, float]] | None = None
    is_update_rule: bool = False
    sums: bool = False


def _of_tensorflow(
    hyperparameters: Mapping[str, tuple[float, _Domain]],
    formula: Callable[["OptimizerSpec"], str],
    slots: Callable[["OptimizerSpec"], Mapping[str, float]] = _no_slots,
    at_rate: Callable[["OptimizerSpec", float], Mapping[str, float]] | None = None,
) -> OptimizerKind:
    """One of tf.compat.v1.train, with the formula and slots of its CPU kernel (tensorflow/core/kernels/training_ops.cc).

    In the kernel's order of operations, save for how that rounds 1/sqrt and fused multiply-adds. Beside it there are two decays.
    `weight_decay` is decoupled: variable -= learning_rate * weight_decay * variable, beside what the optimizer does. `l2` is part of the
    gradient: gradient += l2 * variable, before the optimizer sees it.
    """
    return OptimizerKind(hyperparameters={**hyperparameters, **_DECAYS}, formula=formula, slots=slots, is_single=True, at_rate=at_rate)


def _accumulator(spec: "OptimizerSpec") -> Mapping[str, float]:
    return {"accumulator": spec.hyperparameter("initial_accumulator_value")}


# The formulas that depend on hyper-parameters. What is 0 is left out of the text, so that it costs nothing.


def _momentum(spec: "OptimizerSpec") -> str:
    change = "g * lr + momentum_slot * momentum * lr" if spec.hyperparameter("use_nesterov") else "momentum_slot * lr"
    return f"momentum_slot = momentum_slot * momentum + g; v = v - ({change})"


def _adagrad_da(spec: "OptimizerSpec") -> str:
    # The variable's old value does not matter.
    total = "gradient_accumulator"
    threshold = "t * l1_regularization_strength"
    shrunk = f"max(abs({total}) - {threshold}, 0) * sign({total})" if spec.has("l1_regularization_strength") else total
    return f"""
        {total} = {total} + g
        gradient_squared_accumulator = gradient_squared_accumulator + g * g
        v = {shrunk} * -lr / (sqrt(gradient_squared_accumulator) + t * l2_regularization_strength * lr)
    """


def _rmsprop(spec: "OptimizerSpec") -> str:
    is_centered = spec.hyperparameter("centered")
    return f"""
        rms = rms + (g * g - rms) * (1 - decay)
        {"mg = mg + (g - mg) * (1 - decay)" if is_centered else ""}
        momentum_slot = momentum_slot * momentum + g * lr / sqrt({"rms - mg * mg" if is_centered else "rms"} + epsilon)
        v = v - momentum_slot
    """


def _ftrl(spec: "OptimizerSpec") -> str:
    power = -single(spec.hyperparameter("learning_rate_power"))
    penalized = "g + v * (2 * l2_shrinkage_regularization_strength)" if spec.has("l2_shrinkage_regularization_strength") else "g"
    # The quotient is sign(z) * l1 - z where |z| > l1, at a third of the price; elsewhere the variable is 0 in any case.
    return f"""
        before = accum ** {power!r}
        accum = accum + g * g
        after = accum ** {power!r}
        linear = linear + ({penalized} - (after - before) / lr * v)
        l1 = l1_regularization_strength
        v = where(abs(linear) > l1, (clip(linear, -l1, l1) - linear) / (after / lr + 2 * l2_regularization_strength), 0)
    """


def _ftrl_at_rate(spec: "OptimizerSpec", rate: float) -> Mapping[str, float]:
    beta, l2 = spec.hyperparameter("beta"), spec.hyperparameter("l2_regularization_strength")
    return {"l2_regularization_strength": single(float(l2 + beta / (2 * np.float64(rate))) if beta else l2)}


def _proximal_sgd(spec: "OptimizerSpec") -> str:
    shrunk = "sign(p) * max(abs(p) - lr * l1_regularization_strength, 0)" if spec.has("l1_regularization_strength") else "p"
    return f"p = v - g * lr; v = {shrunk} / (1 + lr * l2_regularization_strength)"


def _proximal_adagrad(spec: "OptimizerSpec") -> str:
    shrunk = "sign(p) * max(abs(p) - rate * l1_regularization_strength, 0)" if spec.has("l1_regularization_strength") else "p"
    divisor = " / (rate * l2_regularization_strength + 1)" if spec.has("l2_regularization_strength") else ""
    return f"""
        accumulator = accumulator + g * g
        rate = 1 / sqrt(accumulator) * lr
        p = v - g * rate
        v = {shrunk}{divisor}
    """


def _gradient(spec: "OptimizerSpec") -> tuple[str, str]:
    """The line that makes the gradient with its l2 penalty, and what the gradient is called from there on."""
    return (f"d = {GRADIENT} + l2 * {VARIABLE}", "d") if spec.hyperparameter("l2") else ("", GRADIENT)


def _decayed(spec: "OptimizerSpec") -> str:
    """The variable after its weight decay."""
    return "v * (1 - lr * weight_decay)" if spec.hyperparameter("weight_decay") else "v"


def _adamw(spec: "OptimizerSpec") -> str:
    # lr / (1 - b1^t) * m / (sqrt(s / (1 - b2^t)) + epsilon) with one operation less for each element.
    first, gradient = _gradient(spec)
    largest = "max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)" if spec.hyperparameter("amsgrad") else ""
    root = "sqrt(max_exp_avg_sq)" if largest else "sqrt(exp_avg_sq)"
    return f"""
        {first}
        exp_avg = exp_avg + ({gradient} - exp_avg) * (1 - beta1)
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * ({gradient} * {gradient})
        {largest}
        c = sqrt(1 - beta2 ** t)
        v = {_decayed(spec)} - lr * c / (1 - beta1 ** t) * exp_avg / ({root} + epsilon * c)
    """


def _nadam(spec: "OptimizerSpec") -> str:
    first, gradient = _gradient(spec)
    return f"""
        {first}
        mu = beta1 * (1 - 0.5 * exp(t * momentum_decay * log(0.96)))
        mu_next = beta1 * (1 - 0.5 * exp((t + 1) * momentum_decay * log(0.96)))
        mu_product = mu_product * mu
        exp_avg = exp_avg + ({gradient} - exp_avg) * (1 - beta1)
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * ({gradient} * {gradient})
        of_gradient = lr * (1 - mu) / (1 - mu_product) * {gradient}
        of_average = lr * mu_next / (1 - mu_product * mu_next) * exp_avg
        v = {_decayed(spec)} - (of_gradient + of_average) / (sqrt(exp_avg_sq / (1 - beta2 ** t)) + epsilon)
    """


def _delayed_nesterov(spec: "OptimizerSpec") -> str:
    # Numbers decide, so that every step makes the same operations: 0 times a sum is nothing, and 1 times the momentum leaves it alone.
    return """
        is_due = where(mod(t, delay) > 0, 0, 1)
        total = gradient_sum + g
        momentum_slot = momentum_slot * where(is_due > 0, momentum, 1) + total * (is_due / delay)
        gradient_sum = total * (1 - is_due)
        v = v - (g * (lr / delay) + momentum_slot * (lr * momentum * is_due))
    """


def _lion(spec: "OptimizerSpec") -> str:
    return f"""
        v = {_decayed(spec)} - lr * sign(beta1 * exp_avg + (1 - beta1) * g)
        exp_avg = beta2 * exp_avg + (1 - beta2) * g
    """


def _lamb(spec: "OptimizerSpec") -> str:
    decay = " + weight_decay * v" if spec.hyperparameter("weight_decay") else ""
    return f"""
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * (g * g)
        u = exp_avg / (1 - beta1 ** t) / (sqrt(exp_avg_sq / (1 - beta2 ** t)) + epsilon){decay}
        v = v - lr * where(norm(v) > 0, where(norm(u) > 0, norm(v) / norm(u), 1), 1) * u
    """


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "sgd": _of_tensorflow({}, lambda spec: "v - g * lr"),
    "momentum": _of_tensorflow({"momentum": (0.9, _NOT_NEGATIVE), "use_nesterov": (0.0, _FLAG)}, _momentum, lambda spec: {"momentum": 0.0}),
    "adagrad": _of_tensorflow(
        _INITIAL_ACCUMULATOR, lambda spec: "accumulator = accumulator + g * g; v = v - g * lr * (1 / sqrt(accumulator))", _accumulator
    ),
    # Dual averaging.
    "adagrad_da": _of_tensorflow(
        {"initial_gradient_squared_accumulator_value": (0.1, _POSITIVE), **_PENALTIES},
        _adagrad_da,
        lambda spec: {
            "gradient_accumulator": 0.0,
            "gradient_squared_accumulator": spec.hyperparameter("initial_gradient_squared_accumulator_value"),
        },
    ),
    # `lazy`: rows of a sparse variable that no gradient touches stay as they are; without it their moments decay, as in the original.
    "adam": _of_tensorflow(
        {"beta1": (0.9, _DECAY), "beta2": (0.999, _DECAY), "epsilon": (1e-8, _NOT_NEGATIVE), "lazy": (0.0, _FLAG)},
        lambda spec: (
            """
            bias = 1 - beta1 ** t
            m = m + (g - m) * (1 - beta1)
            v_slot = v_slot + (g * g - v_slot) * (1 - beta2)
            v = v - m * (lr * sqrt(1 - beta2 ** t) / bias) / (sqrt(v_slot) + epsilon)
        """
        ),
        lambda spec: {"m": 0.0, "v": 0.0},
    ),
    "rmsprop": _of_tensorflow(
        {"decay": (0.9, _NOT_NEGATIVE), "momentum": (0.0, _NOT_NEGATIVE), "epsilon": (1e-10, _NOT_NEGATIVE), "centered": (0.0, _FLAG)},
        _rmsprop,
        lambda spec: {**({"mg": 0.0} if spec.hyperparameter("centered") else {}), "momentum": 0.0, "rms": 1.0},
    ),
    "adadelta": _of_tensorflow(
        {"rho": (0.95, _NOT_NEGATIVE), "epsilon": (1e-8, _NOT_NEGATIVE)},
        lambda spec: (
            """
            accum = accum * rho + g * g * (1 - rho)
            u = sqrt(accum_update + epsilon) * (1 / sqrt(accum + epsilon)) * g
            accum_update = accum_update * rho + u * u * (1 - rho)
            v = v - u * lr
        """
        ),
        lambda spec: {"accum": 0.0, "accum_update": 0.0},
    ),
    "ftrl": _of_tensorflow(
        {
            "learning_rate_power": (-0.5, _NOT_POSITIVE),
            "initial_accumulator_value": (0.1, _NOT_NEGATIVE),
            **_PENALTIES,
            "l2_shrinkage_regularization_strength": (0.0, _NOT_NEGATIVE),
            "beta": (0.0, _NOT_NEGATIVE),
        },
        _ftrl,
        lambda spec: {"accum": spec.hyperparameter("initial_accumulator_value"), "linear": 0.0},
        _ftrl_at_rate,
    ),
    "proximal_sgd": _of_tensorflow(_PENALTIES, _proximal_sgd),
    "proximal_adagrad": _of_tensorflow({**_INITIAL_ACCUMULATOR, **_PENALTIES}, _proximal_adagrad, _accumulator),
    # torch.optim.AdamW; with `l2` instead of `weight_decay` torch.optim.Adam.
    "adamw": OptimizerKind(
        hyperparameters={
            "beta1": (0.9, _DECAY),
            "beta2": (0.999, _DECAY),
            "epsilon": (1e-8, _NOT_NEGATIVE),
            "weight_decay": (0.01, _NOT_NEGATIVE),
            "l2": (0.0, _NOT_NEGATIVE),
            "amsgrad": (0.0, _FLAG),
            "lazy": (0.0, _FLAG),
        },
        slots=lambda spec: {
            "exp_avg": 0.0,
            "exp_avg_sq": 0.0,
            **({"max_exp_avg_sq": 0.0} if spec.hyperparameter("amsgrad") else {}),
        },
        formula=_adamw,
    ),
    # torch.optim.NAdam.
    "nadam": OptimizerKind(
        hyperparameters={
            "beta1": (0.9, _DECAY),
            "beta2": (0.999, _DECAY),
            "epsilon": (1e-8, _NOT_NEGATIVE),
            "momentum_decay": (0.004, _NOT_NEGATIVE),
            **_DECAYS,
        },
        slots=lambda spec: {"exp_avg": 0.0, "exp_avg_sq": 0.0, "mu_product": 1.0},
        formula=_nadam,
    ),
    # Algorithm 3 of arXiv 2401.09135, with c = 0.
    "delayed_nesterov": OptimizerKind(
        hyperparameters={"momentum": (0.9, _NOT_NEGATIVE), "delay": (1.0, _COUNT)},
        slots=lambda spec: {"gradient_sum": 0.0, "momentum": 0.0},
        formula=_delayed_nesterov,
    ),
    # The authors' own, lion_pytorch.
    "lion": OptimizerKind(
        hyperparameters={"beta1": (0.9, _DECAY), "beta2": (0.99, _DECAY), "weight_decay": (0.0, _NOT_NEGATIVE)},
        slots=lambda spec: {"exp_avg": 0.0},
        formula=_lion,
    ),
    # optax.lamb.
    "lamb": OptimizerKind(
        hyperparameters={
            "beta1": (0.9, _DECAY),
            "beta2": (0.999, _DECAY),
            "epsilon": (1e-6, _NOT_NEGATIVE),
            "weight_decay": (0.0, _NOT_NEGATIVE),
        },
        slots=lambda spec: {"exp_avg": 0.0, "exp_avg_sq": 0.0},
        formula=_lamb,
    ),
    # Of plain updates: the gradient is the mean of the updates, or their sum.
    "assign_mean": OptimizerKind(hyperparameters={}, formula=lambda spec: "g", is_update_rule=True),
    "add": OptimizerKind(hyperparameters={}, formula=lambda spec: "v + g", is_update_rule=True, sums=True),
    "moving_average": OptimizerKind(
        hyperparameters={"decay": (0.99, _Domain(lambda value: 0 <= value <= 1, "0 to 1"))},
        formula=lambda spec: "v - (v - g) * (1 - decay)",
        is_update_rule=True,
    ),
}

# The optimizer whose formula is part of its specification, with its slots and hyper-parameters.
CUSTOM = "custom"
_CUSTOM_KIND = OptimizerKind(hyperparameters={}, slots=lambda spec: spec.slot_values, formula=lambda spec: spec.formula)
MAX_SLOTS = 8
# What the learning rate is called among the numbers that hold for one step.
RATE = "learning_rate"
# And what the number of a phase of training is called there. No formula can have this name.
PHASE = "phase of training"
_MAX_HYPERPARAMETERS = 32

GRADIENT_OPTIMIZERS = tuple(name for name, kind in OPTIMIZERS.items() if not kind.is_update_rule)

# What the slots are filled with when the model is created; a later change would have no effect.
INITIAL_HYPERPARAMETERS = frozenset(
    {"initial_accumulator_value", "initial_gradient_squared_accumulator_value", "centered", "lazy", "amsgrad"}
)

MAX_BOUNDARIES = 1_000
# Schedule -> names of its scalar arguments that must be given, and of those that may be, with defaults.
SCHEDULES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "piecewise_constant": ((), {}),
    "exponential_decay": (("initial", "decay_steps", "decay_rate"), {"staircase": 0.0}),
    "inverse_time_decay": (("initial", "decay_steps", "decay_rate"), {"staircase": 0.0}),
    "polynomial_decay": (("initial", "decay_steps"), {"final": 0.0001, "power": 1.0, "cycle": 0.0}),
    "cosine_decay": (("initial", "decay_steps"), {"alpha": 0.0}),
}

# Arguments of schedules that may not have just any finite value; outside of these the formulas have no real value.
_ARGUMENTS = {"decay_steps": _POSITIVE, "decay_rate": _NOT_NEGATIVE, "power": _NOT_NEGATIVE, "staircase": _FLAG, "cycle": _FLAG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate as a function of the step."""

    name: str
    arguments: Mapping[str, float] = field(default_factory=dict)
    boundaries: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise InvalidSpec(f"schedule {self.name!r}; want {known_names(self.name, SCHEDULES)}")
        required, optional = SCHEDULES[self.name]
        for key, value in self.arguments.items():
            if key not in required and key not in optional:
                raise InvalidSpec(f"schedule {self.name!r}: unknown argument {key!r}; want {known_names(key, (*required, *optional))}")
            _check_number(f"schedule {self.name!r}: {key}", value, _ARGUMENTS.get(key))
        for key in required:
            if key not in self.arguments:
                raise InvalidSpec(f"schedule {self.name!r}: argument {key!r} is missing")
        self._check_pieces()

    def _check_pieces(self) -> None:
        if self.name != "piecewise_constant":
            if self.boundaries or self.values:
                raise InvalidSpec(f"schedule {self.name!r} takes no boundaries and no values")
            return
        count = len(self.boundaries)
        if count > MAX_BOUNDARIES:
            # They travel with each record that parameter servers keep of a step.
            raise InvalidSpec(f"schedule 'piecewise_constant': {count} boundaries, want at most {MAX_BOUNDARIES}; use another schedule")
        if len(self.values) != count + 1:
            raise InvalidSpec(f"schedule 'piecewise_constant': {count} boundaries want {count + 1} values, got {len(self.values)}")
        for value in (*self.boundaries, *self.values):
            _check_number("schedule 'piecewise_constant': a boundary or value", value)
        for before, after in pairwise(self.boundaries):
            if before > after:
                raise InvalidSpec(
                    f"schedule 'piecewise_constant': boundaries do not ascend: {after:g} after {before:g}; sort them, with their values"
                )

    def argument(self, name: str) -> float:
        """Returns an argument, or its default."""
        return self.arguments[name] if name in self.arguments else SCHEDULES[self.name][1][name]


def constant(value: float) -> Schedule:
    """Returns the schedule that is `value` at every step."""
    return Schedule(name="constant", arguments={"value": value})


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepHyperparameter:
    """A learning rate (`name` is RATE) or hyper-parameter that holds for one step, of the optimizer of `group` (empty: the model's).

    Or the phase of training that the step belongs to (`name` is PHASE, without a group): the first step of a higher one than before begins
    with new slots and powers, and counts steps from there.
    """

    group: str
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer by name with its hyper-parameters; checked against the table above. Truth values are 0.0 and 1.0.

    The one called CUSTOM has a `formula`, in which its hyper-parameters are names; `slot_values` are its slots, and what each starts with.
    `group`: the name by which contributions give it numbers of its own; empty: they cannot, unless it is the model's.
    """

    name: str
    learning_rate: Schedule
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    formula: str = ""
    slot_values: Mapping[str, float] = field(default_factory=dict)
    group: str = ""

    def __post_init__(self) -> None:
        check_optimizer_name(self.name)
        if not isinstance(self.group, str) or len(self.group) > MAX_NAME or not self.group.isprintable():
            raise InvalidSpec(f"optimizer {self.name!r}: group {str(self.group)[:80]!r}: want at most {MAX_NAME} printable characters")
        if self.is_custom:
            self._check_custom()
        elif self.formula or self.slot_values:
            raise InvalidSpec(f"optimizer {self.name!r}: it has a formula of its own; one with another is called {CUSTOM!r}")
        for key, value in self.hyperparameters.items():
            self._check_hyperparameter(key, value)
        for value in self._rates():
            self._check_rate(value)

    def check_for_step(self, name: str, value: float) -> None:
        """Raises InvalidSpec unless this learning rate (RATE) or hyper-parameter may hold for one step in place of the specification's."""
        if name == RATE:
            _check_number(f"optimizer {self.name!r}: {RATE}", value)
            self._check_rate(value)
            return
        known = self.hyperparameters if self.is_custom else self.kind.hyperparameters
        if name not in known:
            raise InvalidSpec(f"optimizer {self.name!r}: unknown hyper-parameter {name!r}; want {known_names(name, (RATE, *known))}")
        if name in self.fixed_hyperparameters:
            raise InvalidSpec(f"optimizer {self.name!r}: {name} only counts when the model is created; no step can have another")
        self._check_hyperparameter(name, value)

    def _check_hyperparameter(self, key: str, value: float) -> None:
        domain: _Domain | None
        if self.is_custom:
            domain = _RAISED if key in self.parsed.bases else None
        else:
            domains = self.kind.hyperparameters
            if key not in domains:
                known = known_names(key, tuple(domains) if self.is_update_rule else (*domains, RATE))
                raise InvalidSpec(f"optimizer {self.name!r}: unknown hyper-parameter {key!r}; want {known or 'none'}")
            domain = domains[key][1]
        _check_number(f"optimizer {self.name!r}: {key}", value, domain)
        _check_single(f"optimizer {self.name!r}: {key}", value)

    def _check_rate(self, value: float) -> None:
        if value < 0:
            raise InvalidSpec(f"optimizer {self.name!r}: learning_rate = {value}, want >= 0")
        _check_single(f"optimizer {self.name!r}: learning_rate", value)

    def _check_custom(self) -> None:
        what = f"optimizer {self.name!r}"
        if not isinstance(self.formula, str):
            raise InvalidSpec(f"{what}: formula: got a {type(self.formula).__name__}, want a str")
        for kind, names, limit in (
            ("hyper-parameter", self.hyperparameters, _MAX_HYPERPARAMETERS),
            ("slot", self.slot_values, MAX_SLOTS),
        ):
            if len(names) > limit:
                raise InvalidSpec(f"{what}: {len(names)} {kind}s, {limit} at most")
            for name in names:
                check_own_name(f"{what}: {kind}", name, taken=(VARIABLE, GRADIENT, LEARNING_RATE, STEP))
        for name, value in self.slot_values.items():
            if name == "average":
                raise InvalidSpec(f"{what}: slot {name!r}: checkpoints call the moving averages so; choose another name")
            if name in self.hyperparameters:
                raise InvalidSpec(f"{what}: {name!r} is a slot and a hyper-parameter; give one of them another name")
            _check_number(f"{what}: slot {name}", value)
            _check_single(f"{what}: slot {name}", value)
        formula = self.parsed
        for name in (GRADIENT, LEARNING_RATE, *self.hyperparameters):
            if name not in formula.reads:
                word = {GRADIENT: ", the gradient,", LEARNING_RATE: ", the learning rate,"}.get(name, "")
                raise InvalidSpec(f"{what}: {name!r}{word} does not occur in the formula; known are {', '.join(sorted(formula.reads))}")
        for name in (VARIABLE, *self.slot_values):
            if name not in formula.writes:
                word = "the variable" if name == VARIABLE else "a slot"
                raise InvalidSpec(f"{what}: the formula assigns nothing to {name!r}, {word}; write {name} = …")
        _ = self.program  # refuses what needs too much memory

    def _rates(self) -> tuple[float, ...]:
        schedule = self.learning_rate
        return (*schedule.values, *(value for key, value in schedule.arguments.items() if key in ("value", "initial", "final")))

    @property
    def key(self) -> str:
        """The same text for equal optimizers, on every machine, whatever the order of their hyper-parameters."""
        rate = self.learning_rate
        numbers = [sorted((key, float(value)) for key, value in part.items()) for part in (self.hyperparameters, rate.arguments)]
        own = [self.formula, sorted((name, float(value)) for name, value in self.slot_values.items())] if self.is_custom else []
        group = [f"group {self.group}"] if self.group else []
        return repr((self.name, rate.name, *numbers, [float(b) for b in rate.boundaries], [float(v) for v in rate.values], *own, *group))

    def in_group(self, group: str) -> "OptimizerSpec":
        """Returns the same optimizer with a name, by which contributions give it numbers of its own; see `Session.step`."""
        return replace(self, group=group)

    @property
    def is_update_rule(self) -> bool:
        """Whether this is a rule for plain updates, not for gradients."""
        return self.kind.is_update_rule

    @property
    def kind(self) -> OptimizerKind:
        """The properties that all optimizers of this name share."""
        return _CUSTOM_KIND if self.is_custom else OPTIMIZERS[self.name]

    @property
    def is_custom(self) -> bool:
        """Whether the formula is part of the specification."""
        return self.name == CUSTOM

    @property
    def title(self) -> str:
        """The name for people: of a custom optimizer the comment that its formula begins with, as in "# Adam", if there is one."""
        first = self.formula.lstrip().partition("\n")[0] if self.is_custom else ""
        return first.removeprefix("#").strip() or self.name if first.startswith("#") else self.name

    @property
    def text(self) -> str:
        """The formula in the language of formulas."""
        return self.kind.formula(self)

    @property
    def numbers(self) -> dict[str, float]:
        """All hyper-parameters by name, with the defaults of those that were not given."""
        return {**{name: default for name, (default, _) in self.kind.hyperparameters.items()}, **self.hyperparameters}

    @property
    def parsed(self) -> Formula:
        """The formula, checked."""
        return parsed(self.text, self._names)

    @property
    def program(self) -> Program:
        """The same, compiled for the variable, its gradient and its slots in their order."""
        return compiled(self.text, self._names)

    @property
    def _names(self) -> Names:
        bases = tuple(sorted(self.numbers))
        taken = (VARIABLE, *bases)
        slots = tuple(f"{slot}_slot" if slot in taken else slot for slot in self.slots)
        return Names((VARIABLE, GRADIENT, *slots), in_place=slots, numbers=(LEARNING_RATE, STEP, *bases), step=STEP, bases=bases)

    @property
    def needs_whole_variables(self) -> bool:
        """Whether an element's update needs other elements, so that a variable must be dense and lie on one shard."""
        return self.parsed.needs_all_elements

    @property
    def slots(self) -> dict[str, float]:
        """Names of the slots that a variable has by this optimizer, sorted, and the value that each starts with."""
        return dict(sorted(self.kind.slots(self).items()))

    @property
    def is_lazy(self) -> bool:
        """Whether rows of a table that no gradient touches stay as they are, with their slots. Where that can be chosen, it must be."""
        return "lazy" not in self.kind.hyperparameters or bool(self.hyperparameter("lazy"))

    @property
    def fixed_hyperparameters(self) -> frozenset[str]:
        """The hyper-parameters that cannot change while training."""
        return frozenset() if self.is_custom else INITIAL_HYPERPARAMETERS

    def differs_in_numbers(self, other: "OptimizerSpec") -> bool:
        """Whether `other` is this optimizer with numbers that can change while training: with the same formula and slots."""
        fixed = [[(name, spec.numbers.get(name)) for name in sorted(spec.fixed_hyperparameters)] for spec in (self, other)]
        mine, theirs = ((spec.name, spec.formula, dict(spec.slot_values), spec.group, spec.is_update_rule) for spec in (self, other))
        return mine == theirs and fixed[0] == fixed[1] and (self == other or not self.is_update_rule)

    def hyperparameter(self, name: str) -> float:
        """Returns a hyper-parameter, or its default."""
        return self.hyperparameters[name] if name in self.hyperparameters else self.kind.hyperparameters[name][0]

    def has(self, name: str) -> bool:
        """Whether a hyper-parameter is not 0 as a float32 number."""
        return bool(single(self.hyperparameter(name)))


def check_optimizer_name(name: str) -> None:
    """Raises InvalidSpec unless the servers have an optimizer of this name."""
    if name not in OPTIMIZERS and name != CUSTOM:
        raise InvalidSpec(f"optimizer {name!r}; want {known_names(name, (*OPTIMIZERS, CUSTOM))}")


def single(value: float) -> float:
    """Returns the float32 number nearest to this one; infinity for one that is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _check_number(what: str, value: object, domain: _Domain | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidSpec(f"{what} = {shown(value)}, want a finite number")
    if domain is not None and not domain.allows(value):
        raise InvalidSpec(f"{what} = {shown(value)}, want {domain.want}")


def _check_single(what: str, value: float) -> None:
    if abs(value) > _LARGEST:
        raise InvalidSpec(f"{what} = {shown(value)}, want at most {_LARGEST:.4g}: a larger one is infinite in float32")
