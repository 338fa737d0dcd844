"""All tables of a shard in one step: whose rows are merged, limited and applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.clipping import ClipSpec
from ps_protocol.errors import InvalidSpec, SlotNotFound
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from ps_protocol.variable_options import SparseMean
from ps_server.memory import MemoryBudget
from ps_server.row_gradient import RowGradient, mean_of
from ps_server.table import Table
from ps_server.update_rule import UpdateRule


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseStep:
    """What one step means for the tables: each contribution's gradients by table, their weights, and the factors of the tables' means."""

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

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def slot_names(self) -> set[str]:
        """Names of the slots that any of them has."""
        return {name for table in self._tables for name in table.slots}

    @property
    def first_values(self) -> list[Array]:
        """Memories of the tables whose first values are sent, in order."""
        return [table.memory for table in self._tables if table.piece.variable.initializer is None]

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
        """Completes what first values have been copied into. Takes long."""
        for table in self._tables:
            table.fill_initial(step)

    def rebase(self, step: int) -> None:
        """Says that all rows are those of `step`."""
        for table in self._tables:
            table.rebase(step)

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

    def settle_journals(self) -> None:
        """Counts the journals' bytes. Under the owner's lock."""
        for table in self._tables:
            table.settle_journal()

    def release(self) -> None:
        """Takes the memory off the budget; the owner must not use it again."""
        for table in self._tables:
            table.release()
        self._tables = []

    def _mean(self, position: int, step: SparseStep) -> RowGradient | None:
        """The mean that the optimizer gets but for its scale, in memory of its own; None if nobody has a gradient."""
        given = [(rows[position], weight) for rows, weight in zip(step.gradients, step.weights, strict=True) if position in rows]
        if not given:
            return None
        variable = self._tables[position].piece.variable
        is_by_replica = variable.sparse_mean is SparseMean.PER_REPLICA
        with np.errstate(all="ignore"):
            mean = mean_of(
                [gradient for gradient, _ in given],
                weights=[weight for _, weight in given],
                num_contributors=len(step.gradients) if is_by_replica else None,
                sum_dtype=variable.data_type.sum_dtype,
            )
            if self._limit:
                np.clip(mean.rows, -self._limit, self._limit, out=mean.rows)
        return mean


def _sum_of_squares(rows: Array) -> float:
    wide = rows.astype(np.float64, copy=False).reshape(-1)
    return float(np.dot(wide, wide))
