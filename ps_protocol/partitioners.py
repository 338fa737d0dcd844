"""How a variable is cut over parameter servers, as functions of its shape and type. Knows sizes; nothing of where slices lie.

Sources: tf.compat.v1.fixed_size_partitioner, variable_axis_size_partitioner, min_max_variable_partitioner.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec
from ps_protocol.variable_options import Partition

# (shape, dtype) -> number of slices of each axis, all 1 but for one axis at most.
Partitioner = Callable[[Sequence[int], Any], Sequence[int]]

DEFAULT_MIN_SLICE_BYTES = 256 << 10


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Partitioner:
    """Returns the partitioner that cuts `axis` into `num_shards` slices, or as many as it has units if those are fewer."""
    _check_count("num_shards", num_shards)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        return _slices(shape, axis, min(num_shards, _extent(shape, axis)))

    return partition


def variable_axis_size_partitioner(
    max_shard_bytes: int, axis: int = 0, bytes_per_string_element: int = 16, max_shards: int | None = None
) -> Partitioner:
    """Returns the partitioner that cuts `axis` into slices of at most `max_shard_bytes` bytes (or one unit), `max_shards` at most.

    `bytes_per_string_element` is checked and has no other meaning: variables are numbers here.
    """
    _check_count("max_shard_bytes", max_shard_bytes)
    _check_count("bytes_per_string_element", bytes_per_string_element)
    if max_shards is not None:
        _check_count("max_shards", max_shards)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        extent = _extent(shape, axis)
        unit_bytes = math.prod(shape) // extent * _itemsize(dtype) if extent else 0
        units = max(1, max_shard_bytes // unit_bytes) if unit_bytes else max(1, extent)
        count = math.ceil(extent / units)
        return _slices(shape, axis, count if max_shards is None else min(max_shards, count))

    return partition


def min_max_variable_partitioner(max_partitions: int = 1, axis: int = 0, min_slice_size: int = DEFAULT_MIN_SLICE_BYTES) -> Partitioner:
    """Returns the partitioner that cuts `axis` into slices of at least `min_slice_size` bytes, `max_partitions` at most."""
    _check_count("max_partitions", max_partitions)
    _check_count("min_slice_size", min_slice_size)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        extent = _extent(shape, axis)
        total_bytes = math.prod(shape) * _itemsize(dtype)
        return _slices(shape, axis, min(extent, max_partitions, max(1, math.ceil(total_bytes / min_slice_size))))

    return partition


def partition_of(partitioner: Partitioner, *, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Partition:
    """Returns the partition that a partitioner asks for. Raises InvalidSpec unless it cuts one axis at most, and into no more than fit."""
    what = f"variable {name!r}: its partitioner"
    if not shape:
        raise InvalidSpec(f"{what} is for a scalar, which cannot be cut; take it away")
    if not callable(partitioner):
        raise InvalidSpec(f"{what} is {partitioner!r}, want what fixed_size_partitioner(2) or another partitioner function returns")
    counts = partitioner(shape, dtype)
    if not isinstance(counts, Sequence) or isinstance(counts, (str, bytes)) or len(counts) != len(shape):
        raise InvalidSpec(f"{what} returned {counts!r}, want a list of {len(shape)} numbers of slices, one for each axis of {shape}")
    cut = [axis for axis, count in enumerate(counts) if count != 1]
    if len(cut) > 1:
        raise InvalidSpec(f"{what} returned {list(counts)!r}; only one axis can be cut")
    axis = cut[0] if cut else 0
    count = counts[axis]
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 1 <= count <= max(1, shape[axis]):
        raise InvalidSpec(f"{what} returned {list(counts)!r}; axis {axis} has {shape[axis]}, want 1 to that many slices")
    return Partition(axis=axis, num_slices=int(count))


def _slices(shape: Sequence[int], axis: int, count: int) -> list[int]:
    return [max(1, count) if index == axis else 1 for index in range(len(shape))]


def _extent(shape: Sequence[int], axis: int) -> int:
    if axis >= len(shape):
        raise InvalidSpec(f"partitioner: cannot cut axis {axis} of a variable of shape {tuple(shape)}; it has {len(shape)} axes")
    return shape[axis]


def _itemsize(dtype: npt.DTypeLike) -> int:
    return np.dtype(dtype).itemsize


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidSpec(f"partitioner: {name} = {value!r}, want a whole number >= 1")


def _check_axis(axis: object) -> None:
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise InvalidSpec(f"partitioner: axis = {axis!r}, want a whole number >= 0")
