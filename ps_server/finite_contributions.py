"""Refuses contributions whose gradients are not finite."""

from ps_protocol.encodings import stretch
from ps_protocol.finite import are_finite, gradient_ranges, refuse_nonfinite
from ps_protocol.layout import Layout
from ps_server.staging import StagedGradients


def check_finite(memory: StagedGradients, layout: Layout, *, who: str) -> None:
    """Raises NonFiniteGradient, naming the first variable, unless all gradients of a contribution that is in order are finite."""
    if memory.dense.size:
        _check_dense(memory, layout, who)
    for position, gradient in memory.rows.items():
        refuse_nonfinite(layout.tables[position].variable.name, gradient.rows.reshape(-1), who=who)


def _check_dense(memory: StagedGradients, layout: Layout, who: str) -> None:
    absent = frozenset(memory.absent)
    for arena in gradient_ranges(layout):
        if are_finite(stretch(layout, memory.dense, memory.encoding, arena, arena.start, arena.stop)):
            continue
        # What a contribution has no gradient for may be anything.
        for position, (piece, start) in enumerate(zip(layout.slices, layout.offsets, strict=True)):
            if arena.start <= start < arena.stop and position not in absent:
                elements = stretch(layout, memory.dense, memory.encoding, arena, start, start + piece.nbytes)
                refuse_nonfinite(piece.variable.name, elements, who=who)
