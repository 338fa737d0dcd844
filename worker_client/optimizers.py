"""Optimizers as values that servers understand. Knows names and hyper-parameters; the formulas are the servers'."""

from ps_protocol.errors import InvalidSpec
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule, constant
from worker_client.schedules import plain_number

# Every factory writes all its hyper-parameters out, so that two workers agree whether or not they spell out a default.


def sgd(learning_rate: float | Schedule) -> OptimizerSpec:
    """Returns plain gradient descent: `variable -= learning_rate * gradient`.

    `gradient` is the mean of the step's contributions, here and below. The rate is a number or a schedule of the step. No slots.
    Raises InvalidSpec for a rate that is negative or not finite.
    """
    return OptimizerSpec(name="sgd", learning_rate=_rate(learning_rate))


def momentum(learning_rate: float | Schedule, *, momentum: float = 0.9, use_nesterov: bool = False) -> OptimizerSpec:
    """Returns gradient descent with momentum: `m = momentum * m + gradient; variable -= learning_rate * m`.

    With `use_nesterov` the variable changes by `learning_rate * (gradient + momentum * m)`. Slot: "momentum", from 0. Raises InvalidSpec.
    """
    return _spec("momentum", learning_rate, momentum=momentum, use_nesterov=_flag(use_nesterov))


def adagrad(learning_rate: float | Schedule, *, initial_accumulator_value: float = 0.1) -> OptimizerSpec:
    """Returns Adagrad: `a += gradient ** 2; variable -= learning_rate * gradient / sqrt(a)`.

    Slot: "accumulator", from `initial_accumulator_value`, which must be > 0. Raises InvalidSpec.
    """
    return _spec("adagrad", learning_rate, initial_accumulator_value=initial_accumulator_value)


def adam(learning_rate: float | Schedule = 0.001, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> OptimizerSpec:
    """Returns Adam with bias correction: `variable -= rate_t * m / (sqrt(v) + epsilon)`.

    `rate_t = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)` at the t-th step. Slots: "m" and "v", from 0. Raises InvalidSpec.
    """
    return _spec("adam", learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon)


def _spec(name: str, learning_rate: float | Schedule, **hyperparameters: float) -> OptimizerSpec:
    plain = {key: plain_number(value) for key, value in hyperparameters.items()}
    return OptimizerSpec(name=name, learning_rate=_rate(learning_rate), hyperparameters=plain)


def _rate(learning_rate: float | Schedule) -> Schedule:
    if isinstance(learning_rate, Schedule):
        return learning_rate
    value = plain_number(learning_rate)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSpec(f"learning_rate = {learning_rate!r}, want a number or a schedule such as exponential_decay(0.1, …)")
    return constant(value)


def _flag(value: bool) -> float:
    return float(value) if isinstance(value, bool) else value
