"""What a chief makes of shards that hold a model which an earlier chief had trained. Pure: looks at what the shards report."""

from collections.abc import Sequence
from dataclasses import dataclass

from chief.wording import listed
from ps_protocol.layout import Layout
from ps_protocol.shard import Adoption, ApplyRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where training goes on: the open step, and, if only some shards have applied it, that step as it was asked for (`redo`)."""

    step: int
    redo: ApplyRequest | None = None


def resumption(adoptions: Sequence[Adoption | None], *, names: Sequence[str], applies_on_arrival: bool = False) -> Resumption | str:
    """Returns where to go on, or, in words, why that is not possible.

    All shards are at the same step, or some are one ahead: the step between was interrupted, and is repeated with what it was made of.
    Where shards apply on arrival there is no step that all have; the highest count holds.
    """
    steps = [adoption.step for adoption in adoptions if adoption is not None and adoption.step is not None]
    if len(steps) < len(adoptions):
        empty = [name for name, adoption in zip(names, adoptions, strict=True) if adoption is None or adoption.step is None]
        return f"{listed(empty)} {'has' if len(empty) == 1 else 'have'} lost the variables"
    low, high = min(steps), max(steps)
    if low == high or applies_on_arrival:
        return Resumption(step=high)
    where = listed([f"{name} is at step {step}" for name, step in zip(names, steps, strict=True)])
    if high - low > 1:
        return f"the parameter servers are too far apart: {where}"
    ahead = [adoption.last_apply for adoption in adoptions if adoption is not None and adoption.step == high]
    known = [request for request in ahead if request is not None and request.step == low]
    if not known or any(request.contributors != known[0].contributors for request in known):
        return f"it is not known what step {low} was made of: {where}"
    return Resumption(step=low, redo=known[0])


def has_applied(adoptions: Sequence[Adoption | None]) -> bool:
    """Whether anything would be lost if the shards' values were."""
    return any(adoption is not None and (adoption.last_apply is not None or adoption.pushes or adoption.step) for adoption in adoptions)


def mismatch(adoptions: Sequence[Adoption | None], layouts: Sequence[Layout], *, names: Sequence[str]) -> str:
    """Says which shards hold other variables than the model has there; empty: none."""
    other = [
        name
        for name, adoption, layout in zip(names, adoptions, layouts, strict=True)
        if adoption is not None and adoption.layout_hash != layout.hash
    ]
    return f"{listed(other)} {'holds' if len(other) == 1 else 'hold'} other variables than the model has there" if other else ""
