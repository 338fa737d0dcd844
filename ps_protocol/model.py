"""A model as all workers must present it: variables, optimizer, placement policy. Knows no address and no value."""

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.layout import VariableSlice
from ps_protocol.optimizer_spec import OPTIMIZERS, SCHEDULES, OptimizerSpec, Schedule
from ps_protocol.tensors import MAX_VARIABLES, VariableSpec

STRATEGIES = ("greedy_bytes", "round_robin")
DEFAULT_SPLIT_BYTES = 64 << 20
_MAX_SPLIT_BYTES = (1 << 64) - 1  # a uint64 on the wire
_MAX_SHARD = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """How variables are spread: a strategy, and the size above which a variable without a partition is split along axis 0 (0: never).

    `loads` (name, load): what "greedy_bytes" balances instead of bytes; a variable's slices share its load by their size. `pins` (name,
    shard): variables that lie there, whatever the strategy; they are not split, count as loads there, and take no turn of "round_robin".
    """

    strategy: str = "greedy_bytes"
    split_bytes: int = DEFAULT_SPLIT_BYTES
    loads: tuple[tuple[str, float], ...] = ()
    pins: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in STRATEGIES:
            raise InvalidSpec(f"placement strategy {reprlib.repr(self.strategy)}; want one of {', '.join(STRATEGIES)}")
        # Not isinstance: a bool is an int, but no size.
        if type(self.split_bytes) is not int or self.split_bytes < 0:
            raise InvalidSpec(f"split_bytes: got {reprlib.repr(self.split_bytes)}, want a whole number >= 0 (an int; 0: never split)")
        if self.split_bytes > _MAX_SPLIT_BYTES:
            raise InvalidSpec("split_bytes: got more than 2^64 - 1; want 0 to never split")
        for name, load in self.loads:
            if isinstance(load, bool) or not isinstance(load, (int, float)) or not 0 <= load < math.inf:
                raise InvalidSpec(f"placement: the load of variable {name!r} is {load!r}, want a finite number >= 0")
        for name, shard in self.pins:
            if type(shard) is not int or not 0 <= shard <= _MAX_SHARD:
                raise InvalidSpec(f"placement: variable {name!r} is pinned to {reprlib.repr(shard)}, want the index of a ps, from 0")
        for what, pairs in (("loads", self.loads), ("pins", self.pins)):
            if len({name for name, _ in pairs}) < len(pairs):
                raise InvalidSpec(f"placement: {what} name a variable twice; name each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSlice:
    """A slice and the shard that holds it."""

    slice: VariableSlice
    shard: int


Placement = tuple[PlacedSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Variables in order of creation, the optimizer that trains them, and how they are placed."""

    variables: tuple[VariableSpec, ...]
    optimizer: OptimizerSpec
    placement: PlacementPolicy
    averages: AverageSpec | None = None
    clip: ClipSpec = NO_CLIP

    def __post_init__(self) -> None:
        if not self.variables:
            raise InvalidSpec("the model has no variables; give at least one")
        if len(self.variables) > MAX_VARIABLES:
            raise LimitExceeded(f"the model has {len(self.variables)} variables, {MAX_VARIABLES} at most")
        seen: set[str] = set()
        for variable in self.variables:
            if variable.name in seen:
                raise InvalidSpec(f"variable {variable.name!r} occurs twice; names must be unique")
            seen.add(variable.name)
        self._check_references()

    def _check_references(self) -> None:
        by_name = {variable.name: variable for variable in self.variables}
        for name, _ in (*self.placement.pins, *self.placement.loads):
            if name not in by_name:
                raise InvalidSpec(f"placement: there is no variable {name!r} in the model; correct the name, or leave it out")
        for name, _ in self.placement.pins:
            partition = by_name[name].partition
            if partition is not None and partition.num_slices > 1:
                raise InvalidSpec(f"variable {name!r} is pinned to one ps and cut into {partition.num_slices} slices; do one of the two")
        for name in self.averages.variables if self.averages is not None else ():
            if name not in by_name:
                raise InvalidSpec(f"averages: there is no variable {name!r} in the model; correct the name, or leave it out")
            if by_name[name].is_sparse or by_name[name].is_state:
                raise InvalidSpec(f"averages: variable {name!r} is a table or takes plain updates; others have averages")

    def differences(self, other: "ModelSpec") -> list[str]:
        """Says in words how `other` differs from this model, variable by variable and field by field; empty if it does not."""
        return list(self._differences(other))

    def _differences(self, other: "ModelSpec") -> Iterator[str]:
        mine, theirs = ({v.name: v for v in m.variables} for m in (self, other))
        for name, variable in mine.items():
            if name not in theirs:
                yield f"variable {name!r} is missing"
            else:
                yield from _variable_differences(variable, theirs[name])
        for name in theirs:
            if name not in mine:
                yield f"variable {name!r} is not in the cluster's model"
        yield from _optimizer_differences(self.optimizer, other.optimizer)
        yield from _field_differences("placement", _placement_fields(self.placement), _placement_fields(other.placement))
        if self.averages != other.averages:
            yield f"averages are {other.averages or 'not kept'}, the cluster's are {self.averages or 'not kept'}"
        if self.clip != other.clip:
            yield f"limits are {other.clip}, the cluster's are {self.clip}"
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield "the variables come in another order"


def _variable_differences(mine: VariableSpec, theirs: VariableSpec) -> Iterator[str]:
    what = f"variable {mine.name!r}"
    if (mine.shape, mine.data_type) != (theirs.shape, theirs.data_type):
        yield f"{what} has shape {theirs.shape} {theirs.data_type.value}, the cluster's has {mine.shape} {mine.data_type.value}"
    yield from _field_differences(what, *(_variable_options(variable) for variable in (mine, theirs)))


def _variable_options(variable: VariableSpec) -> dict[str, str]:
    options = {name: getattr(variable, name) for name in ("is_sparse", "sparse_mean", "initializer", "constraint", "partition")}
    own = variable.optimizer
    return {name: str(value) for name, value in options.items()} | {"optimizer": "the model's" if own is None else own.key}


def _optimizer_differences(mine: OptimizerSpec, theirs: OptimizerSpec) -> Iterator[str]:
    if mine.name != theirs.name:
        yield f"optimizer is {theirs.name!r}, the cluster's is {mine.name!r}"
        return
    defaults = {name: default for name, (default, _) in OPTIMIZERS[mine.name].items()}
    is_same_schedule = mine.learning_rate.name == theirs.learning_rate.name
    my_fields, their_fields = (
        (_schedule_fields(spec.learning_rate) if is_same_schedule else {"learning_rate": _schedule_words(spec.learning_rate)})
        | _numbers(spec.hyperparameters, defaults)
        for spec in (mine, theirs)
    )
    yield from _field_differences(f"optimizer {mine.name!r}", my_fields, their_fields)


def _field_differences(what: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Both have the same fields."""
    for name, value in mine.items():
        if theirs[name] != value:
            yield f"{what}: {name} is {theirs[name]}, the cluster's is {value}"


def _schedule_fields(schedule: Schedule) -> dict[str, str]:
    if schedule.name == "constant":
        return {"learning_rate": _schedule_words(schedule)}
    return {f"learning_rate's {name}": value for name, value in _schedule_arguments(schedule).items()}


def _schedule_words(schedule: Schedule) -> str:
    arguments = _schedule_arguments(schedule)
    if schedule.name == "constant":
        return arguments["value"]
    return f"{schedule.name} ({', '.join(f'{name} {value}' for name, value in arguments.items())})"


def _schedule_arguments(schedule: Schedule) -> dict[str, str]:
    if schedule.name == "piecewise_constant":
        return {"boundaries": str(list(schedule.boundaries)), "values": str(list(schedule.values))}
    required, optional = SCHEDULES[schedule.name]
    return _numbers(schedule.arguments, dict.fromkeys(required, 0.0) | optional)


def _numbers(given: Mapping[str, float], defaults: Mapping[str, float]) -> dict[str, str]:
    return {name: repr(float(given[name])) if name in given else f"{default!r} by default" for name, default in defaults.items()}


def _placement_fields(placement: PlacementPolicy) -> dict[str, str]:
    loads, pins = (str(dict(sorted(pairs))) for pairs in (placement.loads, placement.pins))
    return {"strategy": repr(placement.strategy), "split_bytes": str(placement.split_bytes), "loads": loads, "pins": pins}
