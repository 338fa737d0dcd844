"""One participant as the chief knows it, and the errors about it. Knows no other participant, step or call; `now` is an argument."""

import enum
from dataclasses import dataclass, field

from chief.push_outcomes import PushOutcomes
from chief.wording import lease_end, name_of, seconds
from ps_protocol.chief import ParticipantKind, ParticipantStatus, PushOutcome
from ps_protocol.errors import LeaseExpired, Superseded, WorkerIndexTaken


class MemberState(enum.Enum):
    """Where a participant is: its lease runs, has ended, or it said goodbye."""

    LIVE = "live"
    LAPSED = "lapsed"
    LEFT = "left"


@dataclass(slots=True, kw_only=True)
class Member:
    """The latest incarnation of one participant. Counters cover all incarnations of the index."""

    kind: ParticipantKind
    index: int
    incarnation: int
    host: str
    pid: int
    request_id: int
    last_seen: float
    lease_s: float
    state: MemberState = MemberState.LIVE
    ended_at: float = 0.0
    failure: str = ""
    outcomes: PushOutcomes = field(default_factory=PushOutcomes)
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0

    @property
    def is_live(self) -> bool:
        """Whether the lease runs."""
        return self.state is MemberState.LIVE

    @property
    def name(self) -> str:
        """For example "worker 3"."""
        return name_of(self.kind, self.index)

    @property
    def where(self) -> str:
        """For example "on host-b pid 912"."""
        return f"on {self.host or 'an unnamed host'} pid {self.pid}"

    def count(self, outcome: PushOutcome) -> None:
        """Counts one of its contributions."""
        self.num_accepted += outcome is PushOutcome.ACCEPTED
        self.num_stale += outcome is PushOutcome.STALE
        self.num_late += outcome is PushOutcome.LATE


def superseded_error(incarnation: int, *, by: Member) -> Superseded:
    """Returns the error that an older incarnation gets."""
    text = f"{by.name} (incarnation {incarnation}) was replaced by incarnation {by.incarnation} {by.where}. End this process"
    return Superseded(text, facts={"worker": str(by.index), "host": by.host, "pid": str(by.pid)})


def gone_error(member: Member, *, now: float) -> LeaseExpired:
    """Returns the error that a participant gets whose lease has ended or that has left."""
    how = "it left" if member.state is MemberState.LEFT else "lease ended"
    return LeaseExpired(f"{member.name}: {how} {seconds(now - member.ended_at)} ago. Register again", facts={"worker": str(member.index)})


def is_free(member: Member, now: float) -> bool:
    """Whether another may have its index."""
    return not member.is_live or now >= member.last_seen + member.lease_s


def taken_error(holder: Member, now: float) -> WorkerIndexTaken:
    """Returns the error that who wants its index gets."""
    seen_ago_s, lease_left_s = now - holder.last_seen, holder.last_seen + holder.lease_s - now
    return WorkerIndexTaken(
        f"{holder.name} is already running {holder.where} (seen {seconds(seen_ago_s)} ago{lease_end(lease_left_s)});"
        " use another index, or connect(takeover=True)",
        facts={
            "worker": str(holder.index),
            "host": holder.host,
            "pid": str(holder.pid),
            "seen_ago_s": f"{seen_ago_s:.3f}",
            "lease_left_s": f"{lease_left_s:.3f}",
        },
    )


def status_of(member: Member, now: float, waiting: frozenset[int]) -> ParticipantStatus:
    """Returns it as it is reported; `waiting` are the workers that block on a token."""
    return ParticipantStatus(
        kind=member.kind,
        index=member.index,
        incarnation=member.incarnation,
        host=member.host,
        pid=member.pid,
        state=member.state.value,
        seen_ago_s=max(0.0, now - member.last_seen),
        num_accepted=member.num_accepted,
        num_stale=member.num_stale,
        num_late=member.num_late,
        is_waiting=member.kind is ParticipantKind.WORKER and member.index in waiting,
        failure=member.failure,
    )
