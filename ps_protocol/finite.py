"""Whether the elements of gradients are finite, and the words for those that are not. Pure: arrays and names; knows no step and no wire."""

import math
from collections.abc import Iterator

import numpy as np

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.layout import ArenaRange, Layout
from ps_protocol.tensors import Array

# Elements that are looked at one by one stay in a core's cache.
_BLOCK = 1 << 15
_FLOAT16, _BFLOAT16 = np.uint16(0x7C00), np.uint16(0x7F80)  # the bits of the exponent: all are set where an element is not finite


def gradient_ranges(layout: Layout) -> tuple[ArenaRange, ...]:
    """Returns the parts of an arena that have gradients, not plain updates: an update may be an infinity that somebody means."""
    rules = layout.rules
    return tuple(arena for arena in layout.arenas if (rule := rules[arena.rule]) is None or not rule.is_update_rule)


def are_finite(elements: Array) -> bool:
    """Whether all elements of a flat array are finite; allocates nothing of its size. uint16 stands for the bits of bfloat16."""
    if elements.itemsize > 2:
        # The dot product is the cheapest look at all elements; it is also not finite where elements are very large.
        with np.errstate(all="ignore"):
            if math.isfinite(np.dot(elements, elements)):
                return True
    return not count_nonfinite(elements)


def count_nonfinite(elements: Array) -> int:
    """Returns how many elements of a flat array are not finite; allocates nothing of its size. uint16 stands for the bits of bfloat16."""
    if elements.itemsize > 2:
        return sum(block.size - int(np.count_nonzero(np.isfinite(block))) for block in _blocks(elements))
    mask = _FLOAT16 if elements.dtype == np.float16 else _BFLOAT16
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in _blocks(elements.view(np.uint16)))


def refuse_nonfinite(name: str, elements: Array, *, who: str) -> None:
    """Raises NonFiniteGradient if some elements of the gradient of this variable are not finite; `who`: whose, and of which step."""
    count = count_nonfinite(elements)
    if count:
        what = "1 non-finite value" if count == 1 else f"{count} non-finite values"
        raise NonFiniteGradient(f"{name!r} has {what} ({who}); nothing was changed", facts={"variable": name, "count": str(count)})


def _blocks(elements: Array) -> Iterator[Array]:
    return (elements[start : start + _BLOCK] for start in range(0, elements.size, _BLOCK))
