"""Learning-rate schedules as values that servers understand. Knows names and arguments; the formulas are the servers'."""

from collections.abc import Sequence

import numpy as np

from ps_protocol.optimizer_spec import Schedule


def exponential_decay(initial: float, *, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """Returns the rate `initial * decay_rate ** (step / decay_steps)`.

    `decay_steps` is in steps (`global_step`) and > 0. With `staircase` the quotient is rounded down, so the rate changes every
    `decay_steps` steps. Raises InvalidSpec for an argument that no server would take.
    """
    return _schedule("exponential_decay", initial=initial, decay_steps=decay_steps, decay_rate=decay_rate, staircase=float(staircase))


def inverse_time_decay(initial: float, *, decay_steps: float, decay_rate: float, staircase: bool = False) -> Schedule:
    """Returns the rate `initial / (1 + decay_rate * step / decay_steps)`.

    `decay_steps` is in steps (`global_step`) and > 0. With `staircase` the quotient is rounded down. Raises InvalidSpec.
    """
    return _schedule("inverse_time_decay", initial=initial, decay_steps=decay_steps, decay_rate=decay_rate, staircase=float(staircase))


def polynomial_decay(initial: float, *, decay_steps: float, final: float = 0.0001, power: float = 1.0, cycle: bool = False) -> Schedule:
    """Returns the rate that goes from `initial` to `final` in `decay_steps` steps as `(1 - step / decay_steps) ** power`, then stays.

    With `cycle` the decay is stretched to the next multiple of `decay_steps` instead of staying at `final`. Raises InvalidSpec.
    """
    return _schedule("polynomial_decay", initial=initial, decay_steps=decay_steps, final=final, power=power, cycle=float(cycle))


def cosine_decay(initial: float, *, decay_steps: float, alpha: float = 0.0) -> Schedule:
    """Returns the rate that falls along half a cosine from `initial` to `alpha * initial` in `decay_steps` steps, then stays.

    `decay_steps` is in steps (`global_step`) and > 0. Raises InvalidSpec for an argument that no server would take.
    """
    return _schedule("cosine_decay", initial=initial, decay_steps=decay_steps, alpha=alpha)


def piecewise_constant(boundaries: Sequence[float], *, values: Sequence[float]) -> Schedule:
    """Returns the rate `values[i]` up to and with step `boundaries[i]`, and the last value after the last boundary.

    `boundaries` are steps and must ascend; there is one value more than boundaries. Raises InvalidSpec otherwise.
    """
    return Schedule(
        name="piecewise_constant",
        boundaries=tuple(plain_number(boundary) for boundary in boundaries),
        values=tuple(plain_number(value) for value in values),
    )


def plain_number(value: float) -> float:
    """Returns a NumPy scalar as the Python number that it stands for, and anything else as it is: the specifications check it."""
    return value.item() if isinstance(value, np.generic) else value


def _schedule(name: str, **arguments: float) -> Schedule:
    return Schedule(name=name, arguments={key: plain_number(value) for key, value in arguments.items()})
