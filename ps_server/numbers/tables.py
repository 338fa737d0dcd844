"""The sparse variables of a shard: rows that change in place, their slots and first values, and the merging of gradients. Knows no lock.

A step first copies the rows that it is about to touch into a journal and makes that known, and only then overwrites the first of them. So
a reader copies rows without waiting, looks afterwards how far the steps have come, and takes the touched rows from the journals of the
steps after the one that it wants. There is one journal; while a table is followed there are more, so that all of its rows can be copied. An
optimizer that moves every row in every step has a second copy of the values instead of a journal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, PsError, SlotNotFound, StepGone
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import ClipSpec
from ps_protocol.model.variables import Array, Initializer, InitializerKind, SparseMean
from ps_server.numbers.memory import MemoryBudget
from ps_server.optimizers.rule import UpdateRule

# Gradients of a table, as rows with their indices: put in order, and merged into a mean.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RowGradient:
    """`rows[i]` is the gradient of row `indices[i]`. `indices`: int64, strictly ascending once `in_order` has seen them."""

    indices: Array
    rows: Array


def check_indices(indices: Array, *, num_rows: int, name: str, first_row: int = 0) -> None:
    """Raises IndexOutOfRange naming the first index that is no row of a slice of `num_rows` rows; `first_row` is that of the slice."""
    if not indices.size or (int(indices.min()) >= 0 and int(indices.max()) < num_rows):
        return
    position = int(np.flatnonzero((indices < 0) | (indices >= num_rows))[0])
    where = f", counted from row {first_row}, the first one here" if first_row else ""
    raise IndexOutOfRange(
        f"variable {name!r}: indices[{position}] = {int(indices[position])}, want 0 to {num_rows - 1}{where}",
        facts={"variable": name, "position": str(position)},
    )


def in_order(gradient: RowGradient, *, sum_dtype: np.dtype[Any]) -> RowGradient:
    """Returns the same gradient with ascending indices, each once; rows of one index are summed in the order given.

    Sums are made in `sum_dtype` and stay in it, since rounding them to half precision would lose what the mean needs.
    """
    indices = gradient.indices
    if bool(np.all(indices[1:] > indices[:-1])):
        return gradient
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(is_first)
    rows = gradient.rows[order]
    if starts.size < ordered.size:
        rows = np.add.reduceat(rows.astype(sum_dtype, copy=False), starts, axis=0)
    return RowGradient(indices=ordered[starts], rows=rows)


def mean_of_rows(
    gradients: Sequence[RowGradient], *, weights: Sequence[float], divisor: float | None, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the mean of gradients in order, summed in the order given, as an array of its own in `sum_dtype`.

    `weights`: a factor for each gradient. `divisor`: what every row is divided by; None: by the weights of the gradients that have it.
    """
    if len(gradients) == 1:
        indices, rows = gradients[0].indices, gradients[0].rows.astype(sum_dtype)
        if weights[0] != 1 and divisor is not None:
            rows *= sum_dtype.type(weights[0])
        total: Array | None = None
    else:
        indices = np.unique(np.concatenate([gradient.indices for gradient in gradients]))
        rows = np.zeros((indices.size, gradients[0].rows.shape[1]), sum_dtype)
        total = np.zeros((indices.size, 1), sum_dtype)
        for gradient, weight in zip(gradients, weights, strict=True):
            at = np.searchsorted(indices, gradient.indices)
            part = gradient.rows.astype(sum_dtype, copy=False)
            # No index twice, so nothing is lost where rows are added in place.
            rows[at] += part if weight == 1 else part * sum_dtype.type(weight)
            total[at] += weight
    if divisor is not None:
        rows /= sum_dtype.type(divisor)
    elif total is not None:
        rows /= total
    return RowGradient(indices=indices, rows=rows)


# First values that a server makes by itself.
#
# A row's values follow from the seed and the row's position in the whole variable, so that they do not depend on how it is cut.


# Elements that one generator makes, in whole rows: few enough to stay in a core's cache, many enough that making a generator costs nothing.
_INITIAL_BLOCK_ELEMENTS = 1 << 16


