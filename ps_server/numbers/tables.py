"""The sparse variables of a shard: rows that change in place, their slots and first values, and the merging of gradients. Knows no lock.

A table has a size, and its gradients and readers name rows by their numbers. Or it is keyed: they name them by keys, of which an index
knows the rows, and a row is made by the first gradient that is applied to it. In everything else the two are alike: gradients, means and
journals have indices, which are numbers or (spread) keys.

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

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, LimitExceeded, PsError, SlotNotFound, StepGone
from ps_protocol.model.keys import KEYS_PART, ROWS_PART, USE_PART, are_gone, draws
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.spec import ClipSpec
from ps_protocol.model.variables import MAX_TENSOR_BYTES, Array, SparseMean
from ps_server.numbers.first_rows import fill_table, rows_of_keys
from ps_server.numbers.key_index import MAX_ROWS, KeyIndex
from ps_server.numbers.memory import MemoryBudget, growing_bytes
from ps_server.numbers.row_buckets import RowBuckets
from ps_server.numbers.trimmed import trimmed_mean_of
from ps_server.optimizers.rule import UpdateRule

# Gradients of a table, as rows with their indices: put in order, and merged into a mean.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RowGradient:
    """`rows[i]` is the gradient of row `indices[i]`. `indices`: int64, strictly ascending once `in_order` has seen them."""

    indices: Array
    rows: Array


def check_indices(indices: Array, piece: VariableSlice) -> None:
    """Raises IndexOutOfRange naming the first index that is no row of the slice."""
    least, greatest = (bound - piece.first_index for bound in piece.index_range)
    if not indices.size or (int(indices.min()) >= least and int(indices.max()) <= greatest):
        return
    name, position = piece.variable.name, int(np.flatnonzero((indices < least) | (indices > greatest))[0])
    where = f", counted from row {piece.first_index}, the first one here" if piece.first_index else ""
    raise IndexOutOfRange(
        f"variable {name!r}: indices[{position}] = {int(indices[position])}, want {least} to {greatest}{where}",
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


def _row_scale(where: Sequence[Array], weights: Sequence[float], num_rows: int) -> Array:
    """Returns for each row what its gradients' weights are multiplied with, so that they are as many as its gradients."""
    counts, sums = np.zeros((num_rows, 1)), np.zeros((num_rows, 1))
    for at, weight in zip(where, weights, strict=True):
        counts[at] += 1
        sums[at] += weight
    scale: Array = counts / sums
    return scale


