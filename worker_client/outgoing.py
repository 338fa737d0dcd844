"""What each shard is sent of a contribution: its arena, or none, and its rows of tables. Knows layouts and memory; no transport."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.segments import Segments
from ps_protocol.shard import Metric, SparsePart
from ps_protocol.tensors import Array, check_name
from worker_client.gradients import Staged
from worker_client.model_memory import ModelMemory
from worker_client.row_gradients import RowGradient
from worker_client.schedules import plain_number

Metrics = Mapping[str, float | tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """One shard's part of a contribution: its bytes, and the header's words on them."""

    segments: Segments
    sparse: tuple[SparsePart, ...] = ()
    absent: tuple[int, ...] = ()


class Outgoing:
    """Cuts contributions into the shards' parts, without copying. What most steps have in common is made once."""

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory
        self._hashes = tuple(layout.hash for layout in memory.layouts)
        self._absent: tuple[str, ...] = ()
        self._arenas: Sequence[ShardPart] = tuple(ShardPart(segments) for segments in memory.segments)

    @property
    def layout_hashes(self) -> Sequence[str]:
        """The names of the shards' layouts."""
        return self._hashes

    def parts(self, staged: Staged) -> Sequence[ShardPart]:
        """Returns one part for each shard; they share the staging memory and the rows' arrays."""
        self._memory.pack()
        if staged.absent != self._absent:
            absent, pairs = frozenset(staged.absent), zip(self._memory.layouts, self._memory.segments, strict=True)
            self._arenas = tuple(_arena(layout, segments, absent) for layout, segments in pairs)
            self._absent = staged.absent
        if not staged.rows:
            return self._arenas
        return [_with_rows(part, layout, staged.rows) for part, layout in zip(self._arenas, self._memory.layouts, strict=True)]


def as_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Returns numbers, and numbers with weights, as they travel. Raises InvalidSpec."""
    if not isinstance(metrics, Mapping):
        raise InvalidSpec(f"metrics: got a {type(metrics).__name__}, want a dict from name to number")
    return {name: _metric(name, report) for name, report in metrics.items()}


def _metric(name: str, report: object) -> Metric:
    check_name(name)
    value, weight = report if isinstance(report, tuple) and len(report) == 2 else (report, 1.0)
    times = _number(name, weight)
    if not 0 <= times < math.inf:
        raise InvalidSpec(f"metric {name!r}: its weight is {weight!r}, want a finite number >= 0")
    return Metric(value=_number(name, value), weight=times)


def _number(name: str, value: object) -> float:
    plain = plain_number(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)  # type: ignore[arg-type]
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidSpec(f"metric {name!r}: got {value!r}, want a number, or a tuple of number and weight")
    return float(plain)


def _arena(layout: Layout, segments: Segments, absent: frozenset[str]) -> ShardPart:
    positions = tuple(position for position, piece in enumerate(layout.slices) if piece.variable.name in absent)
    return ShardPart(Segments(()) if len(positions) == len(layout.slices) else segments, absent=positions)


def _with_rows(part: ShardPart, layout: Layout, rows: Mapping[str, RowGradient]) -> ShardPart:
    sparse: list[SparsePart] = []
    pieces: list[Array] = []
    for position, piece in enumerate(layout.tables):
        gradient = rows.get(piece.variable.name)
        if gradient is not None:
            # Named also if none of its rows lie here: the table has a gradient, and some optimizers move all rows then.
            indices, values = _rows_of(piece, gradient)
            sparse.append(SparsePart(table=position, num_rows=len(indices)))
            pieces += [_bytes(indices), _bytes(values)]
    return ShardPart(part.segments.followed_by([piece for piece in pieces if piece.nbytes]), tuple(sparse), part.absent)


def _rows_of(piece: VariableSlice, gradient: RowGradient) -> tuple[Array, Array]:
    if piece.is_whole:
        return gradient.indices, gradient.values
    first, last = np.searchsorted(gradient.indices, (piece.start, piece.stop))
    return gradient.indices[first:last] - piece.start, gradient.values[first:last]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
