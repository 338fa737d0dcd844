"""Values that differ by replica, or are the same for all: taking them apart and putting them together. Knows no context, no variable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec
from worker_client.model.declarations import IndexedSlices

# More levels than any program's structures have, and fewer than Python can call functions inside of each other.
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, eq=False)
class PerReplica:
    """One value for each replica, by replica id. `strategy.run()` returns it if the replicas returned different objects.

    Has no value across replicas until it is reduced, so it refuses to be made an array, and to be true or false.
    """

    values: Mapping[int, Any]

    def __post_init__(self) -> None:
        _check_by_id(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"a PerReplica of {len(self.values)} replicas is not true or false: reduce it with strategy.reduce(), "
            "or take its values with strategy.experimental_local_results()"
        )

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError(
            f"a PerReplica of {len(self.values)} replicas is no single array: reduce it with reduce_to() or strategy.reduce(), "
            "or take its values with strategy.experimental_local_results()"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """The same value for each replica, by replica id. It can be read as an array: any replica's value will do."""

    values: Mapping[int, Any]

    def __post_init__(self) -> None:
        _check_by_id(self)

    @property
    def primary(self) -> Any:
        """The value of the replica with the lowest id."""
        return self.values[min(self.values)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # `copy` is passed on only if it asks for one, since older versions of asarray() do not know the argument.
        return np.array(self.primary, dtype) if copy else np.asarray(self.primary, dtype)


def _check_by_id(value: PerReplica | Mirrored) -> None:
    if not isinstance(value.values, Mapping) or not value.values:
        got = "nothing" if isinstance(value.values, Mapping) else f"a {type(value.values).__name__}"
        raise InvalidSpec(f"{type(value).__name__}: got {got}, want a dict of values by replica id")


def arguments(what: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a function is to be called with. Raises InvalidSpec for other types; `what` names the call."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise InvalidSpec(f"{what}: args: got a {type(args).__name__}, want a tuple or list of arguments; for a single one: args=(value,)")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise InvalidSpec(f"{what}: kwargs: got a {type(kwargs).__name__}, want a dict of arguments by name")
    return tuple(args), dict(kwargs or {})


def check_function(what: str, fn: Any) -> None:
    """Raises InvalidSpec, which begins with `what`, for an object that cannot be called."""
    if not callable(fn):
        raise InvalidSpec(f"{what}: got a {type(fn).__name__}, want a function")


def map_nested(function: Callable[[Any], Any], nested: Any, *, depth: int = 0) -> Any:
    """Returns `nested` with `function` applied to everything in it that is no tuple, list or dict; in a dict by key.

    `depth`: how many levels are around it. Raises InvalidSpec for more than 100 levels, and for a tuple or list that cannot be made again.
    """
    if isinstance(nested, dict):
        depth = one_deeper(depth)
        # Programs of several workers may have the same keys in different orders, and all must process the keys in one order.
        mapped = {key: map_nested(function, nested[key], depth=depth) for key in sorted(nested, key=repr)}
        return {key: mapped[key] for key in nested}
    if isinstance(nested, tuple | list):
        depth = one_deeper(depth)
        return _like(nested, [map_nested(function, value, depth=depth) for value in nested])
    return function(nested)


def map_replicas(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to it, or to its value for each replica."""
    if isinstance(value, PerReplica | Mirrored):
        return type(value)({replica: function(one) for replica, one in value.values.items()})
    return function(value)


def leaves(nested: Any) -> list[Any]:
    """Returns everything in `nested` that is no tuple, list or dict, in order."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_nested(note, nested)
    return found


def select(replica: int, nested: Any) -> Any:
    """Returns `nested` as replica `replica` gets it: of each PerReplica and Mirrored its own value. Raises ValueError if one has none."""

    def own(value: Any) -> Any:
        if not isinstance(value, PerReplica | Mirrored):
            return value
        if replica not in value.values:
            known = ", ".join(str(known) for known in sorted(value.values))
            raise ValueError(f"a {type(value).__name__} value has nothing for replica {replica}, only for {known}")
        return value.values[replica]

    return map_nested(own, nested)


def regroup(
    results: Mapping[int, Any], container_of: Callable[[Any], Any] = lambda value: None, *, wraps_same: bool = False, depth: int = 0
) -> Any:
    """Returns one value for the replicas' results: the object if all have the same one, else a PerReplica; nested likewise.

    `container_of(value)` is the variable that a value is or is a part of, or None; the parts of one variable become that variable. With
    `wraps_same`, for one of several processes, arrays and numbers always become PerReplica: the same object here says nothing of the other
    processes, and all must reduce alike. Raises ValueError if the replicas' results are nested differently, and what `map_nested` does.
    """
    first = results[min(results)]

    def again(parts: Mapping[int, Any]) -> Any:
        return regroup(parts, container_of, wraps_same=wraps_same, depth=one_deeper(depth))

    if isinstance(first, dict):
        _check_alike(results, lambda value: sorted(map(repr, value)), "keys")
        return {key: again({replica: result[key] for replica, result in results.items()}) for key in first}
    if isinstance(first, tuple | list):
        _check_alike(results, len, "length")
        return _like(first, [again({replica: result[place] for replica, result in results.items()}) for place in range(len(first))])
    for replica, result in results.items():
        if isinstance(result, dict | tuple | list):
            raise _differ(replica, f"a {type(result).__name__}", f"a {type(first).__name__}")
    container = container_of(first)
    if container is not None and all(container_of(result) is container for result in results.values()):
        return container
    if wraps_same and _may_differ_elsewhere(first):
        return PerReplica(dict(results))
    if all(result is first for result in results.values()):
        return first
    return PerReplica(dict(results))


def check_alike(merged: Any, what: str) -> None:
    """Raises RuntimeError if there is anything in `merged` that the replicas do not have in common."""
    for leaf in leaves(merged):
        if isinstance(leaf, PerReplica):
            first = min(leaf.values)
            replica = next(one for one in sorted(leaf.values) if leaf.values[one] is not leaf.values[first])
            raise RuntimeError(
                f"{what}: replica {replica} has {_named(leaf.values[replica])} where replica {first} has {_named(leaf.values[first])}; "
                "all replicas must make the same calls in the same order"
            )


def _named(value: Any) -> str:
    return f'{type(value).__name__} "{value.name}"' if isinstance(getattr(value, "name", None), str) else repr(value)


def _check_alike(results: Mapping[int, Any], part: Callable[[Any], Any], word: str) -> None:
    first = results[min(results)]
    for replica, result in results.items():
        if type(result) is not type(first):
            raise _differ(replica, f"a {type(result).__name__}", f"a {type(first).__name__}")
        if part(result) != part(first):
            raise _differ(replica, f"{word} {part(result)}", f"{word} {part(first)}")


def _differ(replica: int, got: str, want: str) -> ValueError:
    return ValueError(f"replica {replica} returned {got} where another returned {want}; all replicas must return the same structure")


def _may_differ_elsewhere(value: Any) -> bool:
    if isinstance(value, Mirrored | PerReplica):
        return False
    return isinstance(value, int | float | IndexedSlices) or hasattr(value, "__array__")


def one_deeper(depth: int) -> int:
    """Returns the next level of a structure. Raises InvalidSpec where there are too many."""
    if depth == _MAX_DEPTH:
        raise InvalidSpec(f"tuples, lists and dicts are nested in more than {_MAX_DEPTH} levels; want fewer, and none that contains itself")
    return depth + 1


def _like(sample: Any, values: list[Any]) -> Any:
    kind = type(sample)
    try:
        # A named tuple's elements are arguments of their own, also where it has a constructor of another form.
        return kind._make(values) if hasattr(kind, "_make") else kind(values)
    except Exception as error:
        raise InvalidSpec(
            f"a {kind.__name__} cannot be made again of other elements: {type(error).__name__}: {error}; want a tuple, named tuple or list"
        ) from error
