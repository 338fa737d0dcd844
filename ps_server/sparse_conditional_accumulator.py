"""The sum of sparse gradients, row by row: merged by index, each row with its own count."""

import numpy as np

from ps_protocol.accumulators import UNKNOWN, AccumulatorSpec, Reduction
from ps_protocol.errors import IndexOutOfRange, InvalidSpec, ShapeMismatch
from ps_protocol.tensors import Array
from ps_protocol.variable_options import SparseMean
from ps_server.conditional_accumulator import Gradient, shape_text
from ps_server.row_gradient import RowGradient, in_order


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
