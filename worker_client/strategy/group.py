"""The replicas of a strategy, where its variables lie, and reductions over all replicas: the seam, and the group of one process."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from worker_client.strategy.reduction import ReduceOp, reduce_all

_WIRE_DTYPES = ("float16", "float32")


@dataclass(frozen=True, slots=True)
class CollectiveHints:
    """Options of a reduction over processes. No effect in one process.

    `bytes_per_pack`: values of one batch go together up to so many bytes of arrays, then the next ones (0: all at once), so that worker 0
    need not hold all replicas' at once. The limit is `timeout_seconds` (None: 60). `wire_dtype`, "float16" or "float32": wider
    floats travel as that, both ways; they are added in float32 at least, and all workers get the same bits.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise InvalidSpec(f"bytes_per_pack: got {self.bytes_per_pack!r}, want an int >= 0; 0: all values at once")
        is_number = isinstance(self.timeout_seconds, int | float) and not isinstance(self.timeout_seconds, bool)
        if self.timeout_seconds is not None and not (is_number and self.timeout_seconds > 0):
            raise InvalidSpec(f"timeout_seconds: got {self.timeout_seconds!r}, want seconds > 0, or None for 60")
        if self.wire_dtype is not None and self.wire_dtype not in _WIRE_DTYPES:
            raise InvalidSpec(f"wire_dtype: got {self.wire_dtype!r}, want {', '.join(_WIRE_DTYPES)}, or None: as they are")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One value to be made of those that the replicas contribute: their sum or mean, or with `op` None that of the first replica.

    `contributions` are those of this process's replicas, by id. `variable`: the name of the variable that the value is for, if any.
    """

    op: ReduceOp | None
    contributions: Mapping[int, Any]
    variable: str = ""


def combine(op: ReduceOp | None, contributions: Mapping[int, Any]) -> Any:
    """Returns the combination of all replicas' contributions. Raises ShapeMismatch, DtypeMismatch, ValueError."""
    return contributions[min(contributions)] if op is None else reduce_all(op, contributions)


class Cell(Protocol):
    """The place of one copy of a variable."""

    @property
    def device(self) -> str:
        """The name of the place."""

    def read(self) -> Array:
        """Returns the value; the array cannot be written."""

    def write(self, value: Array) -> None:
        """Replaces the value."""


class Group(Protocol):
    """All replicas of a strategy, seen from one process. Its calls belong to the thread that is across the replicas."""

    @property
    def replicas(self) -> range:
        """The ids of this process's replicas."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all processes."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of all replicas, by id."""

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the places of variables with one copy."""

    def begin(self) -> None:
        """Takes note that no more variables with one copy come."""

    def place(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns the cell of a new variable with one copy, on the device `beside` if given."""

    def writing(self) -> AbstractContextManager[None]:
        """Has variables with one copy that are written in the block reach their places together, at its end; not if it fails."""

    def combine(self, what: str, combinations: Sequence[Combination], *, hints: CollectiveHints) -> list[Any]:
        """Returns the combination of all replicas' contributions, the same in all processes. All processes call it in the same order."""

    def close(self) -> None:
        """Lets go of the connection that values meet over, if any. Idempotent."""


class MemoryCell:
    """A copy of a variable in this process's memory."""

    def __init__(self, device: str, value: Array) -> None:
        self.device, self._value = device, value

    def read(self) -> Array:
        """Returns the value; the array cannot be written."""
        return self._value

    def write(self, value: Array) -> None:
        """Replaces the value."""
        self._value = value


class LocalGroup:
    """The replicas of one process that is alone."""

    def __init__(self, num_replicas: int) -> None:
        self.replicas = range(num_replicas)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.replicas)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas, by id."""
        return tuple(f"worker:0/replica:{replica}" for replica in self.replicas)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The one place of variables: this process."""
        return ("ps:0",)

    def begin(self) -> None:
        """Variables may come at any time."""

    def place(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns a cell in memory."""
        return MemoryCell(beside or self.parameter_devices[0], value)

    def writing(self) -> AbstractContextManager[None]:
        """Everything is written at once."""
        return nullcontext()

    def combine(self, what: str, combinations: Sequence[Combination], *, hints: CollectiveHints) -> list[Any]:
        """Combines at once."""
        return [combine(one.op, one.contributions) for one in combinations]

    def close(self) -> None:
        """There is no connection."""
