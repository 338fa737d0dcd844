"""float32 to bfloat16 or float16 and back, as fast as NumPy can. Knows arrays of bits; no arena."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ps_protocol.model.variables import Array

# Elements that are converted at a time, where that takes several operations: they stay in a core's cache.
_BLOCK = 1 << 15
_NEAR = 1 << 16  # elements that are copied near, for one operation that is slow on memory farther away
_LARGEST_ROUNDED = np.float32(65520)  # of float16: from here on it is an infinity
_SIGN, _EXPONENT, _QUIET_NAN = np.uint32(0x80000000), np.int32(0x7F800000), np.uint16(0x7FC0)
_LEAST_EXPONENT = np.int32((127 - 14) << 23)  # of float16's normal numbers
_ONE, _HALF_BELOW, _SIXTEEN = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)


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
    _narrow(values, encoded.view(np.uint16), _narrow_to_bfloat16)


def narrow_float16(values: Array, encoded: Array) -> None:
    """Writes float32 `values` into `encoded`, memory of two bytes for each, as float16."""
    _narrow(values, encoded.view(np.uint16), _narrow_to_float16)


def widen_bfloat16(encoded: Array, out: Array) -> None:
    """Writes the bfloat16 in `encoded`, memory that may lie anywhere, into float32 `out`. Exact."""
    bits = encoded.view(np.uint16)
    if (bfloat16 := _bfloat16()) is not None and bits.flags.aligned:
        with np.errstate(all="ignore"):
            np.copyto(out, bits.view(bfloat16))
        return
    _widen(bits, out, _widen_bfloat16)


def widen_float16(encoded: Array, out: Array) -> None:
    """Writes the float16 in `encoded`, memory that may lie anywhere, into float32 `out`. Exact."""
    _widen(encoded.view(np.uint16), out, _widen_float16)


def widen_into(block: Array, out: Array) -> None:
    """Writes a block of gradients into `out`, where sums are made: uint16 is the bits of bfloat16, other types convert by value."""
    if block.dtype == np.uint16:
        widen_bfloat16(block, out)
    elif block.dtype == np.float16 and out.dtype == np.float32:
        widen_float16(block, out)
    else:
        np.copyto(out, block)


def _narrow(values: Array, bits: Array, narrow_block: Callable[[Array, Array, Array, Array], None]) -> None:
    scratch = np.empty(min(_BLOCK, values.size), np.uint32), np.empty(min(_BLOCK, values.size), np.uint32)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _BLOCK):
            part = slice(start, min(start + _BLOCK, values.size))
            size = part.stop - start
            narrow_block(values[part], bits[part], scratch[0][:size], scratch[1][:size])


def _widen(bits: Array, out: Array, widen_block: Callable[[Array, Array], None]) -> None:
    with np.errstate(all="ignore"):
        for start in range(0, bits.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            widen_block(bits[part], out[part])


@cache
def _bfloat16() -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _narrow_to_bfloat16(values: Array, bits: Array, scratch: Array, _: Array) -> None:
    words = values.view(np.uint32)
    np.right_shift(words, _SIXTEEN, out=scratch)
    np.bitwise_and(scratch, _ONE, out=scratch)
    np.add(scratch, _HALF_BELOW, out=scratch)
    np.add(scratch, words, out=scratch)
    np.right_shift(scratch, _SIXTEEN, out=scratch)
    np.copyto(bits, scratch, casting="unsafe")
    # The dot product is the cheapest look at all elements; it is also not finite where elements are very large.
    if not np.isfinite(np.dot(values, values)):
        is_nan = np.isnan(values)
        bits[is_nan] = (words[is_nan] >> _SIXTEEN).astype(np.uint16) & np.uint16(0x8000) | _QUIET_NAN


def _widen_bfloat16(bits: Array, out: Array) -> None:
    words = out.view(np.uint32)
    np.copyto(words, bits)
    np.left_shift(words, _SIXTEEN, out=words)


def _narrow_to_float16(values: Array, bits: Array, scratch: Array, rounded: Array) -> None:
    # Not so if one is NaN.
    if not (values.max() < _LARGEST_ROUNDED and values.min() > -_LARGEST_ROUNDED):
        np.copyto(bits.view(np.float16), values, casting="unsafe")
        return
    words, magic, near = scratch.view(np.int32), scratch.view(np.float32), rounded.view(np.float32)
    # 1.5 * 2^13 times the element's own power of 2: when it is added, what float16 has no bits for falls off, rounded.
    np.bitwise_and(values.view(np.int32), _EXPONENT, out=words)
    np.maximum(words, _LEAST_EXPONENT, out=words)
    np.add(words, np.int32((13 << 23) + (1 << 22)), out=words)
    np.add(values, magic, out=near)
    np.subtract(near, magic, out=near)
    # float16's exponents begin 112 above float32's: now its bits are 13 further up, but for the sign.
    np.multiply(near, _DOWN, out=near)
    np.right_shift(rounded, np.uint32(13), out=rounded)
    np.bitwise_and(values.view(np.uint32), _SIGN, out=scratch)
    np.right_shift(scratch, _SIXTEEN, out=scratch)
    # The sign that the number itself has is cut off with the upper half.
    np.bitwise_or(rounded, scratch, out=rounded)
    np.copyto(bits, rounded, casting="unsafe")


def _widen_float16(bits: Array, out: Array) -> None:
    words = out.view(np.int32)
    # The sign fills the upper half; the bits come to where float32 has them, and the exponent is still 112 too small.
    np.copyto(words, bits.view(np.int16))
    np.left_shift(words, np.int32(13), out=words)
    np.bitwise_and(words, np.int32(-0x70002000), out=words)
    np.multiply(out, _UP, out=out)
    if not (out.max() < 65536 and out.min() > -65536):
        np.copyto(out, bits.view(np.float16))
