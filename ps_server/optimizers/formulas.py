"""The formula of each optimizer, built-in or given as text, for one block of elements at a time. Knows arrays and numbers; no variable.

Formulas and slot names are those of the CPU kernels behind tf.compat.v1.train's optimizers (tensorflow/core/kernels/training_ops.cc), in
their order of operations, save for how the original rounds 1/sqrt and fused multiply-adds. As there, rates, hyper-parameters and the powers
of Adam's decays are float32 numbers, also for float64 variables; values, slots and gradients have the variable's own precision.

All other formulas are texts: `ps_protocol/model/expressions.py` has their language, `ps_protocol/model/programs.py` compiles them to
operations on blocks.

A formula writes the next values beside the present ones (`out`), updates the slots in place, and leaves `value` and `gradient` alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import LEARNING_RATE, STEP, OptimizerSpec
from ps_protocol.model.variables import Array

# Scalars in the precision of one element type, and the function that makes one.
Scalars = tuple["np.floating[Any]", ...]
Number = Callable[[Any], "np.floating[Any]"]

# The number of blocks of scratch memory of every formula. The last one is for the caller's additions to the gradient.
NUM_SCRATCH = 4


def single(value: float) -> float:
    """Returns the number that the original computes with: it makes float32 scalars of rates and the like, also for float64 variables."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@light_dataclass(frozen=True, slots=True)
class Pass:
    """Sums over all blocks of a variable that a formula needs before it can be applied.

    `measure(value, slots, gradient, scratch, squares, constants)` returns the sums of a block. `conclude(constants, totals, number)`
    returns the constants with what follows from the sums of all blocks.
    """

    measure: Callable[[Array, Sequence[Array], Array, Sequence[Array], Array, Scalars], Sequence[float]]
    conclude: Callable[[Scalars, Sequence[float], Number], Scalars]


@light_dataclass(frozen=True, slots=True)
class Formula:
    """The computation of an optimizer, with its hyper-parameters. Holds no state: slots and powers are the caller's.

    `constants(learning_rate, powers, step, number)` returns what `apply_block` needs at one step: `powers` are those of `decays`, `step` is
    that of the gradients, `number` makes a scalar of the element type. `apply_block(value, out, slots, gradient, scratch, constants)`
    writes the next values of a block to `out`; all arrays have one length and element type, and `slots` the order of their names in the
    specification.
    """

    constants: Callable[[float, Sequence[float], int, Number], Scalars]
    apply_block: Callable[[Array, Array, Sequence[Array], Array, Sequence[Array], Scalars], None]
    # Numbers that the formula needs to the power of the steps applied, the present one included.
    decays: tuple[float, ...] = ()
    # In which precision the learning rate and the powers are given.
    rounded: Callable[[float], float] = single
    # Blocks of scratch memory that it wants.
    num_scratch: int = NUM_SCRATCH
    # Measured over a whole variable first, one pass after the other.
    passes: tuple[Pass, ...] = ()
    # Whether its constants are others at another step, with the same learning rate and powers.
    uses_step: bool = True


def _restore_sign(out: Array, size: Array) -> None:
    """Makes `out` as large as `size`, or 0 where that is negative, and lets it keep its sign."""
    # NumPy's maximum of an array and a number takes three times as long.
    np.clip(size, 0, np.inf, out=size)
    np.sign(out, out=out)
    np.multiply(out, size, out=out)


def _keep_where_greater(out: Array, size: Array, limit: "np.floating[Any]", *, scratch: Array) -> None:
    """Makes `out` 0 wherever not `size` > `limit`. `scratch` is a block of the same kind."""
    is_greater = scratch.view(np.bool_)[: out.size]
    np.greater(size, limit, out=is_greater)
    if not is_greater.all():
        # Twenty times as fast as a copy under a random mask: all bits set for elements that stay, none for the rest.
        bits = np.dtype(f"i{out.itemsize}")
        mask = size.view(bits)
        np.negative(is_greater.view(np.int8), out=mask, dtype=bits)
        np.bitwise_and(out.view(bits), mask, out=out.view(bits))


