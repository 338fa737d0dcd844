"""What a program says about its variables: plain ones, tables, state, rows of gradients. Knows values and options; no model, no server."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.partitioners import Partitioner
from ps_protocol.variable_options import Constraint, ConstraintKind, Initializer, InitializerKind
from worker_client.schedules import plain_number

# Arrays have no single truth value, so none of these can be compared as a whole.


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A dense variable with more to say than its first value; a plain array stands for a `Variable` with no options.

    `value`: its first value, float16, bfloat16, float32 or float64, of any shape. `optimizer`: its own; None: the model's.
    `constraint`: what it is made to satisfy after each update. `partitioner`: how it is cut over parameter servers; None: by its size.
    """

    value: npt.ArrayLike
    _: KW_ONLY
    optimizer: OptimizerSpec | None = None
    constraint: Constraint | None = None
    partitioner: Partitioner | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A variable whose gradients come as rows (`IndexedSlices`) and that is read by rows: `session.read_rows()`, not `session.read()`.

    `value_or_shape`: the first values as an array, or a shape, of at least one axis, whose values the servers make by `initializer` (None:
    zeros), so that nothing travels; `dtype` goes with a shape, an array has its own. `optimizer`: its own; None: the model's.
    `sparse_mean`: a row of a step's mean is divided by the contributions that have it ("per_index", as in the original), or by all
    ("per_replica"). `partitioner` may cut it along axis 0 only; None: by its size. Rows that no gradient touches cost nothing, unless by
    Adam without `lazy`.
    """

    value_or_shape: npt.ArrayLike
    _: KW_ONLY
    dtype: npt.DTypeLike = "float32"
    initializer: Initializer | None = None
    optimizer: OptimizerSpec | None = None
    sparse_mean: str = "per_index"
    partitioner: Partitioner | None = None


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A variable without gradients, that plain updates change: statistics, counters. They ride in a contribution and count only with it.

    `update`: "mean" (it becomes the mean of the step's updates), "add" (their sum is added), or "moving_average" (it becomes
    `decay * itself + (1 - decay) * mean`). A step in which nobody gives an update leaves it as it is.
    """

    value: npt.ArrayLike
    update: str = "mean"
    decay: float = 0.99


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
    """Returns the constraint that keeps every element within `low` and `high`. Raises InvalidSpec if they are the wrong way round."""
    return Constraint(kind=ConstraintKind.CLIP, low=plain_number(low), high=plain_number(high))


def max_norm(limit: float) -> Constraint:
    """Returns the constraint that scales down what has a Euclidean norm over axis 0 above `limit` (> 0). Such a variable is not cut."""
    return Constraint(kind=ConstraintKind.MAX_NORM, high=plain_number(limit))


def unit_norm() -> Constraint:
    """Returns the constraint that scales to a Euclidean norm over axis 0 of 1. Such a variable is not cut."""
    return Constraint(kind=ConstraintKind.UNIT_NORM)


def zeros_initializer() -> Initializer:
    """Returns the initializer of zeros."""
    return constant_initializer(0.0)


def constant_initializer(value: float) -> Initializer:
    """Returns the initializer that gives every element `value`."""
    return Initializer(kind=InitializerKind.CONSTANT, low=plain_number(value))


def uniform_initializer(low: float, high: float, seed: int = 0) -> Initializer:
    """Returns the initializer of values evenly spread from `low` to `high`; the same `seed` gives the same, however the table is cut."""
    return Initializer(kind=InitializerKind.UNIFORM, low=plain_number(low), high=plain_number(high), seed=_seed(seed))


def normal_initializer(mean: float, stddev: float, seed: int = 0) -> Initializer:
    """Returns the initializer of normally distributed values; the same `seed` gives the same, however the table is cut."""
    return Initializer(kind=InitializerKind.NORMAL, low=plain_number(mean), high=plain_number(stddev), seed=_seed(seed))


def _seed(seed: int) -> int:
    return seed.item() if isinstance(seed, np.integer) else seed
