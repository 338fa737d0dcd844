"""Mean of the contributions and the optimizer, fused, one cache-sized block after another. Knows arrays; no push id or lock.

Every gradient byte is read from memory once: the block's sum, its mean and what the optimizer makes of it stay in the cache. Where all
gradients are there, nothing is done per variable, and the only allocations are of views. Each element is computed by itself, so the block
size does not change a result. Constraints and moving averages cost another pass over the variables that have them.
"""

from collections.abc import Sequence

import numpy as np

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from ps_server.apply_plan import Planner, Run
from ps_server.averages import AverageKeeper
from ps_server.constraints import constrain
from ps_server.means import mean_of
from ps_server.square_sums import SquareSums
from ps_server.step_memory import Blocks, BlockView, Cut, RunView, StepMemory
from ps_server.update_rule import UpdateRule

__all__ = ["BLOCK_BYTES", "FusedApply", "StepMemory"]

# Measured for 64 MiB and 2 contributions, SGD to Adam: the same within 5 % from 256 KiB to 1 MiB; 1.1 times as long at 128 KiB, 1.3 at 64
# and over 2 at 16 KiB, where the calls cost more than the work. The smallest of the good ones leaves most of a core's cache to others.
BLOCK_BYTES = 256 << 10


class FusedApply:
    """Applies steps to arenas of one layout. Owns the scratch blocks; the rules are the caller's, who begins and advances them.

    Not thread-safe; `clone` gives one more for another thread. `rules` are those of `layout.rules`, in that order.
    """

    def __init__(
        self,
        layout: Layout,
        rules: Sequence[UpdateRule],
        *,
        clip: ClipSpec = NO_CLIP,
        averages: AverageSpec | None = None,
        initial_step: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._layout = layout
        self._rules = tuple(rules)
        self._clip = clip
        self._averages = averages
        self._initial_step = initial_step
        self._block_bytes = block_bytes
        self._planner = Planner(layout)
        self._blocks = Blocks(block_bytes)
        self._keeper = AverageKeeper(layout, averages, initial_step=initial_step) if averages is not None else None
        pieces = enumerate(layout.slices)
        self._constrained = tuple((index, piece.variable.constraint) for index, piece in pieces if piece.variable.constraint is not None)

    def clone(self) -> "FusedApply":
        """Returns one that works with the same rules, in scratch blocks of its own."""
        return FusedApply(
            self._layout,
            self._rules,
            clip=self._clip,
            averages=self._averages,
            initial_step=self._initial_step,
            block_bytes=self._block_bytes,
        )

    def run(self, memory: StepMemory) -> int:
        """Makes the next step's values from the mean of the gradients, in their order; returns how many elements of it are not finite.

        The caller has begun the rules, and advances them afterwards. What no contribution has a gradient for keeps its values and slots.
        """
        num_nonfinite = 0
        # Infinities and the like are the user's to see in the values and the count, not warnings in a server's log.
        with np.errstate(all="ignore"):
            for run in self._planner.runs(len(memory.gradients), absent=memory.absent, scales=memory.scales):
                num_nonfinite += self._apply(run, memory)
            self._constrain(memory)
            if self._keeper is not None and memory.average is not None:
                self._keeper.update(memory.average, memory.out, step=memory.step, scratch=self._blocks.pair)
        return num_nonfinite

    def sums_of_squares(self, memory: StepMemory) -> list[float]:
        """Returns the sum of squares of each slice's mean, as float64: after weights and clipping by value, before `scales`. No effect.

        Of `memory` only the gradients, `absent` and `weights` are used. Slices without a gradient, and those of update rules, have 0.
        """
        sums = SquareSums(self._layout, max_block_size=self._blocks.max_size)
        with np.errstate(all="ignore"):
            for run in self._planner.runs(len(memory.gradients), absent=memory.absent):
                rule = self._rules[run.arena.rule]
                if not run.contributors or rule.spec.is_update_rule:
                    continue
                view, blocks = RunView(run, memory, slots=()), self._blocks.of(run.arena.data_type)
                for part in blocks.parts(view.size):
                    cut = blocks.cut(part.stop - part.start)
                    gradients = [gradient[part] for gradient in view.gradients]
                    mean = mean_of(gradients, out=cut.mean, scratch=cut.scratch[0], weights=view.weights, sums=rule.sums)
                    sums.add(run, part.start, self._limit(mean, cut) if self._clip.value else mean)
        return sums.values

    def _apply(self, run: Run, memory: StepMemory) -> int:
        rule = self._rules[run.arena.rule]
        view, blocks = RunView(run, memory, slots=tuple(rule.slots)), self._blocks.of(run.arena.data_type)
        if not run.contributors:
            view.keep()
            return 0
        num_nonfinite, is_gradient = 0, not rule.spec.is_update_rule
        weights, sums, is_limited = view.weights if is_gradient else (), rule.sums, is_gradient and bool(self._clip.value)
        for part in blocks.parts(view.size):
            cut = blocks.cut(part.stop - part.start)
            gradients = [gradient[part] for gradient in view.gradients]
            gradient = mean_of(gradients, out=cut.mean, scratch=cut.scratch[0], weights=weights, sums=sums)
            if not np.isfinite(gradient, out=cut.is_finite).all():
                num_nonfinite += cut.size - int(np.count_nonzero(cut.is_finite))
            if is_limited:
                gradient = self._limit(gradient, cut)
            if run.scale != 1.0:
                gradient = np.multiply(gradient, blocks.number(run.scale), out=cut.mean)
            if view.is_direct:
                slots = [slot[part] for slot in view.slots] if view.slots else ()
                rule.apply(view.value[part], out=view.out[part], slots=slots, gradient=gradient, scratch=cut.scratch)
            else:
                block = BlockView(view, part, cut)
                rule.apply(block.value, out=block.out, slots=block.slots, gradient=gradient, scratch=cut.scratch)
                block.store()
        return num_nonfinite

    def _limit(self, mean: Array, cut: Cut) -> Array:
        limit = mean.dtype.type(self._clip.value)
        return np.clip(mean, -limit, limit, out=cut.mean)

    def _constrain(self, memory: StepMemory) -> None:
        for index, constraint in self._constrained:
            if not memory.absent or not all(index in absent for absent in memory.absent):
                constrain(self._layout.view(memory.out, index), constraint)
