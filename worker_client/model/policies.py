"""Policies and moving averages, as values that a program chooses. Knows names and numbers; the chief has the rules."""

from typing import TypeVar

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.merging import merge_of
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.model.spec import AverageSpec
from worker_client.model.optimizers import plain_number

__all__ = [
    "async_policy",
    "moving_average",
    "outer_policy",
    "ssp_policy",
    "sync_policy",
]

Choice = TypeVar("Choice")
Count = TypeVar("Count", int, int | None)

_TOKENS = {"strict": TokenMode.STRICT, "fifo": TokenMode.FIFO}
_TOO_STALE = {"drop": TooStale.DROP, "scale": TooStale.SCALE}


def sync_policy(
    *,
    tokens: str = "strict",
    num_tokens: int = -1,
    replicas_to_aggregate: int | None = None,
    total_num_replicas: int | None = None,
    merge: str = "mean",
) -> PolicySpec:
    """Returns the policy whose steps are means of `replicas_to_aggregate` contributions computed from the step's own variables.

    `tokens`: "strict" (a worker continues when its step is applied) or "fifo" (exactly the token queue of SyncReplicasOptimizer, with
    `num_tokens` initial tokens; -1: as many as `replicas_to_aggregate`; each token that the first step does not need leads to a gradient
    that is dropped). None keeps the chief's own value. Raises InvalidSpec.

    `merge`: how a step's contributions become the gradient that the optimizer gets, weights honoured, in the order of the workers: "mean";
    or "trimmed_mean:0.25", which for each element leaves out so large a share of the values (rounded down) at either end, NaN counting as
    the largest (Yin et al., arXiv 1803.01498); or "bounded_mean:3", which scales a contribution down to at most 3 times the median of the
    others' Euclidean norms, of all gradients together (Sun et al., arXiv 1911.07963); or "radial_mean", where a variable's gradient has the
    mean of the norms and the direction of the mean of the unit vectors (arXiv 2604.21428). The last two take one or two more rounds between
    chief and servers; the sums of a variable on several servers may then differ in the last bit from those on one. Also for rows of tables;
    not for updates of buffers.
    """
    return PolicySpec(
        name=PolicyName.SYNC,
        tokens=_choice("tokens", tokens, _TOKENS),
        num_tokens=_plain(num_tokens),
        replicas_to_aggregate=_plain(replicas_to_aggregate),
        total_num_replicas=_plain(total_num_replicas),
        merge=merge_of(merge),
    )


def ssp_policy(staleness: int, *, max_staleness: int | None = None, too_stale: str = "drop") -> PolicySpec:
    """Returns the policy under which a worker waits only while it is more than `staleness` contributions ahead of the slowest live one.

    Each contribution is a step by itself. A contribution staler than `max_staleness` steps (None: no limit) is dropped
    (`too_stale="drop"`), or applied with the weight 1 / (1 + staleness - max_staleness) ("scale"). Raises InvalidSpec.
    """
    return PolicySpec(
        name=PolicyName.SSP,
        staleness=_plain(staleness),
        max_staleness=_plain(max_staleness),
        too_stale=_choice("too_stale", too_stale, _TOO_STALE),
    )


def async_policy(*, use_locking: bool = True, max_staleness: int | None = None, too_stale: str = "drop") -> PolicySpec:
    """Returns the policy without waiting: each contribution is applied at once, as a step of its own.

    With `use_locking`, contributions are applied one after the other; without it, parameter servers apply them on arrival, and concurrent
    updates may be lost. `max_staleness` and `too_stale` (with locking only) are those of `ssp_policy`. Raises InvalidSpec.
    """
    if not isinstance(use_locking, (bool, np.bool_)):
        raise InvalidSpec(f"use_locking: got {use_locking!r}, want True or False")
    return PolicySpec(
        name=PolicyName.ASYNC,
        use_locking=bool(use_locking),
        max_staleness=_plain(max_staleness),
        too_stale=_choice("too_stale", too_stale, _TOO_STALE),
    )


def outer_policy(
    replicas_to_aggregate: int | None = None,
    total_num_replicas: int | None = None,
    *,
    grace_s: float = 0.0,
    max_staleness: int | None = None,
    merge: str = "mean",
) -> PolicySpec:
    """Returns the policy for contributions that take long to compute, such as the sum of many steps of a worker's own optimizer.

    A step is the weighted mean of at least `replicas_to_aggregate` contributions. Once it has so many, it waits up to `grace_s` seconds for
    those of the other live workers. A contribution that comes later still is a part of the next step, unless it is more than
    `max_staleness` steps late (None: however late). With as many contributions as workers a step depends on no timing.
    `merge`: see `sync_policy`. Raises InvalidSpec.
    """
    return PolicySpec(
        name=PolicyName.OUTER,
        replicas_to_aggregate=_plain(replicas_to_aggregate),
        total_num_replicas=_plain(total_num_replicas),
        grace_s=grace_s,
        max_staleness=_plain(max_staleness),
        merge=merge_of(merge),
    )


def moving_average(
    decay: float, use_num_updates: bool = False, zero_debias: bool = False, variables: list[str] | tuple[str, ...] | None = None
) -> AverageSpec:
    """Returns moving averages for the servers to keep: `average -= (1 - decay) * (average - variable)` in each step, after the update.

    `use_num_updates`: the decay is min(decay, (1 + n) / (10 + n)), n being the step after the update. `zero_debias`: they start from 0 and
    are corrected for it, instead of starting from the first values. `variables`: names; None: all dense ones that take gradients.
    Raises InvalidSpec.
    """
    if isinstance(variables, str):
        raise InvalidSpec(f"averages: variables = {variables!r}, want a list of names: [{variables!r}]")
    return AverageSpec(
        decay=plain_number(decay), use_num_updates=use_num_updates, zero_debias=zero_debias, variables=tuple(variables or ())
    )


def _plain(count: Count) -> Count:
    """Returns a NumPy integer as a Python one, and anything else unchanged: the specification checks it."""
    return count.item() if isinstance(count, np.integer) else count


def _choice(name: str, value: str, known: dict[str, Choice]) -> Choice:
    if not isinstance(value, str) or value not in known:
        raise InvalidSpec(f"{name}: got {value!r}, want one of {', '.join(known)}")
    return known[value]
