"""What a user says of an accumulator, checked: element type, shape, numbers, reduction. Knows values only; no server."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ps_protocol.accumulators import UNKNOWN, Reduction
from ps_protocol.errors import InvalidSpec
from ps_protocol.tensors import DataType


def data_type_of(dtype: npt.DTypeLike | DataType) -> DataType:
    """Returns the element type that a NumPy type, its name, or "bfloat16" stands for. Raises InvalidSpec for others."""
    if isinstance(dtype, DataType):
        return dtype
    name = dtype if dtype == DataType.BFLOAT16.value else np.dtype(dtype).name
    try:
        return DataType(name)
    except ValueError:
        raise InvalidSpec(f"dtype: got {name}, want one of {', '.join(data_type.value for data_type in DataType)}") from None


def declared_shape(shape: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """Returns the shape with UNKNOWN for what is not declared. Raises InvalidSpec."""
    return None if shape is None else tuple(UNKNOWN if extent is None else whole_number("shape", extent) for extent in shape)


def whole_number(what: str, value: SupportsIndex) -> int:
    """Returns the number; `what` names it in the error. Raises InvalidSpec."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidSpec(f"{what}: got {value!r}, want a whole number") from None


def reduction_of(reduction_type: str) -> Reduction:
    """Returns the reduction of this name. Raises ValueError, as the original does."""
    if reduction_type not in Reduction.__members__:
        raise ValueError(f"reduction_type: got {reduction_type!r}, want one of {', '.join(Reduction.__members__)}")
    return Reduction[reduction_type]
