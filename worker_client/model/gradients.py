"""Turns a user's gradients into each shard's part: checks, stages, cuts and encodes them. Knows names and layouts; no transport."""

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from ps_protocol.encodings.formats import FloatEncoding, is_encodable
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.errors import DtypeMismatch, IncompletePush, IndexOutOfRange, InvalidSpec, PsError, ShapeMismatch, VariableNotFound
from ps_protocol.model.expressions import VARIABLE
from ps_protocol.model.keys import spread
from ps_protocol.model.layout import Layout, Segments, VariableSlice, are_finite, gradient_ranges, refuse_nonfinite
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.misspelling import did_you_mean
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.updates import FormulaUpdate, check_fits
from ps_protocol.model.variables import Array, DataType, VariableSpec, check_name
from ps_protocol.roles.chief import check_weight
from ps_protocol.roles.shard import Metric, SparsePart
from worker_client.model.declarations import IndexedSlices, UpdateFormula
from worker_client.model.memory import ModelMemory
from worker_client.model.optimizers import plain_number
from worker_client.model.wire_format import WireFormat

# A table's gradient in the form that its server takes: rows by ascending index.


@light_dataclass(frozen=True, slots=True, eq=False)
class RowGradient:
    """Rows of a table's gradient: int64 `indices` (numbers, or spread keys), ascending, and their `values`, contiguous, one row each.

    An index occurs once, except with half-precision types: the server sums their rows, so that the sums are not rounded.
    """

    indices: Array
    values: Array


def row_gradient(gradient: IndexedSlices, variable: VariableSpec) -> RowGradient:
    """Returns the gradient sorted by index. Sums the rows of one index in the given order; half-precision rows stay side by side.

    Shares the caller's arrays if they are sorted already. Raises ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec.
    """
    what = f"gradient for {variable.name!r}"
    _check_dense_shape(what, gradient.dense_shape, variable)
    indices = row_indices(what, gradient.indices, variable)
    if indices.ndim != 1:
        raise ShapeMismatch(f"{what}: indices have the shape {indices.shape}, want one axis")
    values = _values(what, gradient.values, variable)
    if len(values) != len(indices):
        raise ShapeMismatch(f"{what}: indices {len(indices)}, values {len(values)} rows; give one row for each index")
    return _merged(indices, values, variable)


def all_rows(gradient: Array) -> RowGradient:
    """Returns a table's dense gradient as rows of all indices; its shape and type must have been checked."""
    return RowGradient(np.arange(len(gradient), dtype=np.int64), np.ascontiguousarray(gradient))


def row_indices(what: str, names: Any, variable: VariableSpec) -> Array:
    """Returns what servers know rows by, int64, in the shape of their numbers or keys: the numbers; or the keys, spread.

    Raises DtypeMismatch, InvalidSpec, IndexOutOfRange with the first wrong one.
    """
    array = _integers(what, names)
    if variable.keys is None:
        return _in_range(what, array, 0, variable.num_rows - 1).astype(np.int64, copy=False)
    dtype = np.dtype(variable.keys.kind.value)
    limits = np.iinfo(dtype)
    return spread(np.ascontiguousarray(_in_range(what, array, limits.min, limits.max), dtype))


def _integers(what: str, indices: Any) -> Array:
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidSpec(f"{what}: its indices, a {type(indices).__name__}, cannot be read as an array: {error}") from error
    if array.size == 0:
        return array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu" and not isinstance(indices, np.ndarray) and hasattr(indices, "__len__"):
        # Of a list of Python's integers on both sides of 2^63, NumPy makes floats.
        objects = np.asarray(indices, object)
        if all(type(one) is int for one in objects.flat):
            return objects
    if array.dtype.kind not in "iu":
        raise DtypeMismatch(f"{what}: indices are {array.dtype}, want integers; cast with .astype(np.int64)")
    return array


def _in_range(what: str, array: Array, least: int, greatest: int) -> Array:
    # Compared as Python's integers: NumPy has none for both signs.
    if array.size and (int(array.min()) < least or int(array.max()) > greatest):
        position, number = next((at, int(one)) for at, one in enumerate(array.flat) if not least <= int(one) <= greatest)
        raise IndexOutOfRange(f"{what}: indices[{position}] = {number}, want {least}..{greatest}")
    return array


