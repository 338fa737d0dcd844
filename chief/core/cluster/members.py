"""The participants: indices, incarnations, leases, contributions of each, and the quorum that follows from them.

Knows no step, call or address; `now` is an argument.
"""

import enum
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from chief.core.waiting import Timer
from chief.core.wording import lease_end, name_of, printable, seconds
from chief.options import MAX_PARTICIPANTS, CoordinationConfig
from chief.policies.base import Policy
from ps_protocol.errors import (
    ClusterFull,
    ContributionMissing,
    EpochMismatch,
    InvalidSpec,
    LeaseExpired,
    PsError,
    PushIdReused,
    Superseded,
    WorkerIndexOutOfRange,
    WorkerIndexTaken,
)
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import (
    CommitResult,
    FollowerReport,
    InnerSteps,
    Participant,
    ParticipantKind,
    ParticipantStatus,
    PushOutcome,
    RegisterRequest,
    WorkerTraffic,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import NOBODY, Era, Fence, chief_of, joined_keys, numbered, session_secret
from ps_protocol.roles.shard import AppliedPush, WorkerPushes

if TYPE_CHECKING:
    from chief.core.state import Cluster

_WINDOW = 16
_SHARED = "shared_memory"
# Sequences that a worker passes over between two that are counted: of contributions that it did not commit.
_MAX_GAP = 1 << 20
# Before any outcome is known, a worker may have counted under an earlier chief.
_MAX_SEQUENCE = 1 << 53


class PushOutcomes:
    """Outcomes by sequence. Sequences grow; a sequence before the window is known to be old, but its outcome is not."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self._window = max(window, _WINDOW)
        self._last_sequence = 0
        # By sequence: the step that it was computed from (None: unknown), and its outcome.
        self._recent: dict[int, tuple[int | None, CommitResult]] = {}

    def is_repeated(self, push_id: PushId, *, step: int) -> bool:
        """Whether this push was counted before. Raises PushIdReused if it was for another step, InvalidSpec if its number is far off."""
        if push_id.sequence > self._last_sequence:
            limit = self._last_sequence + _MAX_GAP if self._last_sequence else _MAX_SEQUENCE
            if push_id.sequence > limit:
                # Else all later sequences of its worker would count as repeated.
                raise InvalidSpec(
                    f"push {push_id}: sequence {push_id.sequence} after {self._last_sequence}, want at most {limit};"
                    " number contributions one after the other"
                )
            return False
        known = self._recent.get(push_id.sequence)
        if known is not None and known[0] not in (None, step):
            raise PushIdReused(
                f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {known[0]}, now for step {step};"
                " use a new sequence number for each contribution"
            )
        return True

    def first_result(self, push_id: PushId) -> CommitResult | None:
        """Returns the first outcome of a repeated push; None if it is forgotten or the push was skipped."""
        known = self._recent.get(push_id.sequence)
        return known[1] if known is not None else None

    def restart(self, applied: Sequence[AppliedPush]) -> None:
        """Knows only of these from now on, all accepted; sequences that were used stay used."""
        self._last_sequence = max([self._last_sequence, *(push.sequence for push in applied)])
        self._recent = {
            push.sequence: (None, CommitResult(outcome=PushOutcome.ACCEPTED, global_step=push.step, applied_step=push.step))
            for push in applied[-self._window :]
        }

    def record(self, push_id: PushId, *, step: int, result: CommitResult) -> None:
        """Remembers the outcome of a push that is not repeated."""
        self._last_sequence = push_id.sequence
        self._recent[push_id.sequence] = (step, result)
        if len(self._recent) > self._window:
            del self._recent[next(iter(self._recent))]


class MemberState(enum.Enum):
    """The state of a participant: its lease runs or has ended, it has left, or the chief has expelled it."""

    LIVE = "live"
    LAPSED = "lapsed"
    LEFT = "left"
    EXPELLED = "expelled"


@light_dataclass(slots=True, kw_only=True)
class Member:
    """The latest incarnation of one participant. Counters cover all incarnations of the index."""

    kind: ParticipantKind
    index: int
    incarnation: int
    host: str
    pid: int
    request_id: int
    secret: int = field(repr=False)
    last_seen: float
    lease_s: float
    state: MemberState = MemberState.LIVE
    ended_at: float = 0.0
    failure: str = ""
    # How its gradients and variables travel, and how much has, as it says.
    transport: str = ""
    traffic: WorkerTraffic | None = None
    # The ways that it had while it shared memory with the most servers.
    shared_ways: frozenset[str] = frozenset()
    outcomes: PushOutcomes = field(default_factory=PushOutcomes)
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0
    lease: Timer | None = None
    # When it joined, or its latest contribution counted; and how many since then counted for nothing.
    counted_at: float = 0.0
    num_in_vain: int = 0
    # Its own steps in its latest contribution that counts, and the share of the time since the one before that they took.
    inner: InnerSteps | None = None
    utilisation: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the lease runs."""
        return self.state is MemberState.LIVE

    @property
    def name(self) -> str:
        """For example "worker 3"."""
        return name_of(self.kind, self.index)

    @property
    def follower(self) -> FollowerReport | None:
        """What it follows, if it does."""
        return self.traffic.follower if self.traffic is not None else None

    @property
    def where(self) -> str:
        """For example "on host-b pid 912"."""
        return f"on {self.host or 'an unnamed host'} pid {self.pid}"

    def is_silent(self, now: float) -> bool:
        """Whether it lives and has missed a heartbeat; they come at a third of the lease."""
        return self.is_live and now - self.last_seen >= self.lease_s / 2

    @property
    def has_lost_sharing(self) -> bool:
        """Whether some server shares memory with it no more, that did."""
        ways = frozenset(self.transport.split(", "))
        return bool(self.shared_ways) and not (_SHARED in ways and ways <= self.shared_ways)

    def travels(self, transport: str, traffic: WorkerTraffic | None) -> None:
        """Takes note of how its gradients and variables travel."""
        self.transport, self.traffic = transport, traffic
        if _SHARED in transport and not self.has_lost_sharing:
            self.shared_ways = frozenset(transport.split(", "))

    def count(self, outcome: PushOutcome, *, now: float, inner: InnerSteps | None = None) -> None:
        """Counts one of its contributions."""
        self.num_in_vain += 1
        if outcome is PushOutcome.ACCEPTED:
            if inner is not None:
                self.utilisation = inner.duration_s / max(inner.duration_s, now - self.counted_at)
            self.inner = inner
            self.counted_at, self.num_in_vain = now, 0
        self.num_accepted += outcome is PushOutcome.ACCEPTED
        self.num_stale += outcome is PushOutcome.STALE
        self.num_late += outcome is PushOutcome.LATE


def superseded_error(incarnation: int, *, by: Member) -> Superseded:
    """Returns the error that an older incarnation gets."""
    text = f"{by.name} (incarnation {incarnation}) was replaced by incarnation {by.incarnation} {by.where}. End this process"
    return Superseded(text, facts={"worker": str(by.index), "host": by.host, "pid": str(by.pid)})


def gone_error(member: Member, *, now: float) -> PsError:
    """Returns the error that a participant gets whose lease has ended, or that has left or was expelled."""
    if member.state is MemberState.EXPELLED:
        text = f"{member.name} (incarnation {member.incarnation}) was expelled {seconds(now - member.ended_at)} ago: {member.failure}"
        return ContributionMissing(text, facts={"worker": str(member.index)})
    how = "it left" if member.state is MemberState.LEFT else "lease ended"
    return LeaseExpired(f"{member.name}: {how} {seconds(now - member.ended_at)} ago. Register again", facts={"worker": str(member.index)})


def is_free(member: Member, now: float) -> bool:
    """Whether another may have its index."""
    return not member.is_live or now >= member.last_seen + member.lease_s


def taken_error(holder: Member, now: float) -> WorkerIndexTaken:
    """Returns the error for another process that requests its index."""
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


# What was heard of so lately is at it; heartbeats come at a third of the lease, so that of another only the time is known.
_JUST_NOW_S = 1.0


def doing(member: Member, now: float, *, is_waiting: bool, is_training: bool) -> str:
    """Says what is known of a participant: the one place that decides it."""
    heard_ago_s = now - member.last_seen
    if not member.is_live:
        ended = f"{seconds(now - member.ended_at)} ago"
        if member.state is MemberState.LAPSED:
            return f"lease ended {ended}"
        return f"{'expelled' if member.state is MemberState.EXPELLED else 'failed' if member.failure else 'left'} {ended}"
    if member.is_silent(now):
        return f"silent for {seconds(heard_ago_s)}"
    if is_waiting:
        return "waits for the step"
    if (follower := member.follower) is not None:
        if follower.step is None:
            return "has taken no weights yet"
        return f"follows at step {follower.step:,}" + (f", {follower.lag:,} behind" if follower.lag else "")
    if heard_ago_s >= _JUST_NOW_S:
        return f"heard {seconds(heard_ago_s)} ago"
    if member.kind is ParticipantKind.OBSERVER:
        return "looking on"
    return "at work" if is_training else "here"


def status_of(member: Member, now: float, waiting: frozenset[int], *, is_training: bool) -> ParticipantStatus:
    """Returns it as it is reported; `waiting` are the workers that block on a token."""
    is_waiting = member.kind is ParticipantKind.WORKER and member.index in waiting
    made = f", {member.inner.num} inner steps, {100 * member.utilisation:.0f} % used" if member.inner is not None and member.is_live else ""
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
        is_waiting=is_waiting,
        failure=member.failure,
        transport=member.transport,
        traffic=member.traffic,
        is_silent=member.is_silent(now),
        doing=doing(member, now, is_waiting=is_waiting, is_training=is_training) + made,
        inner=member.inner,
        utilisation=member.utilisation,
    )


