"""The bytes of a simulated shard: numbers laid out as its layout says, and rows of its table. Knows no process.

All that is pushed for a variable is pushed for the rows of some keys, too; so these rows have the values of the variable, unless their keys
were admitted later, or their rows have begun anew.
"""

from collections.abc import Callable

import numpy as np

from ps_protocol.model.keys import spread
from ps_protocol.model.layout import Layout
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId

# What all variables, and all rows, begin with.
FIRST_VALUE = 3.0
_KEYS = np.sort(spread(np.arange(12)))
_NUM_OTHERS, _MOST_LEFT_OUT = 40, 63
# What a server reserves at most for the rows of a contribution: three copies, and what it may have to make.
PUSHED_ROWS_BYTES = (len(_KEYS) + 1) * (3 * (8 + 16) + 38 + 2 * 16)


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


def keys_of(layout: Layout) -> Array:
    """Returns the keys, spread and sorted, whose rows at this shard get what its variable gets."""
    return _here(layout, _KEYS) if layout.tables else _KEYS[:0]


def push_of(layout: Layout, push_id: PushId, numbers: Callable[[int], Array]) -> tuple[Array, int]:
    """Returns the bytes of a contribution, and how many rows it has: those of `keys_of`, and perhaps that of a key of its own."""
    arena = arena_of(layout, numbers)
    rules = layout.tables[0].variable.keys
    # No key is left out more often than that: so no bucket counts as many as make it halve its counters, which the oracle does not do.
    most_left_out = (rules.admit_after if rules is not None and rules.admit_after else 2) - 1
    num_others = min(_NUM_OTHERS, _MOST_LEFT_OUT // most_left_out - len(_KEYS))
    other = spread(np.array([1000 + (push_id.worker * 7 + push_id.sequence) % num_others]))
    keys = np.sort(_here(layout, np.concatenate([_KEYS, other])))
    rows = np.broadcast_to(numbers(layout.tables[0].variable.shape[1]), (keys.size, layout.tables[0].variable.shape[1]))
    return np.concatenate([arena, keys.view(np.uint8), np.ascontiguousarray(rows).reshape(-1).view(np.uint8)]), keys.size


def _here(layout: Layout, keys: Array) -> Array:
    least, greatest = layout.tables[0].index_range
    return keys[(keys >= least) & (keys <= greatest)]
