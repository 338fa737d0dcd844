"""Gradients of a table, as rows with their indices: checked, put in order, and merged into a mean. Knows no table."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import IndexOutOfRange
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MergeSpec
from ps_protocol.model.variables import Array
from ps_server.numbers.trimmed import trimmed_mean_of


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RowGradient:
    """`rows[i]` is the gradient of row `indices[i]`. `indices`: int64, strictly ascending once `in_order` has seen them."""

    indices: Array
    rows: Array


def check_indices(indices: Array, piece: VariableSlice) -> None:
    """Raises IndexOutOfRange naming the first index that is no row of the slice."""
    least, greatest = (bound - piece.first_index for bound in piece.index_range)
    if not indices.size or (int(indices.min()) >= least and int(indices.max()) <= greatest):
        return
    name, position = piece.variable.name, int(np.flatnonzero((indices < least) | (indices > greatest))[0])
    where = f", counted from row {piece.first_index}, the first one here" if piece.first_index else ""
    raise IndexOutOfRange(
        f"variable {name!r}: indices[{position}] = {int(indices[position])}, want {least} to {greatest}{where}",
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


def _row_scale(where: Sequence[Array], weights: Sequence[float], num_rows: int) -> Array:
    """Returns for each row what its gradients' weights are multiplied with, so that they are as many as its gradients."""
    counts, sums = np.zeros((num_rows, 1)), np.zeros((num_rows, 1))
    for at, weight in zip(where, weights, strict=True):
        counts[at] += 1
        sums[at] += weight
    scale: Array = counts / sums
    return scale


def mean_of_rows(
    gradients: Sequence[RowGradient], *, weights: Sequence[float], divisor: float | None, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the mean of gradients in order, summed in the order given, as an array of its own in `sum_dtype`.

    `weights`: how much each gradient counts. `divisor`: what every row is divided by, and weights are factors; None: the mean of a row is
    that of the gradients that have it, weighted as a dense variable's.
    """
    if len(gradients) == 1:
        indices, rows = gradients[0].indices, gradients[0].rows.astype(sum_dtype)
        if weights[0] != 1 and divisor is not None:
            rows *= sum_dtype.type(weights[0])
        total: Array | None = None
    else:
        indices = np.unique(np.concatenate([gradient.indices for gradient in gradients]))
        rows = np.zeros((indices.size, gradients[0].rows.shape[1]), sum_dtype)
        where = [np.searchsorted(indices, gradient.indices) for gradient in gradients]
        total = np.zeros((indices.size, 1), sum_dtype)
        scale = _row_scale(where, weights, indices.size) if divisor is None and any(weight != weights[0] for weight in weights) else None
        for gradient, weight, at in zip(gradients, weights, where, strict=True):
            part = gradient.rows.astype(sum_dtype, copy=False)
            if scale is not None:
                part = part * (weight * scale[at]).astype(sum_dtype)
            elif divisor is not None and weight != 1:
                part = part * sum_dtype.type(weight)
            # No index twice, so nothing is lost where rows are added in place.
            rows[at] += part
            total[at] += 1
    if divisor is not None:
        rows /= sum_dtype.type(divisor)
    elif total is not None:
        rows /= total
    return RowGradient(indices=indices, rows=rows)


def scaled(gradient: RowGradient, factor: float, *, sum_dtype: np.dtype[Any]) -> RowGradient:
    """Returns the gradient times a number."""
    return gradient if factor == 1 else RowGradient(indices=gradient.indices, rows=gradient.rows.astype(sum_dtype) * sum_dtype.type(factor))


def trimmed_mean_of_rows(
    gradients: Sequence[RowGradient | None], merge: MergeSpec, *, weights: Sequence[float], lacks_none: bool, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the trimmed mean of gradients in order, in `sum_dtype`; takes memory for these rows of each of them.

    A row's mean is that of the gradients that have it; with `lacks_none` those that have not, None among them, have zeros there.
    """
    indices = np.unique(np.concatenate([gradient.indices for gradient in gradients if gradient is not None]))
    width = next(gradient.rows.shape[1] for gradient in gradients if gradient is not None)
    values, present = np.zeros((len(gradients), indices.size, width), sum_dtype), np.full((len(gradients), indices.size), lacks_none)
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            at = np.searchsorted(indices, gradient.indices)
            values[position, at], present[position, at] = gradient.rows, True
    rows = np.empty((indices.size, width), sum_dtype)
    is_here = None if present.all() else np.repeat(present, width, axis=1)
    flat = [one.reshape(-1) for one in values]
    trimmed_mean_of(flat, merge, out=rows.reshape(-1), weights=weights, present=is_here)
    return RowGradient(indices=indices, rows=rows)
