"""One slice of a sparse variable: its rows, and the journal for readers of the step before."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import PsError, StepGone
from ps_protocol.layout import VariableSlice
from ps_protocol.tensors import Array
from ps_server.memory import MemoryBudget
from ps_server.row_gradient import RowGradient
from ps_server.table_initial import fill_table
from ps_server.update_rule import UpdateRule

# Elements that the optimizer takes at once: all arrays of such a block stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True)
class _Journal:
    """Values of the step before, of the rows `indices` (ascending; None: of all rows)."""

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


@dataclass(frozen=True, slots=True)
class _Progress:
    """The step whose values the table has, or is being given; and the journal of the step before it, once that is complete."""

    step: int
    journal: _Journal | None


class Table:
    """Memory and rule of one slice. One thread at a time applies; any number read meanwhile."""

    def __init__(self, piece: VariableSlice, rule: UpdateRule, *, budget: MemoryBudget, step: int) -> None:
        self.piece = piece
        self.num_rows = piece.stop - piece.start
        self.row_bytes = piece.row_bytes
        self._rule = rule
        self._budget = budget
        self._width = math.prod(piece.variable.shape[1:])
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
        self._progress = _Progress(step, None)

    def fill_initial(self, step: int) -> None:
        """Makes the first values, if the server is to make them, and those of the slots; the table is then at `step`."""
        initializer = self.piece.variable.initializer
        if initializer is not None:
            fill_table(self.values, self.piece, initializer)
        for name, value in self._rule.slots.items():
            # Zeros too: else the machine gives fresh memory only when a step touches it, and the first step takes seconds.
            self.slots[name].fill(value)
        self._progress = _Progress(step, None)

    def rebase(self, step: int) -> None:
        """Says that the rows are those of `step`; readers of any other are told that it is gone."""
        self._progress = _Progress(step, None)

    def skip(self) -> None:
        """Goes to the next step without a change."""
        empty = _Journal(np.empty(0, np.int64), self.values[:0])
        self._progress = _Progress(self._progress.step + 1, empty)

    def apply(self, gradient: RowGradient) -> None:
        """Goes to the next step; the rule must have begun it. `gradient` is in order and in the type of sums."""
        step = self._progress.step
        if self._rule.is_lazy:
            previous = self.values[gradient.indices]
            self._progress = _Progress(step + 1, _Journal(gradient.indices, previous))
            self._update_rows(gradient, previous)
        else:
            # What readers of the step before the last one had is overwritten now.
            self._progress = _Progress(step, None)
            np.copyto(self._spare, self.values)
            self._progress = _Progress(step + 1, _Journal(None, self._spare))
            self._update_all(gradient, self._spare)

    def apply_on_arrival(self, gradient: RowGradient) -> None:
        """Changes rows in place, whoever reads or changes them meanwhile: an update may be lost."""
        if self._rule.is_lazy:
            self._update_rows(gradient, self.values[gradient.indices])
        else:
            self._update_all(gradient, self.values)

    def take(self, indices: Array, *, step: int | None) -> Array:
        """Returns a copy of rows as they were at `step` (None: as they are now, whoever changes them); raises StepGone."""
        # In range: checked by the caller. "clip" spares NumPy a second copy.
        rows = np.take(self.values, indices, axis=0, mode="clip")
        progress = self._progress
        if step is None or progress.step == step:
            return rows
        if progress.step == step + 1 and progress.journal is not None:
            progress.journal.restore(indices, rows)
            if self._progress is progress or progress.journal.indices is not None:
                return rows
        raise self._gone(step)

    def settle_journal(self) -> None:
        """Counts the journal's bytes in the budget, in place of those of the journal before. Under the owner's lock."""
        journal = self._progress.journal
        held = 0 if journal is None or journal.indices is None else journal.indices.nbytes + journal.rows.nbytes
        self._budget.release(self._journal_bytes - held)
        self._held_bytes += held - self._journal_bytes
        self._journal_bytes = held

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self._budget.release(self._held_bytes)
        self._held_bytes = self._journal_bytes = 0

    def _allocate(self, what: str) -> tuple[Array, Array]:
        memory = self._budget.allocate(self.piece.nbytes, purpose=f"{what} of variable {self.piece.variable.name!r}")
        self._held_bytes += self.piece.nbytes
        return memory, memory.view(self.piece.variable.data_type.dtype).reshape(self.num_rows, self._width)

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
        return [np.empty(self._block_rows * self._width, dtype) for _ in range(4)]
