"""Optimizers, schedules and the hyper-parameters of one step, as values for the servers. Knows names and numbers; no formula."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from ps_protocol.errors import InvalidSpec, PsError, at_boundary, is_boundary
from ps_protocol.model.misspelling import known_names
from ps_protocol.model.optimizers import CUSTOM, OptimizerSpec, Schedule, StepHyperparameter, constant
from ps_protocol.model.shown import shown

__all__ = [
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adam",
    "adamw",
    "cosine_decay",
    "custom_optimizer",
    "delayed_nesterov",
    "exponential_decay",
    "ftrl",
    "inverse_time_decay",
    "lamb",
    "lion",
    "momentum",
    "nadam",
    "piecewise_constant",
    "polynomial_decay",
    "proximal_adagrad",
    "proximal_sgd",
    "rmsprop",
    "sgd",
]

Arguments = ParamSpec("Arguments")
Spec = TypeVar("Spec")


def _naming_arguments(factory: Callable[Arguments, Spec]) -> Callable[Arguments, Spec]:
    """Wraps a factory so that an unknown argument raises InvalidSpec with the names of the known ones."""

    @functools.wraps(factory)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Spec:
        try:
            return factory(*args, **kwargs)
        except PsError as error:
            raise at_boundary(error) from error.__cause__
        except TypeError:
            names = tuple(inspect.signature(factory).parameters)
            for name in kwargs:
                if name not in names:
                    raise InvalidSpec(f"{factory.__name__}(): unknown argument {name!r}; want {known_names(name, names)}") from None
            raise

    return made


# Learning-rate schedules.


@_naming_arguments
def exponential_decay(initial: float, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """Returns the rate `initial * decay_rate ** (step / decay_steps)`.

    `decay_steps` is in steps (`global_step`) and > 0. With `staircase` the quotient is rounded down, so the rate changes every
    `decay_steps` steps. Raises InvalidSpec for an argument that no server would take.
    """
    return _schedule("exponential_decay", initial=initial, decay_steps=decay_steps, decay_rate=decay_rate, staircase=float(staircase))


@_naming_arguments
def inverse_time_decay(initial: float, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """Returns the rate `initial / (1 + decay_rate * step / decay_steps)`.

    `decay_steps` is in steps (`global_step`) and > 0. With `staircase` the quotient is rounded down. Raises InvalidSpec.
    """
    return _schedule("inverse_time_decay", initial=initial, decay_steps=decay_steps, decay_rate=decay_rate, staircase=float(staircase))


@_naming_arguments
def polynomial_decay(initial: float, decay_steps: float, final: float = 0.0001, power: float = 1.0, cycle: bool = False) -> Schedule:
    """Returns the rate that goes from `initial` to `final` in `decay_steps` steps as `(1 - step / decay_steps) ** power`, then stays.

    With `cycle` the decay is stretched to the next multiple of `decay_steps` instead of staying at `final`. Raises InvalidSpec.
    """
    return _schedule("polynomial_decay", initial=initial, decay_steps=decay_steps, final=final, power=power, cycle=float(cycle))


@_naming_arguments
def cosine_decay(initial: float, decay_steps: float, alpha: float = 0.0) -> Schedule:
    """Returns the rate that falls along half a cosine from `initial` to `alpha * initial` in `decay_steps` steps, then stays.

    `decay_steps` is in steps (`global_step`) and > 0. Raises InvalidSpec for an argument that no server would take.
    """
    return _schedule("cosine_decay", initial=initial, decay_steps=decay_steps, alpha=alpha)


@_naming_arguments
def piecewise_constant(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """Returns the rate `values[i]` up to and with step `boundaries[i]`, and the last value after the last boundary.

    `boundaries` are steps and must ascend, 1,000 of them at most; there is one value more than boundaries. Raises InvalidSpec otherwise.
    """
    for name, given in (("boundaries", boundaries), ("values", values)):
        if not isinstance(given, Iterable):
            raise InvalidSpec(f"piecewise_constant(): {name}: got {shown(given)}, want a list of numbers")
    return Schedule(
        name="piecewise_constant",
        boundaries=tuple(plain_number(boundary) for boundary in boundaries),
        values=tuple(plain_number(value) for value in values),
    )


def plain_number(value: float) -> float:
    """Returns a NumPy scalar as a Python number, and anything else unchanged: the specifications check it."""
    return value.item() if isinstance(value, np.generic) else value


def _schedule(name: str, **arguments: float) -> Schedule:
    return Schedule(name=name, arguments={key: plain_number(value) for key, value in arguments.items()})


# Optimizers.


Rate = float | Schedule

# Every factory sets all its hyper-parameters, so that two workers agree whether or not they name a default. All factories have in common:
# the rate is a number or a schedule of the step; with `weight_decay` the variable also shrinks by `learning_rate * weight_decay * variable`
# in each step (decoupled); with `l2` the gradient is `gradient + l2 * variable`, which torch.optim calls weight_decay, except in AdamW.
# They raise InvalidSpec for a number that no server would take. Their parameters are the numbers, so most hand all of `locals()` on.

# Hyper-parameters that a program gives as truth values.
_FLAGS = ("amsgrad", "centered", "lazy", "use_nesterov")


@_naming_arguments
def sgd(learning_rate: Rate, *, weight_decay: float = 0.0, l2: float = 0.0) -> OptimizerSpec:
    """Returns plain gradient descent: `variable -= learning_rate * gradient`.

    `gradient` is the mean of the step's contributions, here and below. No slots.
    """
    return _spec("sgd", **locals())


@_naming_arguments
def momentum(
    learning_rate: Rate, momentum: float = 0.9, *, use_nesterov: bool = False, weight_decay: float = 0.0, l2: float = 0.0
) -> OptimizerSpec:
    """Returns gradient descent with momentum: `m = momentum * m + gradient; variable -= learning_rate * m`.

    With `use_nesterov` the variable changes by `learning_rate * (gradient + momentum * m)`. Slot: "momentum", from 0.
    """
    return _spec("momentum", **locals())


@_naming_arguments
def adagrad(learning_rate: Rate, initial_accumulator_value: float = 0.1, *, weight_decay: float = 0.0, l2: float = 0.0) -> OptimizerSpec:
    """Returns Adagrad: `a += gradient ** 2; variable -= learning_rate * gradient / sqrt(a)`.

    Slot: "accumulator", from `initial_accumulator_value`, which must be > 0.
    """
    return _spec("adagrad", **locals())


@_naming_arguments
def adagrad_da(
    learning_rate: Rate,
    initial_gradient_squared_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns Adagrad with dual averaging: the variable is computed from the sums of all gradients and of their squares.

    Slots: "gradient_accumulator", from 0, and "gradient_squared_accumulator", from its initial value, which must be > 0.
    """
    return _spec("adagrad_da", **locals())