def type_words(dtype: "np.dtype[Any]") -> str:
    """Returns an element type as Python code."""
    return f"{'ml_dtypes' if dtype.name == DataType.BFLOAT16.value else 'np'}.{dtype.name}"


def _values(what: str, values: Any, variable: VariableSpec) -> Array:
    array, dtype = np.asarray(values), variable.data_type.dtype
    if array.dtype != dtype:
        raise DtypeMismatch(f"{what} is {array.dtype}, variable is {dtype}; cast with .astype({type_words(dtype)})")
    if array.ndim != len(variable.shape) or array.shape[1:] != variable.shape[1:]:
        want = ", ".join(("rows", *map(str, variable.shape[1:])))
        raise ShapeMismatch(f"{what}: values have the shape {array.shape}, want ({want})")
    return array


def _check_dense_shape(what: str, dense_shape: Sequence[int] | None, variable: VariableSpec) -> None:
    if dense_shape is not None and variable.keys is not None:
        raise ShapeMismatch(f"{what}: dense_shape {tuple(dense_shape)}, and a table with keys has no size; leave it out")
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


# Checks a user's gradients and updates, and copies them into the staging memory.


MAX_NAMES_SHOWN = 10


# Values are NumPy arrays or scalars, or other frameworks' tensors that can be read as arrays; gradients may also be IndexedSlices or None.
# The type is Any, because a dict of only some of these types would not match a union.
Gradients = Mapping[str, Any] | Iterable[tuple[str, Any]]
Updates = Mapping[str, Any] | Iterable[tuple[str, Any]]
# The formulas of a contribution that shards compute, by shard index.
_Formulas = Mapping[int, tuple[FormulaUpdate, ...]]
_NO_UPDATES: tuple[Collection[str], _Formulas] = (), {}


@light_dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A staged contribution: rows by table, and the names of the dense variables that it has nothing for, in the model's order.

    `formulas`: those that shards compute, by shard index. `memory` has the rest.
    """

    memory: ModelMemory
    absent: tuple[str, ...]
    rows: Mapping[str, RowGradient]
    formulas: _Formulas = field(default_factory=dict)


class Staging:
    """Memory into which a worker's gradients and updates are gathered. Not thread-safe.

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
        """Copies gradients and updates into the memory; gradients that are the memory's own views are not copied.

        Every variable that takes gradients must be named; None: no gradient. Everything is checked before anything is copied. Raises
        VariableNotFound, IncompletePush, ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec.
        """
        foreign: dict[str, Array] = {}
        rows: dict[str, RowGradient] = {}
        absent: set[str] = set()
        if not self.is_own(gradients):
            self._sort_out(gradients, step, foreign, rows, absent)
        updated, formulas = self._check_updates(updates, foreign, step) if updates else _NO_UPDATES
        memory = self.memory.views
        for name, array in foreign.items():
            np.copyto(memory[name], array)
        return self._staged(rows, absent, updated, formulas)

    def nothing(self) -> Staged:
        """Returns a contribution that has no gradient for any variable, and so counts in no mean."""
        return Staged(self.memory, tuple(self.memory.views), {})

    def is_own(self, gradients: Gradients) -> bool:
        """Whether the gradients are exactly the views of all variables, as in most loops; then they need no checks one by one."""
        names, views = self._own
        if type(gradients) is not dict or self._tables or tuple(gradients) != names:
            return False
        return all(map(operator.is_, gradients.values(), views))

    def has_some_of(self, gradients: Gradients) -> bool:
        """Whether some of the gradients are views of this memory, each under its own name."""
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

    def _staged(self, rows: dict[str, RowGradient], absent: set[str], updated: Collection[str], formulas: _Formulas) -> Staged:
        if not (rows or absent or updated or formulas):
            return self._no_updates
        left_out = tuple(n for n in self.memory.views if n in absent or (n in self._states and n not in updated))
        return Staged(self.memory, left_out, rows, formulas)

    def _stage_rows(self, name: str, gradient: object, rows: dict[str, RowGradient], absent: set[str]) -> None:
        table = self._tables.get(name)
        if table is None:
            if name in self._states:
                raise InvalidSpec(f"{name!r} is a Buffer: it takes no gradient; give updates={{{name!r}: …}} or leave it out")
            raise unknown_variable(name, self._trained)
        if gradient is None:
            absent.add(name)
        elif isinstance(gradient, IndexedSlices):
            rows[name] = row_gradient(gradient, table)
        elif table.keys is not None:
            raise InvalidSpec(f"gradient for {name!r} is {_kind(gradient)}; a table with keys takes IndexedSlices(keys, rows)")
        else:
            rows[name] = all_rows(_checked(name, gradient, table.data_type.dtype, table.shape))

    def _check_updates(self, updates: Updates, foreign: dict[str, Array], step: int) -> tuple[Collection[str], _Formulas]:
        """Checks updates; returns the names of the buffers that the memory gets values for, and the formulas."""
        formulas = _FormulaUpdates(self.memory.layouts)
        updated, written = set[str](), set[str]()
        for name, update in _pairs(updates, "updates"):
            target = self._state(name)
            given = {name: update}
            writes = [str(name)]
            if isinstance(update, UpdateFormula):
                for one in update.variables.values():
                    self._state(one)
                writes = [update.variables.get(one, str(name)) for one in update.formula.writes]
                given = formulas.add(str(name), update, writes)
            for one in writes:
                if one in written:
                    raise InvalidSpec(f"push for step {step}: the update of {one!r} occurs twice; combine the two first")
                written.add(one)
            for place, value in given.items():
                updated.add(place)
                foreign[place] = self._checked(place, value, target, what="update")
        return updated, formulas.checked()

    def _state(self, name: object) -> Array:
        """Returns the memory for updates of a variable. Raises InvalidSpec, VariableNotFound if it takes none."""
        target = self._states.get(name) if isinstance(name, str) else None
        if target is not None:
            return target
        if name in self._trained:
            raise InvalidSpec(f"update for {name!r}: it takes gradients; only variables declared as Buffer take updates")
        raise unknown_variable(name, self._states)

    def _checked(self, name: str, gradient: object, target: Array, *, what: str = "gradient") -> Array:
        array = _checked(name, gradient, target.dtype, target.shape, what=what)
        if not self.memory.shares(array):
            return array
        if array.ctypes.data == target.ctypes.data and array.strides == target.strides:
            return target
        # A part of the staging memory under another name could be overwritten before it is copied.
        return array.copy()


