"""The chief's decisions: events in, instructions out. One table says which part of the `Cluster` handles what.

Each kind of event has one method. It checks first, and raises a typed error with nothing changed. Then it changes the state, and puts
instructions into the outbox. `now` is monotonic, in seconds. Not thread-safe. No clock, thread or wire.
"""

from collections.abc import Callable, Sequence
from typing import Any

from chief.core import messages as ev
from chief.core.report import cluster_status
from chief.core.state import Cluster
from chief.core.wording import listed, printable, workers_of
from chief.options import CoordinationConfig
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    ClusterStatus,
    CommitPushRequest,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    FinishTrainingRequest,
    GetModelRequest,
    HeartbeatRequest,
    LeaseRangesRequest,
    RegisterModelRequest,
    RegisterRequest,
    SaveCheckpointRequest,
)

Instructions = list[ev.Instruction]


class Coordinator:
    """The chief's core. `handle` is the only thing that changes its `cluster`, which the shell reads.

    `new_life` names, at random, a life of the cluster that begins: no shard has obeyed a chief before, or all begin anew since one is lost.
    `session_key`: random, and the shards are given it when they are adopted.
    """

    def __init__(
        self,
        *,
        config: CoordinationConfig,
        shard_addresses: Sequence[str],
        now: float,
        has_successors: bool = True,
        new_life: Callable[[], int],
        session_key: bytes,
    ) -> None:
        self.cluster = cluster = Cluster(
            config=config,
            shard_addresses=shard_addresses,
            now=now,
            has_successors=has_successors,
            new_life=new_life,
            session_key=session_key,
        )
        self._out = cluster.out
        # The handler of a request gets its call, too.
        self._requests: dict[type, Callable[[Any, Any, float], None]] = {
            RegisterRequest: cluster.joining.register,
            HeartbeatRequest: cluster.joining.heartbeat,
            DeregisterRequest: cluster.joining.deregister,
            RegisterModelRequest: self._register_model,
            CompleteInitializationRequest: cluster.model_calls.complete,
            GetModelRequest: cluster.model_calls.get,
            CommitPushRequest: lambda call, request, now: cluster.training.commit_push(call, request, now),
            DequeueTokenRequest: lambda call, request, now: cluster.training.dequeue_token(call, request, now),
            ChangeSettingsRequest: lambda call, request, now: cluster.training.change_settings(call, request, now),
            SaveCheckpointRequest: cluster.checkpoints.ask,
            LeaseRangesRequest: lambda call, request, now: cluster.training.lease_ranges(call, request, now),
            FinishTrainingRequest: cluster.ending.ask,
        }
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.AskedToEnd: cluster.ending.leave,
            ev.CallCancelled: lambda event, now: cluster.waiting.cancel(event.call),
            ev.TimerFired: lambda event, now: cluster.timers.fire(now),
            ev.Done: lambda event, now: self._when_done[type(event.work)](event, now),
            ev.Failed: lambda event, now: self._when_failed[type(event.work)](event, now),
            ev.ShardsFound: cluster.recovery.found,
            ev.SessionKeysFound: lambda event, now: cluster.members.learn_keys(event.keys),
            ev.ShardSeen: self._see_shard,
            ev.ShardUnreachable: lambda event, now: cluster.servers.unreachable(event.shard, why=event.why, now=now),
            ev.ShardFailed: self._fail_shard,
            ev.ShardRestoring: lambda event, now: cluster.servers.restoring(event.shard, event.num_bytes_read, event.num_bytes),
            ev.ReplicasChanged: self._replicas_changed,
            ev.ContributionsDiffer: self._contributions_differ,
            ev.ReplicaReady: lambda event, now: cluster.training.replica_ready(event),
        }
        # Each part compares the instruction with the one that it waits for, by identity.
        self._when_done: dict[type, Callable[[ev.Done, float], None]] = {
            ev.PrepareStep: lambda event, now: cluster.training.prepared(event, now),
            ev.ApplyStep: lambda event, now: cluster.training.applied(event, now),
            ev.KeepRecord: lambda event, now: cluster.training.kept(event, now),
            ev.AdoptShards: cluster.recovery.adopted,
            ev.FindCheckpoint: cluster.recovery.checkpoint_found,
            ev.RestoreShards: cluster.recovery.restored,
            ev.CopyStep: cluster.checkpoints.copied,
            ev.WriteStep: cluster.checkpoints.written,
            ev.CommitCheckpoint: cluster.checkpoints.committed,
            ev.BringReplicasBack: lambda event, now: cluster.training.replicas_back(event, now),
        }
        self._when_failed: dict[type, Callable[[ev.Failed, float], None]] = {
            ev.PrepareStep: lambda event, now: cluster.training.refused(event),
            ev.ApplyStep: lambda event, now: cluster.training.refused(event),
            ev.AdoptShards: cluster.recovery.adoption_failed,
            ev.KeepRecord: lambda event, now: cluster.training.kept(event, now),
            ev.FindCheckpoint: cluster.recovery.search_failed,
            ev.RestoreShards: cluster.recovery.restore_failed,
            ev.CopyStep: cluster.checkpoints.failed,
            ev.WriteStep: cluster.checkpoints.failed,
            ev.CommitCheckpoint: cluster.checkpoints.failed,
            ev.BringReplicasBack: lambda event, now: cluster.training.replicas_back(event, now),
        }

    def handle(self, event: ev.Event, now: float) -> Instructions:
        """Handles an event and returns the instructions that follow, in order. Raises PsError, and then nothing has changed."""
        try:
            if type(event) is ev.Asked:
                self._requests[type(event.request)](event.call, event.request, now)
            else:
                self._handlers[type(event)](event, now)
            return self._out.finish(now)
        except BaseException:
            self._out.discard()
            raise

    def next_deadline(self) -> float | None:
        """Returns the latest time for TimerFired; None: never. Call it again after each event."""
        return self.cluster.timers.next()

    def status(self, now: float, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster, without what only the chief's process knows."""
        return cluster_status(self.cluster, now=now, max_ledger_entries=max_ledger_entries)

    # -- events that concern several parts

    def _register_model(self, call: int, request: RegisterModelRequest, now: float) -> None:
        self.cluster.model_calls.register(call, request, now)
        self.cluster.recovery.presented(now)

    def _see_shard(self, event: ev.ShardSeen, now: float) -> None:
        cluster = self.cluster
        is_other = cluster.servers.seen(event.shard, process_incarnation=event.process_incarnation, report=event.report)
        if is_other or event.damage:
            cluster.recovery.lost(event.shard, now, damage="" if is_other else event.damage)
        elif event.is_leaving:
            cluster.checkpoints.server_leaves(event.shard)

    def _fail_shard(self, event: ev.ShardFailed, now: float) -> None:
        self.cluster.ending.fail(f"{self.cluster.servers[event.shard].name}: {printable(event.why)}")

    def _replicas_changed(self, event: ev.ReplicasChanged, now: float) -> None:
        """Notes other processes for a shard; participants get their addresses with their next token."""
        self.cluster.servers.held_by(event.shard, address=event.address, standby=event.standby, missing=printable(event.missing))
        if event.standby:
            self.cluster.training.replica_counts(event.shard)

    def _contributions_differ(self, event: ev.ContributionsDiffer, now: float) -> None:
        """Says which workers have given the two servers of a shard different gradients; they may be broken, or their network, or lie."""
        self._out.note(
            f"{workers_of(event.contributions)} had given the two servers of ps {event.shard} different gradients for step {event.step}"
            f" (contribution {listed([str(push_id) for push_id in event.contributions])}); the server that variables are read from is"
            " believed, and the other one is left out until it is brought back. If that happens again, replace the worker or its machine",
            is_warning=True,
        )
