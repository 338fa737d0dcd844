"""The formula of each optimizer, for one block of elements at a time. Knows arrays and numbers; no variable, step, lock or wire.

Formulas and slot names are those of the CPU kernels behind tf.compat.v1.train's optimizers (tensorflow/core/kernels/training_ops.cc), in
their order of operations, save for how the original rounds 1/sqrt and fused multiply-adds. As there, rates, hyper-parameters and the powers
of Adam's decays are float32 numbers, also for float64 variables; values, slots and gradients have the variable's own precision.

A formula writes the next values beside the present ones (`out`), updates the slots in place, and leaves `value` and `gradient` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array

# What a formula of an optimizer is.


# Scalars in the precision of one element type.
Scalars = tuple["np.floating[Any]", ...]

# How many blocks a formula may ask for as scratch memory.
NUM_SCRATCH = 3


class Formula(Protocol):
    """Hyper-parameters and the formula that they are for. Holds no state: slots and powers are the caller's."""

    @property
    def slots(self) -> Mapping[str, float]:
        """Names of the slots, sorted, and the value that each starts with."""

    @property
    def decays(self) -> tuple[float, ...]:
        """Numbers that the formula needs to the power of the steps applied, the present one included."""

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns what `apply_block` needs at one step; `powers` are those of `decays`, `step` is that of the gradients."""

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """Writes the next values of a block to `out`; all arrays have one length and element type, and `slots` the order of their names."""


def restore_sign(out: Array, size: Array) -> None:
    """Makes `out` as large as `size`, or 0 where that is negative, and lets it keep its sign."""
    # NumPy's maximum of an array and a number takes three times as long.
    np.clip(size, 0, np.inf, out=size)
    np.sign(out, out=out)
    np.multiply(out, size, out=out)


def keep_where_greater(out: Array, size: Array, limit: "np.floating[Any]", *, scratch: Array) -> None:
    """Makes `out` 0 wherever not `size` > `limit`. `scratch` is a block of the same kind."""
    is_greater = scratch.view(np.bool_)[: out.size]
    np.greater(size, limit, out=is_greater)
    if not is_greater.all():
        # Twenty times as fast as a copy under a mask of no pattern: all bits set for what stays, none for the rest.
        bits = np.dtype(f"i{out.itemsize}")
        mask = size.view(bits)
        np.negative(is_greater.view(np.int8), out=mask, dtype=bits)
        np.bitwise_and(out.view(bits), mask, out=out.view(bits))


def single(value: float) -> float:
    """Returns the number that the original computes with: it makes float32 scalars of rates and the like, also for float64 variables."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def given(spec: OptimizerSpec, name: str) -> float:
    """Returns a hyper-parameter as the original computes with it."""
    return single(spec.hyperparameter(name))


# Formulas that move along the gradient, as it is or averaged over steps.


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


# Formulas that divide by the squares of the gradients so far.


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


# Formulas that solve for a penalty on the variable's size.


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


# Formulas of variables that take plain updates (statistics, counters): what is called gradient is the update there.


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignMean:
    """var = mean of the updates."""

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "AssignMean":
        """Returns the formula."""
        return cls()

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns ()."""
        return ()

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        np.copyto(out, gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """var += sum of the updates, which the caller passes instead of their mean."""

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "Add":
        """Returns the formula."""
        return cls()

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns ()."""
        return ()

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        np.add(value, gradient, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingAverage:
    """var -= (1 - decay) * (var - mean of the updates)."""

    decay: float

    slots: ClassVar[Mapping[str, float]] = {}
    decays: ClassVar[tuple[float, ...]] = ()

    @classmethod
    def of(cls, spec: OptimizerSpec) -> "MovingAverage":
        """Returns the formula with the numbers of `spec`."""
        return cls(decay=spec.hyperparameter("decay"))

    def constants(self, learning_rate: float, *, powers: Scalars, step: int, dtype: np.dtype[Any]) -> Scalars:
        """Returns (1 - decay,)."""
        return (dtype.type(1 - self.decay),)

    def apply_block(
        self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars
    ) -> None:
        """See Formula."""
        np.subtract(value, gradient, out=scratch[0])
        np.multiply(scratch[0], constants[0], out=scratch[0])
        np.subtract(value, scratch[0], out=out)


# Which formula an optimizer's name stands for, and its powers from step to step.


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