class _FormulaUpdates:
    """The formula updates of one contribution, by shard."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._by_shard: dict[int, list[FormulaUpdate]] = {}

    def add(self, name: str, update: UpdateFormula, writes: Sequence[str]) -> dict[str, object]:
        """Adds an update of the variable `name`, which assigns to the variables `writes`. Raises InvalidSpec.

        Returns its arrays, by the name of the variable in whose place each is sent.
        """
        places: dict[str, str] = {}
        free = list(writes)
        for array in update.arrays:
            if not free:
                raise InvalidSpec(
                    f"update for {name!r}: {array!r} is one more array than the formula assigns to variables; compute some of it before"
                )
            places[array] = free.pop(0)
        variables = {VARIABLE: name, **{key: one for key, one in update.variables.items() if key in update.formula.reads}}
        found = {key: self._place(one, name) for key, one in (*variables.items(), *places.items())}
        shards = {shard for shard, _ in found.values()}
        if len(shards) > 1:
            raise InvalidSpec(f"update for {name!r}: its variables lie on different parameter servers; place them together")
        made = FormulaUpdate(
            text=update.text,
            variables={key: found[key][1] for key in sorted(variables)},
            arrays={key: found[key][1] for key in places},
            numbers=update.numbers,
        )
        self._by_shard.setdefault(shards.pop(), []).append(made)
        return {place: update.arrays[array] for array, place in places.items()}

    def checked(self) -> _Formulas:
        """Returns all formula updates by shard. Raises InvalidSpec, LimitExceeded if they do not fit their shards."""
        for shard, updates in self._by_shard.items():
            check_fits(updates, self._layouts[shard], ())
        return {shard: tuple(updates) for shard, updates in self._by_shard.items()}

    def _place(self, variable: str, name: str) -> tuple[int, int]:
        """Returns the shard of a variable, and its position there."""
        for shard, layout in enumerate(self._layouts):
            for position, piece in enumerate(layout.slices):
                if piece.variable.name == variable:
                    return shard, position
        raise InvalidSpec(f"update for {name!r}: {variable!r} lies on no parameter server")


def no_gradients() -> InvalidSpec:
    """Returns the error for None in place of all gradients, usually from a function without a return statement."""
    return InvalidSpec("gradients: got None, want a dict from variable name to array, or to None where there is no gradient")


def unknown_variable(name: object, known: Collection[str]) -> VariableNotFound:
    """Returns the error for a name that the model does not have; it suggests the most similar name."""
    if not isinstance(name, str):
        return VariableNotFound(f"variable {name!r} not found: a name is a str, this is {_kind(name)}")
    if meant := did_you_mean(name, known):
        return VariableNotFound(f"variable {name!r} not found{meant}")
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
        raise InvalidSpec(f"{what} for {name!r}: {name!r} takes dense gradients; declare it as an EmbeddingTable to push IndexedSlices")
    if gradient is None:
        raise InvalidSpec(f"{what} for {name!r} is None; leave it out")
    # Tensors of other frameworks convert themselves to arrays, mostly without a copy.
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


# Refuses gradients that are not finite, before they are sent.


class FiniteGradients:
    """Checks the contributions of one model; prepares the common parts once for each memory. For one thread."""

    def __init__(self, model: ModelSpec) -> None:
        self._states = frozenset(spec.name for spec in model.variables if spec.is_state)
        self._memory: ModelMemory | None = None
        self._elements: list[Array] = []

    def check(self, staged: Staged, *, who: str) -> None:
        """Raises NonFiniteGradient, naming the first variable, unless all gradients are finite."""
        memory = staged.memory
        memory.pack()
        if memory is not self._memory:
            self._memory, self._elements = memory, [*_elements(memory)]
        if not all(map(are_finite, self._elements)):
            left_out = self._states.union(staged.absent)
            for name, array in memory.arrays.items():
                if name not in left_out:
                    refuse_nonfinite(name, array.reshape(-1), who=who)
        for name, rows in staged.rows.items():
            refuse_nonfinite(name, rows.values.reshape(-1), who=who)


def _elements(memory: ModelMemory) -> Iterator[Array]:
    """Yields the elements with gradients, in as few flat arrays as possible; they share the memory."""
    for layout, segments in zip(memory.layouts, memory.segments, strict=True):
        ranges = gradient_ranges(layout)
        start = 0
        for piece in segments.pieces:
            for arena in ranges:
                # The pieces end at boundaries of variables.
                first, last = max(arena.start - start, 0), min(arena.stop - start, piece.nbytes)
                if first < last:
                    yield piece[first:last].view(arena.data_type.dtype)
            start += piece.nbytes


# Each shard's part of a contribution: its arena, or none, and its rows of tables.
#
# With an encoding, the arena is encoded once, into memory of its own: a part that is sent again has the same bytes.


Metrics = Mapping[str, float | tuple[float, float]]


@light_dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """One shard's part of a contribution: its bytes, and the header fields that describe them."""

    segments: Segments
    sparse: tuple[SparsePart, ...] = ()
    absent: tuple[int, ...] = ()
    encoding: FloatEncoding = FloatEncoding.AS_IS
    encoded_bytes: int = 0
    formulas: tuple[FormulaUpdate, ...] = ()


