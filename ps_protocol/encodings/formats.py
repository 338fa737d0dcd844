"""Which encodings of float32 exist, for what, and how long an arena is in each. Knows offsets; no message."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import ArenaRange, Layout
from ps_protocol.model.variables import Array, DataType

# Elements that share one scale, and the bytes of the scale (float32) that stands before them.
INT8_BLOCK = 256
SCALE_BYTES = 4
# Bytes of the number that a range of the top k begins with, and of one element's position and value.
COUNT_BYTES = 8
ENTRY_BYTES = 8


class FloatEncoding(enum.Enum):
    """How the float32 elements of an arena travel; those of other types always travel as they are. The last two are for gradients only."""

    AS_IS = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8_BLOCKS = 3
    TOP_K = 4

    @property
    def is_half(self) -> bool:
        """Whether every element travels by itself, in two bytes."""
        return self in (FloatEncoding.BFLOAT16, FloatEncoding.FLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRange:
    """The bytes `start` to `stop` of an encoded arena, and the range that they stand for. `is_encoded` False: its bytes as they are."""

    arena: ArenaRange
    start: int
    stop: int
    is_encoded: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.arena.stop - self.arena.start) // self.arena.data_type.itemsize


def encoded_ranges(layout: Layout, encoding: FloatEncoding) -> Iterator[EncodedRange]:
    """Yields where each range of the arena lies when it travels, in order. Raises InvalidSpec for the top k, whose length varies."""
    if encoding is FloatEncoding.TOP_K:
        raise InvalidSpec("encoding: the length of the top k is that of each contribution; ask its header")
    start = 0
    for arena in layout.arenas:
        is_encoded = encoding is not FloatEncoding.AS_IS and is_encodable(layout, arena)
        nbytes = arena.stop - arena.start
        stop = start + (_encoded(nbytes // 4, encoding) if is_encoded else nbytes)
        yield EncodedRange(arena=arena, start=start, stop=stop, is_encoded=is_encoded)
        start = stop


def is_encodable(layout: Layout, arena: ArenaRange) -> bool:
    """Whether a range is of float32 variables that take gradients."""
    rule = layout.rules[arena.rule]
    return arena.data_type is DataType.FLOAT32 and (rule is None or not rule.is_update_rule)


def encoded_nbytes(layout: Layout, encoding: FloatEncoding) -> int:
    """Returns the bytes of an arena as it travels. Raises InvalidSpec for the top k, whose length varies."""
    return max((one.stop for one in encoded_ranges(layout, encoding)), default=0)


def stretch(layout: Layout, memory: Array, encoding: FloatEncoding, arena: ArenaRange, start: int, stop: int) -> Array:
    """Returns the elements that bytes `start` to `stop` of the arena, all in the range `arena`, have in an encoded `memory`, sharing it.

    `encoding`: as they are, or halves. The elements are of the range's type, or those of a float32 range uint16 (the bits of bfloat16) or
    float16.
    """
    if encoding is FloatEncoding.AS_IS:
        return memory[start:stop].view(arena.data_type.dtype)
    one = next(one for one in encoded_ranges(layout, encoding) if one.arena.start == arena.start)
    if not one.is_encoded:
        return memory[one.start + start - arena.start : one.start + stop - arena.start].view(arena.data_type.dtype)
    halves = memory[one.start + (start - arena.start) // 2 : one.start + (stop - arena.start) // 2]
    return halves.view(np.uint16 if encoding is FloatEncoding.BFLOAT16 else np.float16)


def _encoded(size: int, encoding: FloatEncoding) -> int:
    return 2 * size if encoding.is_half else size + SCALE_BYTES * -(-size // INT8_BLOCK)
