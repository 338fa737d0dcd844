"""What a formula of an optimizer is."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array

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
