"""Variables as they are declared: element types, shapes, first values, constraints, and how they are cut. Knows no offsets."""

import enum
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.expressions import VARIABLE, Formula
from ps_protocol.model.keys import KeySpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.programs import Names, Program, compiled, parsed
from ps_protocol.model.shown import shown

# What a variable may be given besides its type and shape: first values, a constraint, a partition, a kind of mean.


MAX_SLICES = 10_000


class SparseMean(enum.Enum):
    """The divisor of the rows of a sparse gradient: the contributions that have the row, or all contributions of the step."""

    PER_INDEX = 1
    PER_REPLICA = 2


class ConstraintKind(enum.Enum):
    """A condition that a variable is made to satisfy after each update.

    NON_NEGATIVE: no element below 0. CLIP: every element within `low` and `high`. MAX_NORM: the Euclidean norm over axis 0 at most `high`.
    UNIT_NORM: that norm is 1. A vector has one norm, and so has a scalar. FORMULA: the value of `formula`, in which it is `v`.
    """

    NON_NEGATIVE = 1
    CLIP = 2
    MAX_NORM = 3
    UNIT_NORM = 4
    FORMULA = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint with its numbers; those that its kind has no use for are 0."""

    kind: ConstraintKind
    low: float = 0.0
    high: float = 0.0
    formula: str = ""

    def __post_init__(self) -> None:
        _check_finite("constraint: low", self.low)
        _check_finite("constraint: high", self.high)
        if not isinstance(self.formula, str):
            raise InvalidSpec(f"constraint: formula: got a {type(self.formula).__name__}, want a str")
        if self.kind is ConstraintKind.FORMULA:
            _ = self.program  # refuses what is no formula, and what needs too much memory
        elif self.formula:
            raise InvalidSpec(f"constraint {self.kind.name.lower()}: it takes no formula")
        if self.kind is ConstraintKind.CLIP and self.low > self.high:
            raise InvalidSpec(f"constraint clip: low = {self.low} is above high = {self.high}; swap them")
        if self.kind is ConstraintKind.MAX_NORM and self.high <= 0:
            raise InvalidSpec(f"constraint max_norm: got {self.high}, want > 0")

    @property
    def needs_whole_variable(self) -> bool:
        """Whether the constraint is about more than single elements, so that the variable must lie on one shard."""
        if self.kind is ConstraintKind.FORMULA:
            return self.parsed.needs_all_elements
        return self.kind in (ConstraintKind.MAX_NORM, ConstraintKind.UNIT_NORM)

    @property
    def parsed(self) -> Formula:
        """The formula, checked."""
        return parsed(self.formula, _IN_PLACE)

    @property
    def program(self) -> Program:
        """The formula compiled for the variable, which it changes in place."""
        return compiled(self.formula, _IN_PLACE)


_IN_PLACE = Names(arrays=(VARIABLE,), in_place=(VARIABLE,))


class InitializerKind(enum.Enum):
    """CONSTANT: every element is `low`. UNIFORM: between `low` and `high`. NORMAL: mean `low`, standard deviation `high`."""

    CONSTANT = 1
    UNIFORM = 2
    NORMAL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """First values that the server makes by itself, so that a large table need not travel.

    The same `seed` gives the same values, however the variable is spread. The row `zero_row` begins with zeros, as one for padding does.
    """

    kind: InitializerKind
    low: float = 0.0
    high: float = 0.0
    seed: int = 0
    zero_row: int | None = None

    def __post_init__(self) -> None:
        _check_finite("initializer: low", self.low)
        _check_finite("initializer: high", self.high)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise InvalidSpec(f"initializer: seed = {shown(self.seed)}, want a whole number, 0 to 2^63 - 1")
        if self.zero_row is not None and (type(self.zero_row) is not int or self.zero_row < 0):
            raise InvalidSpec(f"initializer: zero_row = {shown(self.zero_row)}, want a row from 0 on, or None")
        if self.kind is InitializerKind.UNIFORM and self.low > self.high:
            raise InvalidSpec(f"initializer uniform: low = {self.low} is above high = {self.high}; swap them")
        if self.kind is InitializerKind.NORMAL and self.high < 0:
            raise InvalidSpec(f"initializer normal: standard deviation = {self.high}, want >= 0")


@light_dataclass(frozen=True, slots=True, kw_only=True)
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
        raise InvalidSpec(f"{what} = {shown(value)}, want a finite number")


# Element types and variable specifications, checked.


Array = npt.NDArray[Any]

MAX_NAME_BYTES = 256
MAX_RANK = 32
MAX_VARIABLES = 100_000
MAX_TENSOR_BYTES = 1 << 36
# The extent of axis 0 of a table whose rows are named by keys.
ANY = -1
# The product of all extents that are not 0. Of elements of eight bytes NumPy can have no array with more than twice as many.
MAX_EXTENTS = 1 << 59


class DataType(enum.Enum):
    """Element type of a variable, always little-endian."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    # Members are compared by identity; the hash of an enum's name is computed anew each time, and every step looks types up.
    __hash__ = object.__hash__

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type, little-endian; that of ml_dtypes for bfloat16, which is imported only here."""
        return _bfloat16() if self is DataType.BFLOAT16 else _DTYPES[self]

    @property
    def sum_dtype(self) -> np.dtype[Any]:
        """The type that sums and formulas are computed in: float32 for the half-precision types, whose own sums stop growing early."""
        return _DTYPES[DataType.FLOAT32] if self.itemsize == 2 else self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_DTYPES: dict[DataType, np.dtype[Any]] = {
    DataType.FLOAT32: np.dtype("<f4"),
    DataType.FLOAT64: np.dtype("<f8"),
    DataType.FLOAT16: np.dtype("<f2"),
}
_ITEM_BYTES = {DataType.FLOAT32: 4, DataType.FLOAT64: 8, DataType.FLOAT16: 2, DataType.BFLOAT16: 2}


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidSpec("bfloat16 needs the package ml_dtypes; pip install ml_dtypes, or use float32") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def data_type_of(array: Array, *, name: str) -> DataType:
    """Returns the element type of `array`; raises InvalidSpec naming the variable if the system has no such type."""
    for data_type, dtype in _DTYPES.items():
        if array.dtype == dtype:
            return data_type
    if array.dtype.name == DataType.BFLOAT16.value:
        return DataType.BFLOAT16
    if array.dtype.newbyteorder("=") in (np.float32, np.float64, np.float16):
        native = array.dtype.newbyteorder("=").name
        raise InvalidSpec(f"variable {name!r}: byte order: little-endian only; convert with .astype({native!r})")
    known = ", ".join(data_type.value for data_type in DataType)
    raise InvalidSpec(f"variable {name!r}: dtype {array.dtype} is not supported; want one of {known}; convert with .astype(np.float32)")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class VariableSpec:
    """One variable of the model.

    `optimizer` None: the model's. `is_sparse`: a table whose gradients come as rows; it is read by rows, and not with the other variables.
    `initializer` (tables only) None: the first values are sent. `partition` None: cut by size, by the model's placement policy.
    `keys` (tables only): a keyed table begins without any row, and ANY is the extent of axis 0; None: rows have numbers.
    """

    name: str
    data_type: DataType
    shape: tuple[int, ...]
    optimizer: OptimizerSpec | None = None
    is_sparse: bool = False
    sparse_mean: SparseMean = SparseMean.PER_INDEX
    initializer: Initializer | None = None
    constraint: Constraint | None = None
    partition: Partition | None = None
    keys: KeySpec | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_shape(self.shape if self.keys is None else self.shape[1:], name=self.name)
        if self.nbytes > MAX_TENSOR_BYTES:
            raise LimitExceeded(f"variable {self.name!r}: {self.nbytes} bytes, limit {MAX_TENSOR_BYTES}; split it into several variables")
        self._check_options()

    def _check_options(self) -> None:
        what = f"variable {self.name!r}"
        if self.is_sparse and not self.shape:
            raise InvalidSpec(f"{what}: a scalar has no rows; a sparse variable needs at least one axis")
        if self.is_sparse and self.constraint is not None:
            raise InvalidSpec(f"{what}: a sparse variable cannot have a constraint: not all of it is looked at in a step; make it dense")
        if self.is_sparse and self.partition is not None and self.partition.axis:
            raise InvalidSpec(f"{what}: a sparse variable can only be cut along axis 0, between rows; got axis {self.partition.axis}")
        if self.is_sparse and self.optimizer is not None and self.is_state:
            raise InvalidSpec(f"{what}: {self.optimizer.name!r} is for dense variables; a sparse one takes gradients")
        if self.initializer is not None and not self.is_sparse:
            raise InvalidSpec(f"{what}: only sparse variables are initialised by the server; give the values of a dense one")
        zero_row = None if self.initializer is None else self.initializer.zero_row
        if self.keys is not None:
            self.keys.check(what)
            if not self.is_sparse or self.initializer is None or self.shape[:1] != (ANY,):
                raise InvalidSpec(f"{what}: only a table of any rows ({ANY}, …) whose first values its server makes has keys")
            if zero_row is not None:
                raise InvalidSpec(f"{what}: its initializer makes row {zero_row} zero, and rows with keys have no number")
        if zero_row is not None and zero_row >= self.shape[0]:
            raise InvalidSpec(f"{what}: its initializer makes row {zero_row} zero, and there are {self.shape[0]} rows")
        if self.partition is None:
            return
        if self.partition.axis >= max(1, len(self.shape)):
            raise InvalidSpec(f"{what}: shape {self.shape} has no axis {self.partition.axis} to cut along")
        extent = self.extent(self.partition.axis)
        if self.partition.num_slices > max(1, extent):
            raise InvalidSpec(f"{what}: {self.partition.num_slices} slices of axis {self.partition.axis}, which has {extent}")
        if self.partition.num_slices > 1 and self.constraint is not None and self.constraint.needs_whole_variable:
            raise InvalidSpec(f"{what}: its constraint needs the whole variable in one place; take away the partition or the constraint")

    @property
    def is_state(self) -> bool:
        """Whether the variable takes plain updates instead of gradients."""
        return self.optimizer is not None and self.optimizer.is_update_rule

    @property
    def size(self) -> int:
        """Number of elements; 0 for a keyed table, which begins without any."""
        return math.prod(self.shape) if self.keys is None else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.data_type.itemsize

    @property
    def num_rows(self) -> int:
        """Extent of axis 0; 1 for a scalar."""
        return self.extent(0)

    def extent(self, axis: int) -> int:
        """Returns the number of parts that can be cut along an axis: its extent, 1 for a scalar, and a keyed table's buckets of keys."""
        if self.keys is not None and axis == 0:
            return self.keys.num_buckets
        return self.shape[axis] if self.shape else 1


