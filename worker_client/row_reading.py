"""Rows of one table from all shards that have some, of one step, in the order asked for. Knows slices and rows; no model, no token."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.segments import Segments
from ps_protocol.shard import RowsRequest, Shard
from ps_protocol.tensors import Array, VariableSpec
from worker_client.shard_group import ShardGroup

# Of a whole table, so many rows are asked for at a time: their numbers travel too.
MAX_ROWS_AT_ONCE = 1 << 20

_Steps = dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows, and the least of the steps that shards had them from; None if no row was asked for."""

    values: Array
    step: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one slice: their numbers within it, and where they go in the result; a slice object if that is one run."""

    table: int
    indices: Array
    target: "slice | Array"


def read_rows(
    shards: ShardGroup,
    layouts: Sequence[Layout],
    variable: VariableSpec,
    indices: Array | None,
    *,
    step: int | None,
    slot: str = "",
    is_aligned: bool = True,
    is_held: bool = False,
) -> Rows:
    """Returns rows of a table, or of one of its slots: `indices` (int64, checked; None: all) in their shape, and then the row's.

    `step` None: the newest; of one step over all shards if `is_aligned`, else of each part the newest. `is_held`: all shards are told of a
    reader of that step first, at the cost of a call more for each of them. Raises IndexOutOfRange, SlotNotFound; StepGone, StepNotReady if
    the step that was named, or, for the newest, one of all shards, could not be had this time.
    """
    shape = (variable.num_rows,) if indices is None else indices.shape
    flat = None if indices is None else np.ascontiguousarray(indices).reshape(-1)
    values = np.empty((variable.num_rows if flat is None else len(flat), *variable.shape[1:]), variable.data_type.dtype)
    parts = [[*_parts(layout, variable.name, flat)] for layout in layouts]
    reading = _Reading(shards, layouts, values, parts, name=variable.name, slot=slot)
    if step is None and is_aligned and is_held and values.nbytes:
        step = reading.read_held()
        return Rows(values.reshape(*shape, *variable.shape[1:]), step)
    found = reading.read(range(len(parts)), step=step, is_whole=step is None and is_aligned)
    if step is None and is_aligned and found:
        # Shards keep the step before as well, so those that have gone ahead can be read again at the step of the others.
        least = min(found.values())
        ahead = [index for index, its_step in found.items() if its_step > least]
        found |= reading.read(ahead, step=least, is_whole=True) if ahead else {}
    return Rows(values.reshape(*shape, *variable.shape[1:]), min(found.values(), default=None))


class _Reading:
    """Rows on their way into `values`."""

    def __init__(
        self,
        shards: ShardGroup,
        layouts: Sequence[Layout],
        values: Array,
        parts: "Sequence[Sequence[_Part]]",
        *,
        name: str,
        slot: str,
    ) -> None:
        self.parts = parts
        self._shards = shards
        self._layouts = layouts
        self._values = values
        self._name = name
        self._slot = slot

    def read(self, indices: Collection[int], *, step: int | None, is_whole: bool) -> "_Steps":
        """Reads what shards have and returns their steps; `step` None: the newest of each shard if `is_whole`, else of each part."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            if index not in indices:
                return None
            at, least = step, None
            for part in self.parts[index]:
                found = _read_part(shard, part, self._values, self._request(index, part, at), timeout_s)
                least = found if least is None else min(least, found)
                at = found if is_whole else step
            return least

        steps = self._shards.each(f"read rows of {self._name!r}", read, num_bytes=[self._values.nbytes] * len(self.parts))
        return {index: found for index, found in enumerate(steps) if found is not None}

    def read_held(self) -> int:
        """Reads what shards have, of the newest step of the first of them, which all of them keep meanwhile if they can; returns it."""
        holders = [index for index, parts in enumerate(self.parts) if parts]
        kept: list[int] = []

        def hold(position: int, step: int | None) -> None:
            if step is not None and position == len(holders):
                self.read(holders, step=step, is_whole=True)
                kept.append(step)
                return
            index = holders[position]
            part = self.parts[index][0]
            row = Segments([np.empty(self._values[:1].nbytes, np.uint8)])
            request = self._request(index, part, step)
            self._shards.while_holding(index, request, part.indices[:1], row, lambda found: hold(position + 1, found))

        hold(0, None)
        return kept[-1]

    def _request(self, index: int, part: _Part, step: int | None) -> RowsRequest:
        layout_hash = self._layouts[index].hash
        return RowsRequest(epoch=self._shards.epoch, layout_hash=layout_hash, table=part.table, step=step, slot=self._slot)


def _parts(layout: Layout, name: str, indices: Array | None) -> Iterator[_Part]:
    for position, piece in enumerate(layout.tables):
        if piece.variable.name != name:
            continue
        if indices is None:
            yield from _runs(position, piece)
        elif piece.is_whole:
            if len(indices):
                yield _Part(position, indices, slice(0, len(indices)))
        else:
            found = np.flatnonzero((indices >= piece.start) & (indices < piece.stop))
            if len(found):
                yield _Part(position, indices[found] - piece.start, found)


def _runs(position: int, piece: VariableSlice) -> Iterator[_Part]:
    for start in range(piece.start, piece.stop, MAX_ROWS_AT_ONCE):
        stop = min(start + MAX_ROWS_AT_ONCE, piece.stop)
        yield _Part(position, np.arange(start - piece.start, stop - piece.start, dtype=np.int64), slice(start, stop))


def _read_part(shard: Shard, part: _Part, values: Array, request: RowsRequest, timeout_s: float) -> int:
    is_run = isinstance(part.target, slice)
    into = values[part.target] if is_run else np.empty((len(part.indices), *values.shape[1:]), values.dtype)
    step = shard.read_rows(request, part.indices, Segments([into.reshape(-1).view(np.uint8)]), timeout_s=timeout_s)
    if not is_run:
        values[part.target] = into
    return step
