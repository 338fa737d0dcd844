"""The sparse variables of a shard: rows that change in place, their slots and first values. Knows no lock.

Gradients, means, journals and readers of a table have indices: numbers of rows, or (spread) keys. Which rows these have, and whether there
are any, `keyed_rows.py` knows.

A step first copies the rows that it is about to touch into a journal and makes that known, and only then overwrites the first of them. So
a reader copies rows without waiting, looks afterwards how far the steps have come, and takes the touched rows from the journals of the
steps after the one that it wants. There is one journal; while a table is followed there are more, so that all of its rows can be copied. An
optimizer that moves every row in every step has a second copy of the values instead of a journal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ps_protocol.errors import DataLoss, InvalidSpec, LimitExceeded, PsError, SlotNotFound, StepGone
from ps_protocol.model.keys import KEYS_PART, OCCURRENCES_PART, ROWS_PART
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.spec import ClipSpec
from ps_protocol.model.variables import Array, SparseMean
from ps_server.numbers.first_rows import fill_table, rows_of_keys
from ps_server.numbers.keyed_rows import KeyedRows, NumberedRows
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.occurrences import BUCKET_BYTES
from ps_server.numbers.row_gradients import RowGradient, mean_of_rows, scaled, trimmed_mean_of_rows
from ps_server.optimizers.rule import UpdateRule

# One slice of a sparse variable: its rows, and the journal for readers of the step before.


# Elements that are given first values between two counts: some hundredths of a second.
_COUNTED_ELEMENTS = 1 << 22
# Elements that the optimizer takes at once: all arrays of such a block stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 14
# Steps that a table which is followed can be taken back.
_MAX_JOURNALS = 256

_MARK_DTYPE = np.dtype("<u4")
# Of a row that has changed so late that its number of steps has no place: it counts as changed ever after.
_MAX_MARK = (1 << 32) - 1


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
    """Memory and rule of one slice. One thread at a time applies; any number read meanwhile.

    `values` and `slots` have a row for each number; the first `num_rows` of them are in use. `rows` knows which row is whose.
    """

    def __init__(self, piece: VariableSlice, rule: UpdateRule, *, budget: MemoryBudget, step: int) -> None:
        self.piece = piece
        self.row_bytes = piece.row_bytes
        self._rule = rule
        # Of a keyed table nobody could look at all rows in each step.
        self._is_lazy = rule.is_lazy or piece.variable.keys is not None
        self._budget = budget
        self._width = math.prod(piece.variable.shape[1:])
        self.filled_bytes = 0  # of the first values that it makes itself; any thread may look
        self.is_followed = False  # any thread may set it
        self._num_awaited = 0  # rows that contributions may still make
        # Of journals, and of rows and slots that are not there from the beginning.
        self._counted_bytes = 0
        num_copies = (1 if self._is_lazy else 2) + len(rule.slots)
        budget.check(num_copies * piece.nbytes, purpose=f"variable {piece.variable.name!r} (rows and slots)")
        # Of each row, once somebody asks which have changed: how many steps after `_marked_from` the last change was.
        self._marks: Array | None = None
        self._marked_from = 0
        keys = piece.variable.keys
        self.rows = NumberedRows(piece, budget) if keys is None else KeyedRows(piece, keys, budget)
        try:
            names = ["rows", *(f"slot {name!r}" for name in rule.slots), *([] if self._is_lazy else ["a second copy of the rows"])]
            dtype, num_rows = piece.variable.data_type.dtype, self.rows.max_rows
            self.values, *parts = [memory.view(dtype).reshape(num_rows, self._width) for memory in self.rows.allocate_rows(names)]
            self.slots = dict(zip(rule.slots, parts, strict=False))
            self._spare = self.values if self._is_lazy else parts[-1]
        except BaseException:
            self.release()
            raise
        self._progress = _Progress(step)
        self.count_growth()

    @property
    def num_rows(self) -> int:
        """The number of rows; a keyed table's grows."""
        return self.rows.num_rows

    @property
    def parts(self) -> dict[str, Array]:
        """The memory of all rows, by the names that it has in a checkpoint: the values (an empty name), slots, and what `rows` has."""
        return self.rows.parts | {name: memory[: self.num_rows] for name, memory in {"": self.values, **self.slots}.items()}

    def changed_since(self, step: int) -> Array | None:
        """Returns the numbers of the rows that have changed since `step`, ascending; None: all rows may have.

        Steps note what they change from the first call on, if there is memory for that. Not beside a step.
        """
        if self._marks is None:
            if self._is_lazy:
                self._marked_from = self._progress.step
                with suppress(LimitExceeded):
                    self._marks = self.rows.allocate("marks of changed rows", _MARK_DTYPE.itemsize).view(_MARK_DTYPE)
                    self._marks[: self.num_rows] = 0
            return None
        if step < self._marked_from:
            return None
        rows = np.flatnonzero(self._marks[: self.num_rows] > step - self._marked_from)
        return rows if rows.size < self.num_rows else None

    def parts_of(self, rows: Array | None) -> dict[str, Array]:
        """Returns memory as large as a copy of these rows, and of all counters, needs, with the rows' numbers; None: that of all rows."""
        if rows is None:
            return self.parts
        return {ROWS_PART: rows} | {name: part if name == OCCURRENCES_PART else part[: rows.size] for name, part in self.parts.items()}

    def memory_of(self, part: str) -> Array:
        """Returns the memory of a part but for the keys, of as many rows as there may be."""
        return {"": self.values, **self.slots, **self.rows.memories}[part]

    @property
    def contents(self) -> list[Array]:
        """The memory of all rows that a digest of them is made of."""
        return [part for name, part in self.parts.items() if name in ("", KEYS_PART)]

    @property
    def bytes_per_new_row(self) -> int:
        """About how many bytes each row takes that a gradient makes; 0 if all rows are there."""
        return self._bytes_per_row + self.rows.place_bytes

    def await_rows(self, num_rows: int) -> None:
        """Makes sure that files have room for so many rows more than contributions may make already; negative: for as many less.

        Raises LimitExceeded.
        """
        self._num_awaited += num_rows
        try:
            if self.rows.file is not None and num_rows > 0:
                self.rows.file.reserve(min(self.num_rows + self._num_awaited, self.rows.max_rows) * self._record_bytes)
        except LimitExceeded:
            self._num_awaited -= num_rows
            raise

    def prefetch(self, indices: Array) -> Array:
        """Has the system read what lies in files of rows and slots, without waiting for it. Returns no rows."""
        if self.rows.file is not None:
            numbers = self.rows.find(indices, step=self._progress.step)
            self.rows.file.prefetch(numbers[numbers >= 0] * self._record_bytes, self._record_bytes)
        return self.values[:0]

    def extend(self, keys: Array) -> tuple[int, Array]:
        """Gives the next rows to those of the keys, none of which is there, that are the table's, in order. Raises LimitExceeded.

        Returns the first of the rows, which the caller fills before anybody reads, and the positions of their keys among `keys`.
        """
        assert isinstance(self.rows, KeyedRows)
        least, greatest = self.piece.index_range
        chosen = np.flatnonzero((keys >= least) & (keys <= greatest))
        keys, first = keys[chosen], self.num_rows
        num_bytes = keys.size * self.bytes_per_new_row
        self._budget.reserve(num_bytes, purpose=f"{keys.size} rows of variable {self.piece.variable.name!r}")
        self._counted_bytes += num_bytes
        self.await_rows(keys.size)
        try:
            self.rows.add(keys)
        finally:
            self.await_rows(-keys.size)
        return first, chosen

    def take_counters(self, piece: VariableSlice, counters: Array, *, where: str) -> None:
        """Takes over how often keys occurred, from a file of another slice. Raises DataLoss if it does not fit."""
        assert isinstance(self.rows, KeyedRows)
        if self.rows.occurrences is None or counters.size != (piece.stop - piece.start) * BUCKET_BYTES:
            raise DataLoss(f"{where}: the counters of keys of table {piece.variable.name!r} are not those of its buckets")
        self.rows.occurrences.take_over(piece, counters)

    def make_rows(self, gradient: RowGradient, *, step: int) -> None:
        """Makes the rows of those keys that have none and are admitted at `step`, as far as there is room. Raises LimitExceeded.

        Rows of keys that have one are used at `step`: when the process begins again, they must not have the age of the step that made them.
        """
        keys = self.admitted(gradient, step=step, counts=True).indices
        plan = self.rows.plan(keys, now=self._progress.step, evicts=False)
        if plan.begins.size:
            self._renew(plan.numbers[plan.begins], self._first_values(keys[plan.begins]))
        self.rows.carry_out(plan, keys, step=step)

    def admitted(self, gradient: RowGradient, *, step: int | None = None, counts: bool = False) -> RowGradient:
        """Returns the gradient without those keys that have no row and are to get none at `step` (None: the one that is applied next).

        `counts`: those that are left out have occurred in that step; else nothing changes.
        """
        now = self._progress.step
        stays = self.rows.are_admitted(gradient.indices, step=now if step is None else step, now=now)
        if stays is None:
            return gradient
        if counts:
            self.rows.count_unadmitted(gradient.indices[~stays])
        return RowGradient(indices=gradient.indices[stays], rows=gradient.rows[stays])

    def _renew(self, numbers: Array, first: Array) -> None:
        """Gives rows first values, and their slots what they begin with."""
        self.values[numbers] = first
        for name, value in self._rule.slots.items():
            self.slots[name][numbers] = value

    def fill_initial(self, step: int) -> None:
        """Makes the first values, if the server is to make them, and those of the slots; the table is then at `step`."""
        initializer, variable, first = self.piece.variable.initializer, self.piece.variable, self.piece.start
        num_rows = max(1, _COUNTED_ELEMENTS // self._width if self._width else self.num_rows)
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
        if self._marks is not None:
            # All rows change with the next step: nobody can be told of changes since an earlier one.
            self._marks[: self.num_rows] = 0
            self._marked_from = self._progress.step + 1
        for name, value in self._rule.slots.items():
            self.slots[name][: self.num_rows].fill(value)

    def skip(self) -> None:
        """Goes to the next step without a change."""
        self._advance(Journal(np.empty(0, np.int64), self.values[:0]))

    def apply(self, gradient: RowGradient) -> None:
        """Goes to the next step; the rule must have begun it. `gradient` is in order and in the type of sums."""
        if self._is_lazy:
            self._apply_to_rows(gradient)
        else:
            # The rows that readers of the step before the last one had are overwritten now.
            self._progress = _Progress(self._progress.step)
            np.copyto(self._spare, self.values)
            self._advance(Journal(None, self._spare))
            self._update_all(gradient, self._spare)

    def _apply_to_rows(self, gradient: RowGradient) -> None:
        keys, now = gradient.indices, self._progress.step
        plan = self.rows.plan(keys, now=now)
        previous = rows_of(self.values, plan.numbers)
        if plan.begins.size:
            first = previous[plan.begins] = self._first_values(keys[plan.begins])
        known, numbers = _known(gradient, plan.numbers)
        if known is not gradient:
            previous = previous[plan.numbers >= 0]
        changed, overwritten = known.indices, previous
        if plan.evicted.size:
            former = self.rows.former_keys(plan.evicted)
            left = self._rows_at(self.values, former, self._first_values, step=now)
            changed, overwritten = np.concatenate([changed, former]), np.concatenate([previous, left])
            order = np.argsort(changed)
            changed, overwritten = changed[order], overwritten[order]
        self._advance(Journal(changed, overwritten))
        if plan.begins.size:
            self._renew(plan.numbers[plan.begins], first)
        self.rows.carry_out(plan, keys, step=self._progress.step)
        self._mark(numbers)
        self._update_rows(numbers, known, previous)

    def _mark(self, numbers: Array) -> None:
        """Notes that the step that has just been made known changes these rows."""
        if self._marks is not None:
            self._marks[numbers] = min(self._progress.step - self._marked_from, _MAX_MARK)

    def apply_on_arrival(self, gradient: RowGradient) -> None:
        """Changes rows in place, without regard to concurrent readers and writers: an update may be lost. All rows must be there."""
        if self._is_lazy:
            gradient, numbers = _known(gradient, self.rows.find(gradient.indices, step=self._progress.step))
            self._update_rows(numbers, gradient, self.values[numbers])
        else:
            self._update_all(gradient, self.values)

    def take(self, indices: Array, *, step: int | None) -> Array:
        """Returns a copy of rows as they were at `step` (None: as they are now, even while they change). Raises StepGone."""
        rows = self._rows_at(self.values, indices, self._first_values, step=self._progress.step if step is None else step)
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
        if not self._is_lazy:
            self.journals_since(step)

    def take_slot(self, name: str, indices: Array) -> Array:
        """Returns a copy of a slot's rows as they are now, even while they change."""
        value = self._rule.slots[name]
        return self._rows_at(self.slots[name], indices, lambda keys: value, step=self._progress.step)

    def count_growth(self) -> None:
        """Counts the bytes of journals and rows in the budget, in place of those before. Under the owner's lock."""
        journals = sum(journal.nbytes for journal in self._progress.journals)
        held = journals + self.num_rows * self._bytes_per_row + self.rows.nbytes
        self._budget.release(self._counted_bytes - held)
        self._counted_bytes = held

    @property
    def _bytes_per_row(self) -> int:
        """Bytes in memory of each row that is not there from the beginning: with slots and key, without its place in the index."""
        if not self.rows.nbytes_per_row:
            return 0
        marks = 0 if self._marks is None else self._marks.itemsize
        return self.rows.nbytes_per_row + (0 if self.rows.file else self._record_bytes) + marks

    @property
    def values_bytes(self) -> int:
        """Bytes of the rows, of their second copy if there is one, and of those that the last step overwrote."""
        return self.rows.held_bytes + self._counted_bytes - self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots in memory."""
        return 0 if self.rows.file else len(self.slots) * self.num_rows * self.row_bytes

    @property
    def files_bytes(self) -> int:
        """Bytes of rows and slots in files."""
        return self.num_rows * self._record_bytes if self.rows.file else 0

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self._budget.release(self._counted_bytes + self.rows.held_bytes)
        self._counted_bytes = self.rows.held_bytes = 0
        if self.rows.file is not None:
            self.rows.file.close()

    @property
    def _record_bytes(self) -> int:
        """Bytes of a row with its slots."""
        return (1 + len(self.slots)) * self.row_bytes

    def _first_values(self, keys: Array) -> Array:
        variable = self.piece.variable
        assert variable.initializer is not None
        return rows_of_keys(variable.initializer, keys, width=self._width, dtype=variable.data_type.sum_dtype)

    def _rows_at(self, memory: Array, indices: Array, first: Callable[[Array], Any], *, step: int) -> Array:
        """Returns a copy of rows of values or a slot, as they are; of keys without rows at a step, what `first` gives to new ones."""
        numbers = self.rows.find(indices, step=step)
        rows = rows_of(memory, numbers)
        if (unknown := np.flatnonzero(numbers < 0)).size:
            rows[unknown] = first(indices[unknown])
        return rows

    def _advance(self, journal: Journal) -> None:
        """Makes the next step's journal known, before the first of its rows is overwritten."""
        journals = [journal]
        if self.is_followed and self._is_lazy:
            # A copy of all rows takes less time than steps take to touch so many. What is free may be less.
            most_bytes, free_bytes = self.piece.nbytes // 2, self._budget.free_bytes
            left_bytes = (most_bytes if free_bytes is None else min(most_bytes, free_bytes + self._counted_bytes)) - journal.nbytes
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

    def _update_rows(self, numbers: Array, gradient: RowGradient, previous: Array) -> None:
        if not self._width:
            return
        slots = list(self.slots.values())
        scratch = self._scratch()
        for block in self._blocks(numbers.size):
            at = numbers[block]
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


def rows_of(memory: Array, numbers: Array) -> Array:
    """Returns a copy of rows; of some row where the number is -1."""
    if not memory.flags.c_contiguous:  # "take" would first copy all of it
        return memory[np.maximum(numbers, 0)]
    # In range: checked by the callers. "clip" spares NumPy a second copy.
    rows: Array = np.take(memory, numbers, axis=0, mode="clip")
    return rows


def _known(gradient: RowGradient, numbers: Array) -> tuple[RowGradient, Array]:
    """Returns the gradient of those rows that have a number, and the numbers."""
    if not numbers.size or int(numbers.min()) >= 0:
        return gradient, numbers
    is_known = numbers >= 0
    return RowGradient(indices=gradient.indices[is_known], rows=gradient.rows[is_known]), numbers[is_known]


# All tables of a shard in one step: whose rows are merged, limited and applied.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SparseStep:
    """The part of a step for the tables: each contribution's gradients by table, how much it counts, and the factors of the tables' means.

    The weight of one alone is a factor. `merge`: what takes the place of the mean; `shares`: for each contribution, a factor for each
    table.
    """

    gradients: Sequence[Mapping[int, RowGradient]]
    weights: Sequence[float]
    scales: Sequence[float]
    merge: MergeSpec = MEAN
    shares: Sequence[Sequence[float]] = ()


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
        """All rows, table by table, and their keys."""
        return [part for table in self._tables for part in table.contents]

    @property
    def first_values(self) -> list[Array]:
        """Memories of the tables whose first values are sent, in order."""
        return [table.contents[-1].reshape(-1).view(np.uint8) for table in self._tables if table.piece.variable.initializer is None]

    @property
    def filled_bytes(self) -> int:
        """How much of the first values that are not sent has been made."""
        return sum(table.filled_bytes for table in self._tables)

    def table(self, position: int) -> Table:
        """Returns a table; raises InvalidSpec if there is none."""
        if not 0 <= position < len(self._tables):
            raise InvalidSpec(f"table {position}: the shard has {len(self._tables)}; ask the chief for the model")
        return self._tables[position]

    def check_slot(self, position: int, name: str) -> None:
        """Raises SlotNotFound, InvalidSpec unless the table has such a slot."""
        table = self.table(position)
        if name not in table.slots:
            known = ", ".join(table.slots) or "none"
            raise SlotNotFound(f"variable {table.piece.variable.name!r} has no slot {name!r}; it has {known}")

    @property
    def bytes_per_new_row(self) -> tuple[int, ...]:
        """Each table's."""
        return tuple(table.bytes_per_new_row for table in self._tables)

    def await_rows(self, position: int, num_rows: int) -> None:
        """Makes sure that a table's files have room for so many rows more; negative: for as many less. Raises LimitExceeded."""
        # None, where a contribution ends later than its model.
        for table in self._tables[position : position + 1]:
            table.await_rows(num_rows)

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
                mean = self._mean(position, step, counts=not on_arrival)
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

    def make_rows(self, gradients: Mapping[int, RowGradient], *, step: int) -> None:
        """Makes the rows of keyed tables that the gradients are for, as if at `step`. Raises LimitExceeded."""
        for position, gradient in gradients.items():
            self._tables[position].make_rows(gradient, step=step)

    def count_growth(self) -> None:
        """Counts the bytes of journals and new rows. Under the owner's lock."""
        for table in self._tables:
            table.count_growth()

    def release(self) -> None:
        """Takes the memory off the budget; the owner must not use it again."""
        for table in self._tables:
            table.release()
        self._tables = []

    def _mean(self, position: int, step: SparseStep, *, counts: bool = False) -> RowGradient | None:
        """The mean for the optimizer, before its scale, in memory of its own; None without a gradient. `counts`: keys not admitted."""
        table, variable = self._tables[position], self._tables[position].piece.variable
        factors = [of[position] for of in step.shares] or [1.0] * len(step.weights)
        given = [
            (scaled(rows[position], factor, sum_dtype=variable.data_type.sum_dtype), weight)
            for rows, weight, factor in zip(step.gradients, step.weights, factors, strict=True)
            if position in rows
        ]
        if not given:
            return None
        weights, divisor, lacks_none = [weight for _, weight in given], None, variable.sparse_mean is SparseMean.PER_REPLICA
        if len(step.weights) == 1:
            divisor = 1.0
        elif lacks_none:
            divisor = float(len(step.weights))
            weights = [weight * (divisor / sum(step.weights)) for weight in weights]
        with np.errstate(all="ignore"):
            sum_dtype = variable.data_type.sum_dtype
            if step.merge.num_trimmed(len(step.weights) if lacks_none else len(given)):
                # Without factors: only merges by norms have them (MergeSpec.needs_norms).
                rows = [one.get(position) for one in step.gradients]
                mean = trimmed_mean_of_rows(rows, step.merge, weights=step.weights, lacks_none=lacks_none, sum_dtype=sum_dtype)
            else:
                mean = mean_of_rows([gradient for gradient, _ in given], weights=weights, divisor=divisor, sum_dtype=sum_dtype)
            # Before its norm is taken: what is not admitted counts for nothing.
            mean = table.admitted(mean, counts=counts)
            if self._limit:
                np.clip(mean.rows, -self._limit, self._limit, out=mean.rows)
        return mean


def _sum_of_squares(rows: Array) -> float:
    wide = rows.astype(np.float64, copy=False).reshape(-1)
    return float(np.dot(wide, wide))
