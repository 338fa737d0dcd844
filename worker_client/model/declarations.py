"""A program's declarations of its model, and the specification made from them. Knows values and options; no chief and no server.

Variables, embedding tables, buffers and rows of gradients; placement; names, types and first values, checked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.expressions import VARIABLE, check_own_name
from ps_protocol.model.keys import KeyKind, KeySpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.model.programs import Names, compiled, parsed
from ps_protocol.model.spec import DEFAULT_SPLIT_BYTES, AverageSpec, ClipSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import (
    ANY,
    Array,
    Constraint,
    ConstraintKind,
    DataType,
    Initializer,
    InitializerKind,
    Partition,
    Partitioner,
    SparseMean,
    VariableSpec,
    data_type_of,
    partition_of,
)
from worker_client.model.optimizers import plain_number

__all__ = [
    "Buffer",
    "EmbeddingTable",
    "IndexedSlices",
    "Placement",
    "UpdateFormula",
    "Variable",
    "clip_to",
    "constant_initializer",
    "custom_constraint",
    "max_norm",
    "non_negative",
    "normal_initializer",
    "uniform_initializer",
    "unit_norm",
    "zeros_initializer",
]

# Declarations: variables, tables, buffers and their updates, rows of gradients.


# None of these classes has equality: arrays have no single truth value.


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A dense variable with options. A plain array is the same as a `Variable` without any.

    `value`: its first value, float16, bfloat16, float32 or float64, of any shape. `optimizer`: its own; None: the model's.
    `constraint`: what it must satisfy after each update. `partitioner`: how it is split over parameter servers; None: by its size.
    """

    value: npt.ArrayLike
    _: KW_ONLY
    optimizer: OptimizerSpec | None = None
    constraint: Constraint | None = None
    partitioner: Partitioner | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """A variable whose gradients come as rows (`IndexedSlices`) and that is read by rows: `session.read_rows()`, not `session.read()`.

    `value_or_shape`: the first values as an array, or a shape of at least one axis, whose values the servers make with `initializer` (None:
    zeros), so that no values are sent; `dtype` goes with a shape, an array has its own. `optimizer`: its own; None: the model's.
    `sparse_mean`: a row of a step's mean is divided by the number of contributions that have it ("per_index", as in the original), or by
    that of all contributions ("per_replica"). `partitioner` may split it along axis 0 only; None: by its size. Rows without a gradient cost
    nothing, except with Adam without `lazy`.

    With `keys` ("int64" or "uint64") the table has no size: `EmbeddingTable(16, keys="int64")` has rows of 16 numbers, named by any
    integers of that type in place of row numbers. A row is made by the first gradient that counts; its first value depends on its key and
    the initializer's seed alone, and reading an unknown key gives it and makes nothing. All optimizers change rows with a gradient only.
    There are at most `max_rows` rows, on all servers together: keys lie in buckets of 16 to 127 rows, and in a full bucket a new key gets
    the row that was used longest ago, in sync the same in each run on any number of servers. A key that comes back begins anew. None: no
    bound. After `max_age_steps` in which no gradient for it counted, a row is gone, too; its memory goes to new keys.

    A key without a row gets one in a step that has a gradient for it with `admit_probability`, after 1 / `admit_probability` such steps in
    the mean; else its gradient does not count. Who is admitted follows from key, step and the initializer's seed. Source: McMahan et al.,
    Ad click prediction: a view from the trenches, 2013, section 4.1 ("Poisson inclusion"). Or it gets one in the `admit_after`th step, at
    most 32, that has a gradient for it. Servers count such steps in a sketch of 257 bytes a bucket, 16 MiB without `max_rows`, which
    forgets what is long ago: half of each count after 64 keys without rows in a bucket.
    """

    value_or_shape: npt.ArrayLike
    _: KW_ONLY
    dtype: npt.DTypeLike = "float32"
    initializer: Initializer | None = None
    optimizer: OptimizerSpec | None = None
    sparse_mean: str = "per_index"
    partitioner: Partitioner | None = None
    keys: str | None = None
    max_rows: int | None = None
    max_age_steps: int | None = None
    admit_probability: float = 1.0
    admit_after: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A variable without gradients, changed by updates that travel with a contribution and count only with it: statistics, counters.

    `update`: "mean" (it becomes the mean of the step's updates), "add" (their sum is added), or "moving_average" (it becomes
    `decay * itself + (1 - decay) * mean`). A step without an update leaves it unchanged.
    """

    value: npt.ArrayLike
    update: str = "mean"
    decay: float = 0.99


class UpdateFormula:
    """An update of a `Buffer` that its parameter server computes: a formula, in which the variable is `v`, and values for its other names.

    `UpdateFormula("s = s + g * g; v = v - rate * g / sqrt(s)", s="slot", g=gradient, rate=0.1)`: a value is an array, a number, or the name
    of another Buffer, which the formula reads and may assign to. The server computes it once, when the step is applied, after the step's
    plain updates and in the order of the contributions. All its variables lie whole on one server and have one shape and type, float32 or
    float64. Its arrays have the same shape and type, and there are at most as many as variables that it assigns to. Raises InvalidSpec with
    line, column and reason.
    """

    def __init__(self, text: str, /, **values: Any) -> None:
        if not isinstance(text, str):
            raise InvalidSpec(f"formula: got a {type(text).__name__}, want a str")
        self.text = text
        self.variables = {name: value for name, value in values.items() if isinstance(value, str)}
        others = {name: value for name, value in values.items() if not isinstance(value, str)}
        self.numbers = {name: float(value) for name, value in others.items() if _is_number(value)}
        self.arrays = {name: value for name, value in others.items() if not _is_number(value)}
        for name in (*values, VARIABLE):
            if name == VARIABLE and name in values:
                raise InvalidSpec(f"formula: {name!r} is the variable itself; give the value another name")
            check_own_name("formula: name", name)
        variables = (VARIABLE, *sorted(self.variables))
        self.formula = parsed(text, Names(variables, in_place=variables, numbers=tuple(sorted(others))))
        # Only values that the formula reads are sent.
        reads = self.formula.reads
        self.arrays, self.numbers = ({name: given[name] for name in sorted(reads & given.keys())} for given in (self.arrays, self.numbers))
        needed = tuple(sorted((VARIABLE, *(reads & self.variables.keys()))))
        compiled(text, Names((*needed, *self.arrays), in_place=needed, numbers=tuple(self.numbers)))


@dataclass(frozen=True, slots=True, eq=False)
class IndexedSlices:
    """The rows `values` of a table's gradient at `indices` (any integer type, any order); rows of one index add up.

    `values` has the shape (number of indices, *shape of a row) and the table's element type. `dense_shape`, if given, must be the table's.
    """

    indices: Any
    values: Any
    dense_shape: tuple[int, ...] | None = None


def non_negative() -> Constraint:
    """Returns the constraint that sets elements below 0 to 0."""
    return Constraint(kind=ConstraintKind.NON_NEGATIVE)


def clip_to(low: float, high: float) -> Constraint:
    """Returns the constraint that keeps every element between `low` and `high`. Raises InvalidSpec if `low` is above `high`."""
    return Constraint(kind=ConstraintKind.CLIP, low=plain_number(low), high=plain_number(high))


def max_norm(limit: float) -> Constraint:
    """Returns the constraint that scales vectors along axis 0 with a Euclidean norm above `limit` (> 0) down to it.

    The variable is not split.
    """
    return Constraint(kind=ConstraintKind.MAX_NORM, high=plain_number(limit))


def unit_norm() -> Constraint:
    """Returns the constraint that scales vectors along axis 0 to a Euclidean norm of 1. The variable is not split."""
    return Constraint(kind=ConstraintKind.UNIT_NORM)


def custom_constraint(formula: str) -> Constraint:
    """Returns the constraint that replaces a variable `v` by the value of a formula, for example "v / max(norm(v), 1)".

    `sum` and `norm` are over all elements; a variable with one of them is not split. Raises InvalidSpec with line, column and reason.
    """
    return Constraint(kind=ConstraintKind.FORMULA, formula=formula)


def zeros_initializer() -> Initializer:
    """Returns the initializer of zeros."""
    return constant_initializer(0.0)


def constant_initializer(value: float) -> Initializer:
    """Returns the initializer that gives every element `value`."""
    return Initializer(kind=InitializerKind.CONSTANT, low=plain_number(value))


def uniform_initializer(low: float, high: float, seed: int = 0) -> Initializer:
    """Returns the initializer of values uniform from `low` to `high`; the same `seed` gives the same values, however the table is split."""
    return Initializer(kind=InitializerKind.UNIFORM, low=plain_number(low), high=plain_number(high), seed=_seed(seed))


def normal_initializer(mean: float, stddev: float, seed: int = 0) -> Initializer:
    """Returns the initializer of normally distributed values; the same `seed` gives the same values, however the table is split."""
    return Initializer(kind=InitializerKind.NORMAL, low=plain_number(mean), high=plain_number(stddev), seed=_seed(seed))


def _seed(seed: int) -> int:
    return seed.item() if isinstance(seed, np.integer) else seed


# A program's wishes for the placement: strategy, pins and loads. `ps_protocol.model.spec` decides.


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of variables on parameter servers.

    `strategy`: "greedy_bytes" (each to the shard with the least load so far) or "round_robin" (dealt out in order). `pins`: name to the
    shard where that variable lies, whatever the strategy. `load`: what "greedy_bytes" balances, as a function of a variable's
    `VariableSpec` (name, shape, data_type, nbytes …); None: its bytes. A variable of more than `split_bytes` bytes and without a
    partitioner of its own is split along axis 0 (0: never). Raises InvalidSpec where it is used.
    """

    strategy: str = "greedy_bytes"
    _: KW_ONLY
    pins: Mapping[str, int] = field(default_factory=dict)
    load: Callable[[VariableSpec], float] | None = None
    split_bytes: int = DEFAULT_SPLIT_BYTES

    def policy_for(self, variables: Iterable[VariableSpec]) -> PlacementPolicy:
        """Returns the policy that all participants agree on, with the loads as numbers."""
        if self.load is not None and not callable(self.load):
            raise InvalidSpec(f"placement: load = {self.load!r}, want a function of a variable's specification, or None for its bytes")
        if not isinstance(self.pins, Mapping):
            raise InvalidSpec(f"placement: pins = {self.pins!r}, want a dict from variable name to the index of a ps")
        loads = () if self.load is None else tuple((spec.name, _load(self.load(spec))) for spec in variables)
        pins = tuple((name, shard.item() if isinstance(shard, np.integer) else shard) for name, shard in self.pins.items())
        return PlacementPolicy(strategy=self.strategy, split_bytes=self.split_bytes, loads=loads, pins=pins)


