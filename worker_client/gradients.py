"""Checks what a user pushes and brings it into the staging memory. Knows names, shapes and element types; no steps and no transport."""

import difflib
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import DtypeMismatch, IncompletePush, InvalidSpec, PsError, ShapeMismatch, VariableNotFound
from ps_protocol.model import ModelSpec
from ps_protocol.tensors import Array, VariableSpec
from worker_client.model_memory import ModelMemory
from worker_client.row_gradients import RowGradient, all_rows, row_gradient, type_words
from worker_client.variables import IndexedSlices

MAX_NAMES_SHOWN = 10


# Values are NumPy arrays or scalars, or other frameworks' tensors that can be read as one, and for gradients also IndexedSlices or None. A
# dict of several of these has no better type than Any for its values: that of a mapping's values would have to be exactly the union.
Gradients = Mapping[str, Any] | Iterable[tuple[str, Any]]
Updates = Mapping[str, Any] | Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """What a contribution has: rows by table, and the names of the dense variables that it has nothing for, in the model's order.

    `memory` has the rest.
    """

    memory: ModelMemory
    absent: tuple[str, ...]
    rows: Mapping[str, RowGradient]


class Staging:
    """Where a worker's gradients and updates are gathered. Not thread-safe.

    `views`: the memory itself, for the dense variables that take gradients, so that a user may fill it in place.
    """

    def __init__(self, model: ModelSpec, memory: ModelMemory) -> None:
        self.memory = memory
        is_state = {spec.name: spec.is_state for spec in model.variables}
        self.views = {name: view for name, view in memory.views.items() if not is_state[name]}
        self._states = {name: view for name, view in memory.views.items() if is_state[name]}
        self._tables: dict[str, VariableSpec] = {spec.name: spec for spec in model.variables if spec.is_sparse}
        self._trained = tuple(name for name, state in is_state.items() if not state)
        self._no_updates = Staged(memory, tuple(self._states), {})
        self._own = tuple(self.views), tuple(self.views.values())

    def stage(self, gradients: Gradients, *, step: int, updates: Updates | None = None) -> Staged:
        """Copies gradients and updates into the memory; what is that very memory already is left where it is.

        Every variable that takes gradients must be named; None stands for none. Everything is checked before anything is copied. Raises
        VariableNotFound, IncompletePush, ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec.
        """
        foreign: dict[str, Array] = {}
        rows: dict[str, RowGradient] = {}
        absent: set[str] = set()
        if not self.is_own(gradients):
            self._sort_out(gradients, step, foreign, rows, absent)
        updated = self._check_updates(updates, foreign, step) if updates else frozenset()
        memory = self.memory.views
        for name, array in foreign.items():
            np.copyto(memory[name], array)
        return self._staged(rows, absent, updated)

    def nothing(self) -> Staged:
        """Returns a contribution that has no gradient for any variable, and so counts in no mean."""
        return Staged(self.memory, tuple(self.memory.views), {})

    def is_own(self, gradients: Gradients) -> bool:
        """Whether they are the views themselves, for every variable, as most loops have it: then nothing is to be looked at one by one."""
        names, views = self._own
        if type(gradients) is not dict or self._tables or tuple(gradients) != names:
            return False
        return all(map(operator.is_, gradients.values(), views))

    def has_some_of(self, gradients: Gradients) -> bool:
        """Whether some of them are the views themselves, each under its own name."""
        return isinstance(gradients, Mapping) and any(gradients.get(name) is view for name, view in self.views.items())

    def _sort_out(self, gradients: Gradients, step: int, foreign: dict[str, Array], rows: dict[str, RowGradient], absent: set[str]) -> None:
        seen: set[str] = set()
        for name, gradient in _pairs(gradients, "gradients"):
            if not isinstance(name, str):
                raise unknown_variable(name, self._trained)
            target = self.views.get(name)
            if name in seen:
                raise InvalidSpec(f"push for step {step}: {name!r} occurs twice; add the two gradients first")
            if target is None:
                self._stage_rows(name, gradient, rows, absent)
            elif gradient is None:
                absent.add(name)
            elif gradient is not target:
                array = self._checked(name, gradient, target)
                if array is not target:
                    foreign[name] = array
            seen.add(name)
        if len(seen) < len(self._trained):
            raise _incomplete(seen, self._trained, step)
        if absent and len(absent) == len(self._trained):
            raise InvalidSpec(f"No gradients provided for any variable: {list(self._trained)}")

    def _staged(self, rows: dict[str, RowGradient], absent: set[str], updated: Collection[str]) -> Staged:
        if not (rows or absent or updated):
            return self._no_updates
        left_out = tuple(n for n in self.memory.views if n in absent or (n in self._states and n not in updated))
        return Staged(self.memory, left_out, rows)

    def _stage_rows(self, name: str, gradient: object, rows: dict[str, RowGradient], absent: set[str]) -> None:
        table = self._tables.get(name)
        if table is None:
            if name in self._states:
                raise InvalidSpec(f"{name!r} is a State: it takes no gradient; give updates={{{name!r}: …}} or leave it out")
            raise unknown_variable(name, self._trained)
        if gradient is None:
            absent.add(name)
        elif isinstance(gradient, IndexedSlices):
            rows[name] = row_gradient(gradient, table)
        else:
            rows[name] = all_rows(_checked(name, gradient, table.data_type.dtype, table.shape))

    def _check_updates(self, updates: Updates, foreign: dict[str, Array], step: int) -> set[str]:
        updated: set[str] = set()
        for name, update in _pairs(updates, "updates"):
            if not isinstance(name, str):
                raise unknown_variable(name, self._states)
            target = self._states.get(name)
            if target is None:
                if name in self._trained:
                    raise InvalidSpec(f"update for {name!r}: it takes gradients; only variables declared as State take updates")
                raise unknown_variable(name, self._states)
            if name in updated:
                raise InvalidSpec(f"push for step {step}: the update of {name!r} occurs twice; combine the two first")
            updated.add(name)
            foreign[name] = self._checked(name, update, target, what="update")
        return updated

    def _checked(self, name: str, gradient: object, target: Array, *, what: str = "gradient") -> Array:
        array = _checked(name, gradient, target.dtype, target.shape, what=what)
        if not self.memory.shares(array):
            return array
        if array.ctypes.data == target.ctypes.data and array.strides == target.strides:
            return target
        # Part of the staging memory under another name would be overwritten before its turn to be copied.
        return array.copy()


