"""float32 to bfloat16 or float16 and back, as fast as NumPy can. Knows arrays of bits; no arena."""

from functools import cache
from typing import Any

import numpy as np

from ps_protocol.model.variables import Array

# Elements that are converted at a time, where that takes several operations: they stay in a core's cache.
_BLOCK = 1 << 15
_NEAR = 1 << 16  # elements that are copied near, for one operation that is slow on memory farther away
_QUIET_NAN = np.uint16(0x7FC0)
_ONE, _HALF_BELOW, _SIXTEEN = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)


def narrow_bfloat16(values: Array, encoded: Array) -> None:
    """Writes float32 `values` into `encoded`, memory of two bytes for each, as bfloat16."""
    if (bfloat16 := _bfloat16()) is not None:
        rounded = encoded.view(bfloat16)
        # A loop of so many instructions an element waits for each line of memory that is not in the cache; a plain copy does not.
        near = np.empty(min(_NEAR, values.size), np.float32)
        with np.errstate(all="ignore"):
            for start in range(0, values.size, _NEAR):
                part = values[start : start + _NEAR]
                block = near[: part.size]
                np.copyto(block, part)
                np.copyto(rounded[start : start + part.size], block, casting="unsafe")
        return
    _narrow_to_bfloat16(values, encoded.view(np.uint16))


def narrow_float16(values: Array, encoded: Array) -> None:
    """Writes float32 `values` into `encoded`, memory of two bytes for each, as float16."""
    with np.errstate(all="ignore"):
        np.copyto(encoded.view(np.float16), values, casting="unsafe")


def widen_bfloat16(encoded: Array, out: Array) -> None:
    """Writes the bfloat16 in `encoded`, memory that may lie anywhere, into float32 `out`. Exact."""
    bits = encoded.view(np.uint16)
    if (bfloat16 := _bfloat16()) is not None and bits.flags.aligned:
        with np.errstate(all="ignore"):
            np.copyto(out, bits.view(bfloat16))
        return
    for start in range(0, bits.size, _BLOCK):
        words = out[start : start + _BLOCK].view(np.uint32)
        np.copyto(words, bits[start : start + _BLOCK])
        np.left_shift(words, _SIXTEEN, out=words)


def widen_float16(encoded: Array, out: Array) -> None:
    """Writes the float16 in `encoded`, memory that may lie anywhere, into float32 `out`. Exact."""
    with np.errstate(all="ignore"):
        np.copyto(out, encoded.view(np.float16))


def widen_into(block: Array, out: Array) -> None:
    """Writes a block of gradients into `out`, where sums are made: uint16 is the bits of bfloat16, other types convert by value."""
    if block.dtype == np.uint16:
        widen_bfloat16(block, out)
    elif block.dtype == np.float16 and out.dtype == np.float32:
        widen_float16(block, out)
    else:
        np.copyto(out, block)


@cache
def _bfloat16() -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _narrow_to_bfloat16(values: Array, encoded: Array) -> None:
    scratch = np.empty(min(_BLOCK, values.size), np.uint32)
    for start in range(0, values.size, _BLOCK):
        part, bits = values[start : start + _BLOCK], encoded[start : start + _BLOCK]
        words, rounded = part.view(np.uint32), scratch[: part.size]
        np.right_shift(words, _SIXTEEN, out=rounded)
        np.bitwise_and(rounded, _ONE, out=rounded)
        np.add(rounded, _HALF_BELOW, out=rounded)
        np.add(rounded, words, out=rounded)
        np.right_shift(rounded, _SIXTEEN, out=rounded)
        np.copyto(bits, rounded, casting="unsafe")
        # The dot product is the cheapest look at all elements; it is also not finite where elements are very large.
        with np.errstate(all="ignore"):
            is_all_finite = np.isfinite(np.dot(part, part))
        if not is_all_finite:
            is_nan = np.isnan(part)
            bits[is_nan] = (words[is_nan] >> _SIXTEEN).astype(np.uint16) & np.uint16(0x8000) | _QUIET_NAN
