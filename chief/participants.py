"""Who comes and goes: methods of the coordinator. Knows the cluster; no clock, thread or wire.

Nobody is taken in before the chief knows which chiefs there were before it: a number that it gave earlier might be another process's,
whose contributions the shards or a checkpoint know. Who comes earlier waits, and is told what for.
"""

from dataclasses import replace

from chief.cluster import Cluster
from chief.data_calls import DataCalls
from chief.ending import Ending
from chief.events import DeregisterWorker, Heartbeat, Instruction, Note, Refuse, RegisterWorker, Reply
from chief.member import Member, MemberState, gone_error, superseded_error
from chief.model_calls import ModelCalls
from chief.token_replies import grant
from chief.wording import seconds
from ps_protocol.chief import ParticipantKind, RegisterRequest, Registration
from ps_protocol.errors import PsError, ShuttingDown, Unavailable

# Who waits to be taken in is told what for, and asks again, before that long has passed.
_ARRIVAL_S = 1.0


class Participants:
    """Answers RegisterWorker, Heartbeat and DeregisterWorker, and settles what is left of who is gone."""

    def __init__(self, cluster: Cluster, models: ModelCalls, data: DataCalls, ending: Ending) -> None:
        self._cluster = cluster
        self._models = models
        self._data = data
        self._ending = ending

    def register(self, event: RegisterWorker, now: float) -> list[Instruction]:
        """Takes a participant in, as soon as the chief knows who was here before. Raises what Membership does, and TrainingFailed."""
        cluster, request = self._cluster, event.request
        cluster.refuse_if_failed()
        if cluster.is_ended:
            raise ShuttingDown(f"the chief is shutting down: {cluster.finish_reason}")
        if not cluster.membership.knows_predecessors:
            cluster.waiting.add_arrival(event.call, event, until=now + _ARRIVAL_S)
            return []
        is_new_here = request.former is not None and not cluster.membership.knows(request.former)
        instructions: list[Instruction] = []
        repeated = cluster.membership.repeated(request)
        member = repeated or cluster.membership.returned(request, now=now)
        if member is None:
            member, former = cluster.membership.admit(request, now=now)
            instructions.append(Note(text=f"{member.name} joined {member.where} incarnation={member.incarnation}"))
            if former is not None:
                instructions += self._release(former, superseded_error(former.incarnation, by=member), now)
        if member.kind is ParticipantKind.WORKER:
            cluster.policy.join(member.index)
            if repeated is None:  # a copy that comes late names what has been given back since
                self._hear_of_former(request, member, is_new_here=is_new_here)
            instructions += self._data.returned(member.index, now)
            cluster.requota()
        cluster.renew(member, now=now)
        return [*instructions, Reply(call=event.call, value=self._registration(member))]

    def _hear_of_former(self, request: RegisterRequest, member: Member, *, is_new_here: bool) -> None:
        """A worker that stays who it was has its data still, and perhaps nothing in the open step any more."""
        cluster = self._cluster
        participant = cluster.membership.participant(member)
        # One that knows of no life is believed.
        if request.former not in (participant, replace(participant, life=0)):
            return
        cluster.data.hold(member.index, member.incarnation, request.held)
        if is_new_here and not cluster.policy.spec.accepts_stale and not cluster.policy.has_contributed(member.index):
            # It may wait for a token, and its predecessor's contribution to the open step has gone with the chief before.
            cluster.turned_away.add(member.index)

    def _registration(self, member: Member) -> Registration:
        cluster = self._cluster
        is_worker = member.kind is ParticipantKind.WORKER
        return Registration(
            participant=cluster.membership.participant(member),
            lease_s=member.lease_s,
            shard_addresses=cluster.shards.addresses,
            global_step=cluster.policy.step,
            may_contribute=is_worker and not cluster.is_finished and cluster.policy.may_contribute(member.index),
            chief_incarnation=cluster.chief_incarnation,
            standby_addresses=cluster.shards.standby_addresses,
            shards_version=cluster.shards_version,
            rejects_nonfinite=cluster.config.reject_nonfinite,
        )

    def settle(self, now: float) -> list[Instruction]:
        """Takes in who came before the chief knew enough for that, if it does now."""
        cluster = self._cluster
        instructions: list[Instruction] = []
        for event in cluster.waiting.take_arrivals() if cluster.are_arrivals_due else ():
            try:
                instructions += self.register(event, now)
            except PsError as error:
                instructions.append(Refuse(call=event.call, error=error))
        return instructions

    def expire(self, call: int, now: float) -> list[Instruction]:
        """Somebody has waited to be taken in as long as one call may."""
        cluster = self._cluster
        return [Refuse(call=call, error=Unavailable(cluster.explain(now)))] if cluster.waiting.take_arrival(call) is not None else []

    def heartbeat(self, event: Heartbeat, now: float) -> list[Instruction]:
        """Renews a lease."""
        cluster = self._cluster
        if not cluster.is_finished:
            cluster.renew(cluster.check(event.participant, now=now), now=now)
        elif (member := cluster.membership.look_up(event.participant)).is_live:
            cluster.renew(member, now=now)
        return [Reply(call=event.call, value=cluster.is_finished)]

    def deregister(self, event: DeregisterWorker, now: float) -> list[Instruction]:
        """Somebody says goodbye."""
        cluster = self._cluster
        member = cluster.membership.look_up_leaver(event.participant)
        reply = Reply(call=event.call, value=None)
        if member.state is MemberState.LEFT:
            return [reply]
        cluster.membership.leave(member, failure=event.failure, now=now)
        words = f"{member.name} failed {member.where}: {member.failure}" if member.failure else f"{member.name} left"
        note = Note(text=words, is_warning=bool(member.failure))
        return [reply, note, *self._release(member, gone_error(member, now=now), now), *self._ending.after_loss(now)]

    def lapse(self, kind: ParticipantKind, index: int, now: float) -> list[Instruction]:
        """The time of a lease is over."""
        member = self._cluster.membership.find(kind, index)
        if member is None or not member.is_live:
            return []
        self._cluster.membership.lapse(member, now=now)
        words = f"the lease of {member.name} has ended: last seen {seconds(now - member.last_seen)} ago {member.where}"
        note = Note(text=words, is_warning=True)
        return [note, *self._release(member, gone_error(member, now=now), now), *self._ending.after_loss(now)]

    def _release(self, gone: Member, error: PsError, now: float) -> list[Instruction]:
        """What a gone incarnation held goes to others, and what it still asks is refused."""
        if gone.kind is not ParticipantKind.WORKER:
            return []
        cluster = self._cluster
        waiting = cluster.waiting.take_token_call(gone.index)
        refusals: list[Instruction] = [Refuse(call=waiting.call, error=error)] if waiting is not None else []
        refusals += self._data.refuse(cluster.membership.participant(gone), error)
        granted = grant(cluster, cluster.policy.drop(gone.index), now)
        if cluster.data.drop(gone.index, gone.incarnation):
            granted += self._data.settle(now)
        cluster.requota()
        cluster.turned_away.discard(gone.index)
        if cluster.policy.spec.accepts_stale:
            cluster.discards.add_incarnation(gone.index, gone.incarnation)
        return [*refusals, *granted, *self._models.drop(cluster.membership.participant(gone), error)]
