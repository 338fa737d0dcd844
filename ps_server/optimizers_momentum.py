"""Formulas that move along the gradient, as it is or averaged over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array
from ps_server.optimizers_formula import Scalars, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """var -= lr * g."""

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Sgd":
        """Returns the formula with the numbers of `spec`."""
        return cls()

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr,)."""
        return (dtype.type(learning_rate),)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        np.multiply(gradient, constants[0], out=scratch[0])
        np.subtract(value, scratch[0], out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    """a = mu * a + g; var -= lr * a. With Nesterov: var -= lr * g + lr * mu * a."""

    momentum: float
    use_nesterov: bool

    slots: ClassVar[Mapping[str, float]] = {"momentum": 0.0}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Momentum":
        """Returns the formula with the numbers of `spec`."""
        return cls(momentum=given(spec, "momentum"), use_nesterov=bool(spec.hyperparameter("use_nesterov")))

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, mu)."""
        return dtype.type(learning_rate), dtype.type(self.momentum)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (accumulator,), (learning_rate, momentum), change = slots, constants, scratch[0]
        np.multiply(accumulator, momentum, out=accumulator)
        np.add(accumulator, gradient, out=accumulator)
        if not self.use_nesterov:
            np.multiply(accumulator, learning_rate, out=change)
        else:
            np.multiply(accumulator, momentum, out=out)
            np.multiply(out, learning_rate, out=out)
            np.multiply(gradient, learning_rate, out=change)
            np.add(change, out, out=change)
        np.subtract(value, change, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """m += (g - m) * (1 - b1); v += (g^2 - v) * (1 - b2); var -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)."""

    beta1: float
    beta2: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"m": 0.0, "v": 0.0}

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Adam":
        """Returns the formula with the numbers of `spec`."""
        return cls(beta1=given(spec, "beta1"), beta2=given(spec, "beta2"), epsilon=given(spec, "epsilon"))

    @property
    def decays(self) -> tuple[float, ...]:
        """See Formula."""
        return self.beta1, self.beta2

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr with the bias correction, 1 - b1, 1 - b2, epsilon)."""
        one, beta1_power, beta2_power = dtype.type(1), dtype.type(powers[0]), dtype.type(powers[1])
        corrected = dtype.type(learning_rate) * np.sqrt(one - beta2_power) / (one - beta1_power)
        return corrected, one - dtype.type(self.beta1), one - dtype.type(self.beta2), dtype.type(self.epsilon)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (m, v), (learning_rate, one_minus_beta1, one_minus_beta2, epsilon) = slots, constants
        change, moved = scratch[0], scratch[1]
        np.subtract(gradient, m, out=change)
        np.multiply(change, one_minus_beta1, out=change)
        np.add(m, change, out=m)
        # Here and not in `out`, as long as `m` is in the cache and `out` need not be.
        np.multiply(m, learning_rate, out=moved)
        np.multiply(gradient, gradient, out=change)
        np.subtract(change, v, out=change)
        np.multiply(change, one_minus_beta2, out=change)
        np.add(v, change, out=v)
        np.sqrt(v, out=change)
        np.add(change, epsilon, out=change)
        np.divide(moved, change, out=change)
        np.subtract(value, change, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsProp:
    """rms += (g^2 - rms) * (1 - rho); mom = mu * mom + lr * g / sqrt(rms + epsilon); var -= mom.

    Centered: mg += (g - mg) * (1 - rho), and rms - mg^2 instead of rms in the root.
    """

    decay: float
    momentum: float
    epsilon: float
    centered: bool

    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "RmsProp":
        """Returns the formula with the numbers of `spec`."""
        numbers = {name: given(spec, name) for name in ("decay", "momentum", "epsilon")}
        return cls(**numbers, centered=bool(spec.hyperparameter("centered")))

    @property
    def slots(self) -> Mapping[str, float]:
        """See Formula."""
        return {"mg": 0.0, "momentum": 0.0, "rms": 1.0} if self.centered else {"momentum": 0.0, "rms": 1.0}

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, 1 - rho, mu, epsilon)."""
        return dtype.type(learning_rate), dtype.type(1) - dtype.type(self.decay), dtype.type(self.momentum), dtype.type(self.epsilon)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (*mg, moment, rms), (learning_rate, one_minus_decay, momentum, epsilon) = slots, constants
        root, change = scratch[0], scratch[1]
        np.multiply(gradient, gradient, out=root)
        np.subtract(root, rms, out=root)
        np.multiply(root, one_minus_decay, out=root)
        np.add(rms, root, out=rms)
        if mg:
            np.subtract(gradient, mg[0], out=root)
            np.multiply(root, one_minus_decay, out=root)
            np.add(mg[0], root, out=mg[0])
            np.multiply(mg[0], mg[0], out=change)
            np.subtract(rms, change, out=root)
            np.add(root, epsilon, out=root)
        else:
            np.add(rms, epsilon, out=root)
        np.sqrt(root, out=root)
        np.multiply(gradient, learning_rate, out=change)
        np.divide(change, root, out=change)
        np.multiply(moment, momentum, out=moment)
        np.add(moment, change, out=moment)
        np.subtract(value, moment, out=out)
