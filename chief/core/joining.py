"""Participants that join, give signs of life, and leave.

No participant is admitted before the chief knows its predecessors: a number that it gave earlier might be another process's, whose
contributions the shards or a checkpoint know. A call that comes earlier waits; its answer says what for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chief.core.cluster.members import Member, MemberState, gone_error, superseded_error
from chief.core.messages import NoteKind
from chief.core.waiting import Blocked
from chief.core.wording import printable, seconds
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.roles.chief import DeregisterRequest, HeartbeatRequest, ParticipantKind, RegisterRequest, Registration

if TYPE_CHECKING:
    from chief.core.state import Cluster

# A participant that waits for admission gets an answer with the reason within this time, and asks again.
_ARRIVAL_S = 1.0
# Of those that a participant names.
_MAX_TRANSPORTS = 8


class Joining:
    """Answers RegisterWorker, Heartbeat and Deregister, and carries on what follows for a worker's tokens, data and calls."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster, self._out, self._members = cluster, cluster.out, cluster.members
        self._arrivals = cluster.waiting.line(self._expire)

    def register(self, call: int, request: RegisterRequest, now: float) -> None:
        """Admits a participant, once the chief knows the earlier ones. Raises the errors of Members, and TrainingFailed."""
        members, ending = self._members, self._cluster.ending
        ending.refuse_if_failed()
        if ending.ended is not None:
            raise ending.ended.refusal
        if not members.knows_predecessors:
            self._arrivals.block(call, request, until=now + _ARRIVAL_S)
            return
        is_new_here = request.former is not None and not members.knows(request.former)
        repeated = members.repeated(request)
        member = repeated or members.returned(request, now=now)
        if member is None:
            member, former = members.admit(request, now=now)
            again = ", in the place of an earlier process" if former is not None else ""
            self._out.note(f"{member.name} joined {member.where}{again}", kind=NoteKind.JOINED)
            if former is not None:
                self.release(former, superseded_error(former.incarnation, by=member), now)
        if member.kind is ParticipantKind.WORKER:
            # A late copy names ranges that have been given back since.
            held = request.held if repeated is None and request.former == members.participant(member) else None
            self._cluster.training.join(member, held=held, is_new_here=is_new_here, now=now)
        members.renew(member, now=now)
        self._out.reply(call, self._registration(member))

    def welcome(self) -> None:
        """Participants that came before the chief knew its predecessors are admitted, or refused, once the event has been handled."""
        if self._arrivals:
            self._out.afterwards(self._take_in)

    def heartbeat(self, call: int, request: HeartbeatRequest, now: float) -> None:
        """Renews a lease."""
        ending = self._cluster.ending
        if not ending.is_finished:
            ending.refuse_if_failed()
            member = self._members.check(request.participant, now=now)
            member.travels(_transport(request.transports), request.traffic)
            self._members.renew(member, now=now)
        elif (member := self._members.look_up(request.participant)).is_live:
            self._members.renew(member, now=now)
        self._out.reply(call, ending.end)

    def deregister(self, call: int, request: DeregisterRequest, now: float) -> None:
        """A participant leaves."""
        member = self._members.look_up_leaver(request.participant)
        self._out.reply(call, None)
        if member.state is MemberState.LEFT:
            return
        self._members.leave(member, failure=request.failure, now=now)
        words = f"{member.name} failed {member.where}: {member.failure}" if member.failure else f"{member.name} left"
        self._out.note(words, kind=NoteKind.LOST if member.failure else NoteKind.LEFT, is_warning=bool(member.failure))
        self._lose(member, now)

    def lapse(self, member: Member, now: float) -> None:
        """The time of a lease is over."""
        if member.is_live:
            self._members.lapse(member, now=now)
            words = f"the lease of {member.name} has ended: last seen {seconds(now - member.last_seen)} ago {member.where}"
            self._out.note(words, kind=NoteKind.LOST, is_warning=True)
            self._lose(member, now)

    def release(self, gone: Member, error: PsError, now: float) -> None:
        """Releases the tokens and ranges of a lost incarnation, and refuses its blocked calls."""
        if gone.kind is ParticipantKind.WORKER:
            self._cluster.training.leave(gone, error, now)
            self._cluster.model_calls.drop(self._members.participant(gone), error)

    def _lose(self, gone: Member, now: float) -> None:
        self.release(gone, gone_error(gone, now=now), now)
        self._cluster.ending.lost_somebody(now)

    def _take_in(self, now: float) -> None:
        for blocked in self._arrivals:
            self._arrivals.take(blocked.who)
            try:
                self.register(blocked.call, blocked.ask, now)
            except PsError as error:
                self._out.refuse(blocked.call, error)

    def _expire(self, blocked: Blocked[RegisterRequest], now: float) -> None:
        """A call has waited for admission as long as one call may."""
        self._arrivals.refuse(blocked.who, Unavailable(self._cluster.explain(now)))

    def _registration(self, member: Member) -> Registration:
        cluster, members, training = self._cluster, self._members, self._cluster.training
        may_contribute = member.kind is ParticipantKind.WORKER and not cluster.ending.is_finished
        return Registration(
            participant=members.participant(member),
            lease_s=member.lease_s,
            shard_addresses=cluster.servers.addresses,
            global_step=training.step,
            may_contribute=may_contribute and training.policy.may_contribute(member.index),
            chief_incarnation=members.chief_incarnation,
            standby_addresses=cluster.servers.standby_addresses,
            shards_version=cluster.servers.version_under(members.chief_incarnation),
            rejects_nonfinite=cluster.settings.config.reject_nonfinite,
        )


def _transport(names: Sequence[str]) -> str:
    """Returns a participant's transports in a few words."""
    return printable(", ".join(sorted({*names[:_MAX_TRANSPORTS]})))
