"""Nested values as the content of a post, and back: JSON for the structure, raw bytes for arrays. Knows no board.

A value may also stand for a dataset of each worker's own, which a named function makes there.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.values import one_deeper

_TYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")}
# Integers travel as decimal digits, of which Python takes about so many, and no more.
_MAX_BITS = 4096
# Keys of the JSON for what is not plain: an array by its position, rows by those of indices and values, containers by their kind, and a
# worker's own datasets.
_ARRAY, _SCALAR, _ROWS, _LIST, _TUPLE, _DICT, _DATASET = "array", "scalar", "rows", "list", "tuple", "dict", "dataset"
# The content is the length of the JSON, the JSON, and the arrays; each part begins at a multiple of so many bytes.
_ALIGNMENT = 16
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class PerWorkerDataset:
    """A dataset that each worker makes for itself, by a function that it has registered; `iter()` gives the argument for closures."""

    function: str
    number: int

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(self, next(_NUMBERS))


@light_dataclass(frozen=True, slots=True)
class PerWorkerIterator:
    """An iterator over such a dataset in each worker; only closures can take elements from it. A dataset's iterators differ in `number`."""

    dataset: PerWorkerDataset
    number: int

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        raise RuntimeError("the elements of a per-worker dataset are in the workers: pass its iterator to schedule()")


def check(value: Any) -> None:
    """Raises InvalidSpec for an array or IndexedSlices that `pack` refuses."""
    if isinstance(value, IndexedSlices):
        indices = np.asarray(value.indices)
        if indices.size and indices.dtype.kind not in "iu":
            raise InvalidSpec(f"indices of {indices.dtype} are no rows; want integers")
        value = value.values
    dtype = np.asarray(value).dtype
    if dtype not in _TYPES.values():
        raise InvalidSpec(f"an array of {dtype} cannot travel between processes; want one of {', '.join(_TYPES)}")


def pack(value: Any, *, what: str = "") -> Array:
    """Returns a value as bytes of its own. Raises InvalidSpec, which begins with `what`, for a value that cannot travel."""
    arrays: list[Array] = []
    prefix = f"{what}: " if what else ""

    def put(array: Array) -> int:
        arrays.append(array)
        return len(arrays) - 1

    def checked(one: Any) -> Any:
        try:
            check(one)
        except InvalidSpec as error:
            raise InvalidSpec(f"{prefix}{error.message}") from None
        return one

    def plain(one: Any, depth: int) -> Any:
        if isinstance(one, int) and one.bit_length() > _MAX_BITS:
            raise InvalidSpec(f"{prefix}an int of {one.bit_length():,} bits cannot travel; want at most {_MAX_BITS:,}")
        if one is None or (isinstance(one, bool | int | float | str) and not isinstance(one, np.generic)):
            return one
        if isinstance(one, np.ndarray | np.generic):
            return {_ARRAY if isinstance(one, np.ndarray) else _SCALAR: put(np.asarray(checked(one)))}
        if isinstance(one, IndexedSlices):
            rows = checked(one)
            return {_ROWS: [put(np.asarray(rows.indices).astype(np.int64)), put(np.asarray(rows.values)), rows.dense_shape]}
        if isinstance(one, PerWorkerIterator):
            return {_DATASET: [one.dataset.function, one.dataset.number, one.number]}
        if type(one) in (tuple, list):
            return {_TUPLE if isinstance(one, tuple) else _LIST: [plain(part, one_deeper(depth)) for part in one]}
        if isinstance(one, Mapping) and all(isinstance(key, str) for key in one):
            return {_DICT: {key: plain(part, one_deeper(depth)) for key, part in one.items()}}
        raise InvalidSpec(
            f"{prefix}a {type(one).__name__} cannot travel; want arrays, numbers, text, and plain tuples, lists and dicts of them"
        )

    structure = plain(value, 0)
    text = json.dumps([structure, [(array.dtype.name, array.shape) for array in arrays]]).encode()
    begins = [*itertools.accumulate([_ALIGNMENT, len(text), *(array.nbytes for array in arrays)], lambda end, size: _aligned(end) + size)]
    content = aligned_bytes(begins[-1])
    content[:8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    content[_ALIGNMENT : _ALIGNMENT + len(text)] = np.frombuffer(text, np.uint8)
    for array, end in zip(arrays, begins[2:], strict=True):
        content[end - array.nbytes : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return content


def unpack(content: Array) -> Any:
    """Returns the value that `pack` made these bytes of; its arrays are copies. Raises MalformedMessage."""
    end = 0

    def take(nbytes: int) -> Array:
        nonlocal end
        begin, end = _aligned(end), _aligned(end) + nbytes
        if nbytes < 0 or end > content.nbytes:
            raise ValueError("it ends too early")
        return content[begin:end]

    def array(name: str, shape: Sequence[int]) -> Array:
        dtype = _TYPES[name]
        if min(shape, default=0) < 0:
            raise ValueError("an extent below 0")
        return take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape).copy()

    def rich(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        ((kind, content),) = one.items()
        if kind in (_ARRAY, _SCALAR):
            return arrays[content] if kind == _ARRAY else arrays[content][()]
        if kind == _ROWS:
            indices, values, whole = content
            return IndexedSlices(arrays[indices], arrays[values], None if whole is None else tuple(map(int, whole)))
        if kind == _DATASET:
            function, number, of_iterator = content
            return PerWorkerIterator(PerWorkerDataset(str(function), int(number)), int(of_iterator))
        if kind == _DICT:
            return {key: rich(part) for key, part in content.items()}
        if kind not in (_TUPLE, _LIST):
            raise ValueError(f"no kind {kind[:20]}")
        parts = [rich(part) for part in content]
        return tuple(parts) if kind == _TUPLE else parts

    try:
        size = int.from_bytes(take(8).tobytes(), "little")
        structure, described = json.loads(take(size).tobytes())
        arrays = [array(name, shape) for name, shape in described]
        return rich(structure)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError, InvalidSpec) as error:
        raise MalformedMessage(f"a post cannot be read: {str(error)[:80]}") from None


def _aligned(end: int) -> int:
    return end + -end % _ALIGNMENT