def _load(load: float) -> float:
    load = plain_number(load)
    return float(load) if type(load) is int else load  # later checks refuse any other type, with the variable's name


def placement_of(placement: "str | Placement", *, split_bytes: int | None) -> Placement:
    """Returns the placement that the arguments of `create_or_join` mean. Raises InvalidSpec."""
    if isinstance(placement, Placement):
        if split_bytes is not None:
            raise InvalidSpec("split_bytes: the placement has it already; write Placement(…, split_bytes=…)")
        return placement
    return Placement(placement, split_bytes=DEFAULT_SPLIT_BYTES if split_bytes is None else split_bytes)


# Makes the model's specification and first values of the declarations.


Choice = TypeVar("Choice")

_UPDATES = {"mean": "assign_mean", "add": "add", "moving_average": "moving_average"}
_KEYS = {kind.value: kind for kind in KeyKind}
_SPARSE_MEANS = {"per_index": SparseMean.PER_INDEX, "per_replica": SparseMean.PER_REPLICA}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A model's specification, and the first values by name, except of tables whose values servers make."""

    model: ModelSpec
    values: Mapping[str, Array]


def declare(
    variables: Mapping[str, Any], *, optimizer: OptimizerSpec, placement: Placement, averages: AverageSpec | None, clip: ClipSpec
) -> Declared:
    """Returns the specification that all workers must agree on, and the first values.

    Raises InvalidSpec, LimitExceeded for a model that no cluster could take.
    """
    if not isinstance(variables, Mapping):
        raise InvalidSpec(f"initial_values: got a {type(variables).__name__}, want a dict from variable name to array")
    _check_optimizer("optimizer", optimizer)
    if averages is not None and not isinstance(averages, AverageSpec):
        raise InvalidSpec(f"averages: got {averages!r}, want what lockstep.moving_average(0.99) returns")
    values: dict[str, Array] = {}
    specs = tuple(_declared(name, declaration, values) for name, declaration in variables.items())
    model = ModelSpec(variables=specs, optimizer=optimizer, placement=placement.policy_for(specs), averages=averages, clip=clip)
    return Declared(model=model, values=values)


