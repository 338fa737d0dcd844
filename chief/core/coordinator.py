"""The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.

One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
be done. `now` is monotonic, in seconds. Not thread-safe.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chief.core import messages, replies
from chief.core.checkpoints import CHECKPOINT_KEY, LAST_KEY, Checkpointing
from chief.core.cluster import Cluster, cluster_status, new_cluster
from chief.core.ending import FINISH_KEY, Ending, ModelCalls
from chief.core.members import Member, MemberState, gone_error, superseded_error
from chief.core.messages import DeregisterWorker, Heartbeat, Instruction, Note, Refuse, RegisterWorker, Reply
from chief.core.recovery import SEARCH_KEY, Recovery
from chief.core.replies import grant
from chief.core.settings import Settings
from chief.core.training import RETURN_KEY, DataCalls, Replicas, ShardSequence, TokenCalls
from chief.core.wording import printable, seconds
from chief.options import CoordinationConfig
from chief.policies.base import Policy
from ps_protocol.errors import PsError, ShuttingDown, Unavailable
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind, RegisterRequest, Registration

# Who comes and goes: methods of the coordinator. Knows the cluster; no clock, thread or wire.
#
# Nobody is taken in before the chief knows which chiefs there were before it: a number that it gave earlier might be another process's,
# whose contributions the shards or a checkpoint know. Who comes earlier waits, and is told what for.


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


# The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.
#
# One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
# be done. `now` is monotonic, in seconds. Not thread-safe.


Instructions = list[messages.Instruction]


class Coordinator:
    """The chief's core. `handle` is the only thing that changes it.

    `new_life` names, at random, a life of the cluster that begins, since no shard has obeyed a chief before; 0: it has no name.
    """

    def __init__(
        self,
        *,
        config: CoordinationConfig,
        shard_addresses: Sequence[str],
        now: float,
        policy: Policy | None = None,
        has_successors: bool = True,
        new_life: Callable[[], int] = lambda: 0,
    ) -> None:
        self._cluster = new_cluster(config, shard_addresses=shard_addresses, policy=policy, now=now, has_successors=has_successors)
        self._cluster.new_life = new_life
        self._settings = Settings(self._cluster)
        self._models = ModelCalls(self._cluster, self._settings)
        self._checkpointing = Checkpointing(self._cluster)
        self._ending = Ending(self._cluster, self._models, self._settings, self._checkpointing)
        self._sequence = ShardSequence(self._cluster, self._settings, self._models, self._ending, self._checkpointing)
        self._recovery = Recovery(self._cluster, self._settings, self._models, self._ending, self._checkpointing)
        self._data = DataCalls(self._cluster)
        self._calls = TokenCalls(self._cluster, self._sequence)
        self._replicas = Replicas(self._cluster, self._settings, self._checkpointing, self._sequence)
        self._participants = Participants(self._cluster, self._models, self._data, self._ending)
        self._handlers: dict[type, Callable[[Any, float], Instructions]] = {
            messages.RegisterWorker: self._participants.register,
            messages.Heartbeat: self._participants.heartbeat,
            messages.DeregisterWorker: self._participants.deregister,
            messages.RegisterModel: self._register_model,
            messages.CompleteInitialization: self._models.complete,
            messages.GetModel: self._models.get,
            messages.CommitPush: self._calls.commit_push,
            messages.DequeueToken: self._calls.dequeue_token,
            messages.SetPolicy: self._set_policy,
            messages.SetHyperparameters: self._set_hyperparameters,
            messages.FinishTraining: self._ending.finish_training,
            messages.CallCancelled: self._cancel_call,
            messages.TimerFired: self._fire_timer,
            messages.ShardAdopted: self._recovery.adopted,
            messages.ShardSeen: self._see_shard,
            messages.ShardUnreachable: self._lose_shard,
            messages.ShardFailed: self._fail_shard,
            messages.StepPrepared: self._prepare,
            messages.ShardsConfigured: self._sequence.configured,
            messages.StepApplied: self._apply,
            messages.ShardsFound: self._recovery.found,
            messages.RecordFound: self._recovery.record_found,
            messages.RecordKept: self._keep,
            messages.CheckpointFound: self._recovery.checkpoint_found,
            messages.ShardsRestored: self._recovery.restored,
            messages.RestoreFailed: self._recovery.restore_failed,
            messages.StepCopied: self._copied,
            messages.StepSaved: self._saved,
            messages.CheckpointCommitted: self._committed,
            messages.SaveFailed: self._save_failed,
            messages.SaveCheckpoint: self._checkpointing.wanted,
            messages.LeaseRanges: self._data.lease,
            messages.ReplicasChanged: self._replicas.changed,
            messages.ReplicaReady: self._replicas.ready,
            messages.ReplicasBack: self._replicas.back,
        }

    @property
    def epoch(self) -> int:
        """Epoch of the cluster: it rises whenever the cluster goes back to a checkpoint."""
        return self._cluster.epoch

    @property
    def chief_incarnation(self) -> int:
        """The chief's number among those of the cluster; 1 until it knows them."""
        return self._cluster.chief_incarnation

    @property
    def state(self) -> ClusterState:
        """Where the cluster is."""
        return self._cluster.state

    @property
    def global_step(self) -> int:
        """The open step: the number of steps applied."""
        return self._cluster.policy.step

    def handle(self, event: messages.Event, now: float) -> Instructions:
        """Takes note of what happened and returns what is to be done, in order. Raises PsError, and then nothing has changed."""
        instructions = self._handlers[type(event)](event, now)
        return [*instructions, *self._begin_what_is_due(now)] if self._cluster.is_due else instructions

    def _begin_what_is_due(self, now: float) -> Instructions:
        cluster = self._cluster
        if cluster.has_opened:
            self._checkpointing.opened(now)
        cluster.has_opened = cluster.is_quorum_changed = False
        return [*self._participants.settle(now), *self._sequence.proceed(now)]

    def next_deadline(self) -> float | None:
        """Returns when TimerFired is due at the latest; None: never. Ask again after each event."""
        return self._cluster.deadlines.next()

    def status(self, now: float, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        status = cluster_status(self._cluster, now, max_ledger_entries=max_ledger_entries)
        return replace(status, checkpoint=self._checkpointing.status(now))

    def explain(self, now: float) -> str:
        """Says in words what the cluster waits for."""
        return self._cluster.explain(now)

    # -- models and settings

    def _register_model(self, event: messages.RegisterModel, now: float) -> Instructions:
        return [*self._models.register(event, now), *self._recovery.presented(now)]

    def _set_policy(self, event: messages.SetPolicy, now: float) -> Instructions:
        instructions = self._settings.set_policy(event)
        return self._settle_settings(instructions, event.call, event.max_wait_s, now)

    def _set_hyperparameters(self, event: messages.SetHyperparameters, now: float) -> Instructions:
        instructions = self._settings.set_hyperparameters(event)
        return self._settle_settings(instructions, event.call, event.max_wait_s, now)

    def _settle_settings(self, instructions: Instructions, call: int, max_wait_s: float, now: float) -> Instructions:
        return [*instructions, *self._sequence.proceed(now), *self._settings.wait(call, max_wait_s=max_wait_s, now=now)]

    # -- time and callers that go away

    def _fire_timer(self, event: messages.TimerFired, now: float) -> Instructions:
        instructions: Instructions = []
        for what, number in self._cluster.deadlines.pop_due(now):
            if what == "token":
                instructions += self._calls.expire(number, now)
            elif what == "model":
                instructions += self._models.expire(number, now)
            elif what == "settings":
                instructions += self._settings.expire(number)
            elif what == FINISH_KEY[0]:
                instructions += self._ending.finish(self._cluster.pending_finish, now)
            elif what == "save":
                instructions += self._checkpointing.expire(number, now)
            elif what == "ranges":
                instructions += self._data.expire(number)
            elif what == "arrival":
                instructions += self._participants.expire(number, now)
            elif what == "told":
                instructions += replies.expire(self._cluster, number, now)
            elif what == replies.LINGER_KEY[0]:
                instructions += [] if self._cluster.policy.is_complete else replies.keep_if_awaited(self._cluster)
            elif what == RETURN_KEY[0]:
                instructions += self._data.stop_waiting(now)
            elif what == SEARCH_KEY[0]:
                instructions += self._recovery.try_again(now)
            elif what == CHECKPOINT_KEY[0]:
                instructions += self._checkpointing.fire(now)
            elif what == LAST_KEY[0]:
                instructions += [*self._checkpointing.give_up_last(), *self._ending.end_if_deserted()]
            else:
                instructions += self._participants.lapse(ParticipantKind[what], number, now)
        return instructions

    def _cancel_call(self, event: messages.CallCancelled, now: float) -> Instructions:
        self._calls.cancel(event.call)
        self._cluster.waiting.take_model_call(event.call)
        self._settings.cancel(event.call)
        self._checkpointing.cancel(event.call)
        self._cluster.waiting.take_data_call(event.call)
        self._cluster.waiting.take_arrival(event.call)
        replies.cancel(self._cluster, event.call)
        return []

    # -- shards

    def _prepare(self, event: messages.StepPrepared, now: float) -> Instructions:
        repeated = self._recovery.prepared(event)
        return self._sequence.prepared(event, now) if repeated is None else repeated

    def _apply(self, event: messages.StepApplied, now: float) -> Instructions:
        repeated = self._recovery.applied(event, now)
        if repeated is not None:
            return repeated
        instructions = self._sequence.applied(event, now)
        return [*instructions, *self._data.settle(now)] if self._cluster.data.spec is not None else instructions

    def _see_shard(self, event: messages.ShardSeen, now: float) -> Instructions:
        cluster = self._cluster
        if not cluster.shards.seen(event.shard, process_incarnation=event.process_incarnation):
            return []
        if not cluster.failure and not cluster.is_finished and self._recovery.has_nothing:
            return [messages.AdoptShard(shard=event.shard)]
        return self._recovery.lost(event.shard, now)

    def _lose_shard(self, event: messages.ShardUnreachable, now: float) -> Instructions:
        self._cluster.shards.unreachable(event.shard, why=event.why, now=now)
        return []

    def _fail_shard(self, event: messages.ShardFailed, now: float) -> Instructions:
        cluster = self._cluster
        if event.epoch not in (None, cluster.epoch):
            return []  # of what is given up
        return self._ending.fail(f"{cluster.shards[event.shard].name}: {printable(event.why)}")

    def _keep(self, event: messages.RecordKept, now: float) -> Instructions:
        return [*replies.kept(self._cluster, event), *self._recovery.kept(now)]

    # -- checkpoints

    def _copied(self, event: messages.StepCopied, now: float) -> Instructions:
        return self._sequence.proceed(now) if self._checkpointing.copied(event) else []

    def _saved(self, event: messages.StepSaved, now: float) -> Instructions:
        return self._checkpointing.saved(event)

    def _committed(self, event: messages.CheckpointCommitted, now: float) -> Instructions:
        instructions, is_told = self._checkpointing.committed(event, now)
        instructions += self._replicas.committed(event, now, is_told=is_told)
        instructions += self._recovery.secured(now)
        return [*instructions, *self._ending.end_if_deserted()]

    def _save_failed(self, event: messages.SaveFailed, now: float) -> Instructions:
        instructions, goes_on = self._checkpointing.failed(event, now)
        instructions += self._replicas.save_failed(event, now)
        return [*instructions, *(self._sequence.proceed(now) if goes_on else []), *self._ending.end_if_deserted()]
