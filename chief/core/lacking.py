"""The workers that a step still needs, as far as the chief's state tells. Changes nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chief.core.cluster.members import Member, MemberState
from ps_protocol.model.light_dataclass import light_dataclass

if TYPE_CHECKING:
    from chief.core.state import Cluster


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The workers whose contributions a step with common contributions lacks, the longest silent first.

    `owing`: live, and at it. `idle`: live, and must push first. Only where live workers cannot complete the step: `gone`, `absent` (indices
    that have not joined), and `num_more`, the number of contributions that those would have to give.
    """

    owing: Sequence[Member]
    idle: Sequence[Member]
    gone: Sequence[Member] = ()
    absent: Sequence[int] = ()
    num_more: int = 0


def missing(cluster: "Cluster") -> Missing:
    """Returns the workers that the open step waits for. While a server does not answer no live worker can contribute, so none is named."""
    training, policy, servers = cluster.training, cluster.policy, cluster.servers
    workers = sorted(cluster.members.workers(), key=lambda member: member.last_seen)
    able = [member for member in workers if member.is_live and policy.may_give(member.index)]
    idle = [member for member in able if training.must_push(member)]
    num_more = policy.num_required - policy.num_contributions - len(able) - policy.tokens.num_free
    owing = [member for member in able if not training.must_push(member) and servers.unreachable_since is None]
    if num_more <= 0:
        return Missing(owing=owing, idle=idle)
    places, outage_since = cluster.settings.config.num_workers or 0, servers.unreachable_since
    gone = [
        member
        for member in workers
        # With any number of workers allowed, one that left in peace need not come back.
        if not member.is_live
        and policy.may_give(member.index)
        and (places or member.state is MemberState.LAPSED or member.failure)
        # One that left during an outage may have left because of it.
        and (outage_since is None or member.last_seen < outage_since)
    ]
    known = {member.index for member in workers}
    return Missing(owing=owing, idle=idle, gone=gone, absent=[index for index in range(places) if index not in known], num_more=num_more)
