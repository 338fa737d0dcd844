"""The parts of the core that a report reads, and the workers that a step still needs. Changes nothing."""

from collections.abc import Sequence

from chief.core.cluster.members import Member, MemberState
from chief.core.epoch.training import Parts, Training
from chief.core.recovery import Recovery
from chief.policies.base import Policy
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterState, End


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The parts of the core that a report reads. `asking`: a worker that waits for a token although it does not block.

    `address`: where workers reach this chief; empty: unknown. `awaited_workers`: how many may still come to a finished training, in words.
    """

    state: ClusterState
    end: End
    reason: str
    parts: Parts
    training: Training
    recovery: Recovery
    asking: int | None = None
    address: str = ""
    awaited_workers: str = ""

    @property
    def policy(self) -> Policy:
        """The policy that holds."""
        return self.training.policy

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that wait for a token."""
        blocked = self.training.waiting_workers
        return blocked if self.asking is None else blocked | {self.asking}

    @property
    def live(self) -> Sequence[Member]:
        """The live workers."""
        return [member for member in self.parts.members.workers() if member.is_live]

    def owes(self, member: Member) -> bool:
        """Whether the open step can use a contribution of the worker."""
        return not self.policy.has_contributed(member.index) or self.policy.holds_token(member.index)

    def is_idle(self, member: Member) -> bool:
        """Whether the worker waits for a token that it gets only once it has pushed."""
        return member.is_live and member.index in self.waiting and not self.policy.has_contributed(member.index)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The workers whose contributions a step with common contributions lacks, the longest silent first.

    `owing`: live, and at it. `idle`: live, and must push first. Only where live workers cannot complete the step: `gone`, `absent` (indices
    that never joined), and `num_more`, the number of contributions that those would have to give.
    """

    owing: Sequence[Member]
    idle: Sequence[Member]
    gone: Sequence[Member] = ()
    absent: Sequence[int] = ()
    num_more: int = 0


def missing(situation: Situation) -> Missing:
    """Returns the workers that the open step waits for. While a server does not answer no live worker can contribute, so none is named."""
    policy, servers = situation.policy, situation.parts.servers
    workers = sorted(situation.parts.members.workers(), key=lambda member: member.last_seen)
    able = [member for member in workers if member.is_live and situation.owes(member)]
    idle = [member for member in able if situation.is_idle(member)]
    num_more = policy.num_required - policy.num_contributions - len(able) - policy.num_free_tokens
    owing = [member for member in able if not situation.is_idle(member) and servers.unreachable_since is None]
    if num_more <= 0:
        return Missing(owing=owing, idle=idle)
    places, outage_since = situation.parts.settings.config.num_workers or 0, servers.unreachable_since
    gone = [
        member
        for member in workers
        # With any number of workers allowed, one that left in peace need not come back.
        if not member.is_live
        and situation.owes(member)
        and (places or member.state is MemberState.LAPSED or member.failure)
        # One that left during an outage may have left because of it.
        and (outage_since is None or member.last_seen < outage_since)
    ]
    known = {member.index for member in workers}
    return Missing(owing=owing, idle=idle, gone=gone, absent=[index for index in range(places) if index not in known], num_more=num_more)
