"""The mean, or the sum, of several contributions' gradients: one block of elements at a time.

Sums are made in the order given and in the type of `out`: float32 for half-precision gradients, whose own sums stop growing early.
"""

from collections.abc import Sequence

import numpy as np

from ps_protocol.encodings_halves import widen_into
from ps_protocol.tensors import Array


def mean_of(blocks: Sequence[Array], *, out: Array, scratch: Array, weights: Sequence[float] = (), sums: bool = False) -> Array:
    """Returns the mean of one or more blocks of equal length, in `out` or, when there is nothing to compute, the one block itself.

    Blocks of another type are converted first; uint16 is the bits of bfloat16. `weights`: a factor for each block; they do
    not change what the sum is divided by. `sums`: nothing is divided at all.
    """
    if weights or any(block.dtype != out.dtype for block in blocks):
        _add_up_converted(blocks, weights, out=out, scratch=scratch)
    elif len(blocks) == 1:
        return blocks[0]
    else:
        np.add(blocks[0], blocks[1], out=out)
        for block in blocks[2:]:
            np.add(out, block, out=out)
    number = len(blocks)
    if sums or number == 1:
        return out
    count = out.dtype.type(number)
    if number & (number - 1):
        np.divide(out, count, out=out)
    else:
        # A power of two has an exact reciprocal: the same result at half the price.
        np.multiply(out, 1 / count, out=out)
    return out


def _add_up_converted(blocks: Sequence[Array], weights: Sequence[float], *, out: Array, scratch: Array) -> None:
    for position, block in enumerate(blocks):
        term = scratch if position else out
        widen_into(block, term)
        if weights and weights[position] != 1.0:
            np.multiply(term, out.dtype.type(weights[position]), out=term)
        if position:
            np.add(out, term, out=out)
