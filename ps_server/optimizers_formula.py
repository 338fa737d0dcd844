"""What a formula of an optimizer is, for one block of elements at a time. Knows arrays and numbers; no variable, lock or wire."""

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


def single(value: float) -> float:
    """Returns the number that the original computes with: it makes float32 scalars of rates and the like, also for float64 variables."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def given(spec: OptimizerSpec, name: str) -> float:
    """Returns a hyper-parameter as the original computes with it."""
    return single(spec.hyperparameter(name))