def mean_of_rows(
    gradients: Sequence[RowGradient], *, weights: Sequence[float], divisor: float | None, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the mean of gradients in order, summed in the order given, as an array of its own in `sum_dtype`.

    `weights`: how much each gradient counts. `divisor`: what every row is divided by, and weights are factors; None: the mean of a row is
    that of the gradients that have it, weighted as a dense variable's.
    """
    if len(gradients) == 1:
        indices, rows = gradients[0].indices, gradients[0].rows.astype(sum_dtype)
        if weights[0] != 1 and divisor is not None:
            rows *= sum_dtype.type(weights[0])
        total: Array | None = None
    else:
        indices = np.unique(np.concatenate([gradient.indices for gradient in gradients]))
        rows = np.zeros((indices.size, gradients[0].rows.shape[1]), sum_dtype)
        where = [np.searchsorted(indices, gradient.indices) for gradient in gradients]
        total = np.zeros((indices.size, 1), sum_dtype)
        scale = _row_scale(where, weights, indices.size) if divisor is None and any(weight != weights[0] for weight in weights) else None
        for gradient, weight, at in zip(gradients, weights, where, strict=True):
            part = gradient.rows.astype(sum_dtype, copy=False)
            if scale is not None:
                part = part * (weight * scale[at]).astype(sum_dtype)
            elif divisor is not None and weight != 1:
                part = part * sum_dtype.type(weight)
            # No index twice, so nothing is lost where rows are added in place.
            rows[at] += part
            total[at] += 1
    if divisor is not None:
        rows /= sum_dtype.type(divisor)
    elif total is not None:
        rows /= total
    return RowGradient(indices=indices, rows=rows)


def _scaled(gradient: RowGradient, factor: float, sum_dtype: np.dtype[Any]) -> RowGradient:
    return gradient if factor == 1 else RowGradient(indices=gradient.indices, rows=gradient.rows.astype(sum_dtype) * sum_dtype.type(factor))


def trimmed_mean_of_rows(
    gradients: Sequence[RowGradient | None], merge: MergeSpec, *, weights: Sequence[float], lacks_none: bool, sum_dtype: np.dtype[Any]
) -> RowGradient:
    """Returns the trimmed mean of gradients in order, in `sum_dtype`; takes memory for these rows of each of them.

    A row's mean is that of the gradients that have it; with `lacks_none` those that have not, None among them, have zeros there.
    """
    indices = np.unique(np.concatenate([gradient.indices for gradient in gradients if gradient is not None]))
    width = next(gradient.rows.shape[1] for gradient in gradients if gradient is not None)
    values, present = np.zeros((len(gradients), indices.size, width), sum_dtype), np.full((len(gradients), indices.size), lacks_none)
    for position, gradient in enumerate(gradients):
        if gradient is not None:
            at = np.searchsorted(indices, gradient.indices)
            values[position, at], present[position, at] = gradient.rows, True
    rows = np.empty((indices.size, width), sum_dtype)
    is_here = None if present.all() else np.repeat(present, width, axis=1)
    flat = [one.reshape(-1) for one in values]
    trimmed_mean_of(flat, merge, out=rows.reshape(-1), weights=weights, present=is_here)
    return RowGradient(indices=indices, rows=rows)


# One slice of a sparse variable: its rows, and the journal for readers of the step before.


# Elements that are given first values between two counts: some hundredths of a second.
_COUNTED_ELEMENTS = 1 << 22
# Elements that the optimizer takes at once: all arrays of such a block stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 14
# Steps that a table which is followed can be taken back.
_MAX_JOURNALS = 256

_KEY_DTYPE = np.dtype("<i8")
_MARK_DTYPE = np.dtype("<u4")
# Of a row that has changed so late that its number of steps has no place: it counts as changed ever after.
_MAX_MARK = (1 << 32) - 1
# A key with its place in the index, of which 25 to 70 % are taken; while a larger one is made there are two.
_KEY_BYTES = 8 + 30

# The step that used a row last; and in a bounded table its place in a bucket, and whether a step needs it.
_USE_BYTES, _BOUNDED_BYTES = 4, 5 + 1
# The rows that a step looks at to find those that are gone, at least, and for each that it needs.
_LOOKED_AT, _LOOKED_AT_PER_ROW = 1 << 12, 16
_GOLDEN = 0x9E3779B97F4A7C15
_STEP_BITS = (1 << 32) - 1


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

    `values` and `slots` have a row for each number; of a keyed table, the first `num_rows` of them are in use.
    """

    def __init__(self, piece: VariableSlice, rule: UpdateRule, *, budget: MemoryBudget, step: int) -> None:
        self.piece = piece
        self.row_bytes = piece.row_bytes
        self._rule = rule
        # Of a keyed table nobody could look at all rows in each step.
        self._is_lazy = rule.is_lazy or piece.variable.is_keyed
        self._budget = budget
        self._width = math.prod(piece.variable.shape[1:])
        self.filled_bytes = 0  # of the first values that it makes itself; any thread may look
        self.is_followed = False  # any thread may set it
        # Of rows, slots and journal.
        self._held_bytes = self._counted_bytes = 0
        num_copies = (1 if self._is_lazy else 2) + len(rule.slots)
        budget.check(num_copies * piece.nbytes, purpose=f"variable {piece.variable.name!r} (rows and slots)")
        self._max_rows = min(MAX_ROWS, MAX_TENSOR_BYTES // max(1, self.row_bytes)) if piece.variable.is_keyed else piece.stop - piece.start
        if piece.variable.max_rows:
            self._max_rows = min(self._max_rows, piece.variable.max_rows)
        self._max_age = piece.variable.max_age_steps
        has_use = bool(piece.variable.max_rows or self._max_age)
        # Of each row, once somebody asks which have changed: how many steps after `_marked_from` the last change was.
        self._marks: Array | None = None
        self._marked_from = 0
        # Of all steps of this process: rows that were made, those whose place went to another key, and keys that found none or that were
        # not admitted.
        self.num_made = self.num_evicted = self.num_refused = self.num_unadmitted = 0
        try:
            self.index = KeyIndex(self._allocate("keys", _KEY_DTYPE.itemsize).view(_KEY_DTYPE)) if piece.variable.is_keyed else None
            self._buckets = RowBuckets(piece, self._growing) if piece.variable.max_rows else None
            # By row, the step that used it last, modulo 2^32.
            self._use = self._growing("use of rows", _USE_BYTES, self._max_rows if has_use else 0).view(np.uint32)
            self.values = self._allocate_rows("rows")
            self._spare = self.values if self._is_lazy else self._allocate_rows("a second copy of the rows")
            self.slots = {name: self._allocate_rows(f"slot {name!r}") for name in rule.slots}
        except BaseException:
            self.release()
            raise
        self._progress = _Progress(step)
        self.count_growth()

    @property
    def num_rows(self) -> int:
        """The number of rows; a keyed table's grows."""
        return self._max_rows if self.index is None else self.index.num_rows

    @property
    def parts(self) -> dict[str, Array]:
        """The memory of all rows, by the names that it has in a checkpoint: the values (an empty name), slots, and keys if there are."""
        keys = {} if self.index is None else {KEYS_PART: self.index.keys[: self.num_rows]}
        if self._use.size:
            keys[USE_PART] = self._use[: self.num_rows]
        return keys | {name: memory[: self.num_rows] for name, memory in {"": self.values, **self.slots}.items()}

    def changed_since(self, step: int) -> Array | None:
        """Returns the numbers of the rows that have changed since `step`, ascending; None: all rows may have.

        Steps note what they change from the first call on, if there is memory for that. Not beside a step.
        """
        if self._marks is None:
            if self._is_lazy:
                self._marked_from = self._progress.step
                with suppress(LimitExceeded):
                    self._marks = self._allocate("marks of changed rows", _MARK_DTYPE.itemsize).view(_MARK_DTYPE)
                    self._marks[: self.num_rows] = 0
            return None
        if step < self._marked_from:
            return None
        rows = np.flatnonzero(self._marks[: self.num_rows] > step - self._marked_from)
        return rows if rows.size < self.num_rows else None

    def parts_of(self, rows: Array | None) -> dict[str, Array]:
        """Returns memory as large as a copy of these rows needs, with their numbers; None: the memory of all rows."""
        if rows is None:
            return self.parts
        return {ROWS_PART: rows} | {name: part[: rows.size] for name, part in self.parts.items()}

    def memory_of(self, part: str) -> Array:
        """Returns the memory of a part but for the keys, of as many rows as there may be."""
        return {"": self.values, USE_PART: self._use, **self.slots}[part]

    @property
    def contents(self) -> list[Array]:
        """The memory of all rows that a digest of them is made of."""
        return [part for name, part in self.parts.items() if name in ("", KEYS_PART)]

    @property
    def bytes_per_new_row(self) -> int:
        """About how many bytes each row takes that a gradient makes; 0 if all rows are there."""
        if self.index is None:
            return 0
        own_bytes = (_USE_BYTES if self._use.size else 0) + (_BOUNDED_BYTES if self._buckets is not None else 0)
        own_bytes += 0 if self._marks is None else self._marks.itemsize
        return _KEY_BYTES + (1 + len(self.slots)) * self.row_bytes + own_bytes

    def extend(self, keys: Array) -> tuple[int, Array]:
        """Gives the next rows to those of the keys, none of which is there, that are the table's, in order. Raises LimitExceeded.

        Returns the first of the rows, which the caller fills before anybody reads, and the positions of their keys among `keys`.
        """
        assert self.index is not None
        least, greatest = self.piece.index_range
        chosen = np.flatnonzero((keys >= least) & (keys <= greatest))
        keys, first = keys[chosen], self.num_rows
        num_bytes = keys.size * self.bytes_per_new_row
        self._budget.reserve(num_bytes, purpose=f"{keys.size} rows of variable {self.piece.variable.name!r}")
        self._held_bytes += num_bytes
        self._counted_bytes += num_bytes
        self._add(keys)
        return first, chosen

    def make_rows(self, gradient: RowGradient, *, step: int) -> None:
        """Makes the rows of those keys that have none and are admitted at `step`, as far as there is room. Raises LimitExceeded.

        Rows of keys that have one are used at `step`.
        """
        keys, num_before = gradient.indices, gradient.indices.size
        keys = self.admitted(gradient, step=step).indices
        self.num_unadmitted += num_before - keys.size
        numbers, new, evicted = self._places_of(keys, evicts=False)
        again = self._gone_among(numbers)
        self._renew(numbers[again], keys[again])
        self._make(keys[new], evicted)
        if self._use.size:
            # When the process begins again, rows in use must not have the age of the step that made them.
            self._use[numbers[numbers >= 0]] = step & _STEP_BITS

    def admitted(self, gradient: RowGradient, *, step: int | None = None) -> RowGradient:
        """Returns the gradient without those keys that have no row and are to get none at `step` (None: the one that is applied next)."""
        variable = self.piece.variable
        if self.index is None or not variable.admit_probability:
            return gradient
        assert variable.initializer is not None
        keys, at = gradient.indices, self._progress.step if step is None else step
        numbers = self.index.find(keys)
        stays = draws(keys, seed=variable.initializer.seed, step=at) < variable.admit_probability
        stays |= (numbers >= 0) & ~self._is_gone(numbers, self._progress.step)
        return RowGradient(indices=keys[stays], rows=gradient.rows[stays])

    def _places_of(self, keys: Array, *, evicts: bool) -> tuple[Array, Array, Array]:
        """Returns the row number of each key, which rows are still to be made, and the rows of other keys that make room.

        Nothing changes. `keys`: ascending. Numbers: -1 for keys that there is no room for. New: positions in `keys`; the last of them get
        the rows of other keys.
        """
        assert self.index is not None
        numbers = self.index.find(keys)
        new = np.flatnonzero(numbers < 0)
        evicted = np.empty(0, np.int64)
        if self._buckets is not None and new.size:
            ages = self._ages if evicts else None
            places = self._buckets.places(keys[new], needed=numbers[numbers >= 0], ages=ages, keys_of=self.index.keys)
            self.num_refused += new.size - places.added.size - places.replacing.size
            new, evicted = new[np.concatenate([places.added, places.replacing])], places.evicted
        elif self._max_age and evicts and new.size:
            evicted = self._some_that_are_gone(new.size, needed=numbers)
        self._check_room(new.size - evicted.size)
        if new.size:
            numbers[new] = np.concatenate([np.arange(self.num_rows, self.num_rows + new.size - evicted.size), evicted])
        return numbers, new, evicted

    def _ages(self, rows: Array) -> Array:
        """Returns how many steps ago rows were used last: 1 by the step before the one that is being applied."""
        ages: Array = np.uint32((self._progress.step + 1) & _STEP_BITS) - self._use[rows]
        return ages

    def _is_gone(self, numbers: Array, step: int) -> Array:
        """Returns whether no step for so long used the rows, or those before the number -1, that they are gone at `step`."""
        if not self._max_age:
            return np.zeros(numbers.size, np.bool_)
        return are_gone(np.take(self._use, numbers, mode="clip"), step=step, max_age=self._max_age)

    def _gone_among(self, numbers: Array) -> Array:
        """Returns the positions of those rows that begin anew."""
        return np.flatnonzero((numbers >= 0) & (numbers < self.num_rows) & self._is_gone(numbers, self._progress.step))

    def _some_that_are_gone(self, count: int, *, needed: Array) -> Array:
        """Returns at most so many rows that are gone, of a part of the table that follows from the step alone, but none of those needed."""
        num_rows = self.num_rows
        size = min(num_rows, max(_LOOKED_AT, _LOOKED_AT_PER_ROW * count))
        start = (self._progress.step * _GOLDEN % (1 << 64)) * num_rows >> 64
        part = (start + np.arange(size)) % max(1, num_rows)
        return np.setdiff1d(part[self._is_gone(part, self._progress.step)], needed)[:count]

    def _renew(self, rows: "Array | slice", keys: Array) -> None:
        """Gives rows what those of new keys begin with."""
        self.values[rows] = self._first_values(keys)
        for name, value in self._rule.slots.items():
            self.slots[name][rows] = value
        if self._use.size:
            self._use[rows] = self._progress.step & _STEP_BITS

    def _make(self, keys: Array, evicted: Array) -> None:
        """Makes rows of keys that have none; the last of them get the rows `evicted`."""
        assert self.index is not None
        if not keys.size:
            return
        num_added, first = keys.size - evicted.size, self.num_rows
        self._renew(slice(first, first + num_added), keys[:num_added])
        self._renew(evicted, keys[num_added:])
        # Last: who finds a key finds its row.
        self._add(keys[:num_added])
        self.index.replace(evicted, keys[num_added:])
        self.num_made += keys.size
        self.num_evicted += evicted.size

    def _add(self, keys: Array) -> None:
        assert self.index is not None
        self._check_room(keys.size)
        if self._buckets is not None and keys.size:
            self._buckets.add(keys, np.arange(self.num_rows, self.num_rows + keys.size))
        self.index.add(keys)

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
            if self.index is not None:
                self._apply_to_keys(gradient)
                return
            previous = self.values[gradient.indices]
            self._advance(Journal(gradient.indices, previous))
            self._mark(gradient.indices)
            self._update_rows(gradient.indices, gradient, previous)
        else:
            # The rows that readers of the step before the last one had are overwritten now.
            self._progress = _Progress(self._progress.step)
            np.copyto(self._spare, self.values)
            self._advance(Journal(None, self._spare))
            self._update_all(gradient, self._spare)

    def _apply_to_keys(self, gradient: RowGradient) -> None:
        assert self.index is not None
        numbers, new, evicted = self._places_of(gradient.indices, evicts=True)
        made, again = gradient.indices[new], self._gone_among(numbers)
        renewed = numbers[again], gradient.indices[again]
        previous = np.take(self.values, numbers, axis=0, mode="clip")
        for some in (new, again):
            previous[some] = self._first_values(gradient.indices[some])
        keys, rows = gradient.indices, previous
        if numbers.size and int(numbers.min()) < 0:
            is_known = numbers >= 0
            keys, rows = keys[is_known], rows[is_known]
        gradient, numbers = _known(gradient, numbers)
        previous = rows
        if evicted.size:
            former = self.index.keys[evicted]
            left = self._rows_at(self.values, evicted, former, self._first_values, step=self._progress.step)
            keys, rows = np.concatenate([keys, former]), np.concatenate([rows, left])
            order = np.argsort(keys)
            keys, rows = keys[order], rows[order]
        self._advance(Journal(keys, rows))
        self._make(made, evicted)
        self._renew(*renewed)
        self._mark(numbers)
        if self._use.size:
            self._use[numbers] = self._progress.step & _STEP_BITS
        self._update_rows(numbers, gradient, previous)

    def _mark(self, numbers: Array) -> None:
        """Notes that the step that has just been made known changes these rows."""
        if self._marks is not None:
            self._marks[numbers] = min(self._progress.step - self._marked_from, _MAX_MARK)

    def apply_on_arrival(self, gradient: RowGradient) -> None:
        """Changes rows in place, without regard to concurrent readers and writers: an update may be lost. All rows must be there."""
        if self._is_lazy:
            numbers = gradient.indices
            if self.index is not None:
                gradient, numbers = _known(gradient, self.index.find(numbers))
            self._update_rows(numbers, gradient, self.values[numbers])
        else:
            self._update_all(gradient, self.values)

    def take(self, indices: Array, *, step: int | None) -> Array:
        """Returns a copy of rows as they were at `step` (None: as they are now, even while they change). Raises StepGone."""
        rows = self._taken(self.values, indices, self._first_values, step=step)
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
        return self._taken(self.slots[name], indices, lambda keys: value, step=None)

    def count_growth(self) -> None:
        """Counts the bytes of journals and rows in the budget, in place of those before. Under the owner's lock."""
        held = sum(journal.nbytes for journal in self._progress.journals)
        if self.index is not None:
            held += self.num_rows * (self.bytes_per_new_row - _KEY_BYTES + self.index.keys.itemsize) + self.index.nbytes
        self._budget.release(self._counted_bytes - held)
        self._held_bytes += held - self._counted_bytes
        self._counted_bytes = held

    @property
    def values_bytes(self) -> int:
        """Bytes of the rows, of their second copy if there is one, and of those that the last step overwrote."""
        return self._held_bytes - self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots."""
        return len(self.slots) * self.num_rows * self.row_bytes

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self._budget.release(self._held_bytes)
        self._held_bytes = self._counted_bytes = 0

    def _allocate_rows(self, what: str) -> Array:
        memory = self._allocate(what, self.row_bytes)
        return memory.view(self.piece.variable.data_type.dtype).reshape(self._max_rows, self._width)

    def _allocate(self, what: str, row_bytes: int) -> Array:
        if self.piece.variable.is_keyed:
            return self._growing(what, row_bytes, self._max_rows)
        memory = self._budget.allocate(self._max_rows * row_bytes, purpose=f"{what} of variable {self.piece.variable.name!r}")
        self._held_bytes += memory.nbytes
        return memory

    def _growing(self, what: str, row_bytes: int, num_rows: int) -> Array:
        try:
            return growing_bytes(num_rows * row_bytes)
        except (OSError, MemoryError):
            name = self.piece.variable.name
            raise LimitExceeded(
                f"{what} of variable {name!r}: this machine sets no addresses aside; let it with sysctl vm.overcommit_memory=0"
            ) from None

    def _check_room(self, num_new: int) -> None:
        if self.num_rows + num_new > self._max_rows:
            raise LimitExceeded(
                f"variable {self.piece.variable.name!r}: {self.num_rows} rows and {num_new} more, {self._max_rows} at most on one"
                " parameter server; add parameter servers"
            )

    def _first_values(self, keys: Array) -> Array:
        variable = self.piece.variable
        assert variable.initializer is not None
        return rows_of_keys(variable.initializer, keys, width=self._width, dtype=variable.data_type.sum_dtype)

    def _taken(self, memory: Array, indices: Array, first: Callable[[Array], Any], *, step: int | None) -> Array:
        """Returns a copy of rows of values or a slot, as they are; of keys without rows at `step`, what `first` gives to new ones."""
        if self.index is None:
            # In range: checked by the caller. "clip" spares NumPy a second copy.
            return np.take(memory, indices, axis=0, mode="clip")
        return self._rows_at(memory, self.index.find(indices), indices, first, step=self._progress.step if step is None else step)

    def _rows_at(self, memory: Array, numbers: Array, keys: Array, first: Callable[[Array], Any], *, step: int) -> Array:
        rows: Array = np.take(memory, numbers, axis=0, mode="clip")
        unknown = np.flatnonzero((numbers < 0) | self._is_gone(numbers, step))
        if unknown.size:
            rows[unknown] = first(keys[unknown])
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
        """The bytes of all rows, table by table, and of their keys."""
        return [part.reshape(-1).view(np.uint8) for table in self._tables for part in table.contents]

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
            if self._tables[position].index is not None:
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
            (_scaled(rows[position], factor, variable.data_type.sum_dtype), weight)
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
                rows = [one.get(position) for one in step.gradients]
                mean = trimmed_mean_of_rows(rows, step.merge, weights=step.weights, lacks_none=lacks_none, sum_dtype=sum_dtype)
            else:
                mean = mean_of_rows([gradient for gradient, _ in given], weights=weights, divisor=divisor, sum_dtype=sum_dtype)
            # Before its norm is taken: what is not admitted counts for nothing.
            num_before, mean = mean.indices.size, table.admitted(mean)
            if counts:
                table.num_unadmitted += num_before - mean.indices.size
            if self._limit:
                np.clip(mean.rows, -self._limit, self._limit, out=mean.rows)
        return mean


def _sum_of_squares(rows: Array) -> float:
    wide = rows.astype(np.float64, copy=False).reshape(-1)
    return float(np.dot(wide, wide))
