"""Where slices of one variable overlap, and a slice that comes as a stream of bytes put into others."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.layout import VariableSlice
from ps_protocol.tensors import Array

# As much as is read at once on the way into another arrangement.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A slice, and the memory of its shape that its values are to be copied into."""

    piece: VariableSlice
    memory: Array


def overlap(one: VariableSlice, other: VariableSlice) -> int:
    """Returns how many elements two slices of one variable have in common."""
    return math.prod(len(range(*both)) for both in _common(one, other))


def fill(source: VariableSlice, targets: Sequence[Target], read_into: Callable[[Array], None]) -> None:
    """Reads the values of `source`, whose bytes come one after the other, and copies what they have in common with `targets`.

    `read_into` fills a contiguous array with the next bytes.
    """
    if len(targets) == 1 and targets[0].piece == source:
        read_into(targets[0].memory)
        return
    if not math.prod(source.shape):
        return
    itemsize = source.variable.data_type.itemsize
    dtype = source.variable.data_type.dtype
    scratch = np.empty(0, dtype)
    for block in _blocks(source.shape, max(1, BLOCK_BYTES // itemsize)):
        shape = tuple(stop - start for start, stop in block)
        if scratch.size < math.prod(shape):
            scratch = np.empty(math.prod(shape), dtype)
        values = scratch[: math.prod(shape)].reshape(shape)
        read_into(values)
        at = [(start + origin, stop + origin) for (start, stop), origin in zip(block, _origin(source), strict=True)]
        for target in targets:
            _copy(values, at, target)


def _copy(values: Array, at: Sequence[tuple[int, int]], target: Target) -> None:
    """Copies what lies in both; `at` is where in the variable the values are."""
    to = [(start, start + extent) for start, extent in zip(_origin(target.piece), target.piece.shape, strict=True)]
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(at, to, strict=True)]
    if any(start >= stop for start, stop in both):
        return
    source = tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(both, at, strict=True))
    into = tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(both, to, strict=True))
    target.memory[into] = values[source]


def _origin(piece: VariableSlice) -> tuple[int, ...]:
    """The place in the variable of a slice's first element."""
    return tuple(piece.start if axis == piece.axis else 0 for axis in range(len(piece.variable.shape)))


def _common(one: VariableSlice, other: VariableSlice) -> list[tuple[int, int]]:
    boxes = [list(zip(_origin(piece), piece.shape, strict=True)) for piece in (one, other)]
    return [(max(a, b), max(a, b, min(a + m, b + n))) for (a, m), (b, n) in zip(*boxes, strict=True)]


def _blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields boxes that are runs of elements in C order, one after the other, of at most `max_elements` each."""
    axis = 0
    while axis < len(shape) and math.prod(shape[axis + 1 :]) > max_elements:
        axis += 1
    if axis >= len(shape):
        yield tuple((0, extent) for extent in shape)
        return
    inner = tuple((0, extent) for extent in shape[axis + 1 :])
    size = max(1, max_elements // math.prod(shape[axis + 1 :]))
    for outer in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], size):
            yield (*((index, index + 1) for index in outer), (start, min(start + size, shape[axis])), *inner)
