"""How two values of one type differ, in words. Knows dataclasses, mappings and sequences; no model."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

# Of one value; a formula or a schedule may be long.
_MAX_CHARACTERS = 300


def differences(mine: Any, theirs: Any, *, whose: str, what: str = "") -> Iterator[str]:
    """Yields how `theirs` differs from `mine`, part by part: "variables['w'].shape is (3,), the cluster's is (4,)". Nothing if it does not.

    `whose` says whose `mine` is, such as "the cluster's". What has a name is compared with what has the same name; of two things of other
    names, the names alone are said.
    """
    if mine == theirs:
        return
    if is_dataclass(mine) and type(mine) is type(theirs):
        has_same_name = getattr(mine, "name", None) == getattr(theirs, "name", None)
        for name in [one.name for one in fields(mine)] if has_same_name else ["name"]:
            yield from differences(getattr(mine, name), getattr(theirs, name), whose=whose, what=f"{what}.{name}" if what else name)
        return
    my_parts, their_parts = _parts(mine), _parts(theirs)
    if my_parts is None or their_parts is None:
        yield f"{what} is {_words(theirs)}, {whose} is {_words(mine)}"
        return
    for key in {**my_parts, **their_parts}:
        place = f"{what}[{key!r}]" if what else str(key)
        if key not in their_parts:
            yield f"{place} is missing"
        elif key not in my_parts:
            yield f"{place} is not among {whose}"
        else:
            yield from differences(my_parts[key], their_parts[key], whose=whose, what=place)
    if not isinstance(mine, Mapping) and my_parts == their_parts:
        yield f"{what} come in another order than {whose}"


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Returns what a value consists of, by key, name or position; None if it is shown as a whole."""
    if isinstance(value, tuple) and all(map(is_dataclass, value)):
        return {getattr(part, "name", position): part for position, part in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def _words(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    words = repr(value)
    return words if len(words) <= _MAX_CHARACTERS else words[:_MAX_CHARACTERS] + "…"