class ShardParts:
    """Cuts contributions into the shards' parts, without copying. Prepares the common parts once for each memory.

    `wire`: the encoding of arenas in the worker's own memory; arenas in a shard's memory are not sent. `travels`: for each shard, whether
    its arena is sent at all. For one thread.
    """

    def __init__(
        self, layouts: Sequence[Layout], *, wire: WireFormat | None = None, travels: Callable[[int], bool] = lambda index: True
    ) -> None:
        self._layouts = tuple(layouts)
        self.layout_hashes = tuple(layout.hash for layout in layouts)
        self._memory: ModelMemory | None = None
        self._absent: tuple[str, ...] = ()
        self._arenas: Sequence[ShardPart] = ()
        self._wire = wire or WireFormat()
        self._travels = travels
        # By shard, made on first use: a shard that shares memory needs none.
        self._encoders: dict[int, GradientEncoder] = {}

    def parts(self, staged: Staged, *, is_last_counted: bool = True) -> Sequence[ShardPart]:
        """Returns one part for each shard; they share the staging memory and the rows' arrays, and are valid until the next call.

        `is_last_counted`: whether the previous contribution counts, as far as is known; error feedback ignores one that does not.
        """
        staged.memory.pack()
        for encoder in self._encoders.values():
            encoder.settle(is_counted=is_last_counted)
        if staged.memory is not self._memory or staged.absent != self._absent:
            absent, pairs = frozenset(staged.absent), zip(self._layouts, staged.memory.segments, strict=True)
            self._arenas = tuple(_arena(layout, segments, absent) for layout, segments in pairs)
            self._memory, self._absent = staged.memory, staged.absent
        arenas = self._arenas
        if self._wire.gradient_encoding is not FloatEncoding.AS_IS:
            arenas = [self._encoded(index, part, staged.memory) for index, part in enumerate(arenas)]
        if staged.formulas:
            arenas = [replace(part, formulas=staged.formulas.get(index, ())) for index, part in enumerate(arenas)]
        if not staged.rows:
            return arenas
        return [_with_rows(part, layout, staged.rows) for part, layout in zip(arenas, self._layouts, strict=True)]

    def _encoded(self, index: int, part: ShardPart, memory: ModelMemory) -> ShardPart:
        layout = self._layouts[index]
        is_here = memory.is_lent(index) or not self._travels(index)
        if is_here or not part.segments.nbytes or not any(is_encodable(layout, arena) for arena in layout.arenas):
            return part
        encoder = self._encoders.get(index)
        if encoder is None:
            wire = self._wire
            encoder = self._encoders[index] = GradientEncoder(
                layout, wire.gradient_encoding, fraction=wire.fraction, feedback=wire.feedback
            )
        encoded = encoder.encode(part.segments, absent=part.absent)
        return replace(part, segments=Segments([encoded]), encoding=encoder.encoding, encoded_bytes=encoded.nbytes)


