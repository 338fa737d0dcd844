"""The bytes of a simulated shard: numbers laid out as its layout says. Knows no process."""

from collections.abc import Callable

import numpy as np

from ps_protocol.model.layout import Layout
from ps_protocol.model.variables import Array


def arena_of(layout: Layout, numbers: Callable[[int], Array]) -> Array:
    """Returns an arena whose float32 elements, padding apart, are `numbers(their count)`, in order of the slices."""
    memory = np.zeros(layout.nbytes, np.uint8)
    count = sum(piece.nbytes for piece in layout.slices) // 4
    values, at = numbers(count), 0
    for index in range(len(layout.slices)):
        view = layout.view(memory, index)
        view[...] = values[at : at + view.size].reshape(view.shape)
        at += view.size
    return memory
