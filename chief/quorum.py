"""How many contributions a strictly synchronous step needs when workers are gone, or have no training data left. Knows numbers only."""

from collections.abc import Collection

from chief.coordination import CoordinationConfig
from chief.membership import Membership
from chief.policy import Policy


def quorum(config: CoordinationConfig, *, membership: Membership, policy: Policy, starved: Collection[int] = ()) -> int:
    """Returns R, or fewer: what the living workers can still give, and those that are expected and never came; at least `min_replicas`.

    `starved`: workers that live and have nothing to contribute, since all training data is done or leased to others. Where there are
    some, whoever is gone or never came would have none either, so the step takes what it can get, and one contribution at least.
    """
    required = config.num_required
    counted = policy.num_contributions
    able = sum(1 for member in membership.workers() if member.is_live and member.index not in starved and _may_give(policy, member.index))
    if starved:
        return max(1, min(required, counted + able))
    if config.min_replicas is None or membership.num_known_workers == membership.num_live_workers:
        return required
    expected = max(0, (config.num_workers or required) - membership.num_known_workers)
    return max(min(config.min_replicas, required), min(required, counted + able + expected))


def _may_give(policy: Policy, worker: int) -> bool:
    return not policy.has_contributed(worker) or policy.holds_token(worker)
