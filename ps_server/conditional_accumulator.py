"""An accumulator's rounds, and the sum of dense gradients."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ps_protocol.accumulators import UNKNOWN, AccumulatorSpec, Reduction, Taken, check_num_required, check_step
from ps_protocol.errors import InvalidSpec, ShapeMismatch
from ps_protocol.tensors import Array


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient's elements; of a sparse one its rows, which `indices` name, and the shape of the whole if the sender knows it.

    Whoever is given one owns its arrays. Indices of a sparse one ascend, none twice.
    """

    values: Array
    indices: Array | None = None
    dense_shape: tuple[int, ...] | None = None


class GradientSum(Protocol):
    """The sum of the gradients of a round."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""

    def check(self, shape: tuple[int, ...], *, num_indices: int, dense_shape: tuple[int, ...] | None) -> None:
        """Raises ShapeMismatch unless a gradient of this shape can be added now."""

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes, at most, that adding the gradient takes for a moment or for good."""

    def add(self, gradient: Gradient) -> None:
        """Adds a checked gradient. The first of a round becomes the sum."""

    def result(self, *, count: int) -> Gradient:
        """Returns the mean or sum of all, as an array of its own."""

    def clear(self) -> None:
        """Begins a round."""


class Take:
    """One taking: `taken` None while it waits."""

    def __init__(self, num_required: int) -> None:
        self.num_required = num_required
        self.taken: Taken | None = None


class ConditionalAccumulator:
    """Gradients of a round, and those who wait for them, first come, first served. Not thread-safe.

    A gradient is accepted if its local step is the accumulator's step, or later. Taking raises the step by one, whatever it was.
    """

    def __init__(self, spec: AccumulatorSpec, total: GradientSum) -> None:
        self.spec = spec
        self.step = 0
        self.count = 0
        self._total = total
        self._takes: deque[Take] = deque()

    @property
    def num_waiting(self) -> int:
        """Takings that wait."""
        return len(self._takes)

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self._total.nbytes

    def is_stale(self, local_step: int) -> bool:
        """Whether a gradient of this step would be dropped."""
        return local_step < self.step

    def check(self, shape: tuple[int, ...], *, num_indices: int = 0, dense_shape: tuple[int, ...] | None = None) -> None:
        """Raises ShapeMismatch unless a gradient of this shape can be added now."""
        self._total.check(shape, num_indices=num_indices, dense_shape=dense_shape)

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes, at most, that adding the gradient takes."""
        return self._total.growth(gradient)

    def apply(self, gradient: Gradient, *, local_step: int) -> bool:
        """Adds a gradient and owns its arrays from now on; False: it was stale, was not looked at, and is dropped.

        Raises ShapeMismatch, and then nothing has changed. May complete a taking.
        """
        if self.is_stale(local_step):
            return False
        num_indices = 0 if gradient.indices is None else len(gradient.indices)
        self.check(gradient.values.shape, num_indices=num_indices, dense_shape=gradient.dense_shape)
        self._total.add(gradient)
        self.count += 1
        self._serve()
        return True

    def take(self, num_required: int) -> Take:
        """Queues up for `num_required` gradients, behind all who wait, whatever they want; it may be done when this returns."""
        check_num_required(num_required, name=self.spec.name)
        take = Take(num_required)
        self._takes.append(take)
        self._serve()
        return take

    def cancel(self, take: Take) -> None:
        """Withdraws a taking that waits. The gradients stay, and whoever is next may be served. Idempotent."""
        if take in self._takes:
            self._takes.remove(take)
            self._serve()

    def set_step(self, step: int) -> None:
        """Sets the step, backwards too; gradients that are in stay in."""
        check_step("step", step)
        self.step = step

    def _serve(self) -> None:
        while self._takes and self.count >= self._takes[0].num_required:
            # First all that can fail; a failure leaves the gradients and the queue as they are.
            result, count = self._total.result(count=self.count), self.count
            self._total.clear()
            self.step, self.count = self.step + 1, 0
            taken = Taken(count=count, step=self.step, values=result.values, indices=result.indices, dense_shape=result.dense_shape)
            self._takes.popleft().taken = taken


class DenseSum:
    """The sum of dense gradients. Without a declared shape, the first gradient of a round fixes the shape for that round."""

    def __init__(self, spec: AccumulatorSpec) -> None:
        self._spec = spec
        self._sum: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return 0 if self._sum is None else self._sum.nbytes

    def check(self, shape: tuple[int, ...], *, num_indices: int, dense_shape: tuple[int, ...] | None) -> None:
        """Raises ShapeMismatch unless a gradient of this shape can be added now."""
        what = f"accumulator {self._spec.name!r}"
        if num_indices or dense_shape is not None:
            raise InvalidSpec(f"{what}: takes dense gradients, got rows; use a SparseConditionalAccumulator for them")
        if not fits(shape, self._spec.shape):
            raise ShapeMismatch(f"{what}: gradient of shape {shape}, want {shape_text(self._spec.shape)}; nothing is broadcast")
        if self._sum is not None and self._sum.shape != shape:
            raise ShapeMismatch(f"{what}: gradient of shape {shape}, but those of this round have {self._sum.shape}; take them first")

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes that the first gradient of a round takes."""
        return gradient.values.size * self._spec.data_type.sum_dtype.itemsize if self._sum is None else 0

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient; the first one's memory becomes the sum's, if it has the type of the sum."""
        if self._sum is None:
            self._sum = gradient.values.astype(self._spec.data_type.sum_dtype, copy=False)
        else:
            np.add(self._sum, gradient.values, out=self._sum)

    def result(self, *, count: int) -> Gradient:
        """Returns the mean or sum in the accumulator's own type."""
        assert self._sum is not None
        dtype = self._spec.data_type.dtype
        if self._spec.reduction is Reduction.SUM:
            return Gradient(self._sum.astype(dtype, copy=False))
        # Of an array without axes NumPy makes a scalar.
        return Gradient(np.asarray(self._sum / self._sum.dtype.type(count)).astype(dtype, copy=False))

    def clear(self) -> None:
        """Lets go of the sum."""
        self._sum = None


def fits(shape: tuple[int, ...], declared: tuple[int, ...] | None) -> bool:
    """Returns whether the shape is what is declared, as far as it is."""
    if declared is None:
        return True
    return len(shape) == len(declared) and all(want in (UNKNOWN, got) for got, want in zip(shape, declared, strict=True))


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Returns a shape for people; "?" for what is not declared."""
    if shape is None:
        return "any"
    return "(" + ", ".join("?" if extent == UNKNOWN else str(extent) for extent in shape) + ("," if len(shape) == 1 else "") + ")"
