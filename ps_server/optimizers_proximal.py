"""Formulas that solve for a penalty on the variable's size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array
from ps_server.optimizers_formula import Scalars, given, keep_where_greater, restore_sign, single


@dataclass(frozen=True, slots=True, kw_only=True)
class Ftrl:
    """n' = n + g^2; z += g + 2 * shrinkage * var - (n'^p - n^p) / lr * var; var = (sign(z) * l1 - z) / (n'^p / lr + 2 * l2').

    var = 0 where |z| <= l1. p = -learning_rate_power and l2' = l2 + beta / (2 * lr).
    """

    initial_accumulator_value: float
    power: float
    l1: float
    l2: float
    l2_shrinkage: float
    beta: float

    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Ftrl":
        """Returns the formula with the numbers of `spec`."""
        return cls(
            initial_accumulator_value=spec.hyperparameter("initial_accumulator_value"),
            power=-given(spec, "learning_rate_power"),
            l1=given(spec, "l1_regularization_strength"),
            l2=spec.hyperparameter("l2_regularization_strength"),
            l2_shrinkage=given(spec, "l2_shrinkage_regularization_strength"),
            beta=spec.hyperparameter("beta"),
        )

    @property
    def slots(self) -> Mapping[str, float]:
        """See Formula."""
        return {"accum": self.initial_accumulator_value, "linear": 0.0}

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, p, l1, 2 * l2', 2 * shrinkage)."""
        l2 = single(float(self.l2 + self.beta / (2 * np.float64(learning_rate))) if self.beta else self.l2)
        two = dtype.type(2)
        rate, power, l1 = dtype.type(learning_rate), dtype.type(self.power), dtype.type(self.l1)
        return rate, power, l1, two * dtype.type(l2), two * dtype.type(self.l2_shrinkage)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (squares, linear), (learning_rate, power, l1, twice_l2, shrinkage) = slots, constants
        before, after = scratch[0], scratch[1]
        self._raise_to_power(squares, power, out=before)
        np.multiply(gradient, gradient, out=after)
        np.add(squares, after, out=squares)
        self._raise_to_power(squares, power, out=after)
        np.subtract(after, before, out=before)
        np.divide(before, learning_rate, out=before)
        np.multiply(before, value, out=before)
        if shrinkage:
            np.multiply(value, shrinkage, out=out)
            np.add(gradient, out, out=out)
            np.subtract(out, before, out=before)
        else:
            np.subtract(gradient, before, out=before)
        np.add(linear, before, out=linear)
        # sign(z) * l1 - z where |z| > l1, at a third of the price; elsewhere the variable is 0 in any case.
        np.clip(linear, -l1, l1, out=out)
        np.subtract(out, linear, out=out)
        np.divide(after, learning_rate, out=after)
        np.add(after, twice_l2, out=after)
        np.divide(out, after, out=out)
        np.abs(linear, out=before)
        keep_where_greater(out, before, l1, scratch=scratch[2])

    def _raise_to_power(self, base: Array, power: "np.floating[Any]", *, out: Array) -> None:
        if self.power == 0.5:
            np.sqrt(base, out=out)
        else:
            np.power(base, power, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalSgd:
    """p = var - lr * g; var = sign(p) * max(|p| - lr * l1, 0) / (1 + lr * l2)."""

    l1: float
    l2: float

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "ProximalSgd":
        """Returns the formula with the numbers of `spec`."""
        return cls(l1=given(spec, "l1_regularization_strength"), l2=given(spec, "l2_regularization_strength"))

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, lr * l1, 1 + lr * l2)."""
        rate = dtype.type(learning_rate)
        return rate, rate * dtype.type(self.l1), dtype.type(1) + rate * dtype.type(self.l2)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (learning_rate, threshold, divisor), change = constants, scratch[0]
        np.multiply(gradient, learning_rate, out=change)
        np.subtract(value, change, out=out)
        if threshold > 0:
            np.abs(out, out=change)
            np.subtract(change, threshold, out=change)
            restore_sign(out, change)
        np.divide(out, divisor, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalAdagrad:
    """a += g^2; r = lr / sqrt(a); p = var - r * g; var = sign(p) * max(|p| - r * l1, 0) / (1 + r * l2)."""

    initial_accumulator_value: float
    l1: float
    l2: float

    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "ProximalAdagrad":
        """Returns the formula with the numbers of `spec`."""
        initial = spec.hyperparameter("initial_accumulator_value")
        l1, l2 = given(spec, "l1_regularization_strength"), given(spec, "l2_regularization_strength")
        return cls(initial_accumulator_value=initial, l1=l1, l2=l2)

    @property
    def slots(self) -> Mapping[str, float]:
        """See Formula."""
        return {"accumulator": self.initial_accumulator_value}

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (lr, l1, l2, 1)."""
        return dtype.type(learning_rate), dtype.type(self.l1), dtype.type(self.l2), dtype.type(1)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        (accumulator,), (learning_rate, l1, l2, one) = slots, constants
        change, rate = scratch[0], scratch[1]
        np.multiply(gradient, gradient, out=change)
        np.add(accumulator, change, out=accumulator)
        np.sqrt(accumulator, out=rate)
        np.divide(one, rate, out=rate)
        np.multiply(rate, learning_rate, out=rate)
        np.multiply(gradient, rate, out=change)
        np.subtract(value, change, out=out)
        if l1 > 0:
            np.multiply(rate, l1, out=scratch[2])
            np.abs(out, out=change)
            np.subtract(change, scratch[2], out=change)
            restore_sign(out, change)
        if l2 > 0:
            np.multiply(rate, l2, out=rate)
            np.add(rate, one, out=rate)
            np.divide(out, rate, out=out)
