"""The step itself: mean and optimizer, block by block."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.layout import ALIGNMENT, Layout
from ps_protocol.tensors import Array
from ps_protocol.variable_options import Constraint
from ps_server.apply_plan import Planner
from ps_server.averages import AveragedPart, AverageKeeper, move
from ps_server.constraints import constrain
from ps_server.means import mean_of
from ps_server.square_sums import SquareSums
from ps_server.step_memory import Blocks, BlockView, Cut, RunView, StepMemory
from ps_server.stripes import ONE_THREAD, StripeRunner, share
from ps_server.update_rule import UpdateRule

# Measured for 64 MiB and 2 contributions, SGD to Adam, in one thread: the same within 5 % from 256 KiB to 1 MiB; 1.1 times as long at 128
# KiB, 1.3 at 64 and over 2 at 16 KiB, where the calls cost more than the work. The smallest of the good ones leaves most of a core's cache
# to others.
BLOCK_BYTES = 256 << 10
# Several threads hand the interpreter's lock to each other at every call, so that they want longer ones. Measured for two threads and Adam,
# against one: 1.0 times as long with blocks of 256 KiB, 0.65 with 512 KiB, 0.56 with 1 MiB and no less with 2 MiB.
_UNITS_SHARED = 4

_Part = tuple[RunView, slice]
_Task = TypeVar("_Task")


class FusedApply:
    """Applies steps to arenas of one layout. Owns the scratch blocks; the rules are the caller's, who begins and advances them.

    For one caller at a time, whose work `stripes` spreads over threads; `clone` gives one more for another caller. `rules` are those of
    `layout.rules`, in that order. `block_bytes`: how much one thread takes on at once; several take four times as much.
    """

    def __init__(
        self,
        layout: Layout,
        rules: Sequence[UpdateRule],
        *,
        clip: ClipSpec = NO_CLIP,
        averages: AverageSpec | None = None,
        initial_step: int = 0,
        initial_product: float = 1.0,
        block_bytes: int = BLOCK_BYTES,
        stripes: StripeRunner = ONE_THREAD,
    ) -> None:
        self._layout = layout
        self._rules = tuple(rules)
        self._clip = clip
        self._averages = averages
        self._initial_step, self._initial_product = initial_step, initial_product
        self._block_bytes = block_bytes
        self._planner = Planner(layout)
        self._stripes = stripes
        # Less for each thread is not worth waking the others. Measured for two: twice as long as one for 512 KiB, as long for 1 MiB, and
        # 0.7 (Adam) to 0.9 times as long (SGD) for 2 MiB.
        self._num_threads = max(1, min(stripes.num_threads, layout.nbytes // (block_bytes * _UNITS_SHARED)))
        self._part_bytes = _part_bytes(layout.nbytes, self._num_threads, block_bytes)
        # A sum depends on where its blocks begin: they are those of one thread, however many at a time.
        self._sum_bytes = block_bytes if self._num_threads == 1 else block_bytes * _UNITS_SHARED
        # A small arena does not fill a block, even where its elements are computed in twice their size.
        max_bytes = min(max(self._part_bytes, self._sum_bytes), max(2 * layout.nbytes, ALIGNMENT))
        self._blocks = [Blocks(max_bytes) for _ in range(self._num_threads)]
        self._keeper = self._make_keeper()
        pieces = enumerate(layout.slices)
        self._constrained = tuple((index, piece.variable.constraint) for index, piece in pieces if piece.variable.constraint is not None)

    def clone(self) -> "FusedApply":
        """Returns one that works with the same rules, in scratch blocks of its own and in the thread of its caller."""
        return FusedApply(
            self._layout,
            self._rules,
            clip=self._clip,
            averages=self._averages,
            initial_step=self._initial_step,
            initial_product=self._initial_product,
            block_bytes=self._block_bytes,
        )

    def average_product(self, step: int) -> float:
        """Returns what the moving averages of the steps before `step` have come to; see `AverageKeeper.product_before`."""
        return self._keeper.product_before(step) if self._keeper is not None else 1.0

    def resume_averages(self, product: float) -> None:
        """Goes on from what `average_product` has returned for the initial step."""
        self._initial_product = product
        self._keeper = self._make_keeper()

    def run(self, memory: StepMemory) -> int:
        """Makes the next step's values from the mean of the gradients, in their order; returns how many elements of it are not finite.

        The caller has begun the rules, and advances them afterwards. What no contribution has a gradient for keeps its values and slots.
        """
        runs = self._planner.runs(len(memory.gradients), absent=memory.absent, scales=memory.scales)
        views = [RunView(run, memory, self._layout, slots=tuple(self._rules[run.arena.rule].slots)) for run in runs]
        parts = [(view, part) for view in views for part in view.parts(self._part_bytes)]
        num_nonfinite = self._share(parts, self._apply)
        if self._constrained:
            self._constrain(memory)
        if self._keeper is not None and memory.average is not None:
            self._move_averages(memory.average, memory, self._keeper)
        return num_nonfinite

    def sums_of_squares(self, memory: StepMemory) -> list[float]:
        """Returns the sum of squares of each slice's mean, as float64: after weights and clipping by value, before `scales`. No effect.

        Of `memory` only the gradients, `absent` and `weights` are used. Slices without a gradient, and those of update rules, have 0.
        """
        sums = SquareSums(self._layout, block_bytes=self._block_bytes)
        runs = self._planner.runs(len(memory.gradients), absent=memory.absent)
        views = [
            RunView(run, memory, self._layout, slots=())
            for run in runs
            if run.contributors and not self._rules[run.arena.rule].spec.is_update_rule
        ]
        parts = [(view, part) for view in views for part in view.parts(self._sum_bytes)]

        def add(task: _Part, thread: int) -> int:
            (view, part), blocks = task, self._blocks[thread]
            cut = blocks.of(view.run.arena.data_type).cut(part.stop - part.start)
            gradients, rule = [gradient[part] for gradient in view.gradients], self._rules[view.run.arena.rule]
            mean = mean_of(gradients, out=cut.mean, scratch=cut.scratch[0], weights=view.weights, sums=rule.sums)
            mean = self._limit(mean, cut) if self._clip.value else mean
            sums.add(view.run, part.start, mean, squares=blocks.squares(mean.size))
            return 0

        self._share(parts, add)
        return sums.values

    def _make_keeper(self) -> AverageKeeper | None:
        if self._averages is None:
            return None
        return AverageKeeper(self._layout, self._averages, initial_step=self._initial_step, initial_product=self._initial_product)

    def _share(self, tasks: Iterable[_Task], act: Callable[[_Task, int], int]) -> int:
        # Infinities and the like are the user's to see in the values and the count, not warnings in a server's log.
        return share(self._stripes, tasks, act, num_threads=self._num_threads, within=lambda: np.errstate(all="ignore"))

    def _apply(self, task: _Part, thread: int) -> int:
        view, part = task
        run = view.run
        rule, blocks = self._rules[run.arena.rule], self._blocks[thread].of(run.arena.data_type)
        if not run.contributors:
            view.keep(part)
            return 0
        num_nonfinite, is_gradient = 0, not rule.spec.is_update_rule
        cut = blocks.cut(part.stop - part.start)
        gradients = [gradient[part] for gradient in view.gradients]
        gradient = mean_of(gradients, out=cut.mean, scratch=cut.scratch[0], weights=view.weights if is_gradient else (), sums=rule.sums)
        if not np.isfinite(gradient, out=cut.is_finite).all():
            num_nonfinite = cut.size - int(np.count_nonzero(cut.is_finite))
        if is_gradient and self._clip.value:
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
        def act(task: tuple[int, Constraint], thread: int) -> int:
            index, constraint = task
            constrain(self._layout.view(memory.out, index), constraint)
            return 0

        absent = memory.absent
        wanted = [task for task in self._constrained if not absent or not all(task[0] in indices for indices in absent)]
        self._share(wanted, act)

    def _move_averages(self, average: Array, memory: StepMemory, keeper: AverageKeeper) -> None:
        rate = keeper.rate(memory.step)

        def act(part: AveragedPart, thread: int) -> int:
            move(average, memory.out, part, rate, scratch=self._blocks[thread].pair)
            return 0

        self._share(keeper.parts(self._part_bytes), act)


def _part_bytes(nbytes: int, num_threads: int, block_bytes: int) -> int:
    """How much to take on at once: a block; or where several threads share the work, equal parts of up to four blocks, as many for each."""
    if num_threads == 1:
        return block_bytes
    num_each = -(-nbytes // (num_threads * block_bytes * _UNITS_SHARED))
    return -(-nbytes // (num_threads * num_each * ALIGNMENT)) * ALIGNMENT
