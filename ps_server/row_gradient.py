"""Gradients of a table, as rows with their indices: put in order, and merged into a mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.errors import IndexOutOfRange
from ps_protocol.tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGradient:
    """`rows[i]` is the gradient of row `indices[i]`. `indices`: int64, strictly ascending once `in_order` has seen them."""

    indices: Array
    rows: Array


def check_indices(indices: Array, *, num_rows: int, name: str, first_row: int = 0) -> None:
    """Raises IndexOutOfRange naming the first index that is no row of a slice of `num_rows` rows; `first_row` is that of the slice."""
    if not indices.size or (int(indices.min()) >= 0 and int(indices.max()) < num_rows):
        return
    position = int(np.flatnonzero((indices < 0) | (indices >= num_rows))[0])
    where = f", counted from row {first_row}, the first one here" if first_row else ""
    raise IndexOutOfRange(
        f"variable {name!r}: indices[{position}] = {int(indices[position])}, want 0 to {num_rows - 1}{where}",
        facts={"variable": name, "position": str(position)},
    )


def in_order(gradient: RowGradient, *, sum_dtype: np.dtype[Any]) -> RowGradient:
    """Returns the same gradient with ascending indices, each once; rows of one index are summed in the order given.

    Sums are made in `sum_dtype` and stay in it, since rounding them to half precision would lose what the mean needs.
    """
    indices = gradient.indices
    if bool(np.all(indices[1:] > indices[:-1])):
        return gradient
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(is_first)
    rows = gradient.rows[order]
    if starts.size < ordered.size:
        rows = np.add.reduceat(rows.astype(sum_dtype, copy=False), starts, axis=0)
    return RowGradient(indices=ordered[starts], rows=rows)


def mean_of(
    gradients: Sequence[RowGradient], *, weights: Sequence[float], num_contributors: int | None, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the mean of gradients in order, summed in the order given, as an array of its own in `sum_dtype`.

    `weights`: a factor for each gradient, that changes nothing of what the sum is divided by. `num_contributors`: what every row is divided
    by; None: by the number of gradients that have it.
    """
    if len(gradients) == 1:
        indices, rows = gradients[0].indices, gradients[0].rows.astype(sum_dtype)
        if weights[0] != 1:
            rows *= sum_dtype.type(weights[0])
        divisor: Array | None = None
    else:
        indices = np.unique(np.concatenate([gradient.indices for gradient in gradients]))
        rows = np.zeros((indices.size, gradients[0].rows.shape[1]), sum_dtype)
        divisor = np.zeros((indices.size, 1), sum_dtype)
        for gradient, weight in zip(gradients, weights, strict=True):
            at = np.searchsorted(indices, gradient.indices)
            part = gradient.rows.astype(sum_dtype, copy=False)
            # No index twice, so nothing is lost where rows are added in place.
            rows[at] += part if weight == 1 else part * sum_dtype.type(weight)
            divisor[at] += 1
    if num_contributors is not None:
        rows /= sum_dtype.type(num_contributors)
    elif divisor is not None:
        rows /= divisor
    return RowGradient(indices=indices, rows=rows)
