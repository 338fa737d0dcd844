"""Sums and means over replicas, of arrays and of rows. Knows no context, no variable, no process."""

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from ps_protocol.errors import DtypeMismatch, ShapeMismatch
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.values import Mirrored


class ReduceOp(enum.Enum):
    """The ways to combine the values of the replicas."""

    SUM = "SUM"
    MEAN = "MEAN"


def reduce_op_of(reduce_op: "ReduceOp | str") -> ReduceOp:
    """Returns the reduction itself or of this name, in any case. Raises ValueError for others."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    if isinstance(reduce_op, str) and reduce_op.upper() in ReduceOp.__members__:
        return ReduceOp[reduce_op.upper()]
    raise ValueError(f"reduce_op: got {reduce_op!r}, want ReduceOp.SUM or ReduceOp.MEAN, or their names")


def reduce_one(op: ReduceOp, value: Any, *, num_replicas: int) -> Any:
    """Returns the reduction of a value that is not per replica: the mean is the value, and the sum of 0 is 0.

    Raises ValueError for a sum over several replicas: how often it would count is not known.
    """
    same = value.primary if isinstance(value, Mirrored) else value
    if op is ReduceOp.MEAN or num_replicas == 1 or _is_zero(same):
        return same
    raise ValueError(
        f"a {type(value).__name__} that is the same for all {num_replicas} replicas cannot be reduced with SUM; "
        "give one value for each replica, or use MEAN"
    )


def reduce_all(op: ReduceOp, contributions: Mapping[int, Any]) -> Any:
    """Returns the sum or mean of the replicas' contributions, added in the order of their ids, as a read-only array.

    Rows (IndexedSlices) are put one after the other; their mean divides the values by the number of replicas. Raises ValueError if only
    some contribute rows, ShapeMismatch and DtypeMismatch with the replica whose array is another, DtypeMismatch for what is no number and
    for a sum of integers that their type cannot have. The mean of integers is a float32 up to 16 bits, else a float64.
    """
    in_order = [contributions[replica] for replica in sorted(contributions)]
    if any(isinstance(value, IndexedSlices) for value in in_order):
        return _reduce_rows(op, contributions)
    arrays = [np.asarray(value) for value in in_order]
    for replica, array in zip(sorted(contributions), arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise ShapeMismatch(f"replica {replica} contributes shape {array.shape}, another one {arrays[0].shape}; want the same")
        if array.dtype != arrays[0].dtype:
            raise DtypeMismatch(f"replica {replica} contributes {array.dtype}, another one {arrays[0].dtype}; cast with .astype()")
    dtype = arrays[0].dtype
    if dtype == np.bool_:
        raise DtypeMismatch("truth values have no sum or mean; cast with .astype(np.int64) to count them, or to a float for their share")
    if dtype.kind not in "iufc":
        raise DtypeMismatch(f"replica {min(contributions)} contributes {dtype}, which has no sum or mean; want numbers")
    # A sum of halves stops growing: 2048 + 1 is 2048.
    total = np.array(arrays[0], np.float32 if dtype == np.float16 else dtype)
    for array in arrays[1:]:
        before = total.copy() if dtype.kind in "iu" else total
        total += array
        # The sum is less than before exactly if adding a number of at least 0 overflows, and the other way round.
        if dtype.kind in "iu" and np.any((total < before) != (array < 0)):
            raise DtypeMismatch(f"the sum over the replicas is beyond what {dtype} has; cast with .astype(np.int64), or to a float")
    if op is ReduceOp.MEAN:
        total = _divided(total, len(arrays))
    return frozen(np.asarray(total, dtype) if dtype.kind == "f" else total)


def _divided(total: Array, count: int) -> Array:
    """Returns a mean; of integers in the type of float that the original gives."""
    is_integer = total.dtype.kind in "iu"
    return np.asarray(total / count, (np.float32 if total.dtype.itemsize <= 2 else np.float64) if is_integer else None)


def sum_along(array: Array, axis: int) -> Any:
    """Returns the sum along an axis; of halves as float32, since their sum stops growing."""
    return array.sum(axis, dtype=np.float32 if array.dtype == np.float16 else None)


def frozen(array: Array) -> Array:
    """Returns the array, made read-only: all that get it see the same values. The caller must hold the only reference."""
    array.flags.writeable = False
    return array


def _reduce_rows(op: ReduceOp, contributions: Mapping[int, Any]) -> IndexedSlices:
    whole = None
    for replica, value in contributions.items():
        if not isinstance(value, IndexedSlices):
            raise ValueError(f"replica {replica} contributes a {type(value).__name__}, another one IndexedSlices; all must contribute rows")
        if whole is not None and value.dense_shape is not None and tuple(value.dense_shape) != whole:
            raise ShapeMismatch(f"replica {replica} contributes rows of a shape {tuple(value.dense_shape)}, another one of {whole}")
        whole = whole if value.dense_shape is None else tuple(value.dense_shape)
    parts = [contributions[replica] for replica in sorted(contributions)]
    first = np.asarray(parts[0].values)
    for replica, part in zip(sorted(contributions), parts, strict=True):
        rows, indices = np.asarray(part.values), np.asarray(part.indices)
        if indices.size and indices.dtype.kind not in "iu":
            raise DtypeMismatch(f"replica {replica} contributes rows at indices of {indices.dtype}; want integers")
        if rows.shape[:1] != np.asarray(part.indices).shape:
            raise ShapeMismatch(f"replica {replica} contributes values of shape {rows.shape} for {np.size(part.indices)} rows")
        if rows.shape[1:] != first.shape[1:]:
            raise ShapeMismatch(
                f"replica {replica} contributes rows of shape {rows.shape[1:]}, another one {first.shape[1:]}; want the same"
            )
        if rows.dtype != first.dtype:
            raise DtypeMismatch(f"replica {replica} contributes rows of {rows.dtype}, another one {first.dtype}; cast with .astype()")
    indices = np.concatenate([np.asarray(part.indices) for part in parts])
    values = np.concatenate([np.asarray(part.values) for part in parts])
    if op is ReduceOp.MEAN:
        values = np.asarray(_divided(values, len(parts)), values.dtype if values.dtype.kind == "f" else None)
    return IndexedSlices(indices, values, whole)


def _is_zero(value: Any) -> bool:
    # A number of the program, not an array that happens to be zero: that is some replica's result.
    return isinstance(value, int | float) and not isinstance(value, np.generic) and value == 0
