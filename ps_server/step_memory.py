"""The memories that a step reads and writes, and blocks of them as the formulas want them. Knows arrays; no optimizer and no lock.

Half-precision elements are computed in float32, and what is overwritten in place is first copied aside; both in reused blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps_protocol.tensors import Array, DataType
from ps_server.apply_plan import Run
from ps_server.update_rule import NUM_SCRATCH

_MAX_SLOTS = 3
_MIN_SUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What one step reads (`value`, `gradients`) and writes (`out`, `slots` by name, `average`); all have the layout's arrangement.

    `out` may be `value` itself: then the values change in place. For each of `gradients`, `absent` has the slices that it has no gradient
    for (an empty gradient: all of them), and `weights` a factor; `scales` has a factor for the mean of each slice. Empty: none, and all 1.
    `step` is that of the gradients.
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


class Blocks:
    """Scratch memory for one thread. What is never used costs no memory."""

    def __init__(self, block_bytes: int) -> None:
        self.max_size = block_bytes // _MIN_SUM_BYTES
        self._memories = [np.empty(block_bytes, np.uint8) for _ in range(3 + NUM_SCRATCH + _MAX_SLOTS)]
        self._is_finite = np.empty(self.max_size, np.bool_)
        self._typed: dict[DataType, TypedBlocks] = {}

    @property
    def pair(self) -> tuple[Array, Array]:
        """Two of the blocks, as bytes, for use between the arenas."""
        return self._memories[0], self._memories[1]

    def of(self, data_type: DataType) -> "TypedBlocks":
        """Returns the blocks as elements of the type that those of `data_type` are computed in."""
        if data_type not in self._typed:
            self._typed[data_type] = TypedBlocks([memory.view(data_type.sum_dtype) for memory in self._memories], self._is_finite)
        return self._typed[data_type]


class TypedBlocks:
    """Blocks of one element type, each for one purpose."""

    def __init__(self, blocks: Sequence[Array], is_finite: Array) -> None:
        self.mean, self.value, self.out, *others = blocks
        self.scratch, self.slots = others[:NUM_SCRATCH], others[NUM_SCRATCH:]
        self.is_finite = is_finite

    def parts(self, size: int) -> Iterator[slice]:
        """Yields the parts of so many elements that fit into a block each."""
        for start in range(0, size, self.mean.size):
            yield slice(start, min(start + self.mean.size, size))

    def number(self, value: float) -> "np.floating[Any]":
        """Returns a scalar of the type that is computed in."""
        scalar: np.floating[Any] = self.mean.dtype.type(value)
        return scalar


class RunView:
    """One run of the memories of a step, as elements of the variables' type."""

    def __init__(self, run: Run, memory: StepMemory, *, slots: Sequence[str]) -> None:
        dtype, stretch = run.arena.data_type.dtype, slice(run.start, run.stop)
        self.value = memory.value[stretch].view(dtype)
        self.out = memory.out[stretch].view(dtype)
        self.slots = [memory.slots[name][stretch].view(dtype) for name in slots]
        self.gradients = [memory.gradients[position][stretch].view(dtype) for position in run.contributors]
        weights = [memory.weights[position] for position in run.contributors] if memory.weights else ()
        self.weights = weights if any(weight != 1.0 for weight in weights) else ()
        self.size = self.value.size
        self.is_half = run.arena.data_type.dtype != run.arena.data_type.sum_dtype
        self.is_in_place = np.may_share_memory(self.value, self.out)

    def keep(self) -> None:
        """Lets the values stay as they are."""
        if not self.is_in_place:
            np.copyto(self.out, self.value)


class BlockView:
    """A part of a run as a formula wants it: `out` apart from `value`, all in the type that is computed in. `store` when it is done."""

    def __init__(self, view: RunView, part: slice, blocks: TypedBlocks) -> None:
        size = part.stop - part.start
        self._view, self._part = view, part
        self.value, self.out = view.value[part], view.out[part]
        self.slots = [slot[part] for slot in view.slots]
        self.scratch = [block[:size] for block in blocks.scratch]
        if view.is_half or view.is_in_place:
            self.value = _copied(self.value, blocks.value[:size])
        if view.is_half:
            self.out = blocks.out[:size]
            self.slots = [_copied(slot, block[:size]) for slot, block in zip(self.slots, blocks.slots, strict=False)]

    def store(self) -> None:
        """Writes results that were computed aside into the step's memories."""
        if self._view.is_half:
            np.copyto(self._view.out[self._part], self.out, casting="same_kind")
            for slot, computed in zip(self._view.slots, self.slots, strict=True):
                np.copyto(slot[self._part], computed, casting="same_kind")


def _copied(source: Array, into: Array) -> Array:
    np.copyto(into, source)
    return into