def _given(spec: OptimizerSpec, name: str) -> float:
    """Returns a hyper-parameter as the original computes with it."""
    return single(spec.hyperparameter(name))


def _sgd(spec: OptimizerSpec) -> Formula:
    """Sgd: var -= lr * g."""

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        np.multiply(gradient, constants[0], out=scratch[0])
        np.subtract(value, scratch[0], out=out)

    return Formula(lambda rate, powers, step, of: (of(rate),), apply, uses_step=False)


def _momentum(spec: OptimizerSpec) -> Formula:
    """Momentum: a = mu * a + g; var -= lr * a. With Nesterov: var -= lr * g + lr * mu * a."""
    momentum, use_nesterov = _given(spec, "momentum"), bool(spec.hyperparameter("use_nesterov"))

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        (accumulator,), (learning_rate, mu), change = slots, constants, scratch[0]
        np.multiply(accumulator, mu, out=accumulator)
        np.add(accumulator, gradient, out=accumulator)
        if not use_nesterov:
            np.multiply(accumulator, learning_rate, out=change)
        else:
            np.multiply(accumulator, mu, out=out)
            np.multiply(out, learning_rate, out=out)
            np.multiply(gradient, learning_rate, out=change)
            np.add(change, out, out=change)
        np.subtract(value, change, out=out)

    return Formula(lambda rate, powers, step, of: (of(rate), of(momentum)), apply, uses_step=False)


def _adam(spec: OptimizerSpec) -> Formula:
    """Adam: m += (g - m) * (1 - b1); v += (g^2 - v) * (1 - b2); var -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon)."""
    beta1, beta2, epsilon = _given(spec, "beta1"), _given(spec, "beta2"), _given(spec, "epsilon")

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        one, beta1_power, beta2_power = of(1), of(powers[0]), of(powers[1])
        # With the correction of the bias.
        corrected = of(rate) * np.sqrt(one - beta2_power) / (one - beta1_power)
        return corrected, one - of(beta1), one - of(beta2), of(epsilon)

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
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

    return Formula(constants, apply, decays=(beta1, beta2))


def _rmsprop(spec: OptimizerSpec) -> Formula:
    """RMSProp: rms += (g^2 - rms) * (1 - rho); mom = mu * mom + lr * g / sqrt(rms + epsilon); var -= mom.

    Centered: mg += (g - mg) * (1 - rho), and rms - mg^2 instead of rms in the root.
    """
    decay, momentum, epsilon = _given(spec, "decay"), _given(spec, "momentum"), _given(spec, "epsilon")

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        (*mg, moment, rms), (learning_rate, one_minus_decay, mu, eps) = slots, constants
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
            np.add(root, eps, out=root)
        else:
            np.add(rms, eps, out=root)
        np.sqrt(root, out=root)
        np.multiply(gradient, learning_rate, out=change)
        np.divide(change, root, out=change)
        np.multiply(moment, mu, out=moment)
        np.add(moment, change, out=moment)
        np.subtract(value, moment, out=out)

    return Formula(lambda rate, powers, step, of: (of(rate), of(1) - of(decay), of(momentum), of(epsilon)), apply, uses_step=False)


def _adagrad(spec: OptimizerSpec) -> Formula:
    """Adagrad: a += g^2; var -= lr * g / sqrt(a)."""

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
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

    return Formula(lambda rate, powers, step, of: (of(rate), of(1)), apply, uses_step=False)


def _adagrad_da(spec: OptimizerSpec) -> Formula:
    """Adagrad, dual averaging: G += g; H += g^2; var = -lr * sign(G) * max(|G| - t * l1, 0) / (l2 * t * lr + sqrt(H)).

    t is the step after the update. The variable's old value does not matter.
    """
    l1, l2 = _given(spec, "l1_regularization_strength"), _given(spec, "l2_regularization_strength")

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        own_rate, t = of(rate), of(step + 1)
        return -own_rate, t * of(l1), t * of(l2) * own_rate

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
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

    return Formula(constants, apply)


