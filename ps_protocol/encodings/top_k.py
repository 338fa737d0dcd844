"""The elements of largest magnitude, their positions and values, and back. Knows arrays and layouts; no message."""

from collections.abc import Callable, Iterator

import numpy as np

from ps_protocol.encodings.formats import COUNT_BYTES, ENTRY_BYTES, FloatEncoding, is_encodable
from ps_protocol.errors import IndexOutOfRange, MalformedMessage
from ps_protocol.model.layout import Layout
from ps_protocol.model.variables import Array

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


def _nbytes_with(layout: Layout, counts: Callable[[int], int]) -> int:
    """Returns the bytes of an arena of which each range of so many elements sends `counts(elements)`."""
    total = 0
    for arena in layout.arenas:
        nbytes = arena.stop - arena.start
        total += COUNT_BYTES + ENTRY_BYTES * counts(nbytes // 4) if is_encodable(layout, arena) else nbytes
    return total


def check_top_k_nbytes(layout: Layout, nbytes: int) -> None:
    """Raises MalformedMessage unless an arena of the top k can have this length."""
    least, most = _nbytes_with(layout, lambda _: 0), _nbytes_with(layout, lambda size: size)
    if not least <= nbytes <= most or (nbytes - least) % ENTRY_BYTES:
        raise MalformedMessage(
            f"encoded_bytes: {nbytes} for {FloatEncoding.TOP_K.name}; this shard's arena takes {least} to {most}, in steps of {ENTRY_BYTES}"
        )


def decode_top_k(encoded: Array, layout: Layout, out: Array) -> None:
    """Fills the arena `out` from its encoded bytes. Raises MalformedMessage or IndexOutOfRange; `out` is then undefined."""
    begin = 0
    for arena in layout.arenas:
        nbytes = arena.stop - arena.start
        target = out[arena.start : arena.stop]
        if not is_encodable(layout, arena):
            _take(encoded, begin, nbytes)
            target[:] = encoded[begin : begin + nbytes]
            begin += nbytes
            continue
        _take(encoded, begin, COUNT_BYTES)
        count = int(encoded[begin : begin + COUNT_BYTES].view("<u8")[0])
        if count > nbytes // 4:
            raise MalformedMessage(f"top k: {count} elements of {nbytes // 4}; send each at most once")
        begin += COUNT_BYTES
        _take(encoded, begin, ENTRY_BYTES * count)
        positions = encoded[begin : begin + 4 * count].view("<u4")
        _check_positions(positions, size=nbytes // 4)
        target.fill(0)
        target.view(np.float32)[positions] = encoded[begin + 4 * count : begin + ENTRY_BYTES * count].view("<f4")
        begin += ENTRY_BYTES * count
    if begin != encoded.size:
        raise MalformedMessage(f"top k: {encoded.size} bytes, its ranges have {begin}; the numbers of elements do not fit encoded_bytes")


def _take(encoded: Array, begin: int, nbytes: int) -> None:
    if begin + nbytes > encoded.size:
        raise MalformedMessage(f"top k: {encoded.size} bytes, {begin + nbytes} at least by its numbers of elements; they do not fit")


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
