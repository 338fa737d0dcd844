"""Variables of a strategy: how writes of replicas become one value, and which copy is read. Knows contexts; not where copies lie."""

import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import DtypeMismatch, InvalidSpec, ShapeMismatch
from ps_protocol.model.variables import Array, check_name
from worker_client.strategy import contexts
from worker_client.strategy.group import Cell
from worker_client.strategy.reduction import ReduceOp, frozen
from worker_client.strategy.values import PerReplica, check_alike, map_replicas


class VariableAggregation(enum.Enum):
    """The rule by which the values that replicas write become one."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(enum.Enum):
    """When that happens: at each write, or only when the variable is read across replicas. AUTO is ON_WRITE."""

    AUTO = "AUTO"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


_REDUCTIONS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}
# How a write changes an element.
_CHANGES: dict[str, Callable[[Array, Array], Any]] = {
    "assign": lambda old, new: new.copy() if new.flags.writeable or new.base is not None else new,
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}


class VariableCopy:
    """One copy of a variable, as `update()` gives it to its function. Reads and writes only itself."""

    def __init__(self, variable: "Variable", index: int, cell: Cell) -> None:
        self._variable, self._index, self._cell = variable, index, cell
        self._staged: Array | None = None
        # The changes that were staged before each of the updates that enclose this one.
        self._before: list[Array | None] = []

    @property
    def name(self) -> str:
        """The variable's name."""
        return self._variable.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's shape."""
        return self._variable.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The variable's element type."""
        return self._variable.dtype

    @property
    def device(self) -> str:
        """The device of the copy."""
        return self._cell.device

    @property
    def container(self) -> "Variable":
        """The variable that this is a copy of."""
        return self._variable

    def read_value(self) -> Array:
        """Returns the copy's value, which cannot be written."""
        return self._cell.read() if self._staged is None else self._staged

    def assign(self, value: npt.ArrayLike) -> Array:
        """Sets the copy and returns its value. Raises ShapeMismatch, DtypeMismatch."""
        return self.change("assign", value)

    def assign_add(self, delta: npt.ArrayLike) -> Array:
        """Adds to the copy and returns its value. Raises ShapeMismatch, DtypeMismatch."""
        return self.change("assign_add", delta)

    def assign_sub(self, delta: npt.ArrayLike) -> Array:
        """Subtracts from the copy and returns its value. Raises ShapeMismatch, DtypeMismatch."""
        return self.change("assign_sub", delta)

    def change(self, how: str, value: Any) -> Array:
        """Applies the method of this name."""
        new = frozen(np.asarray(_CHANGES[how](self.read_value(), self._variable.fitting(value, how)), self.dtype))
        if self._before:
            self._staged = new
        else:
            self._cell.write(new)
        return new

    def stage(self) -> None:
        """Has changes wait, and only the copy itself see them, until `commit` or `drop`. May be nested: the outermost counts."""
        self._before.append(self._staged)

    def commit(self) -> None:
        """Ends an update: writes the staged value once no other update encloses it."""
        self._before.pop()
        if not self._before and self._staged is not None:
            new, self._staged = self._staged, None
            self._cell.write(new)

    def drop(self) -> None:
        """Forgets the changes that wait since `stage`."""
        self._staged = self._before.pop()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self.read_value()
        return np.array(value, dtype) if copy else np.asarray(value, dtype)