def _declared(name: str, declaration: object, values: dict[str, Array]) -> VariableSpec:
    if isinstance(declaration, EmbeddingTable):
        return _table(name, declaration, values)
    optimizer = constraint = partition = None
    if isinstance(declaration, Buffer):
        values[name] = as_array(name, declaration.value)
        optimizer = _update_rule(name, declaration)
    elif isinstance(declaration, Variable):
        values[name] = as_array(name, declaration.value)
        optimizer, constraint = declaration.optimizer, declaration.constraint
        partition = _partition(name, declaration.partitioner, values[name].shape, values[name].dtype)
        if constraint is not None and not isinstance(constraint, Constraint):
            raise InvalidSpec(f"variable {name!r}: constraint: got {constraint!r}, want what non_negative() or clip_to(-1, 1) returns")
        if optimizer is not None:
            _check_optimizer(f"variable {name!r}: optimizer", optimizer)
    else:
        values[name] = as_array(name, declaration)
    return VariableSpec(
        name=name,
        data_type=data_type_of(values[name], name=name),
        shape=values[name].shape,
        optimizer=optimizer,
        constraint=constraint,
        partition=partition,
    )


def _table(name: str, table: EmbeddingTable, values: dict[str, Array]) -> VariableSpec:
    shape, initializer = _shape(table.value_or_shape), table.initializer
    keys = _keys(name, table)
    if keys is not None:
        row = (table.value_or_shape,) if isinstance(table.value_or_shape, (int, np.integer)) else shape
        if row is None:
            raise InvalidSpec(f"variable {name!r}: a table with keys begins without rows; give the length of a row, for example 16")
        if table.partitioner is not None:
            raise InvalidSpec(f"variable {name!r}: a table with keys is split by their hashes, evenly; leave out the partitioner")
        shape = (ANY, *map(int, row))
    if shape is None:
        if initializer is not None:
            raise InvalidSpec(f"variable {name!r}: has values and an initializer; give one of them (a shape goes with an initializer)")
        values[name] = np.asarray(as_array(name, table.value_or_shape), order="C")
        shape, data_type = values[name].shape, data_type_of(values[name], name=name)
    else:
        data_type, initializer = _data_type(name, table.dtype), initializer or zeros_initializer()
    if initializer is not None and not isinstance(initializer, Initializer):
        raise InvalidSpec(f"variable {name!r}: initializer: got {initializer!r}, want what zeros_initializer() or another returns")
    sparse_mean = _choice(name, "sparse_mean", table.sparse_mean, _SPARSE_MEANS)
    if table.optimizer is not None:
        _check_optimizer(f"variable {name!r}: optimizer", table.optimizer)
    return VariableSpec(
        name=name,
        data_type=data_type,
        shape=shape,
        optimizer=table.optimizer,
        is_sparse=True,
        sparse_mean=sparse_mean,
        initializer=initializer,
        partition=_partition(name, table.partitioner, shape, data_type.dtype),
        keys=keys,
    )


