"""A named accumulator's rounds: accepted gradients, the queue of takers, the step, and the sums. Knows arrays; no lock, no clock.

Sources: tf.compat.v1.ConditionalAccumulator and SparseConditionalAccumulator. Differences: sums of half-precision gradients are kept in
float32, since their own sums stop growing early; a take that fails changes nothing; and sparse gradients are sorted first, with their rows
of the same index summed, while the original is right only if the sender has done so.
"""

import math
from collections import deque

import numpy as np

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, LimitExceeded, ShapeMismatch
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import MAX_EXTENTS, Array, SparseMean
from ps_protocol.roles.accumulators import UNKNOWN, AccumulatorSpec, Reduction, Taken, check_num_required, check_step
from ps_server.numbers.row_gradients import RowGradient, in_order

# An accumulator's rounds, and the sum of dense gradients.


@light_dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient's elements; of a sparse one its rows, which `indices` name, and the shape of the whole if the sender knows it.

    The receiver owns its arrays. Indices of a sparse one ascend, none twice.
    """

    values: Array
    indices: Array | None = None
    dense_shape: tuple[int, ...] | None = None


class Take:
    """One taking: `taken` None while it waits."""

    def __init__(self, num_required: int) -> None:
        self.num_required = num_required
        self.taken: Taken | None = None


class Rounds:
    """Gradients of one round after the other, and the takers that wait for them, first come, first served. Not thread-safe.

    A gradient is accepted if its local step is the accumulator's step, or later. Each taking raises the step by one.
    """

    def __init__(self, spec: AccumulatorSpec, total: "DenseSum | SparseSum") -> None:
        self.spec = spec
        self.step = 0
        self.count = 0
        self.total = total
        self._takes: deque[Take] = deque()

    @property
    def num_waiting(self) -> int:
        """Takings that wait."""
        return len(self._takes)

    def is_stale(self, local_step: int) -> bool:
        """Whether a gradient of this step would be dropped."""
        return local_step < self.step

    def apply(self, gradient: Gradient, *, local_step: int) -> bool:
        """Adds a gradient and owns its arrays from now on; False: it was stale, and is dropped unread.

        Raises ShapeMismatch, and then nothing has changed. May complete a taking.
        """
        if self.is_stale(local_step):
            return False
        num_indices = 0 if gradient.indices is None else len(gradient.indices)
        self.total.check(gradient.values.shape, num_indices=num_indices, dense_shape=gradient.dense_shape)
        self.total.add(gradient)
        self.count += 1
        self._serve()
        return True

    def take(self, num_required: int) -> Take:
        """Queues up for `num_required` gradients, behind all waiting takers; it may be done when this returns."""
        check_num_required(num_required, name=self.spec.name)
        take = Take(num_required)
        self._takes.append(take)
        self._serve()
        return take

    def cancel(self, take: Take) -> None:
        """Withdraws a request that waits. The gradients stay, and the next request may be served. Idempotent."""
        if take in self._takes:
            self._takes.remove(take)
            self._serve()

    def set_step(self, step: int) -> None:
        """Sets the step, backwards too; gradients that are in stay in."""
        check_step("step", step)
        self.step = step

    def _serve(self) -> None:
        while self._takes and self.count >= self._takes[0].num_required:
            # The operations that can fail come first; a failure leaves the gradients and the queue as they are.
            result, count = self.total.result(count=self.count), self.count
            self.total.clear()
            self.step, self.count = self.step + 1, 0
            taken = Taken(count=count, step=self.step, values=result.values, indices=result.indices, dense_shape=result.dense_shape)
            self._takes.popleft().taken = taken


class DenseSum:
    """The sum of dense gradients. Without a declared shape, the first gradient of a round fixes the shape for that round.

    As `SparseSum`: a gradient is checked, then added, and the first of a round becomes the sum.
    """

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
    """Returns whether the shape has the declared dimensions."""
    if declared is None:
        return True
    return len(shape) == len(declared) and all(want in (UNKNOWN, got) for got, want in zip(shape, declared, strict=True))


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Formats a shape; "?" for a dimension that is not declared."""
    if shape is None:
        return "any"
    return "(" + ", ".join("?" if extent == UNKNOWN else str(extent) for extent in shape) + ("," if len(shape) == 1 else "") + ")"


# The sum of sparse gradients, row by row: merged by index, each row with its own count.


