"""A model as all workers must present it: variables, optimizer, placement policy. Knows no address and no value."""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.layout import VariableSlice
from ps_protocol.optimizer_spec import OPTIMIZERS, SCHEDULES, OptimizerSpec, Schedule
from ps_protocol.tensors import MAX_VARIABLES, VariableSpec

STRATEGIES = ("greedy_bytes", "round_robin")
DEFAULT_SPLIT_BYTES = 64 << 20
_MAX_SPLIT_BYTES = (1 << 64) - 1  # a uint64 on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """How variables are spread: a strategy, and the size above which a variable is split along axis 0 (0: never)."""

    strategy: str = "greedy_bytes"
    split_bytes: int = DEFAULT_SPLIT_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in STRATEGIES:
            raise InvalidSpec(f"placement strategy {reprlib.repr(self.strategy)}; want one of {', '.join(STRATEGIES)}")
        # Not isinstance: a bool is an int, but no size.
        if type(self.split_bytes) is not int or self.split_bytes < 0:
            raise InvalidSpec(f"split_bytes: got {reprlib.repr(self.split_bytes)}, want a whole number >= 0 (an int; 0: never split)")
        if self.split_bytes > _MAX_SPLIT_BYTES:
            raise InvalidSpec("split_bytes: got more than 2^64 - 1; want 0 to never split")


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

    def differences(self, other: "ModelSpec") -> list[str]:
        """Says in words how `other` differs from this model, variable by variable and field by field; empty if it does not."""
        return list(self._differences(other))

    def _differences(self, other: "ModelSpec") -> Iterator[str]:
        mine, theirs = ({v.name: v for v in m.variables} for m in (self, other))
        for name, variable in mine.items():
            if name not in theirs:
                yield f"variable {name!r} is missing"
            elif theirs[name] != variable:
                yield (
                    f"variable {name!r} has shape {theirs[name].shape} {theirs[name].data_type.value},"
                    f" the cluster's has {variable.shape} {variable.data_type.value}"
                )
        for name in theirs:
            if name not in mine:
                yield f"variable {name!r} is not in the cluster's model"
        yield from _optimizer_differences(self.optimizer, other.optimizer)
        yield from _field_differences("placement", _placement_fields(self.placement), _placement_fields(other.placement))
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield "the variables come in another order"


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
    return {"strategy": repr(placement.strategy), "split_bytes": str(placement.split_bytes)}