class Variable:
    """A variable of the strategy whose scope it is created in, else of none: it then has one replica.

    `initial_value`: a float array, or Python floats and lists of them (float64). `aggregation` says what the values are made into that
    replicas write: NONE (more than one replica may not write), SUM, MEAN, or ONLY_FIRST_REPLICA (that of replica 0). With
    `synchronization` ON_READ each replica has a copy of its own, as metrics want it; they are made into one when the variable is read
    across replicas.

    Raises InvalidSpec, and RuntimeError inside of `run()`: create variables in `scope()`.
    """

    def __init__(
        self,
        initial_value: npt.ArrayLike,
        *,
        name: str,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    ) -> None:
        check_name(name)
        value = np.array(initial_value)
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
        if value.dtype.kind != "f" or value.dtype.itemsize > 8:
            raise InvalidSpec(f'variable "{name}" has type {value.dtype}; want floats of 16, 32 or 64 bits')
        if not isinstance(aggregation, VariableAggregation):
            raise InvalidSpec(f'variable "{name}": aggregation: got {aggregation!r}, want a VariableAggregation')
        if not isinstance(synchronization, VariableSynchronization):
            raise InvalidSpec(f'variable "{name}": synchronization: got {synchronization!r}, want a VariableSynchronization')
        self.name = name
        self.shape, self.dtype = value.shape, value.dtype
        self.aggregation, self.synchronization = aggregation, synchronization
        self._owner = _owner_here(name)
        cells = self._owner.extended.place(name, frozen(value), is_on_read=self.is_on_read)
        self._copies = {index: VariableCopy(self, index, cell) for index, cell in cells.items()}

    @property
    def strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self._owner

    @property
    def is_on_read(self) -> bool:
        """Whether each replica has its own value until the variable is read across replicas."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def copies(self) -> Mapping[int, VariableCopy]:
        """The variable's copies: one, or by replica id those of the replicas in this process."""
        return self._copies

    @property
    def device(self) -> str:
        """The device of the variable, or of its first copy."""
        return self._copies[min(self._copies)].device

    def read_value(self) -> Array:
        """Returns the value that this context sees, an array that cannot be written: a replica's own copy, or the value of all.

        Raises ValueError if it is read across replicas, synchronised on read, and has no aggregation to make it one value.
        """
        copy = self._own_copy()
        if copy is not None:
            return copy.read_value()
        with self._owner.scope():
            if not self.is_on_read or self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                first: Array = self._owner.extended.first_copy(self)
                return first
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f'variable "{self.name}" is synchronised on read and has no aggregation: it has no value across replicas; '
                    "give it SUM, MEAN or ONLY_FIRST_REPLICA, or read it in run()"
                )
            value: Array = self._owner.extended.reduce_copies(_REDUCTIONS[self.aggregation], self)
            return value

    def assign(self, value: Any) -> Array:
        """Sets the variable, as the context and `aggregation` say, and returns the result of `read_value()`.

        In a replica the values of all replicas are made into one first, unless the variable is synchronised on read. Raises ValueError
        where that is not possible, ShapeMismatch, DtypeMismatch.
        """
        return self._change("assign", value)

    def assign_add(self, delta: Any) -> Array:
        """Adds to the variable, like `assign`. Raises ValueError also across replicas if it is synchronised on read and summed."""
        return self._change("assign_add", delta)

    def assign_sub(self, delta: Any) -> Array:
        """Subtracts from the variable, like `assign_add`."""
        return self._change("assign_sub", delta)

    def fitting(self, value: Any, how: str) -> Array:
        """Returns the argument of the method `how` as an array of the variable. Raises ShapeMismatch, DtypeMismatch."""
        array = as_array(value, self.dtype, what=f'variable "{self.name}": {how}()')
        if array.shape != self.shape:
            raise ShapeMismatch(f'variable "{self.name}" has shape {self.shape}, {how}() was given {array.shape}; nothing is broadcast')
        if array.dtype != self.dtype:
            raise DtypeMismatch(
                f'variable "{self.name}" has type {self.dtype}, {how}() was given {array.dtype}; cast with .astype({self.dtype.name!r})'
            )
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self.read_value()
        return np.array(value, dtype) if copy else np.asarray(value, dtype)

    def _own_copy(self) -> VariableCopy | None:
        """Returns the copy of the replica or update that this thread is in, None across replicas."""
        mode = contexts.current()
        if mode is None:
            return None
        contexts.check_same(mode, self._owner)
        if mode.copy is None:
            return None
        return self._copies[mode.copy] if mode.copy in self._copies else self._copies[min(self._copies)]

    def _change(self, how: str, value: Any) -> Array:
        mode = contexts.current()
        if mode is not None:
            contexts.check_same(mode, self._owner)
        if mode is not None and mode.replica is not None and not self.is_on_read:
            self._change_together(how, value, mode.replica)
        elif (copy := self._own_copy()) is not None:
            return copy.change(how, value)
        else:
            with self._owner.scope():
                self._change_across(how, value)
        return self.read_value()

    def _change_across(self, how: str, value: Any) -> None:
        if self.is_on_read and self.aggregation is VariableAggregation.SUM:
            if how != "assign":
                raise ValueError(
                    f'variable "{self.name}" is synchronised on read and summed: {how}() across replicas would not say which replica gets '
                    "how much; use assign(), or write it in run()"
                )
            # So that the sum of all is the assigned value.
            value = map_replicas(lambda one: self.fitting(one, how) / self.dtype.type(self._owner.num_replicas_in_sync), value)
        self._owner.extended.update(self, lambda copy, new: copy.change(how, new), args=(value,))

    def _change_together(self, how: str, value: Any, replica: contexts.Replica) -> None:
        if self.aggregation is VariableAggregation.NONE and self._owner.num_replicas_in_sync > 1:
            raise ValueError(
                f'variable "{self.name}" has no aggregation, so {how}() in each of {self._owner.num_replicas_in_sync} replicas has no '
                "meaning; create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA"
            )

        def write(strategy: Any, values: Any, what: tuple[Any, Any]) -> None:
            check_alike(what, f'{how}() of variable "{self.name}"')
            extended = strategy.extended
            if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                one = extended.first_of(values, self)
            elif self.aggregation is VariableAggregation.NONE:
                one = values
            else:
                # Of what differs only: a number that is the same for all has no sum, and 0 is 0.
                if isinstance(values, PerReplica):
                    values = map_replicas(lambda part: np.asarray(part, self.dtype) if _is_plain_number(part) else part, values)
                one = extended.reduce_to(_REDUCTIONS[self.aggregation], values, self)
            extended.update(self, lambda copy, new: copy.change(how, new), args=(one,))

        # A list is an array here, not a structure of values that are merged one by one.
        given = np.asarray(value, self.dtype) if isinstance(value, list | tuple) else value
        replica.merge(write, (given, (self, how)), {})


