"""float32 to integers of 8 or 4 bits, in blocks that share a scale, and back. Knows arrays; no arena."""

import numpy as np

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

# Bytes of a block's scale (float32), which stands before its elements.
SCALE_BYTES = 4
_LEAST, _FLOAT32_MAX = np.float32(1e-34), np.finfo(np.float32).max
# Elements that are converted at a time: they stay in a core's cache.
_NUM_AT_ONCE = 1 << 16
# What two integers of 4 bits in a byte stand for, the first in its lower half: two float32, as one number to look up.
_SIGNED = np.arange(16, dtype=np.float32) - 16 * (np.arange(16) > 7).astype(np.float32)
_PAIRS = np.stack([np.tile(_SIGNED, 16), np.repeat(_SIGNED, 16)], axis=1).view(np.uint64).ravel()


def quantize(values: Array, scales: Array, integers: Array, *, bits: int) -> None:
    """Writes the scale of each row of `values`, and its elements as integers in float32; of a row that is not finite NaN, and zeros."""
    highest = np.float32((1 << bits - 1) - 1)
    np.abs(values, out=integers)
    largest = integers.max(axis=1)
    np.divide(largest, highest, out=scales)
    # Also not so for NaN. So small a number has no reciprocal in float32.
    is_usual = (largest >= _LEAST) & (largest <= _FLOAT32_MAX)
    factors = np.divide(highest, largest, out=np.zeros_like(largest), where=is_usual)
    np.multiply(values, factors[:, None], out=integers)
    np.rint(integers, out=integers)
    if not is_usual.all():
        scales[largest < _LEAST] = 0
        scales[~np.isfinite(largest)] = np.nan
        integers[~is_usual] = 0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ScaledIntegers:
    """Integers of `bits` bits, 8 or 4, of which `size` share a scale: the largest magnitude among them stands for the largest integer.

    Two integers of 4 bits share a byte, the first in its lower half; a lone last one leaves the upper half 0.
    """

    bits: int
    size: int

    def encode(self, values: Array, out: Array) -> None:
        """Writes float32 `values` into `out`, uint8, of exactly the bytes that they take."""
        scratch = np.empty((_NUM_AT_ONCE // self.size, self.size), np.float32)
        num_whole = values.size // self.size
        whole, blocks = values[: num_whole * self.size].reshape(num_whole, self.size), self._blocks(out, num_whole)
        with np.errstate(all="ignore"):
            for start in range(0, num_whole, scratch.shape[0]):
                part = slice(start, min(start + scratch.shape[0], num_whole))
                block = blocks[part]
                self._encode(whole[part], block["scale"], block["elements"], scratch[: part.stop - part.start])
            rest = values[num_whole * self.size :].reshape(1, -1)
            if rest.size:
                tail = out[blocks.nbytes :]
                self._encode(rest, tail[:SCALE_BYTES].view(np.float32), tail[SCALE_BYTES:].reshape(1, -1), scratch[:1, : rest.size])

    def decode(self, encoded: Array, out: Array) -> None:
        """Writes the elements of `encoded`, uint8, any number of blocks of which the last may be shorter, into float32 `out`."""
        num_whole = out.size // self.size
        blocks, whole = self._blocks(encoded, num_whole), out[: num_whole * self.size].reshape(num_whole, self.size)
        num_at_once = _NUM_AT_ONCE // self.size
        with np.errstate(all="ignore"):
            for start in range(0, num_whole, num_at_once):
                part = slice(start, start + num_at_once)
                block = blocks[part]
                self._widen(block["elements"], whole[part])
                np.multiply(whole[part], block["scale"][:, None], out=whole[part])
            rest = out[num_whole * self.size :]
            if rest.size:
                tail = encoded[blocks.nbytes :]
                self._widen(tail[None, SCALE_BYTES:], rest[None])
                np.multiply(rest, tail[:SCALE_BYTES].view(np.float32), out=rest)

    def _blocks(self, encoded: Array, num_whole: int) -> Array:
        block = np.dtype([("scale", "<f4"), ("elements", "u1", (self.size * self.bits // 8,))])
        return encoded[: num_whole * block.itemsize].view(block)

    def _encode(self, values: Array, scales: Array, elements: Array, scratch: Array) -> None:
        quantize(values, scales, scratch, bits=self.bits)
        if self.bits == 8:
            np.copyto(elements.view(np.int8), scratch, casting="unsafe")
            return
        halves = scratch.astype(np.int8).view(np.uint8) & np.uint8(15)
        np.copyto(elements, halves[:, ::2])
        elements[:, : values.shape[1] // 2] |= halves[:, 1::2] << np.uint8(4)

    def _widen(self, elements: Array, out: Array) -> None:
        if self.bits == 8:
            np.copyto(out, elements.view(np.int8))
            return
        pairs = np.take(_PAIRS, elements).view(np.float32)
        np.copyto(out, pairs[:, : out.shape[1]])


INT8 = ScaledIntegers(bits=8, size=256)
# Fewer share a scale, since so few bits hold less of what is smaller than the largest.
INT4 = ScaledIntegers(bits=4, size=128)
