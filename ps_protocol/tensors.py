"""Element types and variable specifications, checked. Knows names, shapes and sizes; nothing of where a variable lies."""

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec, LimitExceeded

Array = npt.NDArray[Any]

MAX_NAME_BYTES = 256
MAX_RANK = 32
MAX_VARIABLES = 100_000
MAX_TENSOR_BYTES = 1 << 36


class DataType(enum.Enum):
    """Element type of a variable, always little-endian."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type, little-endian."""
        return _DTYPES[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _DTYPES[self].itemsize


_DTYPES: dict[DataType, np.dtype[Any]] = {DataType.FLOAT32: np.dtype("<f4"), DataType.FLOAT64: np.dtype("<f8")}


def data_type_of(array: Array, *, name: str) -> DataType:
    """Returns the element type of `array`; raises InvalidSpec naming the variable if the system has no such type."""
    for data_type, dtype in _DTYPES.items():
        if array.dtype == dtype:
            return data_type
    if array.dtype.newbyteorder("=") in (np.float32, np.float64):
        native = array.dtype.newbyteorder("=").name
        raise InvalidSpec(f"variable {name!r}: byte order: little-endian only; convert with .astype({native!r})")
    known = ", ".join(data_type.value for data_type in DataType)
    raise InvalidSpec(f"variable {name!r}: dtype {array.dtype} is not supported; want one of {known}; convert with .astype(np.float32)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSpec:
    """Name, element type and shape of one variable of the model."""

    name: str
    data_type: DataType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        check_shape(self.shape, name=self.name)
        if self.nbytes > MAX_TENSOR_BYTES:
            raise LimitExceeded(f"variable {self.name!r}: {self.nbytes} bytes, limit {MAX_TENSOR_BYTES}; split it into several variables")

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
        raise InvalidSpec("name is empty; give every variable a name")
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidSpec(f"name {name!r}: not valid UTF-8") from None
    if num_bytes > MAX_NAME_BYTES:
        raise InvalidSpec(f"name: {num_bytes} bytes, want <= {MAX_NAME_BYTES}: {name[:40]!r}…")
    if any(not (character.isprintable() or character == " ") for character in name):
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