@_naming_arguments
def adam(
    learning_rate: Rate = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    epsilon_mode: str = "hat",
    lazy: bool = False,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns Adam with bias correction: `variable -= rate_t * m / (sqrt(v) + epsilon)`.

    `rate_t = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)` at the t-th step. There `epsilon` is the paper's "epsilon hat", as in
    TensorFlow and Keras; `epsilon_mode="torch"` returns `adamw` with this `weight_decay`, whose epsilon is that of PyTorch and optax. With
    `lazy`, rows of a table without a gradient do not change; without it, each step changes the whole table, as in the original. Slots: "m"
    and "v", from 0.
    """
    if epsilon_mode not in _EPSILON_MODES:
        raise InvalidSpec(f"epsilon_mode: got {epsilon_mode!r}, want one of {', '.join(map(repr, _EPSILON_MODES))}")
    if epsilon_mode == "torch":
        return adamw(learning_rate, beta1, beta2, epsilon, weight_decay=weight_decay, l2=l2, lazy=lazy)
    return _spec("adam", learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon, lazy=lazy, weight_decay=weight_decay, l2=l2)


_EPSILON_MODES = ("hat", "torch")


@_naming_arguments
def adamw(
    learning_rate: Rate = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    weight_decay: float = 0.01,
    l2: float = 0.0,
    amsgrad: bool = False,
    lazy: bool = False,
) -> OptimizerSpec:
    """Returns PyTorch's AdamW: `variable -= learning_rate * (m / (1 - beta1 ** t) / (sqrt(v / (1 - beta2 ** t)) + epsilon))` and the decay.

    With `weight_decay=0` it is the Adam of torch.optim, whose own `weight_decay` is `l2` here. `amsgrad` divides by the largest `v` so far.
    `lazy`: as in `adam`. Slots: "exp_avg" and "exp_avg_sq", and with `amsgrad` "max_exp_avg_sq", from 0.
    """
    return _spec("adamw", **locals())


@_naming_arguments
def nadam(
    learning_rate: Rate = 0.002,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    momentum_decay: float = 0.004,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns PyTorch's NAdam: Adam with Nesterov momentum, whose share rises with the step by `momentum_decay`.

    The `weight_decay` of NAdam in torch.optim is `l2` here, and `weight_decay` with `decoupled_weight_decay=True`. Slots: "exp_avg" and
    "exp_avg_sq", from 0, and "mu_product", from 1.
    """
    return _spec("nadam", **locals())


@_naming_arguments
def delayed_nesterov(learning_rate: Rate, momentum: float = 0.9, delay: int = 1) -> OptimizerSpec:
    """Returns delayed Nesterov momentum, for asynchronous outer steps: `variable -= learning_rate * gradient / delay`.

    In each step that is a multiple of `delay`, which should be the number of workers, first `m = momentum * m + the mean of the last
    `delay` gradients`, and the variable also changes by `learning_rate * momentum * m`. So a rate means what it does to the mean of all
    workers, and with a delay of 1 it is `momentum(use_nesterov=True)`. A variable, or a row of a table, without a gradient in such a step
    has its momentum wait for the next such step in which it has one. Algorithm 3 of arXiv 2401.09135, with c = 0. Slots: "gradient_sum"
    and "momentum", from 0.
    """
    return _spec("delayed_nesterov", **locals())


@_naming_arguments
def lion(learning_rate: Rate = 0.0001, beta1: float = 0.9, beta2: float = 0.99, *, weight_decay: float = 0.0) -> OptimizerSpec:
    """Returns Lion: `variable -= learning_rate * (sign(beta1 * m + (1 - beta1) * gradient) + weight_decay * variable)`.

    Then `m = beta2 * m + (1 - beta2) * gradient`. Slot: "exp_avg", from 0.
    """
    return _spec("lion", **locals())


@_naming_arguments
def lamb(
    learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6, *, weight_decay: float = 0.0
) -> OptimizerSpec:
    """Returns LAMB: the direction `u` of AdamW, `weight_decay * variable` included, times `norm(variable) / norm(u)`.

    The norms are of each variable as a whole, which is therefore not split over servers and cannot be a table. Where one of them is 0, the
    ratio is 1. Slots: "exp_avg" and "exp_avg_sq", from 0.
    """
    return _spec("lamb", **locals())


@_naming_arguments
def rmsprop(
    learning_rate: Rate,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-10,
    *,
    centered: bool = False,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns RMSProp: gradients are divided by the root of a moving average of their squares (`centered`: of their variance).

    Slots: "rms", from 1, "momentum", from 0, and if `centered` "mg", from 0.
    """
    return _spec("rmsprop", **locals())


@_naming_arguments
def adadelta(
    learning_rate: Rate = 0.001, rho: float = 0.95, epsilon: float = 1e-8, *, weight_decay: float = 0.0, l2: float = 0.0
) -> OptimizerSpec:
    """Returns Adadelta: gradients are scaled by the ratio of the averages of past updates and past gradients.

    Slots: "accum" and "accum_update", from 0.
    """
    return _spec("adadelta", **locals())


@_naming_arguments
def ftrl(
    learning_rate: Rate,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float = 0.0,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns FTRL-Proximal, with l1 and l2 penalties, shrinkage and beta.

    Slots: "accum", from `initial_accumulator_value` (>= 0), and "linear", from 0.
    """
    return _spec("ftrl", **locals())


@_naming_arguments
def proximal_sgd(
    learning_rate: Rate,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns gradient descent followed by the proximal step of l1 and l2 penalties. No slots."""
    return _spec("proximal_sgd", **locals())


@_naming_arguments
def proximal_adagrad(
    learning_rate: Rate,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
) -> OptimizerSpec:
    """Returns Adagrad followed by the proximal step of l1 and l2 penalties.

    Slot: "accumulator", from `initial_accumulator_value`, which must be > 0.
    """
    return _spec("proximal_adagrad", **locals())


@is_boundary
def custom_optimizer(
    formula: str, learning_rate: Rate, *, slots: Mapping[str, float] | None = None, **hyperparameters: float
) -> OptimizerSpec:
    """Returns the optimizer whose update is a formula, which the servers check and interpret; they run no code of the program.

    The formula is lines of the form `name = expression`, or one expression, which is the variable's new value. `v` is the variable, `g` the
    gradient, `lr` the learning rate of the step, `t` the step after the update (1 for the first); `slots`: the names of the slots, with
    their first values; `hyperparameters`: numbers by name, and `name ** t` is such a number to the power of the step. Other assigned names
    are local to the update. For example Lion:

        custom_optimizer(
            "v = v - lr * (sign(b1 * m + (1 - b1) * g) + decay * v); m = b2 * m + (1 - b2) * g",
            learning_rate=1e-4, slots={"m": 0.0}, b1=0.9, b2=0.99, decay=0.01,
        )

    A first line such as "# Lion" names it in the cluster's status. With `sum(…)` or `norm(…)`, which are over all elements of a
    variable, variables are not split over servers, and tables are refused. Raises InvalidSpec with line, column and reason.
    """
    if slots is not None and not isinstance(slots, Mapping):
        raise InvalidSpec(f"slots: got a {type(slots).__name__}, want a dict from a slot's name to the value that it starts with")
    return OptimizerSpec(
        name=CUSTOM,
        learning_rate=rate_of(learning_rate),
        hyperparameters={name: plain_number(value) for name, value in hyperparameters.items()},
        formula=formula,
        slot_values={name: plain_number(value) for name, value in (slots or {}).items()},
    )


def rate_of(learning_rate: Rate) -> Schedule:
    """Returns a schedule; a number becomes a constant one. Raises InvalidSpec."""
    if isinstance(learning_rate, Schedule):
        return learning_rate
    value = plain_number(learning_rate)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSpec(f"learning_rate = {shown(learning_rate)}, want a number or a schedule such as exponential_decay(0.1, …)")
    return constant(value)


def _spec(name: str, learning_rate: Rate, **hyperparameters: float) -> OptimizerSpec:
    plain = {
        key: float(value) if key in _FLAGS and isinstance(value, bool) else plain_number(value) for key, value in hyperparameters.items()
    }
    return OptimizerSpec(name=name, learning_rate=rate_of(learning_rate), hyperparameters=plain)


# Maps names to numbers for the model's optimizer, and groups to such mappings for the optimizers of those groups.
Hyperparameters = Mapping[str, float | Mapping[str, float]]


def step_hyperparameters(given: Hyperparameters) -> tuple[StepHyperparameter, ...]:
    """Returns a program's hyper-parameters for one step, in the form that is sent. Raises InvalidSpec.

    `StepNumbers` checks that the model has such groups and names.
    """
    if not isinstance(given, Mapping):
        raise InvalidSpec(f"hyperparameters: got a {type(given).__name__}, want a dict such as {{'learning_rate': 0.01}}")
    found: list[StepHyperparameter] = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            found += (_one(name, own, number) for own, number in value.items())
        else:
            found.append(_one("", name, value))
    return tuple(found)


def _one(group: object, name: object, value: float) -> StepHyperparameter:
    for text in (group, name):
        if not isinstance(text, str):
            raise InvalidSpec(f"hyperparameters: got the name {text!r}, want a str")
    number = plain_number(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    try:
        return StepHyperparameter(group=str(group), name=str(name), value=float(number) if is_number else number)
    except OverflowError:
        raise InvalidSpec(f"hyperparameters: {name} = {shown(number)}, want a finite number") from None
