"""The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.

One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
be done. `now` is monotonic, in seconds. Not thread-safe.
"""

from collections.abc import Callable, Sequence
from typing import Any

from chief import events as ev
from chief.cluster import new_cluster
from chief.coordination import CoordinationConfig
from chief.ending import FINISH_KEY, Ending
from chief.membership import Member, MemberState, gone_error, superseded_error
from chief.model_calls import ModelCalls
from chief.policy import Policy
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
        self._ending = Ending(self._cluster, self._models, self._settings)
        self._sequence = ShardSequence(self._cluster, self._settings, self._models, self._ending)
        self._calls = TokenCalls(self._cluster, self._sequence)
        self._handlers: dict[type, Callable[[Any, float], Instructions]] = {
            ev.RegisterWorker: self._register_worker,
            ev.Heartbeat: self._heartbeat,
            ev.DeregisterWorker: self._deregister_worker,
            ev.RegisterModel: self._models.register,
            ev.CompleteInitialization: self._models.complete,
            ev.GetModel: self._models.get,
            ev.CommitPush: self._calls.commit_push,
            ev.DequeueToken: self._calls.dequeue_token,
            ev.SetPolicy: self._set_policy,
            ev.SetHyperparameters: self._set_hyperparameters,
            ev.FinishTraining: self._ending.finish_training,
            ev.CallCancelled: self._cancel_call,
            ev.TimerFired: self._fire_timer,
            ev.ShardAdopted: self._adopt_shard,
            ev.ShardSeen: self._see_shard,
            ev.ShardUnreachable: self._lose_shard,
            ev.ShardFailed: self._fail_shard,
            ev.StepPrepared: self._sequence.prepared,
            ev.ShardsConfigured: self._sequence.configured,
            ev.StepApplied: self._sequence.applied,
        }

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
        return self._handlers[type(event)](event, now)

    def next_deadline(self) -> float | None:
        """Returns when TimerFired is due at the latest; None: never. Ask again after each event."""
        return self._cluster.deadlines.next()

    def status(self, now: float, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        return self._cluster.status(now, max_ledger_entries=max_ledger_entries)

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
        member = cluster.membership.repeated(request)
        if member is None:
            member, former = cluster.membership.admit(request, now=now)
            instructions.append(ev.Note(text=f"{member.name} joined {member.where} incarnation={member.incarnation}"))
            if former is not None:
                instructions += self._release(former, superseded_error(former.incarnation, by=member))
            if member.kind is ParticipantKind.WORKER:
                cluster.policy.join(member.index)
        cluster.renew(member, now=now)
        is_worker = member.kind is ParticipantKind.WORKER
        registration = Registration(
            participant=cluster.membership.participant(member),
            lease_s=member.lease_s,
            shard_addresses=cluster.shards.addresses,
            global_step=cluster.policy.step,
            may_contribute=is_worker and not cluster.is_finished and cluster.policy.may_contribute(member.index),
        )
        return [*instructions, ev.Reply(call=event.call, value=registration)]

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> Instructions:
        cluster = self._cluster
        if not cluster.is_finished:
            cluster.renew(cluster.check(event.participant, now=now), now=now)
        elif (member := cluster.membership.look_up(event.participant)).is_live:
            cluster.renew(member, now=now)
        return [ev.Reply(call=event.call, value=cluster.is_finished)]

    def _deregister_worker(self, event: ev.DeregisterWorker, now: float) -> Instructions:
        cluster = self._cluster
        member = cluster.membership.look_up(event.participant)
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
                instructions += self._ending.finish(self._cluster.pending_finish)
            else:
                member = self._cluster.membership.find(ParticipantKind[what], number)
                instructions += self._lapse(member, now) if member is not None and member.is_live else []
        return instructions

    def _cancel_call(self, event: ev.CallCancelled, now: float) -> Instructions:
        self._calls.cancel(event.call)
        self._cluster.waiting.take_model_call(event.call)
        self._settings.cancel(event.call)
        return []

    # -- shards

    def _adopt_shard(self, event: ev.ShardAdopted, now: float) -> Instructions:
        self._cluster.shards.adopted(event.shard, process_incarnation=event.process_incarnation)
        return self._models.settle()

    def _see_shard(self, event: ev.ShardSeen, now: float) -> Instructions:
        cluster = self._cluster
        if not cluster.shards.seen(event.shard, process_incarnation=event.process_incarnation):
            return []
        name = cluster.shards[event.shard].name
        if cluster.registry.model is None:
            return [ev.AdoptShard(shard=event.shard)]
        return self._ending.fail(
            f"{name} was restarted and has lost its variables (global_step {cluster.policy.step}); start the whole cluster again"
        )

    def _lose_shard(self, event: ev.ShardUnreachable, now: float) -> Instructions:
        self._cluster.shards.unreachable(event.shard, why=event.why, now=now)
        return []

    def _fail_shard(self, event: ev.ShardFailed, now: float) -> Instructions:
        return self._ending.fail(f"{self._cluster.shards[event.shard].name}: {printable(event.why)}")