def check_name(name: str) -> None:
    """Raises InvalidSpec unless `name` is 1 to 256 bytes of UTF-8 without control characters and without a space at either end."""
    if not isinstance(name, str):
        raise InvalidSpec(f"name: got {type(name).__name__}, want a str")
    if not name:
        raise InvalidSpec(f"name is empty; want 1 to {MAX_NAME_BYTES} bytes")
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidSpec(f"name {name!r}: not valid UTF-8") from None
    if num_bytes > MAX_NAME_BYTES:
        raise InvalidSpec(f"name: {num_bytes} bytes, want <= {MAX_NAME_BYTES}: {name[:40]!r}…")
    if not name.isprintable():
        raise InvalidSpec(f"name {name!r}: has a control character; use printable characters")
    if name != name.strip():
        raise InvalidSpec(f"name {name!r}: begins or ends with a space")


def check_shape(shape: tuple[int, ...], *, name: str) -> None:
    """Raises InvalidSpec unless `shape` has at most 32 axes, each of a plausible extent."""
    if len(shape) > MAX_RANK:
        raise InvalidSpec(f"variable {name!r}: rank {len(shape)}, want <= {MAX_RANK}")
    for axis, extent in enumerate(shape):
        if not isinstance(extent, int) or isinstance(extent, bool):
            raise InvalidSpec(f"variable {name!r}: shape[{axis}] is {extent!r}, want an int")
        if extent < 0:
            raise InvalidSpec(f"variable {name!r}: shape[{axis}] = {extent}, want >= 0")
    # NumPy multiplies the extents that are not zero, so a zero elsewhere does not excuse a product that no array can have.
    if math.prod(extent for extent in shape if extent) > MAX_EXTENTS:
        raise InvalidSpec(f"variable {name!r}: shape {shape} is too large")


