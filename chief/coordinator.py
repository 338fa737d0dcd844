"""The chief's decisions: events in, instructions out. Knows who takes part, the open step and who waits; no clock, thread or wire.

One method a kind of event: it checks first, and raises a typed error with nothing changed; then it changes; then it returns what is to
be done. `now` is monotonic, in seconds. Not thread-safe.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chief import events as ev
from chief.cluster import new_cluster
from chief.coordination import CoordinationConfig
from chief.ending import FINISH_KEY, Ending
from chief.membership import Member, MemberState, gone_error, superseded_error
from chief.model_calls import ModelCalls
from chief.policy import Policy
from chief.waiting_calls import TokenCall, slice_s
from chief.wording import printable, seconds
from ps_protocol.chief import (
    ClusterState,
    ClusterStatus,
    CommitResult,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.errors import InvalidSpec, NotInitialized, PsError, ShuttingDown, StepAhead
from ps_protocol.shard import MAX_STEP

Instructions = list[ev.Instruction]


class Coordinator:
    """The chief's core. `handle` is the only thing that changes it."""

    def __init__(
        self, *, config: CoordinationConfig, shard_addresses: Sequence[str], now: float, epoch: int = 1, policy: Policy | None = None
    ) -> None:
        self._cluster = new_cluster(config, shard_addresses=shard_addresses, epoch=epoch, policy=policy, now=now)
        self._models = ModelCalls(self._cluster)
        self._ending = Ending(self._cluster, self._models)
        self._handlers: dict[type, Callable[[Any, float], Instructions]] = {
            ev.RegisterWorker: self._register_worker,
            ev.Heartbeat: self._heartbeat,
            ev.DeregisterWorker: self._deregister_worker,
            ev.RegisterModel: self._models.register,
            ev.CompleteInitialization: self._models.complete,
            ev.GetModel: self._models.get,
            ev.CommitPush: self._commit_push,
            ev.DequeueToken: self._dequeue_token,
            ev.FinishTraining: self._ending.finish_training,
            ev.CallCancelled: self._cancel_call,
            ev.TimerFired: self._fire_timer,
            ev.ShardAdopted: self._adopt_shard,
            ev.ShardSeen: self._see_shard,
            ev.ShardUnreachable: self._lose_shard,
            ev.ShardFailed: self._fail_shard,
            ev.StepApplied: self._apply_step,
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
        granted = self._cluster.policy.drop(gone.index)
        return [*refusals, *self._grant(granted), *self._models.drop(self._cluster.membership.participant(gone), error)]

    # -- steps

    def _commit_push(self, event: ev.CommitPush, now: float) -> Instructions:
        member = self._cluster.check_worker(event.participant, "contribute", now=now)
        result, instructions = self._commit(member, event.commit, now)
        self._cluster.renew(member, now=now)
        return [ev.Reply(call=event.call, value=result), *instructions]

    def _dequeue_token(self, event: ev.DequeueToken, now: float) -> Instructions:
        cluster = self._cluster
        if cluster.is_finished and not cluster.membership.look_up(event.participant).is_live:
            return [ev.Reply(call=event.call, value=self._ending.finished(None))]
        member = cluster.check_worker(event.participant, "take a token", now=now)
        _check_step(event.local_step, global_step=cluster.policy.step)
        commit, instructions = self._commit(member, event.commit, now) if event.commit is not None else (None, [])
        cluster.renew(member, now=now)
        earlier = cluster.waiting.take_token_call(member.index)
        if earlier is not None:
            instructions.append(ev.Reply(call=earlier.call, value=self._wait(earlier.commit, "another call of the same worker")))
        if cluster.is_finished:
            return [*instructions, ev.Reply(call=event.call, value=self._ending.finished(commit))]
        step = cluster.policy.ask(member.index, local_step=event.local_step, request_id=event.request_id)
        if step is not None:
            return [*instructions, ev.Reply(call=event.call, value=TokenReply(result=TokenResult.TOKEN, step=step, commit=commit))]
        if not slice_s(event.max_wait_s):
            cluster.policy.forget_wish(member.index)
            return [*instructions, ev.Reply(call=event.call, value=self._wait(commit, cluster.explain(now, asking=member.index)))]
        cluster.waiting.add_token_call(
            TokenCall(call=event.call, worker=member.index, commit=commit), until=now + slice_s(event.max_wait_s)
        )
        return instructions

    def _commit(self, member: Member, commit: PushCommit, now: float) -> tuple[CommitResult, Instructions]:
        cluster, push_id = self._cluster, commit.push_id
        policy = cluster.policy
        _check_step(commit.step, global_step=policy.step)
        if (push_id.worker, push_id.incarnation) != (member.index, member.incarnation) or push_id.sequence < 1:
            raise InvalidSpec(f"push id {push_id}: want worker {member.index}, incarnation {member.incarnation} and a sequence >= 1")
        if member.outcomes.is_repeated(push_id, step=commit.step):
            first = member.outcomes.first_outcome(push_id)
            return CommitResult(outcome=PushOutcome.DUPLICATE, global_step=policy.step, first_outcome=first), []
        if not cluster.registry.is_ready:
            raise NotInitialized(f"the variables have no values yet: {cluster.explain(now)}")
        outcome = self._judge(commit)
        member.outcomes.record(push_id, step=commit.step, outcome=outcome)
        member.count(outcome)
        cluster.ledger.count(outcome, step=commit.step)
        result = CommitResult(outcome=outcome, global_step=policy.step)
        if outcome is not PushOutcome.ACCEPTED:
            return result, []
        if not policy.is_complete:
            return result, self._grant(policy.after_commit(member.index))
        contributors = policy.contributors
        cluster.ledger.complete_step(contributors, last_worker=member.index, now=now)
        return result, [ev.ApplyStep(epoch=cluster.epoch, step=policy.step, contributors=contributors)]

    def _judge(self, commit: PushCommit) -> PushOutcome:
        policy = self._cluster.policy
        if not commit.staged:
            return PushOutcome.STALE
        if self._cluster.is_finished:
            return PushOutcome.STALE if commit.step < policy.step else PushOutcome.LATE
        return policy.commit(commit.push_id, step=commit.step)

    def _apply_step(self, event: ev.StepApplied, now: float) -> Instructions:
        cluster = self._cluster
        if event.step != cluster.policy.step or not cluster.policy.is_complete or cluster.failure:
            return []  # reported again, or too late to matter
        cluster.ledger.close_step(now=now)
        granted = cluster.policy.advance()
        if cluster.pending_finish:
            return self._ending.finish(cluster.pending_finish)
        if cluster.config.max_steps is not None and cluster.policy.step >= cluster.config.max_steps and not cluster.is_finished:
            return self._ending.finish(f"max_steps {cluster.config.max_steps} reached")
        return self._grant(granted)

    def _grant(self, workers: Iterable[int]) -> Instructions:
        step, take = self._cluster.policy.step, self._cluster.waiting.take_token_call
        return [
            ev.Reply(call=waiting.call, value=TokenReply(result=TokenResult.TOKEN, step=step, commit=waiting.commit))
            for worker in workers
            if (waiting := take(worker)) is not None
        ]

    def _wait(self, commit: CommitResult | None, waiting_for: str) -> TokenReply:
        return TokenReply(result=TokenResult.WAIT, step=self._cluster.policy.step, commit=commit, waiting_for=waiting_for)

    # -- time and callers that go away

    def _fire_timer(self, event: ev.TimerFired, now: float) -> Instructions:
        instructions: Instructions = []
        for what, number in self._cluster.deadlines.pop_due(now):
            if what == "token":
                instructions += self._expire_token_call(number, now)
            elif what == "model":
                instructions += self._models.expire(number, now)
            elif what == FINISH_KEY[0]:
                instructions += self._ending.finish(self._cluster.pending_finish)
            else:
                member = self._cluster.membership.find(ParticipantKind[what], number)
                instructions += self._lapse(member, now) if member is not None and member.is_live else []
        return instructions

    def _expire_token_call(self, worker: int, now: float) -> Instructions:
        if worker not in self._cluster.waiting:
            return []
        # Explained while it still waits: it may be the very one that should have contributed first.
        waiting_for = self._cluster.explain_to_many(now)
        waiting = self._cluster.waiting.take_token_call(worker)
        self._cluster.policy.forget_wish(worker)
        return [ev.Reply(call=waiting.call, value=self._wait(waiting.commit, waiting_for))] if waiting is not None else []

    def _cancel_call(self, event: ev.CallCancelled, now: float) -> Instructions:
        worker = self._cluster.waiting.worker_of(event.call)
        if worker is not None:
            self._cluster.waiting.take_token_call(worker)
            self._cluster.policy.forget_wish(worker)
        self._cluster.waiting.take_model_call(event.call)
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


def _check_step(step: int, *, global_step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        raise InvalidSpec(f"local_step: got {step}, want 0 to 2^62")
    if step > global_step:
        raise StepAhead(f"local_step {step} is ahead of global_step {global_step}; read again")
