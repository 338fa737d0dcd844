"""Refuses gradients that are not finite before anybody is sent them. Knows a worker's memory; no shard, no transport."""

from collections.abc import Iterator

from ps_protocol.finite import are_finite, gradient_ranges, refuse_nonfinite
from ps_protocol.model import ModelSpec
from ps_protocol.tensors import Array
from worker_client.gradients import Staged
from worker_client.model_memory import ModelMemory


class FiniteGradients:
    """Looks at contributions of one model; what most of them have in common is made once for each memory. For one thread."""

    def __init__(self, model: ModelSpec) -> None:
        self._states = frozenset(spec.name for spec in model.variables if spec.is_state)
        self._memory: ModelMemory | None = None
        self._elements: list[Array] = []

    def check(self, staged: Staged, *, who: str) -> None:
        """Raises NonFiniteGradient, naming the first variable, unless all gradients are finite."""
        memory = staged.memory
        memory.pack()
        if memory is not self._memory:
            self._memory, self._elements = memory, [*_elements(memory)]
        if not all(map(are_finite, self._elements)):
            left_out = self._states.union(staged.absent)
            for name, array in memory.arrays.items():
                if name not in left_out:
                    refuse_nonfinite(name, array.reshape(-1), who=who)
        for name, rows in staged.rows.items():
            refuse_nonfinite(name, rows.values.reshape(-1), who=who)


def _elements(memory: ModelMemory) -> Iterator[Array]:
    """Yields what has gradients, in as few pieces as can be: flat arrays that share the memory."""
    for layout, segments in zip(memory.layouts, memory.segments, strict=True):
        ranges = gradient_ranges(layout)
        start = 0
        for piece in segments.pieces:
            for arena in ranges:
                # Pieces end where variables do.
                first, last = max(arena.start - start, 0), min(arena.stop - start, piece.nbytes)
                if first < last:
                    yield piece[first:last].view(arena.data_type.dtype)
            start += piece.nbytes
