"""The trimmed mean of contributions, element by element. Knows arrays; no variable, step or thread."""

from collections.abc import Sequence

import numpy as np

from ps_protocol.encodings.halves import widen_into
from ps_protocol.model.merging import MergeSpec
from ps_protocol.model.variables import Array

# Values of all contributions that are put in order at a time: they, and their order, stay in a core's cache.
_NUM_AT_ONCE = 1 << 15


def trimmed_mean_of(
    blocks: Sequence[Array], merge: MergeSpec, *, out: Array, weights: Sequence[float] = (), present: Array | None = None
) -> Array:
    """Returns in `out` the trimmed mean of two or more blocks of equal length; its formula is that of `MergeName.TRIMMED_MEAN`.

    Blocks of another type are converted first, as `mean_of` does. Sums are made in the order of the blocks, in the type of `out`.
    `weights`: how much each block counts among those that are not left out, in proportion to each other. `present` (blocks x elements):
    whether a block has a value; None: all have all.
    """
    number, size = len(blocks), max(1, _NUM_AT_ONCE // len(blocks))
    values, ranks = np.empty((number, size), out.dtype), np.empty((number, size), np.intp)
    is_weighted = len({*weights}) > 1
    factors = np.array(weights if is_weighted else (1.0,) * number, out.dtype)
    places, trimmed_of = np.arange(number)[:, None], np.array([merge.num_trimmed(count) for count in range(number + 1)])
    for start in range(0, out.size, size):
        part = slice(start, start + size)
        total = out[part]
        block, rank = values[:, : total.size], ranks[:, : total.size]
        for position, given in enumerate(blocks):
            widen_into(given[part], block[position])
        if present is None:
            order, counts = np.argsort(block, axis=0, kind="stable"), np.full(1, number)
        else:
            # What is not there comes last.
            order, counts = np.lexsort((block, ~present[:, part]), axis=0), np.count_nonzero(present[:, part], axis=0)
        num_trimmed = trimmed_of[counts]
        np.put_along_axis(rank, order, np.broadcast_to(places, rank.shape), axis=0)
        is_kept = (rank >= num_trimmed) & (rank < counts - num_trimmed)
        divisor = np.zeros_like(total)
        total.fill(0)
        for position, factor in enumerate(factors):
            term = np.multiply(block[position], factor, out=block[position]) if is_weighted else block[position]
            np.add(total, term, out=total, where=is_kept[position])
            np.add(divisor, factor, out=divisor, where=is_kept[position])
        np.divide(total, divisor, out=total)
    return out
