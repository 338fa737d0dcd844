"""What a constrained variable is made to satisfy after each update.

Formulas are those of tf.keras.constraints (NonNeg, MaxNorm, UnitNorm, with the norm over axis 0 and their epsilon of 1e-7).
"""

from typing import Any

import numpy as np

from ps_protocol.tensors import Array
from ps_protocol.variable_options import Constraint, ConstraintKind

EPSILON = 1e-7


def constrain(value: Array, constraint: Constraint) -> None:
    """Changes `value`, which has the variable's shape and type, in place so that it satisfies the constraint."""
    if value.dtype.itemsize == 2:
        precise = value.astype(np.float32)
        constrain(precise, constraint)
        value[...] = precise
        return
    if constraint.kind is ConstraintKind.NON_NEGATIVE:
        np.maximum(value, 0, out=value)
    elif constraint.kind is ConstraintKind.CLIP:
        np.clip(value, _number(value, constraint.low), _number(value, constraint.high), out=value)
    else:
        norms = np.sqrt(np.sum(np.square(value), axis=0 if value.ndim else None, keepdims=True))
        wanted = np.minimum(norms, _number(value, constraint.high)) if constraint.kind is ConstraintKind.MAX_NORM else _number(value, 1)
        np.multiply(value, wanted / (norms + _number(value, EPSILON)), out=value)


def _number(value: Array, number: float) -> "np.floating[Any]":
    scalar: np.floating[Any] = value.dtype.type(number)
    return scalar
