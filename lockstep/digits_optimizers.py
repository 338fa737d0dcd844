"""Which optimizers the digits can be learned with, and a learning rate that suits each. Knows the SDK's factories; trains nothing."""

from collections.abc import Callable

import worker_client
from ps_protocol.optimizer_spec import OptimizerSpec

# Found by trying; a step is the mean of two batches of 32.
_FACTORIES: dict[str, tuple[Callable[[float], OptimizerSpec], float]] = {
    "sgd": (worker_client.sgd, 0.4),
    "momentum": (worker_client.momentum, 0.05),
    "adagrad": (worker_client.adagrad, 0.1),
    "adagrad_da": (worker_client.adagrad_da, 0.15),
    "adam": (worker_client.adam, 0.005),
    "rmsprop": (worker_client.rmsprop, 0.003),
    "adadelta": (worker_client.adadelta, 3.0),
    "ftrl": (worker_client.ftrl, 0.15),
    "proximal_sgd": (worker_client.proximal_sgd, 0.4),
    "proximal_adagrad": (worker_client.proximal_adagrad, 0.1),
}
NAMES = tuple(_FACTORIES)
DEFAULT = "momentum"


def optimizer_of(name: str, *, learning_rate: float | None = None) -> OptimizerSpec:
    """Returns the optimizer with the given learning rate, or the one that suits it. Raises InvalidSpec for a rate that makes no sense."""
    factory, rate = _FACTORIES[name]
    return factory(rate if learning_rate is None else learning_rate)
