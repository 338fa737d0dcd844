"""Formulas that divide by the squares of the gradients so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array
from ps_server.optimizers_formula import Scalars, given


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """a += g^2; var -= lr * g / sqrt(a)."""

    initial_accumulator_value: float

    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Adagrad":
        """Returns the formula with the numbers of `spec`."""
        return cls(initial_accumulator_value=spec.hyperparameter("initial_accumulator_value"))

    @property
    def slots(self) -> Mapping[str, float]:
        """See Formula."""
        return {"accumulator": self.initial_accumulator_value}

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, 1)."""
        return dtype.type(learning_rate), dtype.type(1)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (accumulator,), (learning_rate, one) = slots, constants
        change, root = scratch[0], scratch[1]
        np.multiply(gradient, gradient, out=change)
        np.add(accumulator, change, out=accumulator)
        # As the original rounds: times the reciprocal of the root.
        np.sqrt(accumulator, out=root)
        np.divide(one, root, out=root)
        np.multiply(gradient, learning_rate, out=change)
        np.multiply(change, root, out=change)
        np.subtract(value, change, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradDa:
    """G += g; H += g^2; var = -lr * sign(G) * max(|G| - t * l1, 0) / (l2 * t * lr + sqrt(H)), where t is the step after the update.

    The variable's old value does not matter.
    """

    initial_value: float
    l1: float
    l2: float

    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "AdagradDa":
        """Returns the formula with the numbers of `spec`."""
        return cls(
            initial_value=spec.hyperparameter("initial_gradient_squared_accumulator_value"),
            l1=given(spec, "l1_regularization_strength"),
            l2=given(spec, "l2_regularization_strength"),
        )

    @property
    def slots(self) -> Mapping[str, float]:
        """See Formula."""
        return {"gradient_accumulator": 0.0, "gradient_squared_accumulator": self.initial_value}

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (-lr, t * l1, l2 * t * lr)."""
        rate, t = dtype.type(learning_rate), dtype.type(step + 1)
        return -rate, t * dtype.type(self.l1), t * dtype.type(self.l2) * rate

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (total, squares), (negative_rate, threshold, ridge), change = slots, constants, scratch[0]
        np.add(total, gradient, out=total)
        np.multiply(gradient, gradient, out=change)
        np.add(squares, change, out=squares)
        if threshold > 0:
            np.abs(total, out=out)
            np.subtract(out, threshold, out=out)
            np.clip(out, 0, np.inf, out=out)  # NumPy's maximum of an array and a number takes three times as long
            np.sign(total, out=change)
            np.multiply(out, change, out=out)
            np.multiply(out, negative_rate, out=out)
        else:
            np.multiply(total, negative_rate, out=out)
        np.sqrt(squares, out=change)
        np.add(change, ridge, out=change)
        np.divide(out, change, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adadelta:
    """a = rho * a + (1 - rho) * g^2; u = sqrt(d + epsilon) / sqrt(a + epsilon) * g; var -= lr * u; d = rho * d + (1 - rho) * u^2."""

    rho: float
    epsilon: float

    slots: ClassVar[Mapping[str, float]] = {"accum": 0.0, "accum_update": 0.0}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Adadelta":
        """Returns the formula with the numbers of `spec`."""
        return cls(rho=given(spec, "rho"), epsilon=given(spec, "epsilon"))

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, rho, 1 - rho, epsilon, 1)."""
        rho, one = dtype.type(self.rho), dtype.type(1)
        return dtype.type(learning_rate), rho, one - rho, dtype.type(self.epsilon), one

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (squares, updates), (learning_rate, rho, one_minus_rho, epsilon, one) = slots, constants
        change, other = scratch[0], scratch[1]
        _decay_towards_square(squares, gradient, rho, one_minus_rho, scratch=other)
        np.add(squares, epsilon, out=other)
        np.sqrt(other, out=other)
        np.divide(one, other, out=other)
        np.add(updates, epsilon, out=change)
        np.sqrt(change, out=change)
        np.multiply(change, other, out=change)
        np.multiply(change, gradient, out=change)
        _decay_towards_square(updates, change, rho, one_minus_rho, scratch=other)
        np.multiply(change, learning_rate, out=change)
        np.subtract(value, change, out=out)


def _decay_towards_square(average: Array, x: Array, rho: "np.floating[Any]", one_minus_rho: "np.floating[Any]", *, scratch: Array) -> None:
    np.multiply(average, rho, out=average)
    np.multiply(x, x, out=scratch)
    np.multiply(scratch, one_minus_rho, out=scratch)
    np.add(average, scratch, out=average)
