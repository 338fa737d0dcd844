"""Who takes part: indices, incarnations, leases, and what each participant did. Knows no step, call or address; `now` is an argument."""

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from chief.coordination import MAX_PARTICIPANTS, CoordinationConfig
from chief.push_outcomes import PushOutcomes
from chief.wording import lease_end, name_of, printable, seconds
from ps_protocol.chief import Participant, ParticipantKind, ParticipantStatus, PushOutcome, RegisterRequest
from ps_protocol.errors import ClusterFull, EpochMismatch, LeaseExpired, Superseded, WorkerIndexOutOfRange, WorkerIndexTaken

_MAX_HOST = 255


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


class Membership:
    """All participants there ever were, each as its latest incarnation. `config` may be replaced; who is in stays in."""

    def __init__(self, *, config: CoordinationConfig, epoch: int) -> None:
        self.config = config
        self._epoch = epoch
        self._members: dict[ParticipantKind, dict[int, Member]] = {kind: {} for kind in ParticipantKind}
        self._by_request: dict[tuple[ParticipantKind, int], int] = {}
        self._num_live = dict.fromkeys(ParticipantKind, 0)

    @property
    def num_live(self) -> int:
        """Participants whose lease runs."""
        return sum(self._num_live.values())

    @property
    def num_live_workers(self) -> int:
        """Workers whose lease runs."""
        return self._num_live[ParticipantKind.WORKER]

    def all(self) -> Iterator[Member]:
        """All participants: workers, then observers, by index."""
        for kind in ParticipantKind:
            yield from sorted(self._members[kind].values(), key=lambda member: member.index)

    def workers(self) -> Iterator[Member]:
        """All workers in order of their first joining."""
        return iter(self._members[ParticipantKind.WORKER].values())

    def find(self, kind: ParticipantKind, index: int) -> Member | None:
        """Returns the latest incarnation, if there ever was one."""
        return self._members[kind].get(index)

    def participant(self, member: Member) -> Participant:
        """Returns the identity that a member calls with."""
        return Participant(epoch=self._epoch, kind=member.kind, index=member.index, incarnation=member.incarnation)

    def check(self, participant: Participant, *, now: float) -> Member:
        """Returns the live member that calls. Raises EpochMismatch, Superseded or LeaseExpired."""
        member = self.look_up(participant)
        if not member.is_live:
            raise gone_error(member, now=now)
        return member

    def look_up(self, participant: Participant) -> Member:
        """Returns the member that calls, live or not. Raises EpochMismatch, Superseded, or LeaseExpired if it never registered."""
        if participant.epoch != self._epoch:
            text = f"cluster epoch is {self._epoch}, you have {participant.epoch}. Connect again"
            raise EpochMismatch(text, facts={"epoch": str(self._epoch)})
        member = self._members[participant.kind].get(participant.index)
        if member is None or participant.incarnation > member.incarnation:
            name = f"{name_of(participant.kind, participant.index)} (incarnation {participant.incarnation})"
            raise LeaseExpired(f"{name} is not registered here. Register again")
        if participant.incarnation < member.incarnation:
            raise superseded_error(participant.incarnation, by=member)
        return member

    def touch(self, member: Member, *, now: float) -> float:
        """Renews the lease; returns when it ends."""
        member.last_seen = now
        return now + member.lease_s

    def repeated(self, request: RegisterRequest) -> Member | None:
        """Returns the live member that this very request made, if it did."""
        index = self._by_request.get((request.kind, request.request_id))
        return None if index is None else self._members[request.kind][index]

    def admit(self, request: RegisterRequest, *, now: float) -> tuple[Member, Member | None]:
        """Makes a new incarnation, live from now on; returns it and the one that it replaces.

        Raises WorkerIndexTaken, WorkerIndexOutOfRange or ClusterFull.
        """
        index = self._wanted_index(request, now=now)
        former = self._members[request.kind].get(index)
        if former is not None:
            self._end(former)
        member = Member(
            kind=request.kind,
            index=index,
            incarnation=former.incarnation + 1 if former else 1,
            host=printable(request.host[:_MAX_HOST]),
            pid=request.pid,
            request_id=request.request_id,
            last_seen=now,
            lease_s=self.config.lease_s,
            outcomes=PushOutcomes(window=self.config.max_staged_per_worker),
            num_accepted=former.num_accepted if former else 0,
            num_stale=former.num_stale if former else 0,
            num_late=former.num_late if former else 0,
        )
        self._members[request.kind][index] = member
        self._by_request[request.kind, request.request_id] = index
        self._num_live[request.kind] += 1
        return member, former

    def lapse(self, member: Member, *, now: float) -> None:
        """The lease has ended."""
        self._end(member)
        member.state, member.ended_at = MemberState.LAPSED, now

    def leave(self, member: Member, *, failure: str, now: float) -> None:
        """The participant says goodbye, perhaps after its lease has ended."""
        self._end(member)
        member.state, member.ended_at, member.last_seen, member.failure = MemberState.LEFT, now, now, printable(failure)

    def last_left_in_peace(self) -> bool:
        """Whether no worker lives, and the one that was seen last said goodbye without a failure.

        By last sign of life, not by when leases ended: a worker that was killed long before the others were done must not keep the cluster
        waiting for it, and one that died last must.
        """
        if self.num_live_workers:
            return False
        last = max(self.workers(), key=lambda member: (member.last_seen, member.state is not MemberState.LEFT), default=None)
        return last is not None and last.state is MemberState.LEFT and not last.failure

    def statuses(self, *, now: float, waiting: frozenset[int]) -> tuple[ParticipantStatus, ...]:
        """Returns all participants; `waiting` are the workers that block on a token."""
        return tuple(_status(member, now, waiting) for member in self.all())

    def _end(self, member: Member) -> None:
        self._num_live[member.kind] -= member.is_live
        member.state = MemberState.LAPSED if member.is_live else member.state
        self._by_request.pop((member.kind, member.request_id), None)

    def _wanted_index(self, request: RegisterRequest, *, now: float) -> int:
        is_worker = request.kind is ParticipantKind.WORKER
        places = (self.config.num_workers if is_worker else None) or MAX_PARTICIPANTS
        if request.index is None:
            return self._free_index(request.kind, places, now)
        name = f"{request.kind.name.lower()} index {request.index}"
        if request.index >= places:
            why = f" (total_num_replicas is {places})" if is_worker and self.config.num_workers else ""
            raise WorkerIndexOutOfRange(f"{name}: want 0..{places - 1}{why}")
        holder = self._members[request.kind].get(request.index)
        if holder is not None and not _is_free(holder, now) and not request.takeover:
            raise _taken(holder, now)
        return request.index

    def _free_index(self, kind: ParticipantKind, places: int, now: float) -> int:
        members = self._members[kind]
        for index in itertools.islice(itertools.count(), places):
            if index not in members or _is_free(members[index], now):
                return index
        left_s = min(member.last_seen + member.lease_s for member in members.values()) - now
        text = f"{places} of {places} {kind.name.lower()} places taken"
        if lease_end(left_s):
            text += f"; the next lease ends in {seconds(left_s)} if its holder is gone. Wait for that, or name an index and take it over"
        else:
            text += ". Close one of them first, or name an index and take it over"
        raise ClusterFull(text, facts={"lease_left_s": f"{left_s:.3f}"})


def superseded_error(incarnation: int, *, by: Member) -> Superseded:
    """Returns the error that an older incarnation gets."""
    text = f"{by.name} (incarnation {incarnation}) was replaced by incarnation {by.incarnation} {by.where}. End this process"
    return Superseded(text, facts={"worker": str(by.index), "host": by.host, "pid": str(by.pid)})


def gone_error(member: Member, *, now: float) -> LeaseExpired:
    """Returns the error that a participant gets whose lease has ended or that has left."""
    how = "it left" if member.state is MemberState.LEFT else "lease ended"
    return LeaseExpired(f"{member.name}: {how} {seconds(now - member.ended_at)} ago. Register again", facts={"worker": str(member.index)})


def _is_free(member: Member, now: float) -> bool:
    return not member.is_live or now >= member.last_seen + member.lease_s


def _taken(holder: Member, now: float) -> WorkerIndexTaken:
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


def _status(member: Member, now: float, waiting: frozenset[int]) -> ParticipantStatus:
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