def fill_table(values: Array, piece: VariableSlice, initializer: Initializer) -> None:
    """Fills `values` (rows of `piece`, two-dimensional) with first values. Takes about 10 ns an element."""
    if not values.size:
        # Rows without elements take no memory: there may be too many of them for a loop.
        return
    if initializer.kind is InitializerKind.CONSTANT:
        values.fill(initializer.low)
    else:
        _fill_randomly(values, piece, initializer)
    if initializer.zero_row is not None and piece.start <= initializer.zero_row < piece.stop:
        values[initializer.zero_row - piece.start] = 0


def _fill_randomly(values: Array, piece: VariableSlice, initializer: Initializer) -> None:
    width = values.shape[1]
    block_rows = max(1, _INITIAL_BLOCK_ELEMENTS // max(1, math.prod(piece.variable.shape[1:])))
    sum_dtype = piece.variable.data_type.sum_dtype
    for block in range(piece.start // block_rows, -(-piece.stop // block_rows)):
        begin = block * block_rows
        # Only as many rows as needed, beginning with the block's first: the numbers before a row are the same in every cut.
        num_rows = min(begin + block_rows, piece.stop) - begin
        made = _made(initializer, block, (num_rows, width), sum_dtype)
        first = max(begin, piece.start)
        values[first - piece.start : begin + num_rows - piece.start] = made[first - begin :]


def _made(initializer: Initializer, block: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    generator = np.random.Generator(np.random.Philox(key=np.array([initializer.seed, block], np.uint64)))
    low, high = dtype.type(initializer.low), dtype.type(initializer.high)
    made: Array
    if initializer.kind is InitializerKind.UNIFORM:
        made = generator.random(shape, dtype=dtype.type)
        made *= high - low
        made += low
        # Rounding may reach the upper end, or pass it by one unit.
        np.minimum(made, high, out=made)
    else:
        made = generator.standard_normal(shape, dtype=dtype.type)
        made *= high
        made += low
    return made


# One slice of a sparse variable: its rows, and the journal for readers of the step before.


# Elements that are given first values between two counts: some hundredths of a second.
_COUNTED_ELEMENTS = 1 << 22
# Elements that the optimizer takes at once: all arrays of such a block stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 14
# Steps that a table which is followed can be taken back.
_MAX_JOURNALS = 256


@light_dataclass(frozen=True, slots=True)
class Journal:
    """What a step has overwritten: the rows `indices` (ascending; None: all rows) as they were before it."""

    indices: Array | None
    rows: Array

    def restore(self, indices: Array, rows: Array) -> None:
        """Overwrites those of `rows`, copied from `indices`, that are in the journal."""
        if self.indices is None:
            np.take(self.rows, indices, axis=0, out=rows, mode="clip")
        elif self.indices.size:
            at = np.minimum(np.searchsorted(self.indices, indices), self.indices.size - 1)
            is_touched = self.indices[at] == indices
            rows[is_touched] = self.rows[at[is_touched]]

    @property
    def nbytes(self) -> int:
        """Its bytes, without those of a second copy of the table."""
        return 0 if self.indices is None else self.indices.nbytes + self.rows.nbytes


@light_dataclass(frozen=True, slots=True)
class _Progress:
    """The step whose values the table has, or is being given; and the journals of it and of steps before it, newest first."""

    step: int
    journals: tuple[Journal, ...] = ()


class Table:
    """Memory and rule of one slice. One thread at a time applies; any number read meanwhile."""

    def __init__(self, piece: VariableSlice, rule: UpdateRule, *, budget: MemoryBudget, step: int) -> None:
        self.piece = piece
        self.num_rows = piece.stop - piece.start
        self.row_bytes = piece.row_bytes
        self._rule = rule
        self._budget = budget
        self._width = math.prod(piece.variable.shape[1:])
        self.filled_bytes = 0  # of the first values that it makes itself; any thread may look
        self.is_followed = False  # any thread may set it
        # Of rows, slots and journal.
        self._held_bytes = self._journal_bytes = 0
        num_copies = (1 if rule.is_lazy else 2) + len(rule.slots)
        budget.check(num_copies * piece.nbytes, purpose=f"variable {piece.variable.name!r} (rows and slots)")
        try:
            self.memory, self.values = self._allocate("rows")
            self._spare = self.values if rule.is_lazy else self._allocate("a second copy of the rows")[1]
            self.slots = {name: self._allocate(f"slot {name!r}")[1] for name in rule.slots}
        except BaseException:
            self.release()
            raise
        self._progress = _Progress(step)

    def fill_initial(self, step: int) -> None:
        """Makes the first values, if the server is to make them, and those of the slots; the table is then at `step`."""
        initializer, variable, first = self.piece.variable.initializer, self.piece.variable, self.piece.start
        num_rows = max(1, _COUNTED_ELEMENTS // self._width) if self._width else self.num_rows
        for start in range(0, self.num_rows, num_rows):
            stop = min(start + num_rows, self.num_rows)
            if initializer is not None:
                fill_table(self.values[start:stop], VariableSlice(variable=variable, start=first + start, stop=first + stop), initializer)
            for name, value in self._rule.slots.items():
                # Zeros too: else the machine gives fresh memory only when a step touches it, and the first step takes seconds.
                self.slots[name][start:stop].fill(value)
            if initializer is not None:
                self.filled_bytes = stop * self.row_bytes
        self._progress = _Progress(step)

    def renew_slots(self) -> None:
        """Gives every slot the value that it starts with."""
        for name, value in self._rule.slots.items():
            self.slots[name].fill(value)

    def skip(self) -> None:
        """Goes to the next step without a change."""
        self._advance(Journal(np.empty(0, np.int64), self.values[:0]))

    def apply(self, gradient: RowGradient) -> None:
        """Goes to the next step; the rule must have begun it. `gradient` is in order and in the type of sums."""
        if self._rule.is_lazy:
            previous = self.values[gradient.indices]
            self._advance(Journal(gradient.indices, previous))
            self._update_rows(gradient, previous)
        else:
            # The rows that readers of the step before the last one had are overwritten now.
            self._progress = _Progress(self._progress.step)
            np.copyto(self._spare, self.values)
            self._advance(Journal(None, self._spare))
            self._update_all(gradient, self._spare)

    def apply_on_arrival(self, gradient: RowGradient) -> None:
        """Changes rows in place, without regard to concurrent readers and writers: an update may be lost."""
        if self._rule.is_lazy:
            self._update_rows(gradient, self.values[gradient.indices])
        else:
            self._update_all(gradient, self.values)

    def take(self, indices: Array, *, step: int | None) -> Array:
        """Returns a copy of rows as they were at `step` (None: as they are now, even while they change). Raises StepGone."""
        # In range: checked by the caller. "clip" spares NumPy a second copy.
        rows = np.take(self.values, indices, axis=0, mode="clip")
        if step is not None:
            for journal in self.journals_since(step):
                journal.restore(indices, rows)
            self.check_journals(step)
        return rows

    def journals_since(self, step: int) -> tuple[Journal, ...]:
        """Returns what the steps after `step` have overwritten, newest first, those included that have only begun. Raises StepGone.

        Rows that were copied before the call and are restored from all of these are those of `step`, if `check_journals` agrees then.
        """
        progress = self._progress
        num_steps = progress.step - step
        if not 0 <= num_steps <= len(progress.journals):
            raise self._gone(step)
        return progress.journals[:num_steps]

    def check_journals(self, step: int) -> None:
        """Raises StepGone if what was restored from the journals since `step` may have been overwritten meanwhile."""
        if not self._rule.is_lazy:
            self.journals_since(step)

    def count_journals(self) -> None:
        """Counts the journals' bytes in the budget, in place of those before. Under the owner's lock."""
        held = sum(journal.nbytes for journal in self._progress.journals)
        self._budget.release(self._journal_bytes - held)
        self._held_bytes += held - self._journal_bytes
        self._journal_bytes = held

    @property
    def values_bytes(self) -> int:
        """Bytes of the rows, of their second copy if there is one, and of those that the last step overwrote."""
        return self._held_bytes - self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots."""
        return len(self.slots) * self.piece.nbytes

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self._budget.release(self._held_bytes)
        self._held_bytes = self._journal_bytes = 0

    def _allocate(self, what: str) -> tuple[Array, Array]:
        memory = self._budget.allocate(self.piece.nbytes, purpose=f"{what} of variable {self.piece.variable.name!r}")
        self._held_bytes += self.piece.nbytes
        return memory, memory.view(self.piece.variable.data_type.dtype).reshape(self.num_rows, self._width)

    def _advance(self, journal: Journal) -> None:
        """Makes the next step's journal known, before the first of its rows is overwritten."""
        journals = [journal]
        if self.is_followed and self._rule.is_lazy:
            # A copy of all rows takes less time than steps take to touch so many. What is free may be less.
            most_bytes, free_bytes = self.piece.nbytes // 2, self._budget.free_bytes
            left_bytes = (most_bytes if free_bytes is None else min(most_bytes, free_bytes + self._journal_bytes)) - journal.nbytes
            for older in self._progress.journals[:_MAX_JOURNALS]:
                left_bytes -= older.nbytes
                if left_bytes < 0:
                    break
                journals.append(older)
        self._progress = _Progress(self._progress.step + 1, tuple(journals))

    def _gone(self, step: int) -> PsError:
        return StepGone(
            f"variable {self.piece.variable.name!r}: its rows of step {step} were overwritten, the shard is at step {self._progress.step};"
            " read a later step",
            facts={"step": str(self._progress.step)},
        )

    def _update_rows(self, gradient: RowGradient, previous: Array) -> None:
        if not self._width:
            return
        slots = list(self.slots.values())
        scratch = self._scratch()
        for block in self._blocks(gradient.indices.size):
            at = gradient.indices[block]
            parts = [self._summable(slot[at]) for slot in slots]
            self.values[at] = self._updated(previous[block], parts, gradient.rows[block].reshape(-1), scratch)
            for slot, part in zip(slots, parts, strict=True):
                slot[at] = part.reshape(-1, self._width)

    def _update_all(self, gradient: RowGradient, previous: Array) -> None:
        if not self._width:
            return
        slots = list(self.slots.values())
        scratch = self._scratch()
        dense = np.zeros((self._block_rows, self._width), gradient.rows.dtype)
        for block in self._blocks(self.num_rows):
            first, last = np.searchsorted(gradient.indices, (block.start, block.stop))
            at = gradient.indices[first:last] - block.start
            dense[at] = gradient.rows[first:last]
            # Of float32 and float64 these are views, changed in place.
            parts = [self._summable(slot[block]) for slot in slots]
            flat = dense[: block.stop - block.start].reshape(-1)
            self.values[block] = self._updated(previous[block], parts, flat, scratch)
            for slot, part in zip(slots, parts, strict=True):
                if part.dtype != slot.dtype:
                    slot[block] = part.reshape(-1, self._width)
            dense[at] = 0

    def _updated(self, previous: Array, slots: list[Array], gradient: Array, scratch: list[Array]) -> Array:
        out, *rest = (part[: gradient.size] for part in scratch)
        self._rule.apply(self._summable(previous), out=out, slots=slots, gradient=gradient, scratch=rest)
        return out.reshape(-1, self._width)

    def _summable(self, rows: Array) -> Array:
        return rows.astype(self.piece.variable.data_type.sum_dtype, copy=False).reshape(-1)

    @property
    def _block_rows(self) -> int:
        return max(1, _BLOCK_ELEMENTS // self._width)

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self._block_rows):
            yield slice(start, min(start + self._block_rows, num_rows))

    def _scratch(self) -> list[Array]:
        dtype = self.piece.variable.data_type.sum_dtype
        return [np.empty(self._block_rows * self._width, dtype) for _ in range(1 + self._rule.num_scratch)]


# All tables of a shard in one step: whose rows are merged, limited and applied.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SparseStep:
    """The part of a step for the tables: each contribution's gradients by table, how much it counts, and the factors of the tables' means.

    The weight of one alone is a factor.
    """

    gradients: Sequence[Mapping[int, RowGradient]]
    weights: Sequence[float]
    scales: Sequence[float]


class TableGroup:
    """The tables of one layout, in its order."""

    def __init__(self, layout: Layout, rules: Sequence[UpdateRule], *, clip: ClipSpec, budget: MemoryBudget, step: int) -> None:
        self._limit = clip.value
        self._tables: list[Table] = []
        try:
            for piece, rule in zip(layout.tables, layout.rule_of_table, strict=True):
                self._tables.append(Table(piece, rules[rule], budget=budget, step=step))
        except BaseException:
            self.release()
            raise

    def __iter__(self) -> Iterator[Table]:
        return iter(self._tables)

    @property
    def slot_names(self) -> set[str]:
        """Names of the slots of all tables."""
        return {name for table in self._tables for name in table.slots}

    @property
    def contents(self) -> list[Array]:
        """The bytes of all rows, table by table."""
        return [table.memory for table in self._tables]

    @property
    def first_values(self) -> list[Array]:
        """Memories of the tables whose first values are sent, in order."""
        return [table.memory for table in self._tables if table.piece.variable.initializer is None]

    @property
    def filled_bytes(self) -> int:
        """How much of the first values that are not sent has been made."""
        return sum(table.filled_bytes for table in self._tables)

    def table(self, position: int) -> Table:
        """Returns a table; raises InvalidSpec if there is none."""
        if not 0 <= position < len(self._tables):
            raise InvalidSpec(f"table {position}: the shard has {len(self._tables)}; ask the chief for the model")
        return self._tables[position]

    def slot(self, position: int, name: str) -> Array:
        """Returns the memory of a table's slot, one row for each of its rows; raises SlotNotFound."""
        table = self.table(position)
        if name not in table.slots:
            known = ", ".join(table.slots) or "none"
            raise SlotNotFound(f"variable {table.piece.variable.name!r} has no slot {name!r}; it has {known}")
        return table.slots[name]

    def fill_initial(self, step: int) -> None:
        """Completes the memory with the copied first values. Takes long."""
        for table in self._tables:
            table.fill_initial(step)

    def renew_slots(self) -> None:
        """Gives every slot the value that it starts with."""
        for table in self._tables:
            table.renew_slots()

    def sums_of_squares(self, step: SparseStep) -> list[float]:
        """Returns the sum of squares of each table's mean, after its elements were limited. No effect."""
        means = (self._mean(position, step) for position in range(len(self._tables)))
        with np.errstate(all="ignore"):
            return [0.0 if mean is None else _sum_of_squares(mean.rows) for mean in means]

    def apply(self, step: SparseStep, *, on_arrival: bool) -> int:
        """Applies the step to every table that has a gradient; returns how many elements of the means are not finite. Takes long."""
        if not self._tables:
            return 0
        num_nonfinite = 0
        with np.errstate(all="ignore"):
            for position, table in enumerate(self._tables):
                mean = self._mean(position, step)
                if mean is not None:
                    num_nonfinite += mean.rows.size - int(np.count_nonzero(np.isfinite(mean.rows)))
                    if step.scales and step.scales[position] != 1:
                        np.multiply(mean.rows, mean.rows.dtype.type(step.scales[position]), out=mean.rows)
                if on_arrival:
                    if mean is not None:
                        table.apply_on_arrival(mean)
                elif mean is not None:
                    table.apply(mean)
                else:
                    table.skip()
        return num_nonfinite

    def count_journals(self) -> None:
        """Counts the journals' bytes. Under the owner's lock."""
        for table in self._tables:
            table.count_journals()

    def release(self) -> None:
        """Takes the memory off the budget; the owner must not use it again."""
        for table in self._tables:
            table.release()
        self._tables = []

    def _mean(self, position: int, step: SparseStep) -> RowGradient | None:
        """The mean for the optimizer, before its scale, in memory of its own; None without a gradient."""
        given = [(rows[position], weight) for rows, weight in zip(step.gradients, step.weights, strict=True) if position in rows]
        if not given:
            return None
        variable = self._tables[position].piece.variable
        is_by_replica = variable.sparse_mean is SparseMean.PER_REPLICA
        divisor = 1.0 if len(step.weights) == 1 else sum(step.weights) if is_by_replica else None
        with np.errstate(all="ignore"):
            mean = mean_of_rows(
                [gradient for gradient, _ in given],
                weights=[weight for _, weight in given],
                divisor=divisor,
                sum_dtype=variable.data_type.sum_dtype,
            )
            if self._limit:
                np.clip(mean.rows, -self._limit, self._limit, out=mean.rows)
        return mean


def _sum_of_squares(rows: Array) -> float:
    wide = rows.astype(np.float64, copy=False).reshape(-1)
    return float(np.dot(wide, wide))