def as_array(value: Any, dtype: "np.dtype[Any]", *, what: str) -> Array:
    """Returns Python's numbers and lists of them as this type, and arrays as they are. Raises DtypeMismatch for other values."""
    if hasattr(value, "dtype"):
        return np.asarray(value)
    plain = np.asarray(value)
    # NumPy makes NaN of None, and a number of a text.
    is_number = all(map(_is_plain_number, plain.flat)) if plain.dtype.kind == "O" else plain.dtype.kind in "biuf"
    try:
        if is_number:
            return np.asarray(value, dtype)
    except OverflowError:
        raise DtypeMismatch(f"{what}: got an integer that no {dtype} can have") from None
    raise DtypeMismatch(f"{what}: got a {type(value).__name__}, want an array, a number, or lists of numbers")


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool | np.generic)


def container_of(value: Any) -> Variable | None:
    """Returns the variable of a value: itself, or the one that it is a copy of; None for other values."""
    if isinstance(value, VariableCopy):
        return value.container
    return value if isinstance(value, Variable) else None


def _owner_here(name: str) -> Any:
    """Returns the strategy of this thread's context. Of type Any: the strategy's module imports this one."""
    mode = contexts.current()
    if mode is None:
        from worker_client.strategy.strategy import default_strategy

        return default_strategy()
    if mode.copy is not None:
        raise RuntimeError(f'variable "{name}" is created while replicas run or a variable is updated; create it in scope(), before run()')
    return mode.strategy