def wanted_index(request: RegisterRequest, members: Mapping[int, Member], *, num_places: int, now: float) -> int:
    """Returns the index that was asked for, or the former one, or the lowest free one; `members` are those of the kind, by index.

    Raises WorkerIndexTaken, WorkerIndexOutOfRange or ClusterFull.
    """
    if request.index is None:
        former = request.former
        if former is not None and former.index < num_places and _is_free(members.get(former.index), now):
            return former.index
        return _free_index(request.kind, members, num_places, now)
    if request.index >= num_places:
        is_chosen = request.kind is ParticipantKind.WORKER and num_places < MAX_PARTICIPANTS
        why = f" (total_num_replicas is {num_places})" if is_chosen else ""
        raise WorkerIndexOutOfRange(f"{request.kind.name.lower()} index {request.index}: want 0..{num_places - 1}{why}")
    holder = members.get(request.index)
    if holder is not None and not is_free(holder, now) and not request.takeover:
        raise taken_error(holder, now)
    return request.index


def _is_free(holder: Member | None, now: float) -> bool:
    return holder is None or is_free(holder, now)


def _free_index(kind: ParticipantKind, members: Mapping[int, Member], num_places: int, now: float) -> int:
    for index in itertools.islice(itertools.count(), num_places):
        if _is_free(members.get(index), now):
            return index
    left_s = min(member.last_seen + member.lease_s for member in members.values()) - now
    text = f"{num_places} of {num_places} {kind.name.lower()} places taken"
    if lease_end(left_s):
        text += f"; the next lease ends in {seconds(left_s)} if its holder is gone. Wait for that, or name an index and take it over"
    else:
        text += ". Close one of them first, or name an index and take it over"
    if kind is ParticipantKind.WORKER and num_places < MAX_PARTICIPANTS:
        text += f"; for one more worker end the cluster and start it again with --workers {num_places + 1}"
    raise ClusterFull(text, facts={"lease_left_s": f"{left_s:.3f}"})


