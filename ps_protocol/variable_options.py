"""What a variable may be given besides its type and shape: first values, a constraint, a partition, a kind of mean. Knows no formula."""

import enum
import sys
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec

MAX_SLICES = 10_000


class SparseMean(enum.Enum):
    """What the rows of a sparse gradient are divided by: the contributions that have the row, or all contributions of the step."""

    PER_INDEX = 1
    PER_REPLICA = 2


class ConstraintKind(enum.Enum):
    """What a variable is made to satisfy after each update.

    NON_NEGATIVE: no element below 0. CLIP: every element within `low` and `high`. MAX_NORM: the Euclidean norm over axis 0 at most `high`.
    UNIT_NORM: that norm is 1. A vector has one norm, and so has a scalar.
    """

    NON_NEGATIVE = 1
    CLIP = 2
    MAX_NORM = 3
    UNIT_NORM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint with its numbers; those that its kind has no use for are 0."""

    kind: ConstraintKind
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("constraint: low", self.low)
        _check_finite("constraint: high", self.high)
        if self.kind is ConstraintKind.CLIP and self.low > self.high:
            raise InvalidSpec(f"constraint clip: low = {self.low} is above high = {self.high}; swap them")
        if self.kind is ConstraintKind.MAX_NORM and self.high <= 0:
            raise InvalidSpec(f"constraint max_norm: got {self.high}, want > 0")

    @property
    def needs_whole_variable(self) -> bool:
        """Whether it is about more than single elements, so that the variable must lie on one shard."""
        return self.kind in (ConstraintKind.MAX_NORM, ConstraintKind.UNIT_NORM)


class InitializerKind(enum.Enum):
    """CONSTANT: every element is `low`. UNIFORM: between `low` and `high`. NORMAL: mean `low`, standard deviation `high`."""

    CONSTANT = 1
    UNIFORM = 2
    NORMAL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """First values that the server makes by itself, so that a large table need not travel.

    The same `seed` gives the same values, however the variable is spread.
    """

    kind: InitializerKind
    low: float = 0.0
    high: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_finite("initializer: low", self.low)
        _check_finite("initializer: high", self.high)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise InvalidSpec(f"initializer: seed = {self.seed!r}, want a whole number, 0 to 2^63 - 1")
        if self.kind is InitializerKind.UNIFORM and self.low > self.high:
            raise InvalidSpec(f"initializer uniform: low = {self.low} is above high = {self.high}; swap them")
        if self.kind is InitializerKind.NORMAL and self.high < 0:
            raise InvalidSpec(f"initializer normal: standard deviation = {self.high}, want >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Cut along `axis` into `num_slices` slices, the first ones larger by one if it does not come out even."""

    axis: int
    num_slices: int

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise InvalidSpec(f"partition: axis = {self.axis}, want >= 0")
        if not 1 <= self.num_slices <= MAX_SLICES:
            raise InvalidSpec(f"partition: {self.num_slices} slices, want 1 to {MAX_SLICES}")


def _check_finite(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidSpec(f"{what} = {value!r}, want a finite number")