# How a variable is cut over parameter servers, as functions of its shape and type.
#
# Sources: tf.compat.v1.fixed_size_partitioner, variable_axis_size_partitioner, min_max_variable_partitioner.


# (shape, dtype) -> number of slices of each axis, all 1 but for one axis at most.
Partitioner = Callable[[Sequence[int], Any], Sequence[int]]

DEFAULT_MIN_SLICE_BYTES = 256 << 10


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Partitioner:
    """Returns the partitioner that cuts `axis` into `num_shards` slices, or as many as it has units if those are fewer."""
    _check_count("num_shards", num_shards)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        return _slices(shape, axis, min(num_shards, _extent(shape, axis)))

    return partition


def variable_axis_size_partitioner(
    max_shard_bytes: int, axis: int = 0, bytes_per_string_element: int = 16, max_shards: int | None = None
) -> Partitioner:
    """Returns the partitioner that cuts `axis` into slices of at most `max_shard_bytes` bytes (or one unit), `max_shards` at most.

    `bytes_per_string_element` is checked and has no other meaning: variables are numbers here.
    """
    _check_count("max_shard_bytes", max_shard_bytes)
    _check_count("bytes_per_string_element", bytes_per_string_element)
    if max_shards is not None:
        _check_count("max_shards", max_shards)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        extent = _extent(shape, axis)
        unit_bytes = math.prod(shape) // extent * _itemsize(dtype) if extent else 0
        units = max(1, max_shard_bytes // unit_bytes) if unit_bytes else max(1, extent)
        count = math.ceil(extent / units)
        return _slices(shape, axis, count if max_shards is None else min(max_shards, count))

    return partition


def min_max_variable_partitioner(max_partitions: int = 1, axis: int = 0, min_slice_size: int = DEFAULT_MIN_SLICE_BYTES) -> Partitioner:
    """Returns the partitioner that cuts `axis` into slices of at least `min_slice_size` bytes, `max_partitions` at most."""
    _check_count("max_partitions", max_partitions)
    _check_count("min_slice_size", min_slice_size)
    _check_axis(axis)

    def partition(shape: Sequence[int], dtype: npt.DTypeLike) -> list[int]:
        extent = _extent(shape, axis)
        total_bytes = math.prod(shape) * _itemsize(dtype)
        return _slices(shape, axis, min(extent, max_partitions, max(1, math.ceil(total_bytes / min_slice_size))))

    return partition


def partition_of(partitioner: Partitioner, *, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Partition:
    """Returns the partition that a partitioner asks for. Raises InvalidSpec unless it cuts one axis at most, and into no more than fit."""
    what = f"variable {name!r}: its partitioner"
    if not shape:
        raise InvalidSpec(f"{what} is for a scalar, which cannot be cut; take it away")
    if not callable(partitioner):
        raise InvalidSpec(f"{what} is {partitioner!r}, want what fixed_size_partitioner(2) or another partitioner function returns")
    counts = partitioner(shape, dtype)
    if not isinstance(counts, Sequence) or isinstance(counts, (str, bytes)) or len(counts) != len(shape):
        raise InvalidSpec(f"{what} returned {counts!r}, want a list of {len(shape)} numbers of slices, one for each axis of {shape}")
    cut = [axis for axis, count in enumerate(counts) if count != 1]
    if len(cut) > 1:
        raise InvalidSpec(f"{what} returned {list(counts)!r}; only one axis can be cut")
    axis = cut[0] if cut else 0
    count = counts[axis]
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 1 <= count <= max(1, shape[axis]):
        raise InvalidSpec(f"{what} returned {list(counts)!r}; axis {axis} has {shape[axis]}, want 1 to that many slices")
    return Partition(axis=axis, num_slices=int(count))


def _slices(shape: Sequence[int], axis: int, count: int) -> list[int]:
    return [max(1, count) if index == axis else 1 for index in range(len(shape))]


def _extent(shape: Sequence[int], axis: int) -> int:
    if axis >= len(shape):
        raise InvalidSpec(f"partitioner: cannot cut axis {axis} of a variable of shape {tuple(shape)}; it has {len(shape)} axes")
    return shape[axis]


def _itemsize(dtype: npt.DTypeLike) -> int:
    return np.dtype(dtype).itemsize


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidSpec(f"partitioner: {name} = {shown(value)}, want a whole number >= 1")


def _check_axis(axis: object) -> None:
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise InvalidSpec(f"partitioner: axis = {shown(axis)}, want a whole number >= 0")
