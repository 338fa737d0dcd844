"""Element types and variable specifications, checked. Knows names, shapes and sizes; nothing of where a variable lies."""

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.variable_options import Constraint, Initializer, Partition, SparseMean

Array = npt.NDArray[Any]

MAX_NAME_BYTES = 256
MAX_RANK = 32
MAX_VARIABLES = 100_000
MAX_TENSOR_BYTES = 1 << 36


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


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSpec:
    """One variable of the model.

    `optimizer` None: the model's. `is_sparse`: a table whose gradients come as rows; it is read by rows, and not with the other variables.
    `initializer` (tables only) None: the first values are sent. `partition` None: cut by size, by the model's placement policy.
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

    def __post_init__(self) -> None:
        check_name(self.name)
        check_shape(self.shape, name=self.name)
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
        if self.partition is None:
            return
        if self.partition.axis >= max(1, len(self.shape)):
            raise InvalidSpec(f"{what}: shape {self.shape} has no axis {self.partition.axis} to cut along")
        extent = self.shape[self.partition.axis] if self.shape else 1
        if self.partition.num_slices > max(1, extent):
            raise InvalidSpec(f"{what}: {self.partition.num_slices} slices of axis {self.partition.axis}, which has {extent}")
        if self.partition.num_slices > 1 and self.constraint is not None and self.constraint.needs_whole_variable:
            raise InvalidSpec(f"{what}: its constraint needs the whole variable in one place; take away the partition or the constraint")

    @property
    def is_state(self) -> bool:
        """Whether it takes plain updates instead of gradients."""
        return self.optimizer is not None and self.optimizer.is_update_rule

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.data_type.itemsize

    @property
    def num_rows(self) -> int:
        """Extent of axis 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1


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
    if math.prod(extent for extent in shape if extent) > (1 << 62):
        raise InvalidSpec(f"variable {name!r}: shape {shape} is too large")
