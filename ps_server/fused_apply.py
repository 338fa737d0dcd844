"""Mean of the contributions and the optimizer, fused, one cache-sized block after another. Knows arrays; no variable, push id or lock.

Every gradient byte is read from memory once: the block's sum, its mean and what the optimizer makes of it stay in the cache. Nothing here
is done per variable, and the only allocations are of views. Each element is computed by itself, so the block size does not change a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.layout import Layout
from ps_protocol.tensors import Array, DataType
from ps_server.optimizers import Optimizer, Scalars, initial_powers, next_powers

# Measured for 64 MiB and 2 contributions, SGD to Adam: the same within 5 % from 256 KiB to 1 MiB; 1.1 times as long at 128 KiB, 1.3 at 64
# and over 2 at 16 KiB, where the calls cost more than the work. The smallest of the good ones leaves most of a core's cache to others.
BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memories that one step reads (`value`, `gradients`) and writes (`out`, `slots` in the order of their names)."""

    value: Array
    out: Array
    slots: Sequence[Array]
    gradients: Sequence[Array]


class FusedApply:
    """Applies steps to arenas of one layout. Owns the scratch blocks and the optimizer's powers. Not thread-safe."""

    def __init__(self, layout: Layout, optimizer: Optimizer, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._block_bytes = block_bytes
        self._mean, self._scratch = np.empty(block_bytes, np.uint8), np.empty(block_bytes, np.uint8)
        self._is_finite = np.empty(block_bytes // min(data_type.itemsize for data_type in DataType), np.bool_)
        self._powers = {data_type: initial_powers(optimizer, data_type.dtype) for data_type in DataType}

    def run(self, memory: StepMemory, *, learning_rate: float) -> int:
        """Makes the next step's values from the mean of the gradients, in their order; returns how many elements of it are not finite."""
        num_nonfinite = 0
        # Infinities and the like are the user's to see in the values and the count, not warnings in a server's log.
        with np.errstate(all="ignore"):
            for arena in self._layout.arenas:
                data_type = arena.data_type
                constants = self._optimizer.constants(learning_rate, powers=self._powers[data_type], dtype=data_type.dtype)
                view = StepMemory(
                    value=self._layout.arena(memory.value, arena),
                    out=self._layout.arena(memory.out, arena),
                    slots=[self._layout.arena(slot, arena) for slot in memory.slots],
                    gradients=[self._layout.arena(gradient, arena) for gradient in memory.gradients],
                )
                num_nonfinite += self._run_arena(view, data_type, constants)
        return num_nonfinite

    def advance_powers(self) -> None:
        """Ends a step: the optimizer's powers move on."""
        self._powers = {data_type: next_powers(self._optimizer, powers) for data_type, powers in self._powers.items()}

    def _run_arena(self, view: StepMemory, data_type: DataType, constants: Scalars) -> int:
        num_nonfinite = 0
        mean, scratch = self._mean.view(data_type.dtype), self._scratch.view(data_type.dtype)
        for start in range(0, view.value.size, mean.size):
            block = slice(start, min(start + mean.size, view.value.size))
            size = block.stop - start
            gradient = _mean_of(view.gradients, block, out=mean[:size])
            is_finite = np.isfinite(gradient, out=self._is_finite[:size])
            num_nonfinite += size - int(np.count_nonzero(is_finite))
            self._optimizer.apply_block(
                view.value[block],
                out=view.out[block],
                slots=[slot[block] for slot in view.slots],
                gradient=gradient,
                scratch=scratch[:size],
                constants=constants,
            )
        return num_nonfinite


def _mean_of(gradients: Sequence[Array], block: slice, *, out: Array) -> Array:
    if len(gradients) == 1:
        return gradients[0][block]
    count = out.dtype.type(len(gradients))
    np.add(gradients[0][block], gradients[1][block], out=out)
    for gradient in gradients[2:]:
        np.add(out, gradient[block], out=out)
    if len(gradients) & (len(gradients) - 1):
        np.divide(out, count, out=out)
    else:
        # A power of two has an exact reciprocal: the same result at half the price.
        np.multiply(out, 1 / count, out=out)
    return out
