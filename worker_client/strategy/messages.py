"""Arrays and rows as a few vectors of floats, which accumulators can carry, and back. Knows no accumulator and no replica."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices

# Element types by their number in a head; those that are no floats travel as float64.
_TYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "bool"))
_LARGEST_EXACT = 1 << 53
# The vector that is read first.
HEAD = "head"


def pack(values: Sequence[Any]) -> dict[str, Array]:
    """Returns the vectors of these arrays and IndexedSlices: by element type, after a head that says what they are.

    Raises InvalidSpec for element types that cannot travel, and for integers beyond 2^53.
    """
    head: list[float] = [len(values)]
    parts: dict[str, list[Array]] = {}

    def put(array: Array) -> None:
        _check(array)
        head.extend((_TYPES.index(array.dtype), array.ndim, *array.shape))
        if array.size:
            carrier = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
            parts.setdefault(carrier.name, []).append(array.astype(carrier, copy=False).reshape(-1))

    for value in values:
        if isinstance(value, IndexedSlices):
            whole = value.dense_shape
            head.extend((1, -1 if whole is None else len(whole), *(whole or ())))
            put(np.asarray(value.indices, np.int64))
            put(np.asarray(value.values))
        else:
            head.append(0)
            put(np.asarray(value))
    return {HEAD: np.array(head, np.float64), **{name: np.concatenate(arrays) for name, arrays in parts.items()}}


def check(value: Any) -> None:
    """Raises InvalidSpec for an array or IndexedSlices that `pack` refuses."""
    if isinstance(value, IndexedSlices):
        _check(np.asarray(value.indices, np.int64))
        value = value.values
    _check(np.asarray(value))


def _check(array: Array) -> None:
    if array.dtype not in _TYPES:
        raise InvalidSpec(f"an array of {array.dtype} cannot travel between processes; want one of {', '.join(map(str, _TYPES))}")
    if array.dtype.kind in "iu" and array.size and max(abs(int(array.min())), abs(int(array.max()))) > _LARGEST_EXACT:
        raise InvalidSpec(f"an array of {array.dtype} beyond 2^53 cannot travel between processes")


def unpack(receive: Callable[[str], Array]) -> list[Any]:
    """Returns the values whose vectors `receive(name)` gives; it is asked for the head, and then for each that has something.

    Raises MalformedMessage for a head that cannot be read.
    """
    numbers = iter(receive(HEAD).tolist())
    try:
        plans = [_planned(numbers) for _ in range(int(next(numbers)))]
    except (IndexError, StopIteration, ValueError, OverflowError):
        raise MalformedMessage("the head of a message cannot be read: its parts are not of one message") from None
    contents: dict[str, Array] = {}
    taken: dict[str, int] = {}

    def get(plan: tuple[np.dtype[Any], tuple[int, ...]]) -> Array:
        dtype, shape = plan
        size = math.prod(shape)
        if not size:
            return np.zeros(shape, dtype)
        name = dtype.name if dtype.kind == "f" else "float64"
        if name not in contents:
            contents[name] = receive(name)
        begin = taken.get(name, 0)
        taken[name] = begin + size
        if size < 0 or begin + size > contents[name].size:
            raise MalformedMessage("a message has less than its head says: its parts are not of one message")
        return contents[name][begin : begin + size].astype(dtype).reshape(shape)

    return [get(arrays[0]) if not is_rows else IndexedSlices(get(arrays[0]), get(arrays[1]), whole) for is_rows, whole, arrays in plans]


def _planned(numbers: Iterator[float]) -> tuple[bool, tuple[int, ...] | None, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
    def whole_number() -> int:
        return int(next(numbers, math.nan))

    def array() -> tuple[np.dtype[Any], tuple[int, ...]]:
        dtype = _TYPES[whole_number()]
        return dtype, tuple(whole_number() for _ in range(whole_number()))

    if not whole_number():
        return False, None, [array()]
    num_extents = whole_number()
    whole = None if num_extents < 0 else tuple(whole_number() for _ in range(num_extents))
    return True, whole, [array(), array()]