def as_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Returns numbers, and numbers with weights, as they are sent. Raises InvalidSpec."""
    if not isinstance(metrics, Mapping):
        raise InvalidSpec(f"metrics: got a {type(metrics).__name__}, want a dict from name to number")
    return {name: _metric(name, report) for name, report in metrics.items()}


def checked_weight(weight: float) -> float:
    """Returns the weight of a contribution as a Python number. Raises InvalidSpec."""
    plain = plain_number(weight)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidSpec(f"weight: got {weight!r}, want a number")
    check_weight(plain)
    return float(plain)


def _metric(name: str, report: object) -> Metric:
    check_name(name)
    value, weight = report if isinstance(report, tuple) and len(report) == 2 else (report, 1.0)
    times = _number(name, weight)
    if not 0 <= times < math.inf:
        raise InvalidSpec(f"metric {name!r}: its weight is {weight!r}, want a finite number >= 0")
    return Metric(value=_number(name, value), weight=times)


def _number(name: str, value: object) -> float:
    # Reads an array of one element, also of another library, such as a loss.
    to_python = getattr(value, "item", None)
    if callable(to_python):
        with contextlib.suppress(Exception):  # with more than one element, the error below shows the value
            value = to_python()
    plain = plain_number(value)  # type: ignore[arg-type]
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidSpec(f"metric {name!r}: got {value!r}, want a number, or a tuple of number and weight")
    try:
        return float(plain)
    except OverflowError:
        raise InvalidSpec(f"metric {name!r}: the whole number is too large for a float64") from None


def _arena(layout: Layout, segments: Segments, absent: frozenset[str]) -> ShardPart:
    if not absent:
        return ShardPart(segments)
    positions = tuple(position for position, piece in enumerate(layout.slices) if piece.variable.name in absent)
    return ShardPart(Segments(()) if len(positions) == len(layout.slices) else segments, absent=positions)


def _with_rows(part: ShardPart, layout: Layout, rows: Mapping[str, RowGradient]) -> ShardPart:
    sparse: list[SparsePart] = []
    pieces: list[Array] = []
    for position, piece in enumerate(layout.tables):
        gradient = rows.get(piece.variable.name)
        if gradient is not None:
            # Named even if none of its rows lie here: the table has a gradient, and some optimizers then change all rows.
            indices, values = _rows_of(piece, gradient)
            sparse.append(SparsePart(table=position, num_rows=len(indices)))
            pieces += [_bytes(indices), _bytes(values)]
    return replace(part, segments=part.segments.followed_by([piece for piece in pieces if piece.nbytes]), sparse=tuple(sparse))


def _rows_of(piece: VariableSlice, gradient: RowGradient) -> tuple[Array, Array]:
    if piece.is_whole:
        return gradient.indices, gradient.values
    least, greatest = piece.index_range
    first, last = np.searchsorted(gradient.indices, least), np.searchsorted(gradient.indices, greatest, side="right")
    return gradient.indices[first:last] - piece.first_index, gradient.values[first:last]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
