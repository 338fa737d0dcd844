"""Rows of one table from all shards that have some, in the order asked for. Knows slices and rows; no model and no step after the first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.segments import Segments
from ps_protocol.shard import RowsRequest, Shard
from ps_protocol.tensors import Array, VariableSpec
from worker_client.shard_group import ShardGroup

# Of a whole table, so many rows are asked for at a time: their numbers travel too.
MAX_ROWS_AT_ONCE = 1 << 20


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
    shards: ShardGroup, layouts: Sequence[Layout], variable: VariableSpec, indices: Array | None, *, step: int | None, slot: str = ""
) -> Rows:
    """Returns rows of a table, or of one of its slots: `indices` (int64, checked; None: all) in their shape, and then the row's.

    Raises IndexOutOfRange, SlotNotFound, StepGone, StepNotReady.
    """
    shape = (variable.num_rows,) if indices is None else indices.shape
    flat = None if indices is None else np.ascontiguousarray(indices).reshape(-1)
    values = np.empty((variable.num_rows if flat is None else len(flat), *variable.shape[1:]), variable.data_type.dtype)

    def read(index: int, shard: Shard, timeout_s: float) -> list[int]:
        found, layout_hash = [], layouts[index].hash
        for part in _parts(layouts[index], variable.name, flat):
            request = RowsRequest(epoch=shards.epoch, layout_hash=layout_hash, table=part.table, step=step, slot=slot)
            found.append(_read_part(shard, part, values, request, timeout_s))
        return found

    steps = shards.each(f"read rows of {variable.name!r}", read, num_bytes=[values.nbytes] * len(layouts))
    found = [its_step for shard_steps in steps for its_step in shard_steps]
    return Rows(values.reshape(*shape, *variable.shape[1:]), min(found, default=None))


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
