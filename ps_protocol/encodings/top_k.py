"""The elements of largest magnitude, their positions and values, and back. Knows arrays; no arena."""

from collections.abc import Callable, Iterator

import numpy as np

from ps_protocol.errors import IndexOutOfRange, MalformedMessage
from ps_protocol.model.variables import Array

# Bytes of the number that a range begins with, and of one element's position and value.
COUNT_BYTES = 8
ENTRY_BYTES = 8
# A position is a uint32.
MAX_POSITIONS = 1 << 32
Blocks = Callable[[], Iterator[tuple[int, Array]]]

_SAMPLE = 1 << 16
# How often a sample's limit is lowered before all elements are looked at.
_NUM_TRIES = 3
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BELOW_ALL = np.int32(-1)


def top_k_of(blocks: Blocks, size: int, count: int) -> tuple[Array, Array]:
    """Returns positions and values of the `count` elements of largest magnitude of `size`.

    `blocks` begins anew with each call: (position of the first element, float32 array) in order. They are read two times as a rule.
    """
    positions, values = _candidates(blocks, size, count)
    if positions.size == count:
        return positions, values
    magnitudes = values.view(np.int32) & _MAGNITUDE
    limit = np.partition(magnitudes, positions.size - count)[positions.size - count]
    is_wanted = magnitudes > limit
    ties = np.flatnonzero(magnitudes == limit)
    is_wanted[ties[: count - np.count_nonzero(is_wanted)]] = True
    return positions[is_wanted], values[is_wanted]


def top_k_nbytes(count: int) -> int:
    """Returns the bytes of a range of which `count` elements are sent."""
    return COUNT_BYTES + ENTRY_BYTES * count


def encode_top_k(blocks: Blocks, size: int, count: int, encoded: Array) -> Array:
    """Writes the `count` elements of largest magnitude of `size`, as `top_k_of` gives them, into `encoded`, and returns their positions."""
    positions, values = top_k_of(blocks, size, count)
    encoded[:COUNT_BYTES].view("<u8")[0] = count
    encoded[COUNT_BYTES : COUNT_BYTES + 4 * count].view("<u4")[:] = positions
    encoded[COUNT_BYTES + 4 * count :].view("<f4")[:] = values
    return positions


def decode_top_k(encoded: Array, out: Array) -> int:
    """Fills float32 `out` from what `encoded` begins with; returns how many bytes that was. Raises MalformedMessage or IndexOutOfRange."""
    _take(encoded, COUNT_BYTES)
    count = int(encoded[:COUNT_BYTES].view("<u8")[0])
    if count > out.size:
        raise MalformedMessage(f"top k: {count} elements of {out.size}; send each at most once")
    nbytes = top_k_nbytes(count)
    _take(encoded, nbytes)
    positions = encoded[COUNT_BYTES : COUNT_BYTES + 4 * count].view("<u4")
    _check_positions(positions, size=out.size)
    out.fill(0)
    out[positions] = encoded[COUNT_BYTES + 4 * count : nbytes].view("<f4")
    return nbytes


def _take(encoded: Array, nbytes: int) -> None:
    if nbytes > encoded.size:
        raise MalformedMessage(f"top k: {encoded.size} bytes are left, {nbytes} at least by the number of elements; they do not fit")


def _check_positions(positions: Array, *, size: int) -> None:
    if not positions.size:
        return
    if positions[-1] >= size:
        raise IndexOutOfRange(f"top k: position {positions[-1]}, the range has {size} elements")
    if not (positions[1:] > positions[:-1]).all():
        raise MalformedMessage("top k: positions do not ascend; send each once, in order")


def _candidates(blocks: Blocks, size: int, count: int) -> tuple[Array, Array]:
    """At least the wanted elements, in order."""
    if size <= _SAMPLE:
        return _above(blocks, _BELOW_ALL)
    sample = np.concatenate([block[:: -(-size // _SAMPLE)].view(np.int32) & _MAGNITUDE for _, block in blocks()])
    share = count / size
    rank = share * sample.size + 5 * (share * sample.size) ** 0.5 + 8
    for _ in range(_NUM_TRIES):
        if rank >= sample.size:
            break
        limit = np.partition(sample, sample.size - int(rank))[sample.size - int(rank)]
        positions, values = _above(blocks, limit)
        if positions.size >= count:
            return positions, values
        # Many may be exactly the limit: zeros, most often.
        found = _with_ties(blocks, limit, positions, values, count)
        if found is not None:
            return found
        rank *= 4
    return _above(blocks, _BELOW_ALL)


def _above(blocks: Blocks, limit: "np.int32") -> tuple[Array, Array]:
    positions, values = [], []
    for start, block in blocks():
        indices = np.flatnonzero((block.view(np.int32) & _MAGNITUDE) > limit)
        values.append(block[indices])
        positions.append((indices + start).astype(np.uint32))
    return np.concatenate(positions), np.concatenate(values)


def _with_ties(blocks: Blocks, limit: "np.int32", positions: Array, values: Array, count: int) -> tuple[Array, Array] | None:
    missing = count - positions.size
    ties: list[Array] = []
    signs: list[Array] = []
    for start, block in blocks():
        indices = np.flatnonzero((block.view(np.int32) & _MAGNITUDE) == limit)[:missing]
        ties.append((indices + start).astype(np.uint32))
        signs.append(block[indices])
        missing -= indices.size
        if not missing:
            break
    if missing:
        return None
    joined, values = np.concatenate([positions, *ties]), np.concatenate([values, *signs])
    order = np.argsort(joined)
    return joined[order], values[order]
