"""The memories that a step reads and writes, and blocks of them as the formulas want them.

Half-precision elements are computed in float32, and what is overwritten in place is first copied aside; both in reused blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps_protocol.encodings import FloatEncoding
from ps_protocol.encodings import stretch as encoded_stretch
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array, DataType
from ps_server.apply_plan import Run
from ps_server.optimizers_formula import NUM_SCRATCH

_MAX_SLOTS = 3
_MIN_SUM_BYTES = 4


@dataclass(slots=True, kw_only=True)
class StepMemory:
    """What one step reads (`value`, `gradients`) and writes (`out`, `slots` by name, `average`); all have the layout's arrangement.

    `out` may be `value` itself: then the values change in place. For each of `gradients`, `absent` has the slices that it has no gradient
    for (an empty gradient: all of them), and `weights` a factor; `scales` has a factor for the mean of each slice. Empty: none, and all 1.
    `encodings`: how each of `gradients` lies in its memory, as it is or in halves; empty: all as they are. `step` is that of the gradients.
    """

    value: Array
    out: Array
    gradients: Sequence[Array]
    step: int
    slots: Mapping[str, Array] = field(default_factory=dict)
    average: Array | None = None
    absent: Sequence[tuple[int, ...]] = ()
    weights: Sequence[float] = ()
    scales: Sequence[float] = ()
    encodings: Sequence[FloatEncoding] = ()


class Blocks:
    """Scratch memory for one thread, `block_bytes` for each purpose. What is never used costs no memory."""

    def __init__(self, block_bytes: int) -> None:
        max_size = block_bytes // _MIN_SUM_BYTES
        self._memories = [np.empty(block_bytes, np.uint8) for _ in range(3 + NUM_SCRATCH + _MAX_SLOTS)]
        self._squares = np.empty(max_size)
        self._typed: dict[DataType, TypedBlocks] = {}

    @property
    def pair(self) -> tuple[Array, Array]:
        """Two of the blocks, as bytes, for use between the arenas."""
        return self._memories[0], self._memories[1]

    def squares(self, size: int) -> Array:
        """Returns room for the squares of so many elements of a block, in float64."""
        return self._squares[:size]

    def of(self, data_type: DataType) -> "TypedBlocks":
        """Returns the blocks as elements of the type that those of `data_type` are computed in."""
        if data_type not in self._typed:
            self._typed[data_type] = TypedBlocks([memory.view(data_type.sum_dtype) for memory in self._memories])
        return self._typed[data_type]


class TypedBlocks:
    """Blocks of one element type, each for one purpose."""

    def __init__(self, blocks: Sequence[Array]) -> None:
        self._blocks = tuple(blocks)
        self._cut = Cut(self._blocks, blocks[0].size)

    def cut(self, size: int) -> "Cut":
        """Returns the blocks' first `size` elements; as long as the size is the same, the same views."""
        if size != self._cut.size:
            self._cut = Cut(self._blocks, size)
        return self._cut

    def number(self, value: float) -> "np.floating[Any]":
        """Returns a scalar of the type that is computed in."""
        scalar: np.floating[Any] = self._blocks[0].dtype.type(value)
        return scalar


class Cut:
    """Views of the first elements of blocks, each for one purpose."""

    __slots__ = ("is_finite", "mean", "out", "scratch", "size", "slots", "value")

    def __init__(self, blocks: Sequence[Array], size: int) -> None:
        self.size = size
        self.mean, *others = [block[:size] for block in blocks]
        self.scratch, (self.value, self.out, *self.slots) = others[:NUM_SCRATCH], others[NUM_SCRATCH:]
        # In memory that the formula is given afterwards.
        self.is_finite = self.scratch[0].view(np.bool_)[:size]


class RunView:
    """One run of the memories of a step, as elements of the variables' type."""

    def __init__(self, run: Run, memory: StepMemory, layout: Layout, *, slots: Sequence[str]) -> None:
        dtype, stretch = run.arena.data_type.dtype, slice(run.start, run.stop)
        self.run = run
        self.value = memory.value[stretch].view(dtype)
        self.out = memory.out[stretch].view(dtype)
        self.slots = [memory.slots[name][stretch].view(dtype) for name in slots]
        self.gradients = [
            encoded_stretch(layout, memory.gradients[position], memory.encodings[position], run.arena, run.start, run.stop)
            if memory.encodings
            else memory.gradients[position][stretch].view(dtype)
            for position in run.contributors
        ]
        weights = [memory.weights[position] for position in run.contributors] if memory.weights else ()
        self.weights = weights if weights and any(weight != 1.0 for weight in weights) else ()
        self.size = self.value.size
        self.is_half = run.arena.data_type.itemsize == 2
        self.is_in_place = memory.out is memory.value
        # Whether a formula may work on the step's memories themselves.
        self.is_direct = not self.is_half and not self.is_in_place

    def parts(self, block_bytes: int) -> Iterator[slice]:
        """Yields the parts whose elements, as they are computed with, take at most `block_bytes` each."""
        max_size = block_bytes // max(_MIN_SUM_BYTES, self.run.arena.data_type.itemsize)
        for start in range(0, self.size, max_size):
            yield slice(start, min(start + max_size, self.size))

    def keep(self, part: slice) -> None:
        """Lets the values of a part stay as they are."""
        if not self.is_in_place:
            np.copyto(self.out[part], self.value[part])


class BlockView:
    """A part of a run as a formula wants it: `out` apart from `value`, all in the type that is computed in. `store` when it is done."""

    def __init__(self, view: RunView, part: slice, cut: Cut) -> None:
        self._view, self._part = view, part
        self.value, self.out = view.value[part], view.out[part]
        self.slots = [slot[part] for slot in view.slots]
        # In place, others read and change the same elements meanwhile: a formula's intermediate results must not be seen there.
        if not view.is_direct:
            self.value, self.out = _copied(self.value, cut.value), cut.out
            self.slots = [_copied(slot, block) for slot, block in zip(self.slots, cut.slots, strict=False)]

    def store(self) -> None:
        """Writes results that were computed aside into the step's memories."""
        if not self._view.is_direct:
            np.copyto(self._view.out[self._part], self.out, casting="same_kind")
            for slot, computed in zip(self._view.slots, self.slots, strict=True):
                np.copyto(slot[self._part], computed, casting="same_kind")


def _copied(source: Array, into: Array) -> Array:
    np.copyto(into, source)
    return into
