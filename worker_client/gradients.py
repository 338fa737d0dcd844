"""Checks what a user pushes and brings it into the staging memory. Knows names, shapes and element types; no steps and no transport."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from ps_protocol.errors import DtypeMismatch, IncompletePush, InvalidSpec, PsError, ShapeMismatch, VariableNotFound
from ps_protocol.tensors import Array
from worker_client.model_memory import ModelMemory

MAX_NAMES_SHOWN = 10


class ArrayLike(Protocol):
    """A NumPy array or scalar, or another framework's tensor that can be read as one."""

    def __array__(self) -> Array:
        """Returns it as a NumPy array."""


Gradients = Mapping[str, ArrayLike] | Iterable[tuple[str, ArrayLike]]


def stage(gradients: Gradients, *, into: ModelMemory, step: int) -> None:
    """Copies one gradient for every variable into the staging memory; what is that very memory already is left where it is.

    Everything is checked before anything is copied. Raises VariableNotFound, IncompletePush, ShapeMismatch, DtypeMismatch, InvalidSpec.
    """
    staging = into.views
    foreign: dict[str, Array] = {}
    seen: set[str] = set()
    for name, gradient in _pairs(gradients):
        target = staging.get(name) if isinstance(name, str) else None
        if target is None:
            raise unknown_variable(name, staging)
        if name in seen:
            raise InvalidSpec(f"push for step {step}: {name!r} occurs twice; add the two gradients first")
        seen.add(name)
        if gradient is not target:
            foreign[name] = _checked(name, gradient, target, into)
    if len(seen) < len(staging):
        raise _incomplete(seen, staging, step)
    for name, gradient in foreign.items():
        np.copyto(staging[name], gradient)


def unknown_variable(name: object, known: Mapping[str, Array]) -> VariableNotFound:
    """Returns the error for a name that the model does not have, with the nearest one that it does."""
    if not isinstance(name, str):
        return VariableNotFound(f"variable {name!r} not found: a name is a str, this is {_kind(name)}")
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return VariableNotFound(f"variable {name!r} not found. Did you mean {close[0]!r}?")
    return VariableNotFound(f"variable {name!r} not found; the model has {_some(list(known))}")


def _pairs(gradients: object) -> Iterator[tuple[str, object]]:
    if isinstance(gradients, Mapping):
        yield from gradients.items()
        return
    if not isinstance(gradients, Iterable) or isinstance(gradients, (str, bytes, np.ndarray)):
        raise InvalidSpec(f"gradients: got {_kind(gradients)}, want a dict from variable name to array")
    for pair in gradients:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidSpec(f"gradients: got an item that is {_kind(pair)}, want a dict, or pairs of variable name and array")
        yield pair


def _checked(name: str, gradient: object, target: Array, staging: ModelMemory) -> Array:
    array = gradient if isinstance(gradient, np.ndarray) else _as_array(name, gradient, target)
    if array.dtype != target.dtype:
        raise _other_dtype(name, array, target)
    if array.shape != target.shape:
        raise ShapeMismatch(
            f"gradient for {name!r}: shape {array.shape}, variable {target.shape}; nothing is broadcast; push the gradient of {name!r}"
        )
    # Part of the staging memory under another name would be overwritten before its turn to be copied.
    return array.copy() if staging.shares(array) else array


def _as_array(name: str, gradient: object, target: Array) -> Array:
    if gradient is None:
        raise IncompletePush(f"gradient for {name!r} is None; every step needs all variables: push zeros where there is no gradient")
    # Tensors of other frameworks offer themselves as arrays, mostly without a copy.
    if not hasattr(gradient, "__array__"):
        raise DtypeMismatch(f"gradient for {name!r} is {_kind(gradient)}, want an array; use np.asarray(…, np.{target.dtype.name})")
    try:
        return np.asarray(gradient)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeMismatch(f"gradient for {name!r} is {_kind(gradient)} and cannot be read as an array: {error}") from error


def _other_dtype(name: str, array: Array, target: Array) -> PsError:
    if array.dtype.newbyteorder("=") == target.dtype.newbyteorder("="):
        return DtypeMismatch(f"gradient for {name!r}: byte order: little-endian only; convert with .astype(np.{target.dtype.name})")
    return DtypeMismatch(f"gradient for {name!r} is {array.dtype}, variable is {target.dtype}; cast with .astype(np.{target.dtype.name})")


def _incomplete(seen: set[str], staging: Mapping[str, Array], step: int) -> IncompletePush:
    missing = [name for name in staging if name not in seen]
    return IncompletePush(
        f"push for step {step} misses {len(missing)} of {len(staging)} variables: {_some(missing)} (push zeros where there is no gradient)"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return f"{shown} and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else shown


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the str {value!r}"
    return "None" if value is None else f"a {type(value).__name__}"
