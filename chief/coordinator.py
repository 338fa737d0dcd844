"""The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.

One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
be done. `now` is monotonic, in seconds. Not thread-safe.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chief import assurance
from chief import events as ev
from chief import recovery_events as rev
from chief.checkpoint_moves import CHECKPOINT_KEY, LAST_KEY
from chief.checkpointing import Checkpointing
from chief.cluster import new_cluster
from chief.cluster_status import cluster_status
from chief.coordination import CoordinationConfig
from chief.data_calls import RETURN_KEY, DataCalls
from chief.ending import FINISH_KEY, Ending
from chief.model_calls import ModelCalls
from chief.participants import Participants
from chief.policy import Policy
from chief.recovery import Recovery
from chief.recovery_moves import SEARCH_KEY
from chief.replicas import Replicas
from chief.settings import Settings
from chief.shard_sequence import ShardSequence
from chief.token_calls import TokenCalls
from chief.wording import printable
from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind

Instructions = list[ev.Instruction]


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
            ev.RegisterWorker: self._participants.register,
            ev.Heartbeat: self._participants.heartbeat,
            ev.DeregisterWorker: self._participants.deregister,
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
            rev.RecordKept: self._keep,
            rev.CheckpointFound: self._recovery.checkpoint_found,
            rev.ShardsRestored: self._recovery.restored,
            rev.RestoreFailed: self._recovery.restore_failed,
            rev.StepCopied: self._copied,
            rev.StepSaved: self._saved,
            rev.CheckpointCommitted: self._committed,
            rev.SaveFailed: self._save_failed,
            rev.SaveCheckpoint: self._checkpointing.wanted,
            rev.LeaseRanges: self._data.lease,
            rev.ReplicasChanged: self._replicas.changed,
            rev.ReplicaReady: self._replicas.ready,
            rev.ReplicasBack: self._replicas.back,
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

    def handle(self, event: ev.Event, now: float) -> Instructions:
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

    def _register_model(self, event: ev.RegisterModel, now: float) -> Instructions:
        return [*self._models.register(event, now), *self._recovery.presented(now)]

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
            elif what == "arrival":
                instructions += self._participants.expire(number, now)
            elif what == "told":
                instructions += assurance.expire(self._cluster, number, now)
            elif what == assurance.LINGER_KEY[0]:
                instructions += [] if self._cluster.policy.is_complete else assurance.keep_if_awaited(self._cluster)
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

    def _cancel_call(self, event: ev.CallCancelled, now: float) -> Instructions:
        self._calls.cancel(event.call)
        self._cluster.waiting.take_model_call(event.call)
        self._settings.cancel(event.call)
        self._checkpointing.cancel(event.call)
        self._cluster.waiting.take_data_call(event.call)
        self._cluster.waiting.take_arrival(event.call)
        assurance.cancel(self._cluster, event.call)
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
        return [*instructions, *self._data.settle(now)] if self._cluster.data.spec is not None else instructions

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

    def _keep(self, event: rev.RecordKept, now: float) -> Instructions:
        return [*assurance.kept(self._cluster, event), *self._recovery.kept(now)]

    # -- checkpoints

    def _copied(self, event: rev.StepCopied, now: float) -> Instructions:
        return self._sequence.proceed(now) if self._checkpointing.copied(event) else []

    def _saved(self, event: rev.StepSaved, now: float) -> Instructions:
        return self._checkpointing.saved(event)

    def _committed(self, event: rev.CheckpointCommitted, now: float) -> Instructions:
        instructions, is_told = self._checkpointing.committed(event, now)
        instructions += self._replicas.committed(event, now, is_told=is_told)
        instructions += self._recovery.secured(now)
        return [*instructions, *self._ending.end_if_deserted()]

    def _save_failed(self, event: rev.SaveFailed, now: float) -> Instructions:
        instructions, goes_on = self._checkpointing.failed(event, now)
        instructions += self._replicas.save_failed(event, now)
        return [*instructions, *(self._sequence.proceed(now) if goes_on else []), *self._ending.end_if_deserted()]
