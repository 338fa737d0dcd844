"""The optimizers' formulas, for one block of elements at a time. Knows arrays and hyper-parameters; no variable, step, lock or wire.

Formulas and slot names are those of the CPU kernels behind tf.compat.v1.train's optimizers, in their order of operations: in float32 the
results agree to the last bit, save for how the original rounds 1/sqrt and fused multiply-adds. One difference on purpose: the original
rounds hyper-parameters to float32 even for float64 variables; here they have the variable's own precision.

A kernel writes the next values beside the present ones (`out`), updates the slots in place, and leaves `value` and `gradient` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array

# Scalars in the precision of one element type.
Scalars = tuple["np.floating[Any]", ...]


class Optimizer(Protocol):
    """Hyper-parameters and the formula that they are for. Holds no state: slots and powers are the caller's."""

    @property
    def slots(self) -> Mapping[str, float]:
        """Names of the slots, sorted, and the value that each starts with."""

    @property
    def decays(self) -> tuple[float, ...]:
        """Numbers that the formula needs to the power of the steps applied, the present one included."""

    def constants(self, learning_rate: float, *, powers: Scalars, dtype: np.dtype[Any]) -> Scalars:
        """Returns what `apply_block` needs at one step; `powers` are those of `decays`."""

    def apply_block(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Array, constants: Scalars) -> None:
        """Writes the next values of a block to `out`; all arrays have one length and element type, and `slots` the order of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """var -= lr * g."""

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    def constants(self, learning_rate: float, *, powers: Scalars, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr,)."""
        return (dtype.type(learning_rate),)

    def apply_block(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Array, constants: Scalars) -> None:
        """See Optimizer."""
        np.multiply(gradient, constants[0], out=scratch)
        np.subtract(value, scratch, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    """a = mu * a + g; var -= lr * a. With Nesterov: var -= lr * g + lr * mu * a."""

    momentum: float
    use_nesterov: bool

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0}
    decays: ClassVar[tuple[float, ...]] = ()

    def constants(self, learning_rate: float, *, powers: Scalars, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, mu)."""
        return dtype.type(learning_rate), dtype.type(self.momentum)

    def apply_block(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Array, constants: Scalars) -> None:
        """See Optimizer."""
        (accumulator,), (learning_rate, momentum) = slots, constants
        np.multiply(accumulator, momentum, out=accumulator)
        np.add(accumulator, gradient, out=accumulator)
        if not self.use_nesterov:
            np.multiply(accumulator, learning_rate, out=scratch)
        else:
            np.multiply(accumulator, momentum, out=out)
            np.multiply(out, learning_rate, out=out)
            np.multiply(gradient, learning_rate, out=scratch)
            np.add(scratch, out, out=scratch)
        np.subtract(value, scratch, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """a += g^2; var -= lr * g / sqrt(a)."""

    initial_accumulator_value: float

    decays: ClassVar[tuple[float, ...]] = ()

    @property
    def slots(self) -> Mapping[str, float]:
        """See Optimizer."""
        return {"accumulator": self.initial_accumulator_value}

    def constants(self, learning_rate: float, *, powers: Scalars, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr,)."""
        return (dtype.type(learning_rate),)

    def apply_block(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Array, constants: Scalars) -> None:
        """See Optimizer."""
        (accumulator,) = slots
        np.multiply(gradient, gradient, out=scratch)
        np.add(accumulator, scratch, out=accumulator)
        np.sqrt(accumulator, out=out)
        np.multiply(gradient, constants[0], out=scratch)
        np.divide(scratch, out, out=scratch)
        np.subtract(value, scratch, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """m += (g - m) * (1 - b1); v += (g^2 - v) * (1 - b2); var -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)."""

    beta1: float
    beta2: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"m": 0.0, "v": 0.0}

    @property
    def decays(self) -> tuple[float, ...]:
        """See Optimizer."""
        return self.beta1, self.beta2

    def constants(self, learning_rate: float, *, powers: Scalars, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr with the bias correction, 1 - b1, 1 - b2, epsilon)."""
        one, beta1_power, beta2_power = dtype.type(1), dtype.type(powers[0]), dtype.type(powers[1])
        corrected = dtype.type(learning_rate) * np.sqrt(one - beta2_power) / (one - beta1_power)
        return corrected, one - dtype.type(self.beta1), one - dtype.type(self.beta2), dtype.type(self.epsilon)

    def apply_block(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Array, constants: Scalars) -> None:
        """See Optimizer."""
        (m, v), (learning_rate, one_minus_beta1, one_minus_beta2, epsilon) = slots, constants
        np.subtract(gradient, m, out=scratch)
        np.multiply(scratch, one_minus_beta1, out=scratch)
        np.add(m, scratch, out=m)
        np.multiply(gradient, gradient, out=scratch)
        np.subtract(scratch, v, out=scratch)
        np.multiply(scratch, one_minus_beta2, out=scratch)
        np.add(v, scratch, out=v)
        np.sqrt(v, out=scratch)
        np.add(scratch, epsilon, out=scratch)
        np.multiply(m, learning_rate, out=out)
        np.divide(out, scratch, out=scratch)
        np.subtract(value, scratch, out=out)


_MAKERS: dict[str, Callable[[OptimizerSpec], Optimizer]] = {
    "sgd": lambda spec: Sgd(),
    "momentum": lambda spec: Momentum(momentum=spec.hyperparameter("momentum"), use_nesterov=bool(spec.hyperparameter("use_nesterov"))),
    "adagrad": lambda spec: Adagrad(initial_accumulator_value=spec.hyperparameter("initial_accumulator_value")),
    "adam": lambda spec: Adam(
        beta1=spec.hyperparameter("beta1"), beta2=spec.hyperparameter("beta2"), epsilon=spec.hyperparameter("epsilon")
    ),
}


def make_optimizer(spec: OptimizerSpec) -> Optimizer:
    """Returns the formula that a checked specification names."""
    return _MAKERS[spec.name](spec)


def initial_powers(optimizer: Optimizer, dtype: np.dtype[Any]) -> Scalars:
    """Returns the powers of the optimizer's decays for its first step."""
    return tuple(dtype.type(decay) for decay in optimizer.decays)


def next_powers(optimizer: Optimizer, powers: Scalars) -> Scalars:
    """Returns the powers for the step after: a product a step, as in the original, whose rounding a power computed anew would not have."""
    return tuple(power * type(power)(decay) for power, decay in zip(powers, optimizer.decays, strict=True))