class SparseSum:
    """The sum of sparse gradients, and for each row how many gradients had it."""

    def __init__(self, spec: AccumulatorSpec) -> None:
        self._spec = spec
        self._indices: Array | None = None
        self._rows: Array | None = None
        self._counts: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of rows, indices and counts."""
        return sum(part.nbytes for part in (self._indices, self._rows, self._counts) if part is not None)

    def check(self, shape: tuple[int, ...], *, num_indices: int, dense_shape: tuple[int, ...] | None) -> None:
        """Raises ShapeMismatch unless rows of this shape can be added now."""
        what, declared = f"accumulator {self._spec.name!r}", self._spec.shape
        if not shape:
            raise ShapeMismatch(f"{what}: values cannot be 0-dimensional; give one row for each index")
        if shape[0] != num_indices:
            raise ShapeMismatch(f"{what}: {num_indices} indices, {shape[0]} rows of values; give one row for each index")
        if declared is not None:
            if dense_shape is not None and not _begins_with(dense_shape, declared):
                raise ShapeMismatch(f"{what}: gradient of a whole of shape {dense_shape}, want {shape_text(declared)}")
            if not _begins_with(shape[1:], declared[1:]):
                raise ShapeMismatch(f"{what}: rows of shape {shape[1:]}, want {shape_text(declared[1:])}")
        held = 0 if self._indices is None else len(self._indices)
        if (held + num_indices) * math.prod(extent for extent in shape[1:] if extent) > MAX_EXTENTS:
            # Rows without elements take no memory, and yet such an array cannot exist.
            raise LimitExceeded(f"{what}: {held + num_indices} rows of shape {shape[1:]} are too large")
        if self._rows is not None and self._rows.shape[1:] != shape[1:]:
            raise ShapeMismatch(f"{what}: rows of shape {shape[1:]}, but those of this round have {self._rows.shape[1:]}; take them first")

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes, at most, that merging takes: old and new sum exist at the same time."""
        return self.nbytes + 2 * (gradient.values.size * self._spec.data_type.sum_dtype.itemsize + 16 * len(gradient.values))

    def add(self, gradient: Gradient) -> None:
        """Merges a combined gradient into the sum."""
        assert gradient.indices is not None
        indices, rows = gradient.indices, gradient.values.astype(self._spec.data_type.sum_dtype, copy=False)
        if self._indices is None or self._rows is None or self._counts is None:
            self._indices, self._rows, self._counts = indices, rows, np.ones(len(indices), np.int64)
            return
        places = np.searchsorted(self._indices, indices)
        is_known = np.zeros(len(indices), np.bool_)
        within = places < len(self._indices)
        is_known[within] = self._indices[places[within]] == indices[within]
        if not is_known.all():
            self._insert(places[~is_known], indices[~is_known], like=rows)
            places = np.searchsorted(self._indices, indices)
        self._rows[places] += rows
        self._counts[places] += 1

    def result(self, *, count: int) -> Gradient:
        """Returns indices, rows and the shape of the whole; the mean divides each row as the specification says."""
        assert self._indices is not None and self._rows is not None and self._counts is not None
        declared = self._spec.shape
        whole = (declared[0] if declared else UNKNOWN, *self._rows.shape[1:])
        rows = self._rows
        if self._spec.reduction is Reduction.MEAN:
            divisor: Array = self._counts if self._spec.sparse_mean is SparseMean.PER_INDEX else np.asarray(count)
            divisor = divisor.astype(rows.dtype).reshape(-1, *(1 for _ in rows.shape[1:]))
            rows = rows / divisor
        return Gradient(rows.astype(self._spec.data_type.dtype, copy=False), self._indices, whole)

    def clear(self) -> None:
        """Lets go of the sum."""
        self._indices = self._rows = self._counts = None

    def _insert(self, places: Array, indices: Array, *, like: Array) -> None:
        assert self._indices is not None and self._rows is not None and self._counts is not None
        zeros = np.zeros((len(indices), *like.shape[1:]), like.dtype)
        self._indices = np.insert(self._indices, places, indices)
        self._rows = np.insert(self._rows, places, zeros, axis=0)
        self._counts = np.insert(self._counts, places, 0)


def combined(gradient: Gradient, spec: AccumulatorSpec) -> Gradient:
    """Returns the gradient with ascending indices, rows of the same index summed in their order.

    Raises IndexOutOfRange for a row that the declared shape, or the gradient's own, does not have.
    """
    indices, values = gradient.indices, gradient.values
    if indices is None or indices.ndim != 1:
        raise InvalidSpec(f"accumulator {spec.name!r}: indices must be a vector of integers")
    _check_range(indices, gradient.dense_shape, spec)
    # In the type of the sum from here on, so that half-precision rows are rounded once, when they are taken.
    dtype = spec.data_type.sum_dtype
    ordered = in_order(RowGradient(indices=indices, rows=values.astype(dtype, copy=False)), sum_dtype=dtype)
    return Gradient(ordered.rows, ordered.indices, gradient.dense_shape)


def _check_range(indices: Array, dense_shape: tuple[int, ...] | None, spec: AccumulatorSpec) -> None:
    if not len(indices):
        return
    declared = spec.shape[0] if spec.shape else UNKNOWN
    num_rows = declared if declared != UNKNOWN else dense_shape[0] if dense_shape else UNKNOWN
    wrong = (indices < 0) if num_rows == UNKNOWN else (indices < 0) | (indices >= num_rows)
    if bool(wrong.any()):
        place = int(np.argmax(wrong))
        want = ">= 0" if num_rows == UNKNOWN else f"0 to {num_rows - 1}" if num_rows else "none: it has no rows"
        raise IndexOutOfRange(f"accumulator {spec.name!r}: indices[{place}] = {int(indices[place])}, want {want}")


def _begins_with(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) >= len(declared) and all(want in (UNKNOWN, got) for got, want in zip(shape, declared, strict=False))
