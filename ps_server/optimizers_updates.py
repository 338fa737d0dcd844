"""Formulas of variables that take plain updates (statistics, counters): what is called gradient is the update there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import Array
from ps_server.optimizers_formula import Scalars


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
