"""Calls of named functions, and their results, as messages: nested values of arrays, numbers and text. Knows no queue; runs nothing.

An argument may also stand for a dataset of each worker's own, which a named function makes there.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.light_dataclass import light_dataclass
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.messages import check
from worker_client.strategy.values import one_deeper

_NUMBERS = itertools.count()
# Integers travel as decimal digits, of which Python takes about so many, and no more.
_MAX_BITS = 4096
# Keys of a message's values that are not plain: an array by its position, containers by their kind, and a worker's own datasets.
_ARRAY, _LIST, _TUPLE, _DICT, _DATASET = "array", "list", "tuple", "dict", "dataset"


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


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function by its name, and its arguments. Without a name: there are no more calls."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a call; or, if it failed, the text of the error."""

    value: Any = None
    error: str = ""


def pack_call(call: Call) -> list[Any]:
    """Returns a call as arrays. Raises InvalidSpec for arguments that cannot travel."""
    return _packed({"function": call.function, "args": tuple(call.args), "kwargs": dict(call.kwargs)}, what=f"closure {call.function!r}")


def unpack_call(message: Sequence[Any]) -> Call:
    """Returns the call. Raises MalformedMessage."""
    function, args, kwargs = _unpacked(message, function=str, args=tuple, kwargs=dict)
    return Call(function=function, args=args, kwargs=kwargs)


def pack_outcome(outcome: Outcome) -> list[Any]:
    """Returns an outcome as arrays. Raises InvalidSpec for a value that cannot travel."""
    return _packed({"value": outcome.value, "error": outcome.error}, what="what the closure returned")


def unpack_outcome(message: Sequence[Any]) -> Outcome:
    """Returns the outcome. Raises MalformedMessage."""
    value, error = _unpacked(message, value=object, error=str)
    return Outcome(value=value, error=error)


def _packed(value: Any, *, what: str) -> list[Any]:
    arrays: list[Any] = []

    def plain(one: Any, depth: int) -> Any:
        if isinstance(one, int) and one.bit_length() > _MAX_BITS:
            raise InvalidSpec(f"{what}: an int of {one.bit_length():,} bits cannot travel; want at most {_MAX_BITS:,}")
        if one is None or (isinstance(one, bool | int | float | str) and not isinstance(one, np.generic)):
            return one
        if isinstance(one, np.ndarray | np.generic | IndexedSlices):
            try:
                check(one)
            except InvalidSpec as error:
                raise InvalidSpec(f"{what}: {error.message}") from None
            arrays.append(one)
            return {_ARRAY: len(arrays) - 1}
        if isinstance(one, PerWorkerIterator):
            return {_DATASET: [one.dataset.function, one.dataset.number, one.number]}
        if type(one) in (tuple, list):
            return {_TUPLE if isinstance(one, tuple) else _LIST: [plain(part, one_deeper(depth)) for part in one]}
        if isinstance(one, Mapping) and all(isinstance(key, str) for key in one):
            return {_DICT: {key: plain(part, one_deeper(depth)) for key, part in one.items()}}
        raise InvalidSpec(
            f"{what}: a {type(one).__name__} cannot travel; want arrays, numbers, text, and plain tuples, lists and dicts of them"
        )

    text = json.dumps(plain(value, 0))
    return [np.frombuffer(text.encode(), np.uint8), *arrays]


def _unpacked(message: Sequence[Any], **types: type) -> list[Any]:
    """Returns the fields of these names, each of its type. Raises MalformedMessage."""
    arrays = message[1:]

    def rich(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        ((kind, content),) = one.items()
        if kind == _ARRAY:
            array = arrays[content]
            return array[()] if isinstance(array, np.ndarray) else array
        if kind == _DATASET:
            function, number, of_iterator = content
            return PerWorkerIterator(PerWorkerDataset(str(function), int(number)), int(of_iterator))
        if kind == _DICT:
            return {key: rich(part) for key, part in content.items()}
        parts = [rich(part) for part in content]
        return tuple(parts) if kind == _TUPLE else parts

    try:
        with np.errstate(invalid="ignore"):  # of a value that is not a byte
            text = bytes(message[0].astype(np.uint8))
        found = rich(json.loads(text))
        fields = [found[name] for name in types]
        for name, field, wanted in zip(types, fields, types.values(), strict=True):
            if not isinstance(field, wanted):
                raise TypeError(f"{name} is no {wanted.__name__}")
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"a closure's message cannot be read: {str(error)[:80]}") from None
    return fields