def _adadelta(spec: OptimizerSpec) -> Formula:
    """Adadelta: a = rho * a + (1 - rho) * g^2; u = sqrt(d + epsilon) / sqrt(a + epsilon) * g; var -= lr * u.

    d = rho * d + (1 - rho) * u^2.
    """
    decay, epsilon = _given(spec, "rho"), _given(spec, "epsilon")

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        (squares, updates), (learning_rate, rho, one_minus_rho, eps, one) = slots, constants
        change, other = scratch[0], scratch[1]
        _decay_towards_square(squares, gradient, rho, one_minus_rho, scratch=other)
        np.add(squares, eps, out=other)
        np.sqrt(other, out=other)
        np.divide(one, other, out=other)
        np.add(updates, eps, out=change)
        np.sqrt(change, out=change)
        np.multiply(change, other, out=change)
        np.multiply(change, gradient, out=change)
        _decay_towards_square(updates, change, rho, one_minus_rho, scratch=other)
        np.multiply(change, learning_rate, out=change)
        np.subtract(value, change, out=out)

    return Formula(lambda rate, powers, step, of: (of(rate), of(decay), of(1) - of(decay), of(epsilon), of(1)), apply, uses_step=False)


def _decay_towards_square(average: Array, x: Array, rho: "np.floating[Any]", one_minus_rho: "np.floating[Any]", *, scratch: Array) -> None:
    np.multiply(average, rho, out=average)
    np.multiply(x, x, out=scratch)
    np.multiply(scratch, one_minus_rho, out=scratch)
    np.add(average, scratch, out=average)


def _ftrl(spec: OptimizerSpec) -> Formula:
    """FTRL: n' = n + g^2; z += g + 2 * shrinkage * var - (n'^p - n^p) / lr * var; var = (sign(z) * l1 - z) / (n'^p / lr + 2 * l2').

    var = 0 where |z| <= l1. p = -learning_rate_power and l2' = l2 + beta / (2 * lr).
    """
    exponent, threshold = -_given(spec, "learning_rate_power"), _given(spec, "l1_regularization_strength")
    ridge, beta = spec.hyperparameter("l2_regularization_strength"), spec.hyperparameter("beta")
    l2_shrinkage = _given(spec, "l2_shrinkage_regularization_strength")

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        l2 = single(float(ridge + beta / (2 * np.float64(rate))) if beta else ridge)
        two = of(2)
        return of(rate), of(exponent), of(threshold), two * of(l2), two * of(l2_shrinkage)

    def raise_to_power(base: Array, power: "np.floating[Any]", *, out: Array) -> None:
        if exponent == 0.5:
            np.sqrt(base, out=out)
        else:
            np.power(base, power, out=out)

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        (squares, linear), (learning_rate, power, l1, twice_l2, shrinkage) = slots, constants
        before, after = scratch[0], scratch[1]
        raise_to_power(squares, power, out=before)
        np.multiply(gradient, gradient, out=after)
        np.add(squares, after, out=squares)
        raise_to_power(squares, power, out=after)
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
        _keep_where_greater(out, before, l1, scratch=scratch[2])

    return Formula(constants, apply)


def _proximal_sgd(spec: OptimizerSpec) -> Formula:
    """Proximal sgd: p = var - lr * g; var = sign(p) * max(|p| - lr * l1, 0) / (1 + lr * l2)."""
    l1, l2 = _given(spec, "l1_regularization_strength"), _given(spec, "l2_regularization_strength")

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        own_rate = of(rate)
        return own_rate, own_rate * of(l1), of(1) + own_rate * of(l2)

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        (learning_rate, threshold, divisor), change = constants, scratch[0]
        np.multiply(gradient, learning_rate, out=change)
        np.subtract(value, change, out=out)
        if threshold > 0:
            np.abs(out, out=change)
            np.subtract(change, threshold, out=change)
            _restore_sign(out, change)
        np.divide(out, divisor, out=out)

    return Formula(constants, apply)


