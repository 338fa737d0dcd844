"""A table's gradient as its server wants it: rows by ascending index. Knows indices and arrays; no shard and no step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import DtypeMismatch, IndexOutOfRange, InvalidSpec, ShapeMismatch
from ps_protocol.tensors import Array, DataType, VariableSpec
from worker_client.variables import IndexedSlices


@dataclass(frozen=True, slots=True, eq=False)
class RowGradient:
    """Rows of a table's gradient: int64 `indices`, ascending, and their `values`, contiguous, one row each.

    An index occurs once, but for half-precision types: their sums must not be rounded, so the server makes them.
    """

    indices: Array
    values: Array


def row_gradient(gradient: IndexedSlices, variable: VariableSpec) -> RowGradient:
    """Returns the gradient sorted by index, the rows of one index summed in the order given (half-precision ones: side by side in it).

    Shares the caller's arrays where there is nothing to do. Raises ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec.
    """
    what = f"gradient for {variable.name!r}"
    _check_dense_shape(what, gradient.dense_shape, variable)
    indices = checked_indices(what, gradient.indices, num_rows=variable.num_rows)
    if indices.ndim != 1:
        raise ShapeMismatch(f"{what}: indices have the shape {indices.shape}, want one axis")
    values = _values(what, gradient.values, variable)
    if len(values) != len(indices):
        raise ShapeMismatch(f"{what}: indices {len(indices)}, values {len(values)} rows; give one row for each index")
    return _merged(indices, values, variable)


def all_rows(gradient: Array) -> RowGradient:
    """Returns the gradient of a whole table as that of all its rows; its shape and type have been checked."""
    return RowGradient(np.arange(len(gradient), dtype=np.int64), np.ascontiguousarray(gradient))


def checked_indices(what: str, indices: Any, *, num_rows: int) -> Array:
    """Returns row numbers as int64, of the shape given. Raises DtypeMismatch, InvalidSpec, IndexOutOfRange with the first that is wrong."""
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidSpec(f"{what}: its indices, a {type(indices).__name__}, cannot be read as an array: {error}") from error
    if array.size == 0:
        return array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise DtypeMismatch(f"{what}: indices are {array.dtype}, want integers; cast with .astype(np.int64)")
    if array.min() < 0 or array.max() >= num_rows:
        position = int(np.flatnonzero((array < 0) | (array >= num_rows))[0])
        raise IndexOutOfRange(f"{what}: indices[{position}] = {array.reshape(-1)[position]}, want 0..{num_rows - 1}")
    return array.astype(np.int64, copy=False)


def type_words(dtype: "np.dtype[Any]") -> str:
    """Returns how a program writes an element type."""
    return f"{'ml_dtypes' if dtype.name == DataType.BFLOAT16.value else 'np'}.{dtype.name}"


def _values(what: str, values: Any, variable: VariableSpec) -> Array:
    array, dtype = np.asarray(values), variable.data_type.dtype
    if array.dtype != dtype:
        raise DtypeMismatch(f"{what} is {array.dtype}, variable is {dtype}; cast with .astype({type_words(dtype)})")
    if array.ndim != len(variable.shape) or array.shape[1:] != variable.shape[1:]:
        want = ", ".join(("rows", *map(str, variable.shape[1:])))
        raise ShapeMismatch(f"{what}: values have the shape {array.shape}, want ({want}): rows of {variable.shape}")
    return array


def _check_dense_shape(what: str, dense_shape: Sequence[int] | None, variable: VariableSpec) -> None:
    if dense_shape is not None and tuple(dense_shape) != variable.shape:
        raise ShapeMismatch(f"{what}: dense_shape {tuple(dense_shape)}, variable {variable.shape}")


def _merged(indices: Array, values: Array, variable: VariableSpec) -> RowGradient:
    if len(indices) < 2 or bool((indices[1:] > indices[:-1]).all()):
        return RowGradient(np.ascontiguousarray(indices), np.ascontiguousarray(values))
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    rows = values[order]
    if len(starts) < len(ordered) and variable.data_type.sum_dtype == rows.dtype:
        ordered, rows = ordered[starts], np.add.reduceat(rows, starts, axis=0)
    return RowGradient(ordered, rows)