_MAX_HOST = 255


class Members:
    """All participants there ever were, each as its latest incarnation, with the epoch, life and chief that they are numbered in.

    `session_key`: this chief's key for secrets, so that no caller takes part in another's name.

    Incarnations that a chief gives are above all that earlier ones gave, see `fence.numbered`.
    """

    def __init__(self, cluster: "Cluster", *, epoch: int, session_key: bytes) -> None:
        self._cluster = cluster
        self._session_key = session_key
        # All keys of this life that shards have reported.
        self._life_keys: tuple[bytes, ...] = ()
        # What numbers are given in, and what the checkpoint was made under that this life has begun with: who was numbered there by that
        # chief, or one before it, is in what was brought back.
        self.fence = Fence(era=Era(life=0, epoch=epoch), chief_incarnation=1)
        self.earlier = NOBODY
        # The lives that this chief has left for another one, and its number in each. Its own participants stay who they are.
        self._left_lives: dict[int, int] = {}
        # Whether the earlier chiefs and epochs are known. No participant is admitted before.
        self.knows_predecessors = False
        self._why_epoch = ""
        self._epoch_facts: dict[str, str] = {"epoch": str(epoch)}
        # Contributions under earlier chiefs that were applied lately, by worker.
        self.remembered: dict[int, WorkerPushes] = {}
        self._chosen: Mapping[PushId, int] = {}
        # The latest incarnations that earlier chiefs of this epoch have given up, by worker: shards have dropped what they gave.
        self._given_up: dict[int, int] = {}
        self._members: dict[ParticipantKind, dict[int, Member]] = {kind: {} for kind in ParticipantKind}
        self._by_request: dict[tuple[ParticipantKind, int], int] = {}
        self._num_live = dict.fromkeys(ParticipantKind, 0)
        # How long the fastest live worker takes for a step of its own; None: to be looked up when it is next asked for.
        self._fastest_s: float | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the cluster."""
        return self.fence.epoch

    @property
    def chief_incarnation(self) -> int:
        """The number of this chief among the chiefs of the cluster; 1 until it knows them."""
        return self.fence.chief_incarnation

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

    def observers(self) -> Iterator[Member]:
        """All observers in order of their first joining."""
        return iter(self._members[ParticipantKind.OBSERVER].values())

    @property
    def live_workers(self) -> Sequence[Member]:
        """The workers that live."""
        return [member for member in self.workers() if member.is_live]

    def speed_of(self, index: int) -> float:
        """Returns how fast a live worker's own steps are beside those of the fastest live one, at most 1; 0: it has not told.

        If each makes that share of as many steps as the fastest, all have made theirs at the same time (DyLU, arXiv 2401.09135).
        """
        own = self._members[ParticipantKind.WORKER][index].inner
        if own is None:
            return 0.0
        if self._fastest_s is None:
            self._fastest_s = min(member.inner.pace_s for member in self.live_workers if member.inner is not None)
        return self._fastest_s / own.pace_s

    def count(self, member: Member, outcome: PushOutcome, *, now: float, inner: InnerSteps | None) -> None:
        """Counts a contribution of a participant, which may have said how long its own steps took."""
        member.count(outcome, inner=inner, now=now)
        self._fastest_s = None

    def find(self, kind: ParticipantKind, index: int) -> Member | None:
        """Returns the latest incarnation, if there ever was one."""
        return self._members[kind].get(index)

    def knows(self, participant: Participant) -> bool:
        """Whether a participant has had this place here."""
        return participant.index in self._members[participant.kind]

    def participant(self, member: Member) -> Participant:
        """Returns the identity that a member calls with."""
        return Participant(
            era=self.fence.era,
            kind=member.kind,
            index=member.index,
            incarnation=member.incarnation,
            secret=member.secret,
        )

    def check_worker(self, participant: Participant, what: str, *, now: float) -> Member:
        """As `check`, for calls that only workers may make."""
        if participant.kind is not ParticipantKind.WORKER:
            raise InvalidSpec(f"an observer cannot {what}; register as a worker")
        return self.check(participant, now=now)

    def check(self, participant: Participant, *, now: float) -> Member:
        """Returns the live member that calls. Raises EpochMismatch, Superseded or LeaseExpired."""
        member = self.look_up(participant)
        if not member.is_live:
            raise gone_error(member, now=now)
        return member

    def look_up(self, participant: Participant) -> Member:
        """Returns the member that calls, live or not. Raises EpochMismatch, Superseded, or LeaseExpired if it never registered."""
        if participant.era != self.fence.era and self.knows_predecessors:
            raise self.other_epoch(participant.era.epoch) if self._is_of_this_run(participant) else self._other_life()
        member = self._members[participant.kind].get(participant.index)
        if member is None or participant.incarnation > member.incarnation:
            name = f"{name_of(participant.kind, participant.index)} (incarnation {participant.incarnation})"
            raise LeaseExpired(f"{name} is not registered here. Register again")
        if participant.incarnation < member.incarnation:
            raise superseded_error(participant.incarnation, by=member)
        if participant.secret != member.secret:
            raise LeaseExpired(f"{member.name} (incarnation {member.incarnation}) is registered to another caller. Register again")
        return member

    def look_up_leaver(self, participant: Participant) -> Member:
        """As `look_up`, but a participant of an earlier epoch may leave too."""
        is_earlier = self._is_of_this_run(participant) and participant.era.epoch < self.epoch
        return self.look_up(replace(participant, era=self.fence.era) if is_earlier else participant)

    def other_epoch(self, epoch: int) -> EpochMismatch:
        """Returns the error that a caller of another epoch gets."""
        return EpochMismatch(f"cluster epoch is {self.epoch}, you have {epoch}{self._why_epoch}. Connect again", facts=self._epoch_facts)

    def _other_life(self) -> EpochMismatch:
        what = f"it has begun again in epoch {self.epoch}{self._why_epoch}"
        return EpochMismatch(f"the cluster that you have joined was lost as a whole; {what}. Connect again", facts=self._epoch_facts)

    def begin_epoch(self, epoch: int, *, why: str, step: int | None = None) -> None:
        """Makes all participants register again before they are served. The error they get names `why` and the `step` to continue from."""
        self.fence, self._why_epoch = replace(self.fence, era=Era(life=self.fence.life, epoch=epoch)), f" ({why})" if why else ""
        self._epoch_facts = {"epoch": str(epoch)} | ({} if step is None else {"step": str(step)})

    def meet_predecessors(self) -> None:
        """From now on it is known which chiefs, and which epochs, there were before this one."""
        self.knows_predecessors = True

    def stem_from(self, earlier: Fence) -> None:
        """Notes `earlier`, the fence of the state that was restored or taken over."""
        self.earlier = earlier

    def learn_keys(self, session_keys: tuple[bytes, ...]) -> None:
        """Adds keys of this life's chiefs that shards have reported."""
        self._life_keys = joined_keys(self._life_keys, session_keys)

    def succeed(self, *, chief_incarnation: int, life: int) -> None:
        """From now on gives numbers as this chief, in this life. Participants admitted before register again and get new numbers."""
        self._life_keys = ()
        self._left_lives.clear()
        for member in self.all():
            self._end(member)
        for members in self._members.values():
            members.clear()
        self.fence = Fence(era=Era(life=life, epoch=self.epoch), chief_incarnation=chief_incarnation)

    def change_life(self, *, life: int) -> None:
        """Goes on in this life, with higher numbers than before. Participants register again, and stay who they are."""
        self._life_keys = ()
        self._left_lives[self.fence.life] = self.chief_incarnation
        self.fence = Fence(era=Era(life=life, epoch=self.epoch), chief_incarnation=self.chief_incarnation + 1)

    def remember(self, pushes: Iterable[WorkerPushes], *, chosen: Mapping[PushId, int] | None = None) -> None:
        """Replaces all known contributions by the applied ones; of everything else only the numbers stay.

        `chosen`: contributions that are counted besides, each with its step.
        """
        self.remembered = {pushed.worker: pushed for pushed in pushes}
        self._chosen = chosen or {}
        for member in self.workers():
            member.outcomes.restart(self._applied_of(member.index, member.incarnation))

    def give_up(self, incarnations: Iterable[PushId]) -> None:
        """Takes note of incarnations that earlier chiefs of this epoch have given up: a process that comes back as one gets another."""
        for one in incarnations:
            self._given_up[one.worker] = max(one.incarnation, self._given_up.get(one.worker, 0))

    def renew(self, member: Member, *, now: float) -> None:
        """Renews the lease of a member that has called."""
        member.last_seen = now
        if member.lease is None:
            member.lease = self._cluster.timers.timer(partial(self._cluster.joining.lapse, member))
        member.lease.set(now + member.lease_s)

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
        if member is None and _chief_of(former) == self.chief_incarnation:
            return None  # this chief has not given it
        if member is None and not self._is_proven(former):
            return None  # nor would a shard take anything from it
        if member is None and former.kind is ParticipantKind.WORKER and former.incarnation <= self._given_up.get(former.index, 0):
            return None  # its lease had ended, and shards have dropped what it gave
        if member is None:
            self._check_was_last(former)
            member = self._recognised(request, former, now=now)
        elif member.incarnation > former.incarnation and (member.host, member.pid) != where:
            raise superseded_error(former.incarnation, by=member)
        elif not member.is_live or (member.incarnation, member.secret, member.host, member.pid) != (
            former.incarnation,
            former.secret,
            *where,
        ):
            return None
        if not self._is_of_this_life(former):
            # The shards of this life do not know the keys of earlier chiefs.
            member.secret = self._new_secret(member.kind, member.index, member.incarnation)
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
        incarnation = max(former.incarnation if former else 0, numbered(self.chief_incarnation, 0)) + 1
        if request.former is not None and (request.former.index, request.former.incarnation) == (index, incarnation):
            incarnation += 1  # or it would seem to be the same one
        return self._made(request, index, incarnation=incarnation, former=former, now=now), former

    def _check_was_last(self, former: Participant) -> None:
        """Raises Superseded if a later process of the worker's index has contributed, under an earlier chief.

        The outcomes of this process's contributions are forgotten then, so that repeated calls could not be answered.
        """
        if former.kind is not ParticipantKind.WORKER:
            return
        applied, index = self.remembered.get(former.index), former.index
        chosen = (one.incarnation for one in self._chosen if one.worker == index)
        latest = max(applied.incarnation if applied is not None else 0, *chosen, 0)
        if latest > former.incarnation:
            words = f"worker {index} (incarnation {former.incarnation}) was replaced by incarnation {latest} under an earlier chief"
            raise Superseded(f"{words}. End this process", facts={"worker": str(index)})

    def _is_plausible(self, former: Participant) -> bool:
        return former.index < self._places(former.kind) and former.incarnation >= 1 and _chief_of(former) <= self.chief_incarnation

    def _is_of_this_life(self, participant: Participant) -> bool:
        return participant.era.life == self.fence.life

    def _is_of_this_run(self, participant: Participant) -> bool:
        """Whether the participant is of this life, or of one that this chief has left."""
        return self._is_of_this_life(participant) or participant.era.life in self._left_lives

    def _is_known(self, former: Participant) -> bool:
        """Whether its incarnation means the same participant here, or in the state that this chief has taken over or restored."""
        is_of_earlier = former.era.life == self.earlier.life and _chief_of(former) <= self.earlier.chief_incarnation
        is_member = self.knows(former) and _chief_of(former) <= self._left_lives.get(former.era.life, 0)
        return self._is_of_this_life(former) or is_of_earlier or is_member

    def _is_proven(self, former: Participant) -> bool:
        """Whether a chief of this life has made its secret.

        Unknown for an earlier life, and if all servers that knew the keys of earlier chiefs are lost.
        """
        if not self._is_of_this_life(former) or not any(key != self._session_key for key in self._life_keys):
            return True
        return self._knows_secret(former)

    def _knows_secret(self, former: Participant) -> bool:
        """Whether its secret was made with a key that the shards know: only then they believe it."""
        name = name_of(former.kind, former.index)
        return any(session_secret(key, name=name, incarnation=former.incarnation) == former.secret for key in self._life_keys)

    @property
    def _config(self) -> CoordinationConfig:
        """The configuration as it is now; a change removes no member."""
        return self._cluster.settings.config

    def _places(self, kind: ParticipantKind) -> int:
        return (self._config.num_workers if kind is ParticipantKind.WORKER else None) or MAX_PARTICIPANTS

    def _recognised(self, request: RegisterRequest, former: Participant, *, now: float) -> Member:
        member = self._made(request, former.index, incarnation=former.incarnation, former=None, now=now)
        if self._is_of_this_life(former) and self._knows_secret(former):
            # Else it gets another one with its number, which no shard would refuse.
            member.secret = former.secret
        if member.kind is ParticipantKind.WORKER:
            member.outcomes.restart(self._applied_of(member.index, member.incarnation))
        return member

    def _applied_of(self, worker: int, incarnation: int) -> Sequence[AppliedPush]:
        pushed = self.remembered.get(worker)
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
            secret=self._new_secret(request.kind, index, incarnation),
            last_seen=now,
            lease_s=self._config.lease_s,
            outcomes=PushOutcomes(window=self._config.max_staged_per_worker),
            num_accepted=former.num_accepted if former else 0,
            num_stale=former.num_stale if former else 0,
            num_late=former.num_late if former else 0,
        )
        self._members[request.kind][index] = member
        self._by_request[request.kind, request.request_id] = index
        self._num_live[request.kind] += 1
        return member

    def _new_secret(self, kind: ParticipantKind, index: int, incarnation: int) -> int:
        return session_secret(self._session_key, name=name_of(kind, index), incarnation=incarnation)

    def lapse(self, member: Member, *, now: float) -> None:
        """The lease has ended."""
        self._end(member)
        member.state, member.ended_at = MemberState.LAPSED, now

    def leave(self, member: Member, *, failure: str, now: float) -> None:
        """The participant says goodbye, perhaps after its lease has ended."""
        self._end(member)
        member.state, member.ended_at, member.last_seen, member.failure = MemberState.LEFT, now, now, printable(failure)

    def expel(self, member: Member, *, why: str, now: float) -> None:
        """Has an incarnation take part no more."""
        self._end(member)
        member.state, member.ended_at, member.failure = MemberState.EXPELLED, now, printable(why)

    def last_left_in_peace(self) -> bool:
        """Whether no worker lives, and the one that was seen last said goodbye without a failure.

        By last sign of life, not by when leases ended: a worker that was killed long before the others were done must not keep the cluster
        waiting for it, and one that died last must.
        """
        if self.num_live_workers:
            return False
        last = max(self.workers(), key=lambda member: (member.last_seen, member.state is not MemberState.LEFT), default=None)
        return last is not None and last.state is MemberState.LEFT and not last.failure

    def statuses(self, *, now: float, waiting: frozenset[int], is_training: bool) -> tuple[ParticipantStatus, ...]:
        """Returns all participants; `waiting` are the workers that block on a token."""
        return tuple(status_of(member, now, waiting, is_training=is_training) for member in self.all())

    def _end(self, member: Member) -> None:
        self._fastest_s = None
        self._num_live[member.kind] -= member.is_live
        member.state = MemberState.LAPSED if member.is_live else member.state
        self._by_request.pop((member.kind, member.request_id), None)
        if member.lease is not None:
            member.lease.clear()