def no_gradients() -> InvalidSpec:
    """Returns the error for None in place of all gradients: mostly of a function that forgot to return them."""
    return InvalidSpec("gradients: got None, want a dict from variable name to array, or to None where there is no gradient")


def unknown_variable(name: object, known: Collection[str]) -> VariableNotFound:
    """Returns the error for a name that the model does not have, with the nearest one that it does."""
    if not isinstance(name, str):
        return VariableNotFound(f"variable {name!r} not found: a name is a str, this is {_kind(name)}")
    close = difflib.get_close_matches(name, list(known), n=1)
    if close:
        return VariableNotFound(f"variable {name!r} not found. Did you mean {close[0]!r}?")
    return VariableNotFound(f"variable {name!r} not found; the model has {_some(list(known)) or 'none of the kind'}")


def _pairs(pairs: object, what: str) -> Iterator[tuple[str, object]]:
    if isinstance(pairs, Mapping):
        yield from pairs.items()
        return
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes, np.ndarray)):
        raise InvalidSpec(f"{what}: got {_kind(pairs)}, want a dict from variable name to array")
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidSpec(f"{what}: got an item that is {_kind(pair)}, want a dict, or pairs of variable name and array")
        yield pair


def _checked(name: str, gradient: object, dtype: "np.dtype[np.generic]", shape: tuple[int, ...], *, what: str = "gradient") -> Array:
    array = gradient if isinstance(gradient, np.ndarray) else _as_array(name, gradient, dtype, what)
    if array.dtype != dtype:
        raise _other_dtype(name, array, dtype, what)
    if array.shape != shape:
        raise ShapeMismatch(
            f"{what} for {name!r}: shape {array.shape}, variable {shape}; nothing is broadcast; push the {what} of {name!r}"
        )
    return array


def _as_array(name: str, gradient: object, dtype: "np.dtype[np.generic]", what: str) -> Array:
    if isinstance(gradient, IndexedSlices):
        raise InvalidSpec(f"{what} for {name!r}: {name!r} takes dense gradients; declare it as a Table to push IndexedSlices")
    if gradient is None:
        raise InvalidSpec(f"{what} for {name!r} is None; leave it out")
    # Tensors of other frameworks offer themselves as arrays, mostly without a copy.
    if not hasattr(gradient, "__array__"):
        raise DtypeMismatch(f"{what} for {name!r} is {_kind(gradient)}, want an array; use np.asarray(…, {type_words(dtype)})")
    try:
        return np.asarray(gradient)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeMismatch(f"{what} for {name!r} is {_kind(gradient)} and cannot be read as an array: {error}") from error


def _other_dtype(name: str, array: Array, dtype: "np.dtype[np.generic]", what: str) -> PsError:
    if array.dtype.newbyteorder("=") == dtype.newbyteorder("="):
        return DtypeMismatch(f"{what} for {name!r}: byte order: little-endian only; convert with .astype({type_words(dtype)})")
    return DtypeMismatch(f"{what} for {name!r} is {array.dtype}, variable is {dtype}; cast with .astype({type_words(dtype)})")


def _incomplete(seen: set[str], trained: Collection[str], step: int) -> IncompletePush:
    missing = [name for name in trained if name not in seen]
    return IncompletePush(
        f"push for step {step} misses {len(missing)} of {len(trained)} variables: {_some(missing)} (give None where there is no gradient)"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return f"{shown} and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else shown


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the str {value!r}"
    return "None" if value is None else f"a {type(value).__name__}"
