"""The moving averages of a shard's variables, one step after the other.

Formula of tf.compat.v1.train.ExponentialMovingAverage: average -= (1 - decay) * (average - variable). As there, 1 - decay is a float32
number.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ps_protocol.averages import AverageSpec
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array, DataType
from ps_server.apply_plan import Planner, Run


class AveragedPart(NamedTuple):
    """The bytes `start` to `stop` of a shard's memory, all of averaged variables of one type."""

    data_type: DataType
    start: int
    stop: int


class AverageKeeper:
    """Knows which variables of a layout are averaged, and the factor of each step; the averages lie in the caller's memory."""

    def __init__(self, layout: Layout, spec: AverageSpec, *, initial_step: int, initial_product: float = 1.0) -> None:
        self._layout = layout
        self._spec = spec
        self._initial_step, self._initial_product = initial_step, initial_product
        self._runs = _averaged_runs(layout, spec)
        # The product of the decays of the steps before `_next_step`.
        self._product, self._next_step = initial_product, initial_step

    def start(self, average: Array, values: Array) -> None:
        """Gives the averages in `average` their first values, from those of the variables."""
        for run in self._runs:
            average[run.start : run.stop] = 0 if self._spec.zero_debias else values[run.start : run.stop]

    def parts(self, block_bytes: int) -> Iterator["AveragedPart"]:
        """Yields what there is to move in a step, in parts of at most `block_bytes` as they are computed with."""
        for run in self._runs:
            itemsize = run.arena.data_type.itemsize
            part_bytes = block_bytes // run.arena.data_type.sum_dtype.itemsize * itemsize
            for start in range(run.start, run.stop, part_bytes):
                yield AveragedPart(run.arena.data_type, start, min(start + part_bytes, run.stop))

    def rate(self, step: int) -> float:
        """Returns how far the averages move towards the values that the update of `step` has made; for one thread at a time."""
        rate = float(np.float32(1) - self._decay(step))
        if not self._spec.zero_debias:
            return rate
        product = self.product_before(step + 1)
        # A decay of 1 never moves; it has no debiased average either.
        return rate / (1.0 - product) if product < 1.0 else 0.0

    def product_before(self, step: int) -> float:
        """Returns the product of the decays of all steps before `step`, which a later keeper goes on from; 1 where it is not needed."""
        if not self._spec.zero_debias:
            return 1.0
        if step < self._next_step:
            self._product, self._next_step = self._initial_product, self._initial_step
        while self._next_step < step:
            self._product *= float(self._decay(self._next_step))
            self._next_step += 1
        return self._product

    def _decay(self, step: int) -> "np.float32":
        return np.float32(self._spec.decay_at(step + 1))


def averaged_slices(layout: Layout, spec: AverageSpec) -> tuple[int, ...]:
    """Returns the positions in `layout.slices` of those that have an average: the ones named, or all that take gradients."""
    if spec.variables:
        names = set(spec.variables)
        return tuple(index for index, piece in enumerate(layout.slices) if piece.variable.name in names)
    optimizers = [piece.variable.optimizer for piece in layout.slices]
    return tuple(index for index, optimizer in enumerate(optimizers) if optimizer is None or not optimizer.is_update_rule)


def _averaged_runs(layout: Layout, spec: AverageSpec) -> tuple[Run, ...]:
    others = set(range(len(layout.slices))) - set(averaged_slices(layout, spec))
    return tuple(run for run in Planner(layout).runs(1, absent=[sorted(others)]) if run.contributors)


def move(average: Array, values: Array, part: AveragedPart, rate: float, *, scratch: tuple[Array, Array]) -> None:
    """Moves a part of the averages towards the values; `scratch`: two blocks of bytes, each as long as the part is computed with."""
    data_type, stretch = part.data_type, slice(part.start, part.stop)
    averages, targets = average[stretch].view(data_type.dtype), values[stretch].view(data_type.dtype)
    change, precise = (block.view(data_type.sum_dtype)[: averages.size] for block in scratch)
    factor = change.dtype.type(rate)
    if averages.dtype == change.dtype:
        _move_block(averages, targets, factor, change=change)
        return
    np.copyto(precise, averages)
    np.copyto(change, targets)
    _move_block(precise, change, factor, change=change)
    np.copyto(averages, precise, casting="same_kind")


def _move_block(average: Array, values: Array, factor: "np.floating[Any]", *, change: Array) -> None:
    np.subtract(average, values, out=change)
    np.multiply(change, factor, out=change)
    np.subtract(average, change, out=average)