def _chief_of(participant: Participant) -> int:
    """Returns the incarnation of the chief that gave this number."""
    return chief_of(participant.incarnation)


# Contributions remembered of each worker.
MAX_PUSHES = 16


def merged_pushes(steps: Iterable[tuple[int, tuple[PushId, ...]]], *, earlier: Mapping[int, WorkerPushes]) -> tuple[WorkerPushes, ...]:
    """Returns the newest contributions of each worker's newest incarnation. `steps`: the steps with their contributions, the newest first.

    `earlier`: contributions before those steps.
    """
    found: dict[int, tuple[int, dict[int, int]]] = {
        worker: (pushed.incarnation, {push.sequence: push.step for push in pushed.applied}) for worker, pushed in earlier.items()
    }
    for step, contributors in steps:
        for push_id in contributors:
            incarnation, applied = found.get(push_id.worker, (0, {}))
            if push_id.incarnation > incarnation:
                found[push_id.worker] = push_id.incarnation, {push_id.sequence: step}
            elif push_id.incarnation == incarnation:
                applied[push_id.sequence] = step
    return tuple(
        WorkerPushes(
            worker=worker,
            incarnation=incarnation,
            applied=tuple(AppliedPush(sequence=sequence, step=applied[sequence]) for sequence in sorted(applied)[-MAX_PUSHES:]),
        )
        for worker, (incarnation, applied) in sorted(found.items())
    )


