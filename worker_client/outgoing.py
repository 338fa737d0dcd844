"""What each shard is sent of a contribution: its arena, or none, and its rows of tables. Knows layouts and memory; no transport.

Where a wire format asks for it, the arena is encoded into memory of its own, once: a part that has to be sent again is the same bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ps_protocol.encodings import FloatEncoding, is_encodable
from ps_protocol.encodings_gradients import GradientEncoder
from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.segments import Segments
from ps_protocol.shard import Metric, SparsePart
from ps_protocol.tensors import Array, check_name
from worker_client.gradients import Staged
from worker_client.model_memory import ModelMemory
from worker_client.row_gradients import RowGradient
from worker_client.schedules import plain_number
from worker_client.wire_format import WireFormat

Metrics = Mapping[str, float | tuple[float, float]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """One shard's part of a contribution: its bytes, and the header's words on them."""

    segments: Segments
    sparse: tuple[SparsePart, ...] = ()
    absent: tuple[int, ...] = ()
    encoding: FloatEncoding = FloatEncoding.AS_IS
    encoded_bytes: int = 0


class Outgoing:
    """Cuts contributions into the shards' parts, without copying. What most steps have in common is made once for each memory.

    `wire`: how arenas travel that lie in the worker's own memory; those in a shard's do not travel. `travels`
    says of each shard whether it is sent its arena at all. For one thread.
    """

    def __init__(
        self, layouts: Sequence[Layout], *, wire: WireFormat | None = None, travels: Callable[[int], bool] = lambda index: True
    ) -> None:
        self._layouts = tuple(layouts)
        self._hashes = tuple(layout.hash for layout in layouts)
        self._memory: ModelMemory | None = None
        self._absent: tuple[str, ...] = ()
        self._arenas: Sequence[ShardPart] = ()
        self._wire = wire or WireFormat()
        self._travels = travels
        # By shard, made when first needed: a shard that shares memory needs none.
        self._encoders: dict[int, GradientEncoder] = {}

    @property
    def layout_hashes(self) -> Sequence[str]:
        """The names of the shards' layouts."""
        return self._hashes

    def parts(self, staged: Staged, *, is_last_counted: bool = True) -> Sequence[ShardPart]:
        """Returns one part for each shard; they share the staging memory and the rows' arrays, and are valid until the next call.

        `is_last_counted`: whether the contribution before counts, as far as is known; for what encoding it made is owed.
        """
        staged.memory.pack()
        for encoder in self._encoders.values():
            encoder.settle(is_counted=is_last_counted)
        if staged.memory is not self._memory or staged.absent != self._absent:
            absent, pairs = frozenset(staged.absent), zip(self._layouts, staged.memory.segments, strict=True)
            self._arenas = tuple(_arena(layout, segments, absent) for layout, segments in pairs)
            self._memory, self._absent = staged.memory, staged.absent
        arenas = self._arenas
        if self._wire.gradient_encoding is not FloatEncoding.AS_IS:
            arenas = [self._encoded(index, part, staged.memory) for index, part in enumerate(arenas)]
        if not staged.rows:
            return arenas
        return [_with_rows(part, layout, staged.rows) for part, layout in zip(arenas, self._layouts, strict=True)]

    def _encoded(self, index: int, part: ShardPart, memory: ModelMemory) -> ShardPart:
        layout = self._layouts[index]
        is_here = memory.is_lent(index) or not self._travels(index)
        if is_here or not part.segments.nbytes or not any(is_encodable(layout, arena) for arena in layout.arenas):
            return part
        encoder = self._encoders.get(index)
        if encoder is None:
            wire = self._wire
            encoder = self._encoders[index] = GradientEncoder(
                layout, wire.gradient_encoding, fraction=wire.fraction, error_feedback=wire.feeds_errors_back
            )
        encoded = encoder.encode(part.segments, absent=part.absent)
        return replace(part, segments=Segments([encoded]), encoding=encoder.encoding, encoded_bytes=encoded.nbytes)


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
    if not absent:
        return ShardPart(segments)
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
    return replace(part, segments=part.segments.followed_by([piece for piece in pieces if piece.nbytes]), sparse=tuple(sparse))


def _rows_of(piece: VariableSlice, gradient: RowGradient) -> tuple[Array, Array]:
    if piece.is_whole:
        return gradient.indices, gradient.values
    first, last = np.searchsorted(gradient.indices, (piece.start, piece.stop))
    return gradient.indices[first:last] - piece.start, gradient.values[first:last]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
