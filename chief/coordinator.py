"""The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.

One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
be done. `now` is monotonic, in seconds. Not thread-safe.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chief import events as ev
from chief import recovery_events as rev
from chief.checkpointing import CHECKPOINT_KEY, LAST_KEY, Checkpointing
from chief.cluster import new_cluster
from chief.coordination import CoordinationConfig
from chief.data_calls import DataCalls
from chief.ending import FINISH_KEY, Ending
from chief.member import Member, MemberState, gone_error, superseded_error
from chief.model_calls import ModelCalls
from chief.policy import Policy
from chief.recovery import Recovery
from chief.settings import Settings
from chief.shard_sequence import ShardSequence
from chief.token_calls import TokenCalls
from chief.token_replies import grant
from chief.wording import printable, seconds
from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind, Registration
from ps_protocol.errors import PsError, ShuttingDown

Instructions = list[ev.Instruction]


class Coordinator:
    """The chief's core. `handle` is the only thing that changes it."""

    def __init__(
        self, *, config: CoordinationConfig, shard_addresses: Sequence[str], now: float, epoch: int = 1, policy: Policy | None = None
    ) -> None:
        self._cluster = new_cluster(config, shard_addresses=shard_addresses, epoch=epoch, policy=policy, now=now)
        self._settings = Settings(self._cluster)
        self._models = ModelCalls(self._cluster, self._settings)
        self._checkpointing = Checkpointing(self._cluster)
        self._ending = Ending(self._cluster, self._models, self._settings, self._checkpointing)
        self._sequence = ShardSequence(self._cluster, self._settings, self._models, self._ending, self._checkpointing)
        self._recovery = Recovery(self._cluster, self._settings, self._models, self._ending, self._checkpointing)
        self._data = DataCalls(self._cluster)
        self._calls = TokenCalls(self._cluster, self._sequence)
        self._handlers: dict[type, Callable[[Any, float], Instructions]] = {
            ev.RegisterWorker: self._register_worker,
            ev.Heartbeat: self._heartbeat,
            ev.DeregisterWorker: self._deregister_worker,
            ev.RegisterModel: self._register_model,
            ev.CompleteInitialization: self._models.complete,
            ev.GetModel: self._models.get,
            ev.CommitPush: self._calls.commit_push,
            ev.DequeueToken: self._calls.dequeue_token,
            ev.SetPolicy: self._set_policy,
            ev.SetHyperparameters: self._set_hyperparameters,
            ev.FinishTraining: self._ending.finish_training,
            ev.CallCancelled: self._cancel_call,
            ev.TimerFired: self._fire_timer,
            ev.ShardAdopted: self._recovery.adopted,
            ev.ShardSeen: self._see_shard,
            ev.ShardUnreachable: self._lose_shard,
            ev.ShardFailed: self._fail_shard,
            ev.StepPrepared: self._prepare,
            ev.ShardsConfigured: self._sequence.configured,
            ev.StepApplied: self._apply,
            rev.ShardsFound: self._recovery.found,
            rev.RecordFound: self._recovery.record_found,
            rev.CheckpointFound: self._recovery.checkpoint_found,
            rev.ShardsRestored: self._recovery.restored,
            rev.RestoreFailed: self._recovery.restore_failed,
            rev.StepCopied: self._copied,
            rev.StepSaved: self._saved,
            rev.CheckpointCommitted: self._committed,
            rev.SaveFailed: self._save_failed,
            rev.SaveCheckpoint: self._checkpointing.wanted,
            rev.LeaseRanges: self._data.lease,
        }

    @property
    def epoch(self) -> int:
        """Epoch of the cluster: it rises whenever the cluster goes back to a checkpoint."""
        return self._cluster.epoch

    @property
    def chief_incarnation(self) -> int:
        """The chief's number among those of the cluster; 1 until it has looked at the shards."""
        return self._cluster.chief_incarnation

    @property
    def state(self) -> ClusterState:
        """Where the cluster is."""
        return self._cluster.state

    @property
    def global_step(self) -> int:
        """The open step: the number of steps applied."""
        return self._cluster.policy.step

    def handle(self, event: ev.Event, now: float) -> Instructions:
        """Takes note of what happened and returns what is to be done, in order. Raises PsError, and then nothing has changed."""
        instructions = self._handlers[type(event)](event, now)
        return [*instructions, *self._begin_what_is_due(now)] if self._cluster.is_due else instructions

    def _begin_what_is_due(self, now: float) -> Instructions:
        cluster = self._cluster
        if cluster.has_opened:
            self._checkpointing.opened(now)
        cluster.has_opened = cluster.is_quorum_changed = False
        return self._sequence.proceed(now)

    def next_deadline(self) -> float | None:
        """Returns when TimerFired is due at the latest; None: never. Ask again after each event."""
        return self._cluster.deadlines.next()

    def status(self, now: float, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        status = self._cluster.status(now, max_ledger_entries=max_ledger_entries)
        return replace(status, checkpoint=self._checkpointing.status(now))

    def explain(self, now: float) -> str:
        """Says in words what the cluster waits for."""
        return self._cluster.explain(now)

    # -- participants

    def _register_worker(self, event: ev.RegisterWorker, now: float) -> Instructions:
        cluster, request = self._cluster, event.request
        cluster.refuse_if_failed()
        if cluster.is_ended:
            raise ShuttingDown(f"the chief is shutting down: {cluster.finish_reason}")
        instructions: Instructions = []
        member = cluster.membership.repeated(request) or cluster.membership.returned(request, now=now)
        if member is None:
            member, former = cluster.membership.admit(request, now=now)
            instructions.append(ev.Note(text=f"{member.name} joined {member.where} incarnation={member.incarnation}"))
            if former is not None:
                instructions += self._release(former, superseded_error(former.incarnation, by=member))
        if member.kind is ParticipantKind.WORKER:
            cluster.policy.join(member.index)
            cluster.requota()
        cluster.renew(member, now=now)
        is_worker = member.kind is ParticipantKind.WORKER
        registration = Registration(
            participant=cluster.membership.participant(member),
            lease_s=member.lease_s,
            shard_addresses=cluster.shards.addresses,
            global_step=cluster.policy.step,
            may_contribute=is_worker and not cluster.is_finished and cluster.policy.may_contribute(member.index),
            chief_incarnation=cluster.chief_incarnation,
        )
        return [*instructions, ev.Reply(call=event.call, value=registration)]

    def _register_model(self, event: ev.RegisterModel, now: float) -> Instructions:
        return [*self._models.register(event, now), *self._recovery.presented(now)]

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> Instructions:
        cluster = self._cluster
        if not cluster.is_finished:
            cluster.renew(cluster.check(event.participant, now=now), now=now)
        elif (member := cluster.membership.look_up(event.participant)).is_live:
            cluster.renew(member, now=now)
        return [ev.Reply(call=event.call, value=cluster.is_finished)]

    def _deregister_worker(self, event: ev.DeregisterWorker, now: float) -> Instructions:
        cluster = self._cluster
        member = cluster.membership.look_up_leaver(event.participant)
        reply = ev.Reply(call=event.call, value=None)
        if member.state is MemberState.LEFT:
            return [reply]
        cluster.membership.leave(member, failure=event.failure, now=now)
        words = f"{member.name} failed {member.where}: {member.failure}" if member.failure else f"{member.name} left"
        note = ev.Note(text=words, is_warning=bool(member.failure))
        return [reply, note, *self._release(member, gone_error(member, now=now)), *self._ending.after_loss(now)]

    def _lapse(self, member: Member, now: float) -> Instructions:
        self._cluster.membership.lapse(member, now=now)
        words = f"the lease of {member.name} has ended: last seen {seconds(now - member.last_seen)} ago {member.where}"
        note = ev.Note(text=words, is_warning=True)
        return [note, *self._release(member, gone_error(member, now=now)), *self._ending.after_loss(now)]

    def _release(self, gone: Member, error: PsError) -> Instructions:
        """What a gone incarnation held goes to others, and what it still asks is refused."""
        if gone.kind is not ParticipantKind.WORKER:
            return []
        waiting = self._cluster.waiting.take_token_call(gone.index)
        refusals: Instructions = [ev.Refuse(call=waiting.call, error=error)] if waiting is not None else []
        granted = grant(self._cluster, self._cluster.policy.drop(gone.index))
        if self._cluster.data.drop(gone.index, gone.incarnation):
            granted += self._data.settle()
        self._cluster.requota()
        self._cluster.turned_away.discard(gone.index)
        if self._cluster.policy.spec.accepts_stale:
            self._cluster.discards.add_incarnation(gone.index, gone.incarnation)
        return [*refusals, *granted, *self._models.drop(self._cluster.membership.participant(gone), error)]

    # -- settings

    def _set_policy(self, event: ev.SetPolicy, now: float) -> Instructions:
        instructions = self._settings.set_policy(event)
        return self._settle_settings(instructions, event.call, event.max_wait_s, now)

    def _set_hyperparameters(self, event: ev.SetHyperparameters, now: float) -> Instructions:
        instructions = self._settings.set_hyperparameters(event)
        return self._settle_settings(instructions, event.call, event.max_wait_s, now)

    def _settle_settings(self, instructions: Instructions, call: int, max_wait_s: float, now: float) -> Instructions:
        return [*instructions, *self._sequence.proceed(now), *self._settings.wait(call, max_wait_s=max_wait_s, now=now)]

    # -- time and callers that go away

    def _fire_timer(self, event: ev.TimerFired, now: float) -> Instructions:
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
            elif what == CHECKPOINT_KEY[0]:
                instructions += self._checkpointing.fire(now)
            elif what == LAST_KEY[0]:
                instructions += [*self._checkpointing.give_up_last(), *self._ending.end_if_deserted()]
            else:
                member = self._cluster.membership.find(ParticipantKind[what], number)
                instructions += self._lapse(member, now) if member is not None and member.is_live else []
        return instructions

    def _cancel_call(self, event: ev.CallCancelled, now: float) -> Instructions:
        self._calls.cancel(event.call)
        self._cluster.waiting.take_model_call(event.call)
        self._settings.cancel(event.call)
        self._checkpointing.cancel(event.call)
        self._cluster.waiting.take_data_call(event.call)
        return []

    # -- shards

    def _prepare(self, event: ev.StepPrepared, now: float) -> Instructions:
        repeated = self._recovery.prepared(event)
        return self._sequence.prepared(event, now) if repeated is None else repeated

    def _apply(self, event: ev.StepApplied, now: float) -> Instructions:
        repeated = self._recovery.applied(event, now)
        if repeated is not None:
            return repeated
        instructions = self._sequence.applied(event, now)
        return [*instructions, *self._data.settle()] if self._cluster.data.spec is not None else instructions

    def _see_shard(self, event: ev.ShardSeen, now: float) -> Instructions:
        cluster = self._cluster
        if not cluster.shards.seen(event.shard, process_incarnation=event.process_incarnation):
            return []
        if not cluster.failure and not cluster.is_finished and self._recovery.has_nothing:
            return [ev.AdoptShard(shard=event.shard)]
        return self._recovery.lost(event.shard, now)

    def _lose_shard(self, event: ev.ShardUnreachable, now: float) -> Instructions:
        self._cluster.shards.unreachable(event.shard, why=event.why, now=now)
        return []

    def _fail_shard(self, event: ev.ShardFailed, now: float) -> Instructions:
        cluster = self._cluster
        if event.epoch not in (None, cluster.epoch):
            return []  # of what is given up
        return self._ending.fail(f"{cluster.shards[event.shard].name}: {printable(event.why)}")

    # -- checkpoints

    def _copied(self, event: rev.StepCopied, now: float) -> Instructions:
        return self._sequence.proceed(now) if self._checkpointing.copied(event) else []

    def _saved(self, event: rev.StepSaved, now: float) -> Instructions:
        return self._checkpointing.saved(event)

    def _committed(self, event: rev.CheckpointCommitted, now: float) -> Instructions:
        instructions, is_told = self._checkpointing.committed(event, now)
        if is_told:
            instructions += self._sequence.tell(now)
        instructions += self._recovery.secured(now)
        return [*instructions, *self._ending.end_if_deserted()]

    def _save_failed(self, event: rev.SaveFailed, now: float) -> Instructions:
        instructions, goes_on = self._checkpointing.failed(event, now)
        return [*instructions, *(self._sequence.proceed(now) if goes_on else []), *self._ending.end_if_deserted()]
