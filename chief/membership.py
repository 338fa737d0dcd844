"""Who takes part: indices, incarnations, leases, and what each participant did. Knows no step, call or address; `now` is an argument."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from chief.coordination import MAX_PARTICIPANTS, CoordinationConfig
from chief.member import Member, MemberState, gone_error, status_of, superseded_error
from chief.member_places import wanted_index
from chief.push_outcomes import PushOutcomes
from chief.wording import name_of, printable
from ps_protocol.chief import Participant, ParticipantKind, ParticipantStatus, RegisterRequest
from ps_protocol.errors import EpochMismatch, LeaseExpired
from ps_protocol.shard import AppliedPush, PushId, WorkerPushes

_MAX_HOST = 255
# Incarnations of one index that one chief may give, as a power of two.
_BITS_OF_A_CHIEF = 20


class Membership:
    """All participants there ever were, each as its latest incarnation. `config` may be replaced; who is in stays in.

    New incarnations that the chief of incarnation k gives are numbered from (k - 1) << 20 | 1, above all that earlier ones gave.
    """

    def __init__(self, *, config: CoordinationConfig, epoch: int) -> None:
        self.config = config
        # The life of the cluster that numbers are given in; and the one, with its chief, that made the checkpoint which this one has begun
        # with: who was numbered there by that chief, or one before it, is in what was brought back. 0: none is known.
        self.life = 0
        self.earlier = (0, 0)
        # Whether it is known which chiefs, and which epochs, there were before this one. Nobody is to be taken in before.
        self.knows_predecessors = False
        self._epoch = epoch
        self._why_epoch = ""
        self._epoch_facts: dict[str, str] = {"epoch": str(epoch)}
        self._chief_incarnation = 1
        # What earlier chiefs' workers have had applied lately, by worker.
        self._pushes: dict[int, WorkerPushes] = {}
        self._chosen: Mapping[PushId, int] = {}
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

    @property
    def num_known_workers(self) -> int:
        """Indices that some worker has had."""
        return len(self._members[ParticipantKind.WORKER])

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

    def knows(self, participant: Participant) -> bool:
        """Whether somebody has had this place here."""
        return participant.index in self._members[participant.kind]

    def participant(self, member: Member) -> Participant:
        """Returns the identity that a member calls with."""
        return Participant(epoch=self._epoch, kind=member.kind, index=member.index, incarnation=member.incarnation, life=self.life)

    def check(self, participant: Participant, *, now: float) -> Member:
        """Returns the live member that calls. Raises EpochMismatch, Superseded or LeaseExpired."""
        member = self.look_up(participant)
        if not member.is_live:
            raise gone_error(member, now=now)
        return member

    def look_up(self, participant: Participant) -> Member:
        """Returns the member that calls, live or not. Raises EpochMismatch, Superseded, or LeaseExpired if it never registered."""
        if participant.life != self.life and self.knows_predecessors and not self._may_be_of_this_life(participant):
            raise self._other_life()
        if participant.epoch != self._epoch and self.knows_predecessors:
            raise self.other_epoch(participant.epoch)
        member = self._members[participant.kind].get(participant.index)
        if member is None or participant.incarnation > member.incarnation:
            name = f"{name_of(participant.kind, participant.index)} (incarnation {participant.incarnation})"
            raise LeaseExpired(f"{name} is not registered here. Register again")
        if participant.incarnation < member.incarnation:
            raise superseded_error(participant.incarnation, by=member)
        return member

    def look_up_leaver(self, participant: Participant) -> Member:
        """As `look_up`, but whoever stems from an earlier epoch may say goodbye too."""
        return self.look_up(replace(participant, epoch=self._epoch) if participant.epoch < self._epoch else participant)

    def other_epoch(self, epoch: int) -> EpochMismatch:
        """Returns the error that a caller of another epoch gets."""
        return EpochMismatch(f"cluster epoch is {self._epoch}, you have {epoch}{self._why_epoch}. Connect again", facts=self._epoch_facts)

    def _other_life(self) -> EpochMismatch:
        what = f"it has begun again in epoch {self._epoch}{self._why_epoch}"
        return EpochMismatch(f"the cluster that you have joined was lost as a whole; {what}. Connect again", facts=self._epoch_facts)

    def begin_epoch(self, epoch: int, *, why: str, step: int | None = None) -> None:
        """Has all participants register again before they are served; `why`, and the `step` to go on from, are what they are told."""
        self._epoch, self._why_epoch = epoch, f" ({why})" if why else ""
        self._epoch_facts = {"epoch": str(epoch)} | ({} if step is None else {"step": str(step)})

    def succeed(self, *, chief_incarnation: int, life: int) -> None:
        """Numbers from now on as this chief, in this life; whoever was taken in before registers again, and is given a new number."""
        self.life = life
        for member in self.all():
            self._end(member)
        for members in self._members.values():
            members.clear()
        self._chief_incarnation = chief_incarnation

    def remember(self, pushes: Iterable[WorkerPushes], *, chosen: Mapping[PushId, int] | None = None) -> None:
        """Takes note of what has been applied, in place of whatever is known; of all else only the numbers stay.

        `chosen`: what is counted besides, with the step that it will be a part of.
        """
        self._pushes = {pushed.worker: pushed for pushed in pushes}
        self._chosen = chosen or {}
        for member in self.workers():
            member.outcomes.restart(self._applied_of(member.index, member.incarnation))

    @property
    def remembered(self) -> Mapping[int, WorkerPushes]:
        """What `remember` was told, by worker."""
        return self._pushes

    def touch(self, member: Member, *, now: float) -> float:
        """Renews the lease; returns when it ends."""
        member.last_seen = now
        return now + member.lease_s

    def repeated(self, request: RegisterRequest) -> Member | None:
        """Returns the live member that this very request made, if it did."""
        index = self._by_request.get((request.kind, request.request_id))
        return None if index is None else self._members[request.kind][index]

    def returned(self, request: RegisterRequest, *, now: float) -> Member | None:
        """Returns the member that registers again after the epoch rose or another chief took over: it stays the same incarnation.

        None: it is to be admitted as a new one. Raises Superseded if another has taken its place.
        """
        former = request.former
        if former is None or former.kind is not request.kind or not (self._is_plausible(former) and self._is_known(former)):
            return None
        where = (printable(request.host[:_MAX_HOST]), request.pid)
        member = self._members[former.kind].get(former.index)
        if member is None and _chief_of(former) == self._chief_incarnation:
            return None  # this chief has given it to nobody
        if member is None:
            member = self._recognised(request, former, now=now)
        elif member.incarnation > former.incarnation and (member.host, member.pid) != where:
            raise superseded_error(former.incarnation, by=member)
        elif member.incarnation != former.incarnation or not member.is_live or (member.host, member.pid) != where:
            return None
        self._by_request.pop((member.kind, member.request_id), None)
        member.request_id = request.request_id
        self._by_request[member.kind, member.request_id] = member.index
        return member

    def admit(self, request: RegisterRequest, *, now: float) -> tuple[Member, Member | None]:
        """Makes a new incarnation, live from now on; returns it and the one that it replaces.

        Raises WorkerIndexTaken, WorkerIndexOutOfRange or ClusterFull.
        """
        members = self._members[request.kind]
        index = wanted_index(request, members, num_places=self._places(request.kind), now=now)
        former = members.get(index)
        if former is not None:
            self._end(former)
        least = (self._chief_incarnation - 1) << _BITS_OF_A_CHIEF
        if request.former is not None and request.former.index == index and self._is_plausible(request.former):
            least = max(least, request.former.incarnation)  # or it would seem to be the same one
        member = self._made(request, index, incarnation=max(former.incarnation if former else 0, least) + 1, former=former, now=now)
        return member, former

    def _is_plausible(self, former: Participant) -> bool:
        return former.index < self._places(former.kind) and former.incarnation >= 1 and _chief_of(former) <= self._chief_incarnation

    def _may_be_of_this_life(self, participant: Participant) -> bool:
        return participant.life == self.life or not participant.life or not self.life

    def _is_known(self, former: Participant) -> bool:
        """Whether its number means in what this chief has taken over, or brought back, who it says that it means."""
        life, chief_incarnation = self.earlier
        return self._may_be_of_this_life(former) or (former.life == life and _chief_of(former) <= chief_incarnation)

    def _places(self, kind: ParticipantKind) -> int:
        return (self.config.num_workers if kind is ParticipantKind.WORKER else None) or MAX_PARTICIPANTS

    def _recognised(self, request: RegisterRequest, former: Participant, *, now: float) -> Member:
        member = self._made(request, former.index, incarnation=former.incarnation, former=None, now=now)
        if member.kind is ParticipantKind.WORKER:
            member.outcomes.restart(self._applied_of(member.index, member.incarnation))
        return member

    def _applied_of(self, worker: int, incarnation: int) -> Sequence[AppliedPush]:
        pushed = self._pushes.get(worker)
        applied = pushed.applied if pushed is not None and pushed.incarnation == incarnation else ()
        mine = [one for one in self._chosen if (one.worker, one.incarnation) == (worker, incarnation)]
        return (*applied, *(AppliedPush(sequence=one.sequence, step=self._chosen[one]) for one in sorted(mine)))

    def _made(self, request: RegisterRequest, index: int, *, incarnation: int, former: Member | None, now: float) -> Member:
        member = Member(
            kind=request.kind,
            index=index,
            incarnation=incarnation,
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
        return member

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
        return tuple(status_of(member, now, waiting) for member in self.all())

    def _end(self, member: Member) -> None:
        self._num_live[member.kind] -= member.is_live
        member.state = MemberState.LAPSED if member.is_live else member.state
        self._by_request.pop((member.kind, member.request_id), None)


def _chief_of(participant: Participant) -> int:
    """Returns the incarnation of the chief that gave this number."""
    return 1 + (participant.incarnation >> _BITS_OF_A_CHIEF)