def _proximal_adagrad(spec: OptimizerSpec) -> Formula:
    """Proximal Adagrad: a += g^2; r = lr / sqrt(a); p = var - r * g; var = sign(p) * max(|p| - r * l1, 0) / (1 + r * l2)."""
    l1_strength, l2_strength = _given(spec, "l1_regularization_strength"), _given(spec, "l2_regularization_strength")

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
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
            _restore_sign(out, change)
        if l2 > 0:
            np.multiply(rate, l2, out=rate)
            np.add(rate, one, out=rate)
            np.divide(out, rate, out=out)

    return Formula(lambda rate, powers, step, of: (of(rate), of(l1_strength), of(l2_strength), of(1)), apply, uses_step=False)


# Variables that take plain updates (statistics, counters): the gradient is the update.


def _assign_mean(spec: OptimizerSpec) -> Formula:
    """Assignment: var = mean of the updates."""

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        np.copyto(out, gradient)

    return Formula(lambda rate, powers, step, of: (), apply, uses_step=False)


def _add(spec: OptimizerSpec) -> Formula:
    """Addition: var += sum of the updates, which the caller passes instead of their mean."""

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        np.add(value, gradient, out=out)

    return Formula(lambda rate, powers, step, of: (), apply, uses_step=False)


def _moving_average(spec: OptimizerSpec) -> Formula:
    """Moving average: var -= (1 - decay) * (var - mean of the updates)."""
    decay = spec.hyperparameter("decay")

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        np.subtract(value, gradient, out=scratch[0])
        np.multiply(scratch[0], constants[0], out=scratch[0])
        np.subtract(value, scratch[0], out=out)

    return Formula(lambda rate, powers, step, of: (of(1 - decay),), apply, uses_step=False)


FORMULAS: dict[str, Callable[[OptimizerSpec], Formula]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adagrad_da": _adagrad_da,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "ftrl": _ftrl,
    "proximal_sgd": _proximal_sgd,
    "proximal_adagrad": _proximal_adagrad,
    "assign_mean": _assign_mean,
    "add": _add,
    "moving_average": _moving_average,
}


def formula_of(spec: OptimizerSpec) -> Formula:
    """Returns the formula of a checked specification."""
    return _text_formula(spec) if spec.text else FORMULAS[spec.name](spec)


def _text_formula(spec: OptimizerSpec) -> Formula:
    """Returns the formula of a specification that has a text.

    Numbers are computed as Python computes them, in double precision, and rounded where they meet an array of another type: in float32,
    1 - 0.999 is wrong in the fifth digit.
    """
    program, bases, given = spec.program, spec.parsed.bases, spec.numbers

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        raised = {f"{base} ** {STEP}": power for base, power in zip(bases, powers, strict=True)}
        return program.numbers({**given, **raised, LEARNING_RATE: rate, STEP: step + 1}, float)

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        program.run((value, gradient, *slots), (out,), scratch, constants)

    return Formula(
        constants,
        apply,
        decays=tuple(given[base] for base in bases),
        rounded=float,
        num_scratch=max(NUM_SCRATCH, program.num_scratch),
        passes=tuple(_pass(spec, index) for index in range(program.num_passes)),
    )


def _pass(spec: OptimizerSpec, index: int) -> Pass:
    program = spec.program

    def measure(
        value: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], squares: Array, constants: Scalars
    ) -> list[float]:
        return program.measure(index, (value, gradient, *slots), scratch, squares, constants)

    def conclude(constants: Scalars, totals: Sequence[float], of: Number) -> Scalars:
        return program.conclude(index, totals, constants, float)

    return Pass(measure, conclude)


def initial_powers(formula: Formula) -> tuple[float, ...]:
    """Returns the powers of the formula's decays for its first step."""
    return tuple(formula.rounded(decay) for decay in formula.decays)


def next_powers(formula: Formula, powers: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the powers for the step after: a product a step, as in the original, whose rounding a power computed anew would not have."""
    if not powers:
        return powers
    # In double precision the product of two float32 numbers is exact, so that it is rounded once.
    return tuple(formula.rounded(power * formula.rounded(decay)) for power, decay in zip(powers, formula.decays, strict=True))
