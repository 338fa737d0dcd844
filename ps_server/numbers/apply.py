"""Mean of the contributions and the optimizer, fused, one cache-sized block after another. Knows arrays; no push id, lock or thread.

Every gradient byte is read from memory once: the block's sum, its mean and what the optimizer makes of it stay in the cache. Where all
gradients are there, nothing is done per variable, and the only allocations are of views. Each element is computed by itself: neither the
block size nor the number of threads that share the blocks changes a result. Constraints and moving averages cost another pass over the
variables that have them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.formats import stretch as encoded_stretch
from ps_protocol.encodings.halves import widen_into
from ps_protocol.model.layout import ALIGNMENT, ArenaRange, Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.programs import MAX_SCRATCH
from ps_protocol.model.spec import NO_CLIP, AverageSpec, ClipSpec
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Array, Constraint, ConstraintKind, DataType
from ps_server.numbers.trimmed import trimmed_mean_of
from ps_server.optimizers.rule import NUM_SCRATCH, Measuring, UpdateRule

# How an apply's work is offered to several threads, without a thread of its own.


Task = TypeVar("Task")


class StripeRunner(Protocol):
    """Runs the parts of an apply in threads. Thread-safe."""

    @property
    def num_threads(self) -> int:
        """The number of threads that may work at once, the caller's included; at least 1."""

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        """Calls `work(0)` here, and `work(1)` to `work(num_threads - 1)` in other threads as far as they are free; returns when all have
        ended.

        `work(0)` alone must be enough to do all the work. Raises the first error of any call.
        """


class OneThread:
    """Does everything in the thread of the caller."""

    num_threads = 1

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        """See StripeRunner."""
        work(0)


ONE_THREAD = OneThread()


def share(
    runner: StripeRunner,
    tasks: Iterable[Task],
    act: Callable[[Task, int], int],
    *,
    num_threads: int,
    within: Callable[[], AbstractContextManager[object]],
) -> int:
    """Calls `act(task, thread)` once for each task, in any order and in up to `num_threads` threads; returns the sum of what it returns.

    Each thread works in a context of its own, made by `within`. An error of `act` ends the other threads after their present task,
    and is raised here.
    """
    # Taken one by one: a thread that the system holds up leaves the rest to the others.
    left, counts = deque(tasks), [0] * num_threads

    def work(thread: int) -> None:
        count = 0
        try:
            with within():
                while (task := _next(left)) is not None:
                    count += act(task, thread)
        except BaseException:
            left.clear()
            raise
        counts[thread] = count

    if num_threads == 1:
        work(0)
    else:
        runner.run(work, num_threads=num_threads)
    return sum(counts)


def _next(left: deque[Task]) -> Task | None:
    try:
        return left.popleft()
    except IndexError:
        return None


