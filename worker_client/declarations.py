"""From what a program says about its variables to the model's specification and first values. Knows options; no chief, no server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import ClipSpec
from ps_protocol.errors import InvalidSpec
from ps_protocol.model import ModelSpec
from ps_protocol.optimizer_spec import UPDATE_RULES, OptimizerSpec, constant
from ps_protocol.partitioners import Partitioner, partition_of
from ps_protocol.tensors import Array, DataType, VariableSpec, data_type_of
from ps_protocol.variable_options import Constraint, Initializer, Partition, SparseMean
from worker_client.placements import Placement
from worker_client.variables import State, Table, Variable, zeros_initializer

Choice = TypeVar("Choice")

_UPDATES = {"mean": "assign_mean", "add": "add", "moving_average": "moving_average"}
_SPARSE_MEANS = {"per_index": SparseMean.PER_INDEX, "per_replica": SparseMean.PER_REPLICA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A model's specification, and the first values by name, but of those tables that servers make themselves."""

    model: ModelSpec
    values: Mapping[str, Array]


def declare(
    variables: Mapping[str, Any], *, optimizer: OptimizerSpec, placement: Placement, averages: AverageSpec | None, clip: ClipSpec
) -> Declared:
    """Returns what all workers must agree on. Raises InvalidSpec, LimitExceeded, for whatever no cluster could take."""
    if not isinstance(variables, Mapping):
        raise InvalidSpec(f"initial_values: got a {type(variables).__name__}, want a dict from variable name to array")
    _check_optimizer("optimizer", optimizer)
    if averages is not None and not isinstance(averages, AverageSpec):
        raise InvalidSpec(f"averages: got {averages!r}, want what worker_client.moving_average(0.99) returns")
    values: dict[str, Array] = {}
    specs = tuple(_declared(name, declaration, values) for name, declaration in variables.items())
    model = ModelSpec(variables=specs, optimizer=optimizer, placement=placement.policy_for(specs), averages=averages, clip=clip)
    return Declared(model=model, values=values)


def _declared(name: str, declaration: object, values: dict[str, Array]) -> VariableSpec:
    if isinstance(declaration, Table):
        return _table(name, declaration, values)
    optimizer = constraint = partition = None
    if isinstance(declaration, State):
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


def _table(name: str, table: Table, values: dict[str, Array]) -> VariableSpec:
    shape, initializer = _shape(table.value_or_shape), table.initializer
    if shape is None:
        if initializer is not None:
            raise InvalidSpec(f"variable {name!r}: has values and an initializer; give one of them (a shape goes with an initializer)")
        values[name] = np.asarray(as_array(name, table.value_or_shape), order="C")
        shape, data_type = values[name].shape, data_type_of(values[name], name=name)
    else:
        data_type, initializer = _data_type(name, table.dtype), initializer or zeros_initializer()
    if initializer is not None and not isinstance(initializer, Initializer):
        raise InvalidSpec(f"variable {name!r}: initializer: got {initializer!r}, want what zeros_initializer() or another returns")
    sparse_mean = _chosen(name, "sparse_mean", table.sparse_mean, _SPARSE_MEANS)
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
    )


def _update_rule(name: str, state: State) -> OptimizerSpec:
    rule = _chosen(name, "update", state.update, _UPDATES)
    numbers = {"decay": state.decay} if "decay" in UPDATE_RULES[rule] else {}
    return OptimizerSpec(name=rule, learning_rate=constant(1.0), hyperparameters=numbers)


def _chosen(name: str, option: str, value: str, known: Mapping[str, Choice]) -> Choice:
    if not isinstance(value, str) or value not in known:
        raise InvalidSpec(f"variable {name!r}: {option} = {value!r}, want one of {', '.join(known)}")
    return known[value]


def _partition(name: str, partitioner: Partitioner | None, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Partition | None:
    return None if partitioner is None else partition_of(partitioner, name=name, shape=shape, dtype=dtype)


def _shape(value: object) -> tuple[int, ...] | None:
    """A tuple or list of plain integers is a shape: values of integers are no variables."""
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
        raise InvalidSpec(f"variable {name!r}: dtype = {dtype!r} is no type: {error}; want for example 'float32'") from error


def _check_optimizer(what: str, optimizer: object) -> None:
    if not isinstance(optimizer, OptimizerSpec) or optimizer.is_update_rule:
        raise InvalidSpec(f"{what}: got {optimizer!r}, want what worker_client.sgd(0.1) or another optimizer function returns")


def as_array(name: object, value: object) -> Array:
    """Returns a first value as an array, an array as it is. Raises InvalidSpec for what is no array of floats."""
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
