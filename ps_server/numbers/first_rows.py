"""The first values that a server makes of a table's rows by itself: from seed and row number, or from seed and key. Knows no server.

A row's values follow from the seed and the row's position in the whole variable, or its key, so that they do not depend on how it is cut.
"""

import math
from typing import Any

import numpy as np

from ps_protocol.model.keys import mix
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.variables import Array, Initializer, InitializerKind

# Elements that one generator makes, in whole rows: few enough to stay in a core's cache, many enough that making a generator costs nothing.
_INITIAL_BLOCK_ELEMENTS = 1 << 16


def fill_table(values: Array, piece: VariableSlice, initializer: Initializer) -> None:
    """Fills `values` (rows of `piece`, two-dimensional) with first values. Takes about 10 ns an element."""
    if not values.size:
        # Rows without elements take no memory: there may be too many of them for a loop.
        return
    if initializer.kind is InitializerKind.CONSTANT:
        values.fill(initializer.low)
    else:
        _fill_randomly(values, piece, initializer)
    if initializer.zero_row is not None and piece.start <= initializer.zero_row < piece.stop:
        values[initializer.zero_row - piece.start] = 0


def _fill_randomly(values: Array, piece: VariableSlice, initializer: Initializer) -> None:
    width = values.shape[1]
    block_rows = max(1, _INITIAL_BLOCK_ELEMENTS // max(1, math.prod(piece.variable.shape[1:])))
    sum_dtype = piece.variable.data_type.sum_dtype
    for block in range(piece.start // block_rows, -(-piece.stop // block_rows)):
        begin = block * block_rows
        # Only as many rows as needed, beginning with the block's first: the numbers before a row are the same in every cut.
        num_rows = min(begin + block_rows, piece.stop) - begin
        made = _made(initializer, block, (num_rows, width), sum_dtype)
        first = max(begin, piece.start)
        values[first - piece.start : begin + num_rows - piece.start] = made[first - begin :]


def _made(initializer: Initializer, block: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    generator = np.random.Generator(np.random.Philox(key=np.array([initializer.seed, block], np.uint64)))
    low, high = dtype.type(initializer.low), dtype.type(initializer.high)
    made: Array
    if initializer.kind is InitializerKind.UNIFORM:
        made = generator.random(shape, dtype=dtype.type)
        made *= high - low
        made += low
        # Rounding may reach the upper end, or pass it by one unit.
        np.minimum(made, high, out=made)
    else:
        made = generator.standard_normal(shape, dtype=dtype.type)
        made *= high
        made += low
    return made


_STEP = np.uint64(0x9E3779B97F4A7C15)


def rows_of_keys(initializer: Initializer, keys: Array, *, width: int, dtype: np.dtype[Any]) -> Array:
    """Returns first values of the rows of spread keys, one after the other, in float32 or float64."""
    if initializer.kind is InitializerKind.CONSTANT or not width:
        return np.full((keys.size, width), initializer.low, dtype)
    is_uniform = initializer.kind is InitializerKind.UNIFORM
    seed = np.array([initializer.seed], np.uint64)
    mix(seed)
    # Half a word for an element, or a whole one for a uniform one of float64. `keys` are random already.
    num_words = width if is_uniform and dtype.itemsize == 8 else -(-width // 2)
    words = (keys.view(np.uint64) ^ seed)[:, None] + np.arange(1, num_words + 1, dtype=np.uint64) * _STEP
    mix(words)
    if is_uniform:
        parts = words.astype("<u8", copy=False).view(f"<u{dtype.itemsize}")[:, :width]
        num_bits = 8 * dtype.itemsize - np.finfo(dtype).nmant - 1
        made: Array = (parts >> parts.dtype.type(num_bits)).astype(dtype)
        made *= dtype.type((initializer.high - initializer.low) * 2.0 ** (num_bits - 8 * dtype.itemsize))
        made += dtype.type(initializer.low)
        np.minimum(made, dtype.type(initializer.high), out=made)
        return made
    # Box and Muller: of 32 bits each, a distance from 0 and a direction.
    distance = np.sqrt(-2 * np.log(((words >> np.uint64(32)).astype(np.float64) + 0.5) / (1 << 32)))
    direction = (words & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2 * np.pi / (1 << 32))
    pairs = np.stack([distance * np.cos(direction), distance * np.sin(direction)], axis=-1)
    made = (pairs.reshape(keys.size, 2 * num_words)[:, :width] * initializer.high + initializer.low).astype(dtype)
    return made