def newest_pushes(reports: Iterable[Iterable[WorkerPushes]]) -> tuple[WorkerPushes, ...]:
    """Returns the newest pushes in the reports of several shards: all apply the same steps, but one may be a step behind."""
    merged: dict[int, WorkerPushes] = {}
    for report in reports:
        for pushed in report:
            known = merged.get(pushed.worker)
            if known is None or (pushed.incarnation, _last(pushed)) > (known.incarnation, _last(known)):
                merged[pushed.worker] = pushed
    return tuple(merged[worker] for worker in sorted(merged))


def _last(pushed: WorkerPushes) -> int:
    return pushed.applied[-1].sequence if pushed.applied else 0


def quorum(config: CoordinationConfig, *, members: Members, policy: Policy, starved: Collection[int] = ()) -> int:
    """Returns R, or the number that live workers and workers that have not joined yet can give, if less; at least `min_replicas`.

    `starved`: workers that live and have nothing to contribute, since all training data is done or leased to others. Where there are
    some, a worker that is gone or never came would have none either, so the step takes what it can get, and one contribution at least.
    """
    required = config.num_required
    counted = policy.num_contributions
    able = sum(1 for member in members.workers() if member.is_live and member.index not in starved and policy.may_give(member.index))
    if starved:
        return max(1, min(required, counted + able))
    if config.min_replicas is None or members.num_known_workers == members.num_live_workers:
        return required
    expected = max(0, (config.num_workers or required) - members.num_known_workers)
    return max(min(config.min_replicas, required), min(required, counted + able + expected))