# Which stretches of a shard's memory have the same contributors in a step, and the same factor.
#
# In the ordinary case every contribution has every gradient, and a stretch is a whole arena: nothing is done per variable.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The bytes `start` to `stop`, all in one arena: the positions of the contributions with a gradient for them, and the mean's factor.

    `shares`: a factor for the gradient of each contributor; empty: all 1.
    """

    arena: ArenaRange
    start: int
    stop: int
    contributors: tuple[int, ...]
    scale: float = 1.0
    shares: tuple[float, ...] = ()


class Planner:
    """Makes the runs of each step, and keeps those of the last one, since most steps are alike. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._members = _members(layout)
        self._key: tuple[int, Sequence[Sequence[int]], Sequence[float], Sequence[Sequence[float]]] = (0, (), (), ())
        self._runs: tuple[Run, ...] = ()

    def runs(
        self,
        num_gradients: int,
        *,
        absent: Sequence[Sequence[int]] = (),
        scales: Sequence[float] = (),
        shares: Sequence[Sequence[float]] = (),
    ) -> tuple[Run, ...]:
        """Returns runs that cover all arenas, in their order.

        `absent`: for each contribution, the slices that it has no gradient for. `scales`: a factor for each slice. `shares`: for
        each contribution, a factor for each slice. Empty: none, and all 1.
        """
        key = (
            num_gradients,
            absent if any(absent) else (),
            scales if any(scale != 1.0 for scale in scales) else (),
            shares if any(share != 1.0 for of in shares for share in of) else (),
        )
        if key != self._key:
            self._runs = tuple(self._split(*key))
            self._key = key
        return self._runs

    def _split(
        self, num_gradients: int, absent: Sequence[Sequence[int]], scales: Sequence[float], shares: Sequence[Sequence[float]]
    ) -> Iterator[Run]:
        everyone = tuple(range(num_gradients))
        if not absent and not scales and not shares:
            for arena in self._layout.arenas:
                yield Run(arena=arena, start=arena.start, stop=arena.stop, contributors=everyone)
            return
        missing: dict[int, set[int]] = {}
        for position, indices in enumerate(absent):
            for index in indices:
                missing.setdefault(index, set()).add(position)
        for arena, members in zip(self._layout.arenas, self._members, strict=True):
            run: Run | None = None
            for index in members:
                contributors = tuple(p for p in everyone if p not in missing[index]) if index in missing else everyone
                scale = scales[index] if scales else 1.0
                of_each = tuple(shares[position][index] for position in contributors) if shares else ()
                start, stop = span(self._layout, index)
                if run is not None and (run.contributors, run.scale, run.shares) == (contributors, scale, of_each):
                    start = run.start
                elif run is not None:
                    yield run
                run = Run(arena=arena, start=start, stop=stop, contributors=contributors, scale=scale, shares=of_each)
            if run is not None:
                yield run


