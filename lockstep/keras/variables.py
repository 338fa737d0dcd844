"""Converts Keras' variables to named arrays and back. Knows Keras; no session, no optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.errors import InvalidSpec
from ps_protocol.model.variables import Array


def names_of(variables: Sequence[Any]) -> tuple[str, ...]:
    """Returns the variables' names: their paths, with a number appended if layers have the same path."""
    names: list[str] = []
    for variable in variables:
        path = str(variable.path)
        names.append(path if path not in names else f"{path}#{sum(name.partition('#')[0] == path for name in names) + 1}")
    return tuple(names)


def value_of(variable: Any) -> Array:
    """Returns a copy of a variable's value. Raises InvalidSpec if the backend compiles the training step."""
    return np.array(numbers_of(f"variable {variable.path!r}", variable))


def gradient_of(name: str, gradient: Any, *, dtype: Any) -> Array:
    """Returns a gradient as an array of its variable's type. Raises InvalidSpec if the backend compiles the training step."""
    array = numbers_of(f"gradient for {name!r}", gradient)
    # With mixed precision, gradients may have the type of the computation.
    return array if array.dtype == dtype else array.astype(dtype)


def numbers_of(what: str, tensor: Any) -> Array:
    """Returns a tensor as an array. Raises InvalidSpec if the backend compiles the training step, so that there are no numbers yet."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(tensor))
    except Exception as error:  # each backend raises its own error, without advice
        if getattr(getattr(tensor, "value", tensor), "is_meta", False):
            raise InvalidSpec(f"{what} has no values (device meta); build the model on a device that has memory") from error
        raise InvalidSpec(
            f"{what}: the {keras.backend.backend()} backend has no numbers for it here ({type(error).__name__}), since it compiles the "
            "training step. Give compile() run_eagerly=True, or use lockstep.keras.AverageUpdates, which runs beside a compiled step"
        ) from error


def are_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether both have the same values, bit for bit except for the kind of NaN."""
    return all(np.array_equal(value, other[name], equal_nan=True) for name, value in one.items())


def check_floats(names: Sequence[str], variables: Sequence[Any]) -> None:
    """Raises InvalidSpec for a variable that cannot be trained on servers."""
    for name, variable in zip(names, variables, strict=True):
        if not keras.backend.is_float_dtype(variable.dtype):
            raise InvalidSpec(f"variable {name!r} is {variable.dtype}, want floats: only they have gradients; set trainable=False")
