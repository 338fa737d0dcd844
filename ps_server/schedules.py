"""Learning-rate schedules, evaluated at a step.

The formulas are those of tf.compat.v1.train: exponential_decay, inverse_time_decay, polynomial_decay, cosine_decay
(keras/optimizers/legacy_learning_rate_decay.py, learning_rate_schedule.py) and piecewise_constant, in double precision. The step is the
one whose gradients are applied, that is global_step before it rises. What has no finite value is inf or nan, never an exception.
"""

from collections.abc import Callable

import numpy as np

from ps_protocol.optimizer_spec import Schedule


def learning_rate(schedule: Schedule, *, step: int) -> float:
    """Returns the learning rate of `step`."""
    with np.errstate(all="ignore"):
        return _FORMULAS[schedule.name](schedule, np.float64(step))


def _constant(schedule: Schedule, step: np.float64) -> float:
    return schedule.argument("value")


def _piecewise_constant(schedule: Schedule, step: np.float64) -> float:
    # A boundary itself still belongs to the piece before it.
    return schedule.values[int(np.searchsorted(np.array(schedule.boundaries), step, side="left"))]


def _exponential_decay(schedule: Schedule, step: np.float64) -> float:
    return float(schedule.argument("initial") * np.float64(schedule.argument("decay_rate")) ** _periods(schedule, step))


def _inverse_time_decay(schedule: Schedule, step: np.float64) -> float:
    return float(schedule.argument("initial") / (1.0 + schedule.argument("decay_rate") * _periods(schedule, step)))


def _periods(schedule: Schedule, step: np.float64) -> np.float64:
    periods = step / schedule.argument("decay_steps")
    return np.floor(periods) if schedule.argument("staircase") else periods


def _polynomial_decay(schedule: Schedule, step: np.float64) -> float:
    initial, final = schedule.argument("initial"), schedule.argument("final")
    decay_steps = schedule.argument("decay_steps")
    if schedule.argument("cycle"):
        # The first step that is a multiple of decay_steps: the rate falls to `final` at each of them.
        decay_steps *= max(1.0, np.ceil(step / decay_steps))
    fraction = np.minimum(step, decay_steps) / decay_steps
    return float((initial - final) * (1.0 - fraction) ** schedule.argument("power") + final)


def _cosine_decay(schedule: Schedule, step: np.float64) -> float:
    decay_steps, alpha = schedule.argument("decay_steps"), schedule.argument("alpha")
    cosine = 0.5 * (1.0 + np.cos(np.pi * np.minimum(step, decay_steps) / decay_steps))
    return float(schedule.argument("initial") * ((1.0 - alpha) * cosine + alpha))


_FORMULAS: dict[str, Callable[[Schedule, np.float64], float]] = {
    "constant": _constant,
    "piecewise_constant": _piecewise_constant,
    "exponential_decay": _exponential_decay,
    "inverse_time_decay": _inverse_time_decay,
    "polynomial_decay": _polynomial_decay,
    "cosine_decay": _cosine_decay,
}
