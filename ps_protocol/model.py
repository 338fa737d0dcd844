"""A model as all workers must present it: variables, optimizer, placement policy. Knows no address and no value."""

from collections.abc import Iterator
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.layout import VariableSlice
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.tensors import MAX_VARIABLES, VariableSpec

STRATEGIES = ("greedy_bytes", "round_robin")
DEFAULT_SPLIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """How variables are spread: a strategy, and the size above which a variable is split along axis 0 (0: never)."""

    strategy: str = "greedy_bytes"
    split_bytes: int = DEFAULT_SPLIT_BYTES

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidSpec(f"placement strategy {self.strategy!r}; want one of {', '.join(STRATEGIES)}")
        if self.split_bytes < 0:
            raise InvalidSpec(f"split_bytes: got {self.split_bytes}, want >= 0 (0: never split)")


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
        """Says in words how `other` differs from this model, variable by variable; empty if it does not."""
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
        if self.optimizer != other.optimizer:
            yield f"optimizer is {other.optimizer}, the cluster's is {self.optimizer}"
        if self.placement != other.placement:
            yield f"placement is {other.placement}, the cluster's is {self.placement}"
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield "the variables come in another order"
