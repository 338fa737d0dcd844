"""The factors that a step's gradients and means are multiplied by, as the chief asks for them."""

from collections.abc import Sequence

from ps_protocol.errors import InvalidSpec
from ps_protocol.shard import ApplyRequest, PushId


def factors(request: ApplyRequest, *, num_scales: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the weights, in the order of the push ids, and the scales; empty if all are 1. Raises InvalidSpec if they do not fit."""
    weights, scales = request.weights, request.scales
    if not weights and not scales:
        return (), ()
    if weights and len(weights) != len(request.contributors):
        raise InvalidSpec(
            f"step {request.step}: {len(weights)} weights of {len(request.contributors)} contributors; give one for each, or none"
        )
    if scales and len(scales) != num_scales:
        raise InvalidSpec(f"step {request.step}: {len(scales)} scales of {num_scales} slices and tables; give one for each, or none")
    if weights and all(weight == 1 for weight in weights):
        weights = ()
    by_id: Sequence[tuple[PushId, float]] = sorted(zip(request.contributors, weights, strict=False))
    return tuple(weight for _, weight in by_id), () if all(scale == 1 for scale in scales) else scales
