"""float32 to int8 in blocks of 256 that share a scale, and back. Knows arrays; no arena."""

import numpy as np

from ps_protocol.model.variables import Array

# Elements that share one scale, and the bytes of the scale (float32) that stands before them.
INT8_BLOCK = 256
SCALE_BYTES = 4
_LARGEST = np.float32(127)
_LEAST, _FLOAT32_MAX = np.float32(1e-34), np.finfo(np.float32).max
# Blocks that are converted at a time: their 65,536 elements stay in a core's cache.
_NUM_AT_ONCE = 256
_DTYPE = np.dtype([("scale", "<f4"), ("elements", "i1", (INT8_BLOCK,))])


def encode_int8(values: Array, out: Array) -> None:
    """Writes float32 `values` into `out`, uint8, of exactly the bytes that they take."""
    scratch = np.empty((_NUM_AT_ONCE, INT8_BLOCK), np.float32)
    num_whole = values.size // INT8_BLOCK
    whole, blocks = values[: num_whole * INT8_BLOCK].reshape(num_whole, INT8_BLOCK), out[: num_whole * _DTYPE.itemsize].view(_DTYPE)
    with np.errstate(all="ignore"):
        for start in range(0, num_whole, _NUM_AT_ONCE):
            part = slice(start, min(start + _NUM_AT_ONCE, num_whole))
            block = blocks[part]
            _encode(whole[part], block["scale"], block["elements"], scratch[: part.stop - part.start])
        rest = values[num_whole * INT8_BLOCK :].reshape(1, -1)
        if rest.size:
            tail = out[num_whole * _DTYPE.itemsize :]
            _encode(rest, tail[:SCALE_BYTES].view(np.float32), tail[SCALE_BYTES:].view(np.int8).reshape(1, -1), scratch[:1, : rest.size])


def decode_int8(encoded: Array, out: Array) -> None:
    """Writes the elements of `encoded`, uint8, any number of blocks of which the last may be shorter, into float32 `out`."""
    num_whole = out.size // INT8_BLOCK
    blocks, whole = encoded[: num_whole * _DTYPE.itemsize].view(_DTYPE), out[: num_whole * INT8_BLOCK].reshape(num_whole, INT8_BLOCK)
    with np.errstate(all="ignore"):
        for start in range(0, num_whole, _NUM_AT_ONCE):
            part = slice(start, start + _NUM_AT_ONCE)
            block = blocks[part]
            np.copyto(whole[part], block["elements"])
            np.multiply(whole[part], block["scale"][:, None], out=whole[part])
        rest = out[num_whole * INT8_BLOCK :]
        if rest.size:
            tail = encoded[num_whole * _DTYPE.itemsize :]
            np.multiply(tail[SCALE_BYTES:].view(np.int8), tail[:SCALE_BYTES].view(np.float32), out=rest)


def _encode(values: Array, scales: Array, elements: Array, scratch: Array) -> None:
    np.abs(values, out=scratch)
    largest = scratch.max(axis=1)
    np.divide(largest, _LARGEST, out=scales)
    # Also not so for NaN. So small a number has no reciprocal in float32.
    is_usual = (largest >= _LEAST) & (largest <= _FLOAT32_MAX)
    factors = np.divide(_LARGEST, largest, out=np.zeros_like(largest), where=is_usual)
    np.multiply(values, factors[:, None], out=scratch)
    np.rint(scratch, out=scratch)
    if not is_usual.all():
        scales[largest < _LEAST] = 0
        scales[~np.isfinite(largest)] = np.nan
        scratch[~is_usual] = 0
    np.copyto(elements, scratch, casting="unsafe")
