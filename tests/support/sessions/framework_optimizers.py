"""Optimizers of other libraries, and our optimizers that are to compute the same. Knows names and numbers; imports no framework."""

from dataclasses import dataclass, field
from typing import Any

import worker_client
from worker_client import OptimizerSpec

NUM_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`library`.`name`(**arguments), and ours. `tolerance`: relative, of float64 variables after NUM_STEPS steps."""

    ours: OptimizerSpec
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    library: str = "torch"
    tolerance: float = 1e-12


# As docs/reference/optimizers.md has them.
TORCH_SGD = "d = g + l2 * v; m = mu * m + where(t > 1, 1 - dampening, 1) * d; v = v - lr * m"
TORCH_ADAGRAD = "s = s + g * g; v = v - lr * g / (sqrt(s) + eps)"
TORCH_RMSPROP = "s = a * s + (1 - a) * g * g; b = mu * b + g / (sqrt(s) + eps); v = v - lr * b"
TORCH_CENTERED_RMSPROP = """
s = a * s + (1 - a) * g * g
m = m + (g - m) * (1 - a)
b = mu * b + g / (sqrt(s - m * m) + eps)
v = v - lr * b
"""

_custom = worker_client.custom_optimizer
# Numbers that are no float32 ones, so that it shows where they are rounded.
PAIRS = {
    "adamw": Pair(ours=worker_client.adamw(), name="AdamW"),
    "adamw with amsgrad": Pair(
        ours=worker_client.adamw(0.01, 0.8, 0.95, 1e-3, weight_decay=0.1, amsgrad=True),
        name="AdamW",
        arguments={"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adam": Pair(ours=worker_client.adam(epsilon_mode="torch"), name="Adam"),
    "adam with l2": Pair(
        ours=worker_client.adam(0.01, epsilon_mode="torch", l2=0.1), name="Adam", arguments={"lr": 0.01, "weight_decay": 0.1}
    ),
    "adam with l2 and amsgrad": Pair(
        ours=worker_client.adamw(0.01, weight_decay=0.0, l2=0.1, amsgrad=True),
        name="Adam",
        arguments={"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    ),
    "nadam": Pair(ours=worker_client.nadam(), name="NAdam", tolerance=1e-6),  # torch has float32 numbers in it
    "nadam with l2": Pair(ours=worker_client.nadam(l2=0.1), name="NAdam", arguments={"weight_decay": 0.1}, tolerance=1e-6),
    "nadam with decay": Pair(
        ours=worker_client.nadam(weight_decay=0.1),
        name="NAdam",
        arguments={"weight_decay": 0.1, "decoupled_weight_decay": True},
        tolerance=1e-6,
    ),
    "lion": Pair(
        ours=worker_client.lion(0.01, weight_decay=0.1),
        name="lion",
        arguments={"weight_decay": 0.1, "learning_rate": 0.01},
        library="optax",
    ),
    "lamb": Pair(
        ours=worker_client.lamb(0.01, weight_decay=0.1),
        name="lamb",
        arguments={"weight_decay": 0.1, "learning_rate": 0.01},
        library="optax",
    ),
    # Formulas of TensorFlow that are also PyTorch's: their numbers are float32 ones.
    "sgd": Pair(ours=worker_client.sgd(0.1, l2=0.03), name="SGD", arguments={"lr": 0.1, "weight_decay": 0.03}, tolerance=1e-6),
    "momentum": Pair(
        ours=worker_client.momentum(0.1, 0.9, l2=0.03),
        name="SGD",
        arguments={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03},
        tolerance=1e-5,
    ),
    "nesterov": Pair(
        ours=worker_client.momentum(0.1, 0.9, use_nesterov=True, l2=0.03),
        name="SGD",
        arguments={"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.03},
        tolerance=1e-5,
    ),
    "adadelta": Pair(
        ours=worker_client.adadelta(1.0, 0.9, 1e-6, l2=0.03), name="Adadelta", arguments={"lr": 1.0, "weight_decay": 0.03}, tolerance=1e-5
    ),
    # Formulas of PyTorch that are no built-in ones.
    "sgd with dampening": Pair(
        ours=_custom(TORCH_SGD, 0.1, slots={"m": 0.0}, mu=0.9, dampening=0.3, l2=0.03),
        name="SGD",
        arguments={"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.03},
    ),
    "adagrad": Pair(
        ours=_custom(TORCH_ADAGRAD, worker_client.inverse_time_decay(0.1, 1, 0.01), slots={"s": 0.0}, eps=1e-10),
        name="Adagrad",
        arguments={"lr": 0.1, "lr_decay": 0.01},
    ),
    "rmsprop": Pair(
        ours=_custom(TORCH_RMSPROP, 0.01, slots={"s": 0.0, "b": 0.0}, a=0.99, mu=0.9, eps=1e-8), name="RMSprop", arguments={"momentum": 0.9}
    ),
    "rmsprop, centered": Pair(
        ours=_custom(TORCH_CENTERED_RMSPROP, 0.01, slots={"s": 0.0, "m": 0.0, "b": 0.0}, a=0.99, mu=0.9, eps=1e-8),
        name="RMSprop",
        arguments={"momentum": 0.9, "centered": True},
        tolerance=1e-9,  # the difference of two numbers that are nearly equal
    ),
}
