"""Limits on the mean gradient of a step, over all shards: what is asked for, and the factors that follow from norms. Knows no array.

Sources: tf.clip_by_value, tf.clip_by_norm, tf.clip_by_global_norm. Norms are of the mean that the optimizer would get, so shards first
report sums of squares, slice by slice, and then apply with the factors that follow from all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, VariableSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec:
    """Limits; 0 is none. First every element to -value … value, then every variable to `norm`, then all together to `global_norm`."""

    value: float = 0.0
    norm: float = 0.0
    global_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("value", "norm", "global_norm"):
            limit = getattr(self, name)
            if not (math.isfinite(limit) and limit >= 0):
                raise InvalidSpec(f"clip: {name} = {limit!r}, want a finite number > 0, or 0 for no limit")

    @property
    def needs_norms(self) -> bool:
        """Whether shards must report sums of squares before a step is applied."""
        return bool(self.norm or self.global_norm)


NO_CLIP = ClipSpec()


def scales(clip: ClipSpec, *, layouts: Sequence[Layout], sums: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Returns, for each shard, the factor of each of its slices: first `layout.slices`, then `layout.tables`.

    `sums` are the sums of squares in the same arrangement, after clipping by value. Slices of one variable have one factor. A norm that is
    not finite gives nan: such a step must show in the values, as in the original. Plain updates (not gradients) have 0 and get 1.
    """
    by_variable: dict[str, float] = {}
    for layout, shard_sums in zip(layouts, sums, strict=True):
        for piece, square in zip((*layout.slices, *layout.tables), shard_sums, strict=True):
            by_variable[piece.variable.name] = by_variable.get(piece.variable.name, 0.0) + square
    factors = {name: _factor(math.sqrt(square), clip.norm) for name, square in by_variable.items()}
    total = math.sqrt(math.fsum(square * factors[name] ** 2 for name, square in by_variable.items()))
    common = _factor(total, clip.global_norm)
    return tuple(
        tuple(1.0 if _is_update(piece) else factors[piece.variable.name] * common for piece in (*layout.slices, *layout.tables))
        for layout in layouts
    )


def _factor(norm: float, limit: float) -> float:
    if not limit:
        return 1.0
    if not math.isfinite(norm):
        return math.nan
    return limit / max(norm, limit)


def _is_update(piece: VariableSlice) -> bool:
    return piece.variable.optimizer is not None and piece.variable.optimizer.is_update_rule