def _keys(name: str, table: EmbeddingTable) -> KeySpec | None:
    given = {option.name: getattr(table, option.name) for option in fields(KeySpec) if option.name != "kind"}
    options = {what: value.item() if isinstance(value, np.generic) else value for what, value in given.items()}
    if table.keys is not None:
        return KeySpec(kind=_choice(name, "keys", table.keys, _KEYS), **options)
    for option in fields(KeySpec):
        if option.name in options and options[option.name] != option.default:
            raise InvalidSpec(f"variable {name!r}: {option.name} is of a table with keys only; give keys='int64', or leave it out")
    return None


def _update_rule(name: str, state: Buffer) -> OptimizerSpec:
    rule = _choice(name, "update", state.update, _UPDATES)
    numbers = {"decay": state.decay} if "decay" in OPTIMIZERS[rule].hyperparameters else {}
    return OptimizerSpec(name=rule, learning_rate=constant(1.0), hyperparameters=numbers)


def _choice(name: str, option: str, value: str, known: Mapping[str, Choice]) -> Choice:
    if not isinstance(value, str) or value not in known:
        raise InvalidSpec(f"variable {name!r}: {option} = {value!r}, want one of {', '.join(known)}")
    return known[value]


def _partition(name: str, partitioner: Partitioner | None, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Partition | None:
    return None if partitioner is None else partition_of(partitioner, name=name, shape=shape, dtype=dtype)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, np.generic | np.ndarray) and value.ndim == 0 and value.dtype.kind in "fiub")


def _shape(value: object) -> tuple[int, ...] | None:
    """Returns a tuple or list of plain integers as a shape, and None for anything else: integers are not valid as values."""
    if isinstance(value, (tuple, list)) and value and all(isinstance(extent, (int, np.integer)) for extent in value):
        return tuple(int(extent) for extent in value)
    return None


def _data_type(name: str, dtype: npt.DTypeLike) -> DataType:
    if isinstance(dtype, DataType):
        return dtype
    if dtype == DataType.BFLOAT16.value:
        return DataType.BFLOAT16
    try:
        return data_type_of(np.empty(0, dtype), name=name)
    except TypeError as error:
        raise InvalidSpec(f"variable {name!r}: dtype = {dtype!r} is not a type: {error}; use for example 'float32'") from error


def _check_optimizer(what: str, optimizer: object) -> None:
    if not isinstance(optimizer, OptimizerSpec) or optimizer.is_update_rule:
        raise InvalidSpec(f"{what}: got {optimizer!r}, want what lockstep.sgd(0.1) or another optimizer function returns")


def as_array(name: object, value: object) -> Array:
    """Returns a first value as an array; an array is not copied. Raises InvalidSpec for anything but floats."""
    if value is None:
        raise InvalidSpec(f"variable {name!r}: its initial value is None; give an array of float32 or float64")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidSpec(f"variable {name!r}: its initial value, a {type(value).__name__}, cannot be read as an array: {error}") from error
    if array.dtype.kind in "iub":
        raise InvalidSpec(
            f"variable {name!r}: its initial value is {array.dtype}; want float32 or float64: write 0.0 for 0, or .astype(np.float32)"
        )
    return array
