"""Which formula an optimizer's name stands for, and its powers from step to step."""

from collections.abc import Callable

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_server.optimizers_adagrad import Adadelta, Adagrad, AdagradDa
from ps_server.optimizers_formula import Formula, Scalars
from ps_server.optimizers_momentum import Adam, Momentum, RmsProp, Sgd
from ps_server.optimizers_proximal import Ftrl, ProximalAdagrad, ProximalSgd
from ps_server.optimizers_updates import Add, AssignMean, MovingAverage

FORMULAS: dict[str, Callable[[OptimizerSpec], Formula]] = {
    "sgd": Sgd.of,
    "momentum": Momentum.of,
    "adagrad": Adagrad.of,
    "adagrad_da": AdagradDa.of,
    "adam": Adam.of,
    "rmsprop": RmsProp.of,
    "adadelta": Adadelta.of,
    "ftrl": Ftrl.of,
    "proximal_sgd": ProximalSgd.of,
    "proximal_adagrad": ProximalAdagrad.of,
    "assign_mean": AssignMean.of,
    "add": Add.of,
    "moving_average": MovingAverage.of,
}


def make_formula(spec: OptimizerSpec) -> Formula:
    """Returns the formula that a checked specification names."""
    return FORMULAS[spec.name](spec)


def initial_powers(formula: Formula) -> Scalars:
    """Returns the powers of the formula's decays for its first step."""
    return tuple(np.float32(decay) for decay in formula.decays)


def next_powers(formula: Formula, powers: Scalars) -> Scalars:
    """Returns the powers for the step after: a product a step, as in the original, whose rounding a power computed anew would not have."""
    if not powers:
        return powers
    return tuple(power * np.float32(decay) for power, decay in zip(powers, formula.decays, strict=True))