def span(layout: Layout, index: int) -> tuple[int, int]:
    """Returns the first and last byte (excluded) of a slice with the padding behind it."""
    start = layout.offsets[index]
    return start, start - (-layout.slices[index].nbytes // ALIGNMENT) * ALIGNMENT


def _members(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Returns the slices of each arena in the order of memory, without those that have no elements."""
    members: list[tuple[int, ...]] = []
    indices = [index for index in layout.order if layout.slices[index].nbytes]
    for arena in layout.arenas:
        members.append(tuple(index for index in indices if arena.start <= layout.offsets[index] < arena.stop))
    return tuple(members)


# The mean, or the sum, of several contributions' gradients: one block of elements at a time.
#
# Sums are made in the order given and in the type of `out`: float32 for half-precision gradients, whose own sums stop growing early.


def mean_of(blocks: Sequence[Array], *, out: Array, scratch: Array, weights: Sequence[float] = (), sums: bool = False) -> Array:
    """Returns the mean of one or more blocks of equal length, in `out` or, when there is nothing to compute, the one block itself.

    Blocks of another type are converted first; uint16 is the bits of bfloat16. `weights`: a factor for each block; they do
    not change what the sum is divided by. `sums`: nothing is divided at all.
    """
    if weights or any(block.dtype != out.dtype for block in blocks):
        _add_up_converted(blocks, weights, out=out, scratch=scratch)
    elif len(blocks) == 1:
        return blocks[0]
    else:
        np.add(blocks[0], blocks[1], out=out)
        for block in blocks[2:]:
            np.add(out, block, out=out)
    number = len(blocks)
    if sums or number == 1:
        return out
    count = out.dtype.type(number)
    if number & (number - 1):
        np.divide(out, count, out=out)
    else:
        # A power of two has an exact reciprocal: the same result at half the price.
        np.multiply(out, 1 / count, out=out)
    return out


def _add_up_converted(blocks: Sequence[Array], weights: Sequence[float], *, out: Array, scratch: Array) -> None:
    for position, block in enumerate(blocks):
        term = scratch if position else out
        widen_into(block, term)
        if weights and weights[position] != 1.0:
            np.multiply(term, out.dtype.type(weights[position]), out=term)
        if position:
            np.add(out, term, out=out)


# Sums of squares, slice by slice, of gradients that come in parts, in any order.
#
# A slice's sum is that of its blocks, in their order, however they were grouped: the same to the last bit.


class SquareSums:
    """Adds up in float64, where the square of any float32 has room. Takes it that the padding between slices is zero.

    `block_bytes`: of the blocks that are summed by themselves; every part begins where one does.
    """

    def __init__(self, layout: Layout, *, block_bytes: int) -> None:
        self._num_slices = len(layout.slices)
        self._block_bytes = block_bytes
        self._indices = np.array([index for index in layout.order if layout.slices[index].nbytes], np.int64)
        self._offsets = np.array(layout.offsets, np.int64)[self._indices]
        # Slices and the sums of each, by the first byte of the part.
        self._parts: dict[int, tuple[Array, Array]] = {}

    @property
    def values(self) -> list[float]:
        """The sum of each of `layout.slices`, so far."""
        sums = np.zeros(self._num_slices)
        for _, (indices, partial_sums) in sorted(self._parts.items()):
            np.add.at(sums, indices, partial_sums)  # one after the other, also where a slice occurs twice
        return [float(total) for total in sums]

    def add(self, run: Run, start: int, part: Array, *, squares: Array) -> None:
        """Adds the part that begins at element `start` of a run; `squares` is scratch memory for as many float64. Thread-safe."""
        itemsize = run.arena.data_type.itemsize
        first_byte = run.start + start * itemsize
        last_byte = first_byte + part.size * itemsize
        block_size = self._block_bytes // part.dtype.itemsize
        first = int(np.searchsorted(self._offsets, first_byte, side="right")) - 1
        last = int(np.searchsorted(self._offsets, last_byte, side="left"))
        starts = np.maximum(self._offsets[first:last] - first_byte, 0) // itemsize
        starts = np.union1d(starts, np.arange(0, part.size, block_size))
        owners = np.searchsorted(self._offsets, first_byte + starts * itemsize, side="right") - 1
        np.multiply(part, part, out=squares, dtype=np.float64)
        self._parts[first_byte] = self._indices[owners], np.add.reduceat(squares, starts)


# The moving averages of a shard's variables, one step after the other.
#
# Formula of tf.compat.v1.train.ExponentialMovingAverage: average -= (1 - decay) * (average - variable). As there, 1 - decay is a float32
# number.


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
        """Yields the averages to move in a step, in parts of at most `block_bytes` in the type of the computation."""
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
        """Returns the product of the decays of all steps before `step`, which a later keeper continues from; 1 where it is not needed."""
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


# The constraint that each update of a variable ends with.
#
# Formulas are those of tf.keras.constraints (NonNeg, MaxNorm, UnitNorm, with the norm over axis 0 and their epsilon of 1e-7).


EPSILON = 1e-7


def constrain(value: Array, constraint: Constraint) -> None:
    """Changes `value`, which has the variable's shape and type, in place so that it satisfies the constraint."""
    if not value.size:
        # It takes no memory, but its norms over axis 0 would.
        return
    if value.dtype.itemsize == 2:
        precise = value.astype(np.float32)
        constrain(precise, constraint)
        value[...] = precise
        return
    if constraint.kind is ConstraintKind.FORMULA:
        # In as much memory for the values between as some blocks take, however large it is.
        program = constraint.program
        program.compute((value.reshape(-1),), (), program.numbers({}, float), float)
    elif constraint.kind is ConstraintKind.NON_NEGATIVE:
        np.maximum(value, 0, out=value)
    elif constraint.kind is ConstraintKind.CLIP:
        np.clip(value, _number(value, constraint.low), _number(value, constraint.high), out=value)
    else:
        norms = np.sqrt(np.sum(np.square(value), axis=0 if value.ndim else None, keepdims=True))
        wanted = np.minimum(norms, _number(value, constraint.high)) if constraint.kind is ConstraintKind.MAX_NORM else _number(value, 1)
        np.multiply(value, wanted / (norms + _number(value, EPSILON)), out=value)


def _number(value: Array, number: float) -> "np.floating[Any]":
    scalar: np.floating[Any] = value.dtype.type(number)
    return scalar


# The memories that a step reads and writes, and blocks of them as the formulas want them.
#
# Half-precision elements are computed in float32, and what is overwritten in place is first copied aside; both in reused blocks.


# Of the optimizers that have a formula of their own here.
_NUM_SLOTS = 3
_MIN_SUM_BYTES = 4


@light_dataclass(slots=True, kw_only=True)
class StepMemory:
    """What one step reads (`value`, `gradients`) and writes (`out`, `slots` by name, `average`); all have the layout's arrangement.

    `out` may be `value` itself: then the values change in place. For each of `gradients`, `absent` has the slices that it has no gradient
    for (an empty gradient: all of them), and `weights` how much it counts in the mean; one alone is a factor. `scales` has a factor for the
    mean of each slice. Empty: none, and all 1.
    `encodings`: how each of `gradients` lies in its memory, as it is or in halves; empty: all as they are. `formulas`: what is computed
    once everything else is, in this order, each with the position of the contribution that has its arrays; what they write is `absent`
    there. `merge`: what takes the place of the mean; `shares`: for each of `gradients`, a factor for each slice. `step` is that of the
    gradients.
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
    formulas: Sequence[tuple[int, FormulaUpdate]] = ()
    merge: MergeSpec = MEAN
    shares: Sequence[Sequence[float]] = ()


class Blocks:
    """Scratch memory for one thread, `block_bytes` for each purpose. Unused blocks cost no memory."""

    def __init__(self, block_bytes: int, *, num_scratch: int = NUM_SCRATCH, num_slots: int = _NUM_SLOTS) -> None:
        max_size = block_bytes // _MIN_SUM_BYTES
        self._num_scratch = num_scratch
        self._memories = [np.empty(block_bytes, np.uint8) for _ in range(3 + num_scratch + num_slots)]
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
            blocks = [memory.view(data_type.sum_dtype) for memory in self._memories]
            self._typed[data_type] = TypedBlocks(blocks, num_scratch=self._num_scratch)
        return self._typed[data_type]


class TypedBlocks:
    """Blocks of one element type, each for one purpose."""

    def __init__(self, blocks: Sequence[Array], *, num_scratch: int) -> None:
        self._blocks, self._num_scratch = tuple(blocks), num_scratch
        self._cut = Cut(self._blocks, blocks[0].size, num_scratch=num_scratch)

    def cut(self, size: int) -> "Cut":
        """Returns the blocks' first `size` elements; as long as the size is the same, the same views."""
        if size != self._cut.size:
            self._cut = Cut(self._blocks, size, num_scratch=self._num_scratch)
        return self._cut

    def number(self, value: float) -> "np.floating[Any]":
        """Returns a scalar of the type that is computed in."""
        scalar: np.floating[Any] = self._blocks[0].dtype.type(value)
        return scalar


class Cut:
    """Views of the first elements of blocks, each for one purpose."""

    __slots__ = ("is_finite", "mean", "out", "scratch", "size", "slots", "value")

    def __init__(self, blocks: Sequence[Array], size: int, *, num_scratch: int) -> None:
        self.size = size
        self.mean, *others = [block[:size] for block in blocks]
        self.scratch, (self.value, self.out, *self.slots) = others[:num_scratch], others[num_scratch:]
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
        weights = [memory.weights[position] for position in run.contributors] if memory.weights else []
        self._merge, self._relative_weights = memory.merge, weights
        if len(memory.weights) > 1 and weights:
            scale = len(weights) / sum(weights)
            weights = [weight * scale for weight in weights] if len(weights) > 1 else [1.0]
        if run.shares:
            weights = [weight * share for weight, share in zip(weights or [1.0] * len(run.shares), run.shares, strict=True)]
        self.weights = weights if weights and any(weight != 1.0 for weight in weights) else ()
        self.size = self.value.size
        self.is_half = run.arena.data_type.itemsize == 2
        self.is_in_place = memory.out is memory.value
        # Whether a formula may work on the step's memories themselves.
        self.is_direct = not self.is_half and not self.is_in_place

    def parts(self, block_bytes: int, *, of: slice | None = None) -> Iterator[slice]:
        """Yields the parts, of `of` or of all, whose elements, as they are computed with, take at most `block_bytes` each."""
        max_size = block_bytes // max(_MIN_SUM_BYTES, self.run.arena.data_type.itemsize)
        first, last = (0, self.size) if of is None else (of.start, of.stop)
        for start in range(first, last, max_size):
            yield slice(start, min(start + max_size, last))

    def merged(self, part: slice, cut: "Cut") -> Array:
        """Returns the mean of a part of the gradients, or what takes its place; perhaps in memory of `cut`."""
        gradients = [gradient[part] for gradient in self.gradients]
        if self._merge.num_trimmed(len(gradients)):
            return trimmed_mean_of(gradients, self._merge, out=cut.mean, weights=self._relative_weights)
        return mean_of(gradients, out=cut.mean, scratch=cut.scratch[0], weights=self.weights)

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


class FormulaStep:
    """One formula of a step, from the contribution at `position`: new values of variables in `out`, computed part by part."""

    def __init__(self, update: FormulaUpdate, position: int, memory: StepMemory, layout: Layout) -> None:
        piece = layout.slices[update.writes[0]]
        self.data_type, self.program = piece.variable.data_type, update.program
        self._size = piece.nbytes // self.data_type.itemsize
        self._given = [_elements(memory.out, layout, index) for index in update.positions]
        encoding = memory.encodings[position] if memory.encodings else FloatEncoding.AS_IS
        for index in update.arrays.values():
            start = layout.offsets[index]
            arena = next(arena for arena in layout.arenas if arena.start <= start < arena.stop)
            self._given.append(encoded_stretch(layout, memory.gradients[position], encoding, arena, start, start + piece.nbytes))
        self._numbers = self.program.numbers(update.numbers, float)

    def parts(self, block_bytes: int) -> list[slice]:
        """Returns the parts of at most so many bytes; where sums begin depends on them."""
        size = block_bytes // self.data_type.itemsize
        return [slice(start, min(start + size, self._size)) for start in range(0, self._size, size)]

    def measure(self, index: int, part: slice, blocks: Blocks) -> list[float]:
        """Returns the sums of a part that pass `index` is for."""
        cut = blocks.of(self.data_type).cut(part.stop - part.start)
        return self.program.measure(index, [array[part] for array in self._given], cut.scratch, blocks.squares(cut.size), self._numbers)

    def conclude(self, index: int, sums: Iterable[Sequence[float]]) -> None:
        """Ends a pass: `sums` are those of the parts, in their order."""
        totals = [sum(of_parts) for of_parts in zip(*sums, strict=True)]
        self._numbers = self.program.conclude(index, totals, self._numbers, float)

    def run(self, part: slice, blocks: Blocks) -> None:
        """Computes a part, in place."""
        scratch = blocks.of(self.data_type).cut(part.stop - part.start).scratch
        self.program.run([array[part] for array in self._given], (), scratch, self._numbers)


def _elements(arena: Array, layout: Layout, index: int) -> Array:
    start, piece = layout.offsets[index], layout.slices[index]
    return arena[start : start + piece.nbytes].view(piece.variable.data_type.dtype)


# The step itself: mean and optimizer, block by block.


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
        self._max_bytes = max_bytes = min(max(self._part_bytes, self._sum_bytes), max(2 * layout.nbytes, ALIGNMENT))
        num_scratch = max((rule.num_scratch for rule in self._rules), default=NUM_SCRATCH)
        num_slots = max((_NUM_SLOTS, *(len(rule.slots) for rule in self._rules)))
        self._blocks = [Blocks(max_bytes, num_scratch=num_scratch, num_slots=num_slots) for _ in range(self._num_threads)]
        # The variables whose update needs all their elements: where they lie, by the arena.
        self._whole = {arena: _spans(layout, arena) for arena in layout.arenas if self._rules[arena.rule].needs_whole_variables}
        # Made for the first step that has formulas.
        self._formula_blocks: list[Blocks] = []
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
        """Returns the product of the moving averages over the steps before `step`; see `AverageKeeper.product_before`."""
        return self._keeper.product_before(step) if self._keeper is not None else 1.0

    def resume_averages(self, product: float) -> None:
        """Continues from a result of `average_product` for the initial step."""
        self._initial_product = product
        self._keeper = self._make_keeper()

    def run(self, memory: StepMemory) -> int:
        """Makes the next step's values from the mean of the gradients, in their order; returns how many elements of it are not finite.

        The caller has begun the rules, and advances them afterwards. Slices for which no contribution has a gradient keep values and slots.
        """
        runs = self._planner.runs(len(memory.gradients), absent=memory.absent, scales=memory.scales, shares=memory.shares)
        views = [RunView(run, memory, self._layout, slots=tuple(self._rules[run.arena.rule].slots)) for run in runs]
        parts = [(view, part) for view in views for part in self._parts(view)]
        num_nonfinite = self._share(parts, self._apply)
        if memory.formulas:
            self._compute(memory)
        if self._constrained:
            self._constrain(memory)
        if self._keeper is not None and memory.average is not None:
            self._move_averages(memory.average, memory, self._keeper)
        return num_nonfinite

    def sums_of_squares(self, memory: StepMemory) -> list[float]:
        """Returns the sum of squares of each slice's mean, as float64: after weights and clipping by value, before `scales`. No effect.

        Of `memory` only the gradients, `absent`, `weights`, `merge` and `shares` are used. Slices without a gradient, and those of update
        rules, have 0.
        """
        sums = SquareSums(self._layout, block_bytes=self._block_bytes)
        runs = self._planner.runs(len(memory.gradients), absent=memory.absent, shares=memory.shares)
        views = [
            RunView(run, memory, self._layout, slots=())
            for run in runs
            if run.contributors and not self._rules[run.arena.rule].spec.is_update_rule
        ]
        parts = [(view, part) for view in views for part in view.parts(self._sum_bytes)]

        def add(task: _Part, thread: int) -> int:
            (view, part), blocks = task, self._blocks[thread]
            cut = blocks.of(view.run.arena.data_type).cut(part.stop - part.start)
            mean = view.merged(part, cut)
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
        if self._num_threads == 1:
            with np.errstate(all="ignore"):
                return sum([act(task, 0) for task in tasks])
        return share(self._stripes, tasks, act, num_threads=self._num_threads, within=lambda: np.errstate(all="ignore"))

    def _parts(self, view: RunView) -> Iterable[slice]:
        """The part that one thread computes at once: a block, or, if all elements of a variable are needed, the variable."""
        arena, start = view.run.arena, view.run.start
        if arena not in self._whole or not view.run.contributors:
            return view.parts(self._part_bytes)
        itemsize = arena.data_type.itemsize
        spans = [(first, last) for first, last in self._whole[arena] if start <= first < view.run.stop]
        return [slice((first - start) // itemsize, (last - start) // itemsize) for first, last in spans]

    def _apply(self, task: _Part, thread: int, measuring: Measuring | None = None) -> int:
        view, part = task
        run = view.run
        rule, blocks = self._rules[run.arena.rule], self._blocks[thread].of(run.arena.data_type)
        if not run.contributors:
            view.keep(part)
            return 0
        if self._whole and measuring is None and run.arena in self._whole:
            return self._apply_whole(view, part, thread)
        num_nonfinite, is_gradient = 0, not rule.spec.is_update_rule
        cut = blocks.cut(part.stop - part.start)
        if is_gradient:
            gradient = view.merged(part, cut)
        else:
            updates = [update[part] for update in view.gradients]
            gradient = mean_of(updates, out=cut.mean, scratch=cut.scratch[0], sums=rule.sums)
        if not np.isfinite(gradient, out=cut.is_finite).all():
            num_nonfinite = cut.size - int(np.count_nonzero(cut.is_finite))
        if is_gradient and self._clip.value:
            gradient = self._limit(gradient, cut)
        if run.scale != 1.0:
            gradient = np.multiply(gradient, blocks.number(run.scale), out=cut.mean)
        if measuring is not None:
            block = BlockView(view, part, cut)
            squares = self._blocks[thread].squares(cut.size)
            if not measuring.step(block.value, out=block.out, slots=block.slots, gradient=gradient, scratch=cut.scratch, squares=squares):
                return 0
            block.store()
        elif view.is_direct:
            slots = [slot[part] for slot in view.slots] if view.slots else ()
            rule.apply(view.value[part], out=view.out[part], slots=slots, gradient=gradient, scratch=cut.scratch)
        else:
            block = BlockView(view, part, cut)
            rule.apply(block.value, out=block.out, slots=block.slots, gradient=gradient, scratch=cut.scratch)
            block.store()
        return num_nonfinite

    def _apply_whole(self, view: RunView, variable: slice, thread: int) -> int:
        """Goes through a variable as often as its rule has to measure it, and then applies the step."""
        measuring = self._rules[view.run.arena.rule].measuring(view.run.arena.data_type.sum_dtype)
        # A sum depends on where its blocks begin: they are the same whatever the number of threads.
        parts = list(view.parts(self._block_bytes, of=variable))
        while measuring.is_under_way:
            for part in parts:
                self._apply((view, part), thread, measuring)
            measuring.conclude()
        return sum(self._apply((view, part), thread, measuring) for part in parts)

    def _limit(self, mean: Array, cut: Cut) -> Array:
        limit = mean.dtype.type(self._clip.value)
        return np.clip(mean, -limit, limit, out=cut.mean)

    def _compute(self, memory: StepMemory) -> None:
        """Computes the formulas of a step in order: each may read the results of the ones before."""
        if not self._formula_blocks:
            self._formula_blocks = [Blocks(self._max_bytes, num_scratch=MAX_SCRATCH, num_slots=0) for _ in range(self._num_threads)]
        for position, update in memory.formulas:
            if self._layout.slices[update.writes[0]].nbytes:
                self._compute_one(FormulaStep(update, position, memory, self._layout), self._formula_blocks)

    def _compute_one(self, step: FormulaStep, blocks: Sequence[Blocks]) -> None:
        for index in range(step.program.num_passes):
            # A sum depends on where its blocks begin: they are the same whatever the number of threads.
            parts = step.parts(self._block_bytes)
            sums: dict[int, list[float]] = {}

            def measure(part: slice, thread: int, index: int = index, sums: dict[int, list[float]] = sums) -> int:
                sums[part.start] = step.measure(index, part, blocks[thread])
                return 0

            self._share(parts, measure)
            step.conclude(index, (sums[part.start] for part in parts))

        def run(part: slice, thread: int) -> int:
            step.run(part, blocks[thread])
            return 0

        self._share(step.parts(self._part_bytes), run)

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


def _spans(layout: Layout, arena: ArenaRange) -> list[tuple[int, int]]:
    """Returns the first and last byte (excluded) of each variable of an arena, without the padding."""
    starts = ((layout.offsets[index], layout.slices[index].nbytes) for index in layout.order)
    return [(start, start + nbytes) for start, nbytes in starts if nbytes and arena.start <= start < arena.stop]


def _part_bytes(nbytes: int, num_threads: int, block_bytes: int) -> int:
    """How much to take on at once: a block; or where several threads share the work, equal parts of up to four blocks, as many for each."""
    if num_threads == 1:
        return block_bytes
    num_each = -(-nbytes // (num_threads * block_bytes * _UNITS_SHARED))
    return -(-nbytes // (num_threads * num_each * ALIGNMENT)) * ALIGNMENT
