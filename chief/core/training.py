"""Training: contributions, tokens, the step at the shards, ranges of the data, replicas between two steps. Knows no thread or wire."""

from chief.core import replies
from chief.core.checkpoints import Checkpointing
from chief.core.cluster import Cluster, UnderWay
from chief.core.ending import Ending, ModelCalls
from chief.core.members import Member
from chief.core.messages import (
    ApplyStep,
    BringReplicasBack,
    CheckpointCommitted,
    CommitPush,
    DequeueToken,
    Instruction,
    LeaseRanges,
    Note,
    PrepareStep,
    Refuse,
    ReplicaReady,
    ReplicasBack,
    ReplicasChanged,
    Reply,
    SaveFailed,
    ShardsConfigured,
    StepApplied,
    StepPrepared,
)
from chief.core.replies import finished, grant, token, wait
from chief.core.settings import Settings
from chief.core.waiting import DataCall, Key, TokenCall, slice_s
from chief.core.wording import listed, printable
from chief.policies.base import Grant, Verdict
from ps_protocol.errors import InvalidSpec, NotInitialized, PsError, StepAhead
from ps_protocol.model.spec import scales
from ps_protocol.roles.chief import CommitResult, LeaseReply, LeaseResult, Participant, PushCommit, PushOutcome
from ps_protocol.roles.shard import MAX_STEP, PushId

# What is done to the shards, one thing after another: settings, then steps. Methods of the coordinator; knows no clock, thread or wire.
#
# At most one thing is under way at all shards. When it is done everywhere, the next is begun.


class ShardSequence:
    """Begins what is due as soon as nothing else is under way."""

    def __init__(self, cluster: Cluster, settings: Settings, models: ModelCalls, ending: Ending, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._checkpointing = checkpointing
        self._settings = settings
        self._models = models
        self._ending = ending

    def proceed(self, now: float) -> list[Instruction]:
        """Begins the next thing, if there is one and nothing is under way."""
        cluster = self._cluster
        if cluster.failure or cluster.recovering:
            return []
        instructions = self._settings.begin(now)
        if cluster.is_save_due and cluster.under_way is None:
            instructions += self._checkpointing.begin(now)
        if cluster.under_way is None and cluster.registry.is_ready and cluster.policy.is_complete:
            instructions.append(self._begin_step(now))
        return instructions

    def configured(self, event: ShardsConfigured, now: float) -> list[Instruction]:
        """All shards work by new settings: what waited for that goes on."""
        cluster = self._cluster
        if cluster.under_way is not UnderWay.CONFIGURE or event.version != self._settings.version or not self._is_current(event.epoch):
            return []  # reported again, or too late to matter
        cluster.under_way = None
        done = self._settings.configured(now) if cluster.registry.is_ready else self._models.open(now)
        return [*done, *self.proceed(now)]

    def prepared(self, event: StepPrepared, now: float) -> list[Instruction]:
        """The size of the mean is known: it is applied, scaled down if it is too large."""
        cluster, registry = self._cluster, self._cluster.registry
        if cluster.under_way is not UnderWay.PREPARE or event.step != cluster.policy.step or not self._is_current(event.epoch):
            return []
        for index, (sums, layout) in enumerate(zip(event.sums, registry.layouts, strict=True)):
            num_slices = len(layout.slices) + len(layout.tables)
            if len(sums) != num_slices:
                return self._ending.fail(f"{cluster.shards[index].name}: reported {len(sums)} sums of squares of {num_slices} slices")
        assert registry.model is not None
        return [self._apply(scales(registry.model.clip, layouts=registry.layouts, sums=event.sums))]

    def applied(self, event: StepApplied, now: float) -> list[Instruction]:
        """All shards have applied the step: the next one is open."""
        cluster = self._cluster
        if cluster.under_way is not UnderWay.APPLY or event.step != cluster.policy.step or not self._is_current(event.epoch):
            return []
        is_held = (self._checkpointing.holds_steps or cluster.holds_for_replicas) and not cluster.is_finished
        is_of_interest = cluster.data.has_counted or is_held or cluster.told.waiting or cluster.told.sure
        contributors = cluster.policy.contributors if is_of_interest else ()
        if cluster.data.has_counted:
            cluster.told.unkept += cluster.data.applied(contributors)
        instructions = replies.applied(cluster, contributors, is_held=is_held)
        if is_held:
            return [*instructions, *self._checkpointing.hold(contributors, now)]
        return [*instructions, *self.tell(now)]

    def tell(self, now: float) -> list[Instruction]:
        """The step that all shards have applied is made known: the next one is open."""
        cluster = self._cluster
        cluster.under_way = None
        cluster.ledger.close_step(now=now)
        granted = cluster.policy.advance()
        if cluster.is_quorum_lowered:
            cluster.requota()
        self._checkpointing.stepped()
        if cluster.pending_finish and not cluster.policy.is_complete:
            return self._ending.finish(cluster.pending_finish, now)
        return self._end_or(granted, now)

    def counted(self, push_id: PushId, now: float) -> list[Instruction]:
        """A contribution that the shards had applied on arrival has been counted as a step."""
        ledger = self._cluster.ledger
        ledger.complete_step((push_id,), last_worker=push_id.worker, now=now)
        ledger.close_step(now=now)
        self._cluster.told.unkept += self._cluster.data.applied((push_id,))
        self._checkpointing.stepped()
        return self._end_or([], now)

    def _is_current(self, epoch: int | None) -> bool:
        return epoch in (None, self._cluster.epoch) and not self._cluster.failure

    def _end_or(self, granted: list[Grant], now: float) -> list[Instruction]:
        cluster = self._cluster
        max_steps = cluster.config.max_steps
        if max_steps is not None and cluster.policy.step >= max_steps and not cluster.is_finished:
            return self._ending.finish(f"max_steps {max_steps} reached", now)
        return [*grant(cluster, granted, now), *self.proceed(now)]

    def _begin_step(self, now: float) -> Instruction:
        cluster, policy, model = self._cluster, self._cluster.policy, self._cluster.registry.model
        cluster.ledger.complete_step(policy.contributors, last_worker=policy.last_worker, now=now)
        if model is None or not model.clip.needs_norms:
            return self._apply(())
        cluster.under_way = UnderWay.PREPARE
        return PrepareStep(epoch=cluster.epoch, step=policy.step, contributors=policy.contributors, weights=policy.weights)

    def _apply(self, factors: tuple[tuple[float, ...], ...]) -> ApplyStep:
        cluster, policy = self._cluster, self._cluster.policy
        cluster.under_way = UnderWay.APPLY
        return ApplyStep(
            epoch=cluster.epoch,
            step=policy.step,
            contributors=policy.contributors,
            weights=policy.weights,
            scales=factors,
            discards=cluster.take_discards(),
            ranges=cluster.ranges_of_step(),
        )


# Contributions and waits for tokens: methods of the coordinator. Knows the cluster; no clock, thread or wire.


class TokenCalls:
    """Answers CommitPush and DequeueToken, now or when there is a token."""

    def __init__(self, cluster: Cluster, sequence: ShardSequence) -> None:
        self._cluster = cluster
        self._sequence = sequence

    def commit_push(self, event: CommitPush, now: float) -> list[Instruction]:
        """Counts a contribution."""
        member = self._cluster.check_worker(event.participant, "contribute", now=now)
        self._cluster.refuse_if_recovering(now)
        result, instructions = self._commit(member, event.commit, now)
        self._cluster.renew(member, now=now)
        return [*self._tell(Reply(call=event.call, value=result), event.commit, result, now), *instructions]

    def dequeue_token(self, event: DequeueToken, now: float) -> list[Instruction]:
        """Counts what rides along, and gives a token, or has the caller wait for one."""
        cluster = self._cluster
        if cluster.is_finished and not cluster.membership.look_up(event.participant).is_live:
            return [Reply(call=event.call, value=finished(cluster, None))]
        member = cluster.check_worker(event.participant, "take a token", now=now)
        cluster.refuse_if_recovering(now)
        self._check_step(event.local_step, now)
        commit, instructions = self._commit(member, event.commit, now) if event.commit is not None else (None, [])
        cluster.renew(member, now=now)
        earlier = cluster.waiting.take_token_call(member.index)
        if earlier is not None:
            known = replies.is_told(cluster, earlier.push_id, earlier.commit)
            instructions.append(Reply(call=earlier.call, value=wait(cluster, known, "another call of the same worker")))
        if cluster.is_finished:
            return [*instructions, Reply(call=event.call, value=finished(cluster, commit))]
        step = cluster.ask(member.index, local_step=event.local_step, request_id=event.request_id)
        if step is not None:
            reply = Reply(call=event.call, value=token(cluster, step, commit))
            return [*instructions, *self._tell(reply, event.commit, commit, now)]
        push_id = event.commit.push_id if event.commit is not None else None
        if not slice_s(event.max_wait_s):
            cluster.policy.forget_wish(member.index)
            known = replies.is_told(cluster, push_id, commit)
            return [*instructions, Reply(call=event.call, value=wait(cluster, known, cluster.explain(now, asking=member.index)))]
        call = TokenCall(
            call=event.call,
            worker=member.index,
            commit=commit,
            local_step=event.local_step,
            request_id=event.request_id,
            push_id=push_id,
        )
        cluster.waiting.add_token_call(call, until=now + slice_s(event.max_wait_s))
        return instructions

    def expire(self, worker: int, now: float) -> list[Instruction]:
        """A call has blocked as long as it may: its caller is told what it waits for."""
        cluster = self._cluster
        if worker not in cluster.waiting:
            return []
        # Explained while it still waits: it may be the very one that should have contributed first.
        waiting_for = cluster.explain_to_many(now)
        waiting = cluster.waiting.take_token_call(worker)
        cluster.policy.forget_wish(worker)
        if waiting is None:
            return []
        known = replies.is_told(cluster, waiting.push_id, waiting.commit)
        return [Reply(call=waiting.call, value=wait(cluster, known, waiting_for))]

    def cancel(self, call: int) -> None:
        """A blocked caller has gone away."""
        worker = self._cluster.waiting.worker_of(call)
        if worker is not None:
            self._cluster.waiting.take_token_call(worker)
            self._cluster.policy.forget_wish(worker)

    def _tell(self, reply: Reply, commit: PushCommit | None, result: CommitResult | None, now: float) -> list[Instruction]:
        if commit is not None and commit.is_applied and commit.ranges:
            return replies.tell_of_data(self._cluster, reply, now=now)
        push_id = commit.push_id if commit is not None else None
        return replies.tell(self._cluster, reply, push_id=push_id, commit=result, now=now)

    def _commit(self, member: Member, commit: PushCommit, now: float) -> tuple[CommitResult, list[Instruction]]:
        cluster, push_id = self._cluster, commit.push_id
        policy = cluster.policy
        self._check_step(commit.step, now)
        if (push_id.worker, push_id.incarnation) != (member.index, member.incarnation) or push_id.sequence < 1:
            raise InvalidSpec(f"push id {push_id}: want worker {member.index}, incarnation {member.incarnation} and a sequence >= 1")
        if member.outcomes.is_repeated(push_id, step=commit.step):
            first = member.outcomes.first_result(push_id)
            return _repeated(first, global_step=policy.step), []
        if not cluster.registry.is_ready:
            raise NotInitialized(f"the variables have no values yet: {cluster.explain(now)}")
        open_step = policy.step
        is_complete, has_ranges = policy.is_complete, cluster.data.may_use(member.index, member.incarnation, commit.ranges)
        # Samples that others have, or had, would count twice: it comes from the time of an earlier chief.
        verdict = self._judge(commit) if has_ranges or commit.is_applied else Verdict(outcome=PushOutcome.LATE)
        result = CommitResult(
            outcome=verdict.outcome,
            global_step=open_step,
            applied_step=verdict.applied_step,
            staleness=verdict.staleness,
            weight=verdict.weight,
        )
        member.outcomes.record(push_id, step=commit.step, result=result)
        member.count(verdict.outcome)
        cluster.ledger.count(verdict.outcome, step=commit.step, staleness=verdict.staleness)
        if verdict.outcome is not PushOutcome.ACCEPTED and policy.spec.accepts_stale:
            cluster.discards.add(push_id)
        if verdict.outcome is PushOutcome.ACCEPTED and commit.is_applied == policy.spec.applies_on_arrival:
            cluster.turned_away.discard(member.index)
        elif policy.spec.accepts_stale or commit.is_applied or ((not commit.staged or not has_ranges) and not is_complete):
            cluster.turned_away.add(member.index)  # it has met a change of policy, or of the chief
        if commit.ranges or cluster.data.starved:
            self._count_ranges(member, commit, verdict)
        granted = grant(cluster, policy.after_commit(member.index), now)
        if policy.step > open_step:
            return result, [*granted, *self._sequence.counted(push_id, now)]
        return result, [*granted, *self._sequence.proceed(now)]

    def _count_ranges(self, member: Member, commit: PushCommit, verdict: Verdict) -> None:
        """The training data that a contribution was made from is done once that is applied, or free again."""
        leases = self._cluster.data
        if verdict.outcome is PushOutcome.ACCEPTED:
            leases.count(commit.push_id, commit.ranges)
            if commit.is_applied:
                self._cluster.told.unkept += leases.applied((commit.push_id,))
        else:
            leases.give_back(member.index, member.incarnation, commit.ranges)

    def _judge(self, commit: PushCommit) -> Verdict:
        cluster, policy = self._cluster, self._cluster.policy
        behind = max(0, policy.step - commit.step)
        if commit.is_applied:
            if policy.spec.applies_on_arrival and not cluster.is_finished:
                return policy.commit(commit.push_id, step=commit.step)
            # Applied by servers that had not heard yet of the end of that policy, or of training.
            return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=max(0, policy.step - 1), staleness=max(0, behind - 1))
        if not commit.staged or (policy.spec.accepts_stale and commit.step < cluster.oldest_kept):
            return Verdict(outcome=PushOutcome.STALE, staleness=behind)
        if policy.spec.applies_on_arrival:
            return Verdict(outcome=PushOutcome.LATE, staleness=behind)  # staged before the servers heard of this policy
        if cluster.is_finished:
            is_stale = commit.step < policy.step and not policy.spec.accepts_stale
            return Verdict(outcome=PushOutcome.STALE if is_stale else PushOutcome.LATE, staleness=behind)
        return policy.commit(commit.push_id, step=commit.step)

    def _check_step(self, step: int, now: float) -> None:
        if not 0 <= step <= MAX_STEP:
            raise InvalidSpec(f"local_step: got {step}, want 0 to 2^62")
        policy = self._cluster.policy
        # Where contributions are applied one by one, workers read what the chief has not heard of yet.
        if step > policy.step and not policy.spec.accepts_stale:
            if not self._cluster.registry.is_ready:  # another chief may have trained further than this one knows yet
                raise NotInitialized(f"the model is not known here yet: {self._cluster.explain(now)}")
            raise StepAhead(f"local_step {step} is ahead of global_step {policy.step}; read again")


def _repeated(first: CommitResult | None, *, global_step: int) -> CommitResult:
    if first is None:
        return CommitResult(outcome=PushOutcome.DUPLICATE, global_step=global_step)
    return CommitResult(
        outcome=PushOutcome.DUPLICATE,
        global_step=global_step,
        first_outcome=first.outcome,
        applied_step=first.applied_step,
        staleness=first.staleness,
        weight=first.weight,
    )


# Shards that have standbys: who holds them, and when a lost one is brought back. Methods of the coordinator; knows no clock or wire.
#
# It is brought back between two steps, before anybody hears of the second: then nobody has given anything yet that it would lack. All
# shards save the step, it takes over what the other replica of its shard has saved, and then the step is told, and who is there.


class Replicas:
    """Decides when replicas that were lost come back."""

    def __init__(self, cluster: Cluster, settings: Settings, checkpointing: Checkpointing, sequence: ShardSequence) -> None:
        self._cluster = cluster
        self._settings = settings
        self._checkpointing = checkpointing
        self._sequence = sequence
        self._returning: tuple[int, frozenset[int]] | None = None  # the epoch, and the shards whose replicas are being restored

    def changed(self, event: ReplicasChanged, now: float) -> list[Instruction]:
        """Other processes than before hold a shard; participants hear of it with their next token."""
        cluster = self._cluster
        cluster.shards.held_by(event.shard, address=event.address, standby=event.standby, missing=printable(event.missing))
        if event.standby:
            cluster.replicas_due.discard(event.shard)
        return []

    def ready(self, event: ReplicaReady, now: float) -> list[Instruction]:
        """A lost replica could be brought back: it is after the next step, if that can be."""
        cluster, record = self._cluster, self._cluster.shards[event.shard]
        if record.standby or cluster.failure or cluster.is_finished or cluster.recovering or event.shard in cluster.replicas_due:
            return []
        if cluster.config.checkpoints is None:
            record.standby_missing = (
                "it is there again, and empty; without --checkpoint-dir it stays out until the cluster is started again"
            )
        elif cluster.policy.spec.accepts_stale or cluster.policy.spec.applies_on_arrival:
            words = cluster.policy.spec.text
            record.standby_missing = f"it is there again, and empty; with the policy {words} it cannot be brought back between two steps"
        else:
            record.standby_missing = "it is there again, and is brought back after the next step"
            cluster.replicas_due.add(event.shard)
        return []

    def committed(self, event: CheckpointCommitted, now: float, *, is_told: bool) -> list[Instruction]:
        """A checkpoint is whole; `is_told`: the step that was held back for it may be told. Replicas come back from it first."""
        cluster = self._cluster
        if not is_told:
            return []
        if not cluster.holds_for_replicas:
            return self._sequence.tell(now)
        shards = tuple(sorted(cluster.replicas_due))
        cluster.under_way = UnderWay.SAVE
        cluster.saving = f"{self._named(shards)}: a standby is being brought back to step {cluster.policy.step + 1}"
        self._returning = cluster.epoch, frozenset(shards)
        step = cluster.policy.step + 1
        specs = cluster.shard_specs(step)
        order = BringReplicasBack(
            epoch=cluster.epoch,
            tag=event.tag,
            shards=shards,
            specs=tuple(specs[shard] for shard in shards),
            settings=self._settings.for_shards(step=step),
        )
        return [order]

    def save_failed(self, event: SaveFailed, now: float) -> list[Instruction]:
        """The step could not be saved: where it need not be, training goes on, and the replicas come back another time."""
        cluster = self._cluster
        if not (cluster.replicas_due and self._checkpointing.is_holding and not self._checkpointing.holds_steps):
            return []
        for shard in cluster.replicas_due:
            cluster.shards[
                shard
            ].standby_missing = f"the step that it is to be brought back from could not be saved: {printable(event.why)}"
        cluster.replicas_due.clear()
        self._checkpointing.let_go(now)
        return self._sequence.tell(now)

    def back(self, event: ReplicasBack, now: float) -> list[Instruction]:
        """Replicas have been brought back, or could not be: the step is told."""
        cluster, returning = self._cluster, self._returning
        if returning is None or event.epoch != returning[0] or event.epoch != cluster.epoch or cluster.failure:
            return []
        self._returning = None
        instructions: list[Instruction] = []
        for shard, why in event.failures:
            cluster.shards[shard].standby_missing = f"it could not be brought back: {printable(why)}"
            instructions.append(Note(text=f"the standby of {cluster.shards[shard].name} could not be brought back: {why}", is_warning=True))
        cluster.replicas_due -= returning[1]
        cluster.saving = ""
        return [*instructions, replies.keep(cluster), *self._sequence.tell(now)]

    def _named(self, shards: tuple[int, ...]) -> str:
        return listed([self._cluster.shards[shard].name for shard in shards])


# Workers that want ranges of the training data: methods of the coordinator. Knows the cluster; no clock, thread or wire.


# Workers of an earlier chief are waited for until then.
RETURN_KEY: Key = ("return", 0)


class DataCalls:
    """Answers LeaseRanges, now or when there are ranges."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def lease(self, event: LeaseRanges, now: float) -> list[Instruction]:
        """Leases ranges to a worker, or has it wait for what others hold. Raises InvalidSpec, DataMismatch and what every call may."""
        cluster = self._cluster
        member = cluster.check_worker(event.participant, "lease training data", now=now)
        if event.max_ranges < 1:
            raise InvalidSpec(f"max_ranges: got {event.max_ranges}, want >= 1")
        cluster.refuse_if_recovering(now)
        cluster.data.check(event.data)
        cluster.renew(member, now=now)
        if cluster.is_finished:
            return [_reply(event.call, LeaseResult.EXHAUSTED)]
        has_returned = cluster.data.give_back(member.index, member.incarnation, event.returned)
        waiting = DataCall(
            call=event.call,
            participant=cluster.membership.participant(member),  # the caller may know of no life
            data=event.data,
            max_ranges=event.max_ranges,
            request_id=event.request_id,
        )
        instructions = self._forget_earlier(member)
        reply = self._try(waiting)
        if has_returned:
            instructions += self.settle(now)
        if reply is not None:
            return [*self._tell(reply, now), *instructions]
        cluster.requota()
        if slice_s(event.max_wait_s):
            cluster.waiting.add_data_call(waiting, until=now + slice_s(event.max_wait_s))
            return instructions
        return [_reply(event.call, LeaseResult.WAIT, self._explain()), *instructions]

    def settle(self, now: float) -> list[Instruction]:
        """Answers those who wait and need not any longer; to be called when ranges have come back or are done."""
        instructions: list[Instruction] = []
        for waiting in self._cluster.waiting.data_calls():
            reply = self._try(waiting)
            if reply is not None:
                self._cluster.waiting.take_data_call(waiting.call)
                instructions += self._tell(reply, now)
        return instructions

    def refuse(self, gone: Participant, error: PsError) -> list[Instruction]:
        """A worker is gone: what would come back for others must not be leased to it, which nobody would take from it again."""
        calls = [one.call for one in self._cluster.waiting.data_calls() if one.participant == gone]
        for call in calls:
            self._cluster.waiting.take_data_call(call)
        return [Refuse(call=call, error=error) for call in calls]

    def returned(self, worker: int, now: float) -> list[Instruction]:
        """A worker of an earlier chief has come back, and has said what it has; once all have, the others are served."""
        awaited = self._cluster.awaited
        if worker not in awaited:
            return []
        awaited.discard(worker)
        return [] if awaited else self.stop_waiting(now)

    def stop_waiting(self, now: float) -> list[Instruction]:
        """Whoever has not come back by now may find what it has with others."""
        self._cluster.awaited.clear()
        self._cluster.deadlines.clear(RETURN_KEY)
        return self.settle(now)

    def expire(self, call: int) -> list[Instruction]:
        """A call has blocked as long as it may: its caller is told what it waits for."""
        waiting = self._cluster.waiting.take_data_call(call)
        return [_reply(call, LeaseResult.WAIT, self._explain())] if waiting is not None else []

    def _forget_earlier(self, member: Member) -> list[Instruction]:
        """A worker waits in one call at a time: an earlier one was lost on its way, or is given up."""
        cluster, who = self._cluster, (member.index, member.incarnation)
        earlier = [w for w in cluster.waiting.data_calls() if (w.participant.index, w.participant.incarnation) == who]
        for waiting in earlier:
            cluster.waiting.take_data_call(waiting.call)
        return [_reply(waiting.call, LeaseResult.WAIT, "another call of the same worker") for waiting in earlier]

    def _explain(self) -> str:
        awaited = sorted(self._cluster.awaited)
        if not awaited:
            return self._cluster.data.explain()
        names = listed([f"worker {worker}" for worker in awaited], limit=5)
        return f"another chief has leased training data to {names}: whether they still have it is known once they come back"

    def _tell(self, reply: Reply, now: float) -> list[Instruction]:
        """Another chief must know of the data before anything is made from it."""
        return [reply] if self._cluster.told.is_data_kept else replies.tell_of_data(self._cluster, reply, now=now)

    def _try(self, waiting: DataCall) -> Reply | None:
        cluster, who = self._cluster, waiting.participant
        if cluster.awaited:
            return None
        granted = cluster.data.lease(who.index, who.incarnation, waiting.data, max_ranges=waiting.max_ranges, request_id=waiting.request_id)
        if granted:
            cluster.requota()
            return Reply(call=waiting.call, value=LeaseReply(result=LeaseResult.GRANTED, ranges=granted))
        return _reply(waiting.call, LeaseResult.EXHAUSTED) if cluster.data.is_exhausted else None


def _reply(call: int, result: LeaseResult, waiting_for: str = "") -> Reply:
    return Reply(call=call, value=LeaseReply(result=result, waiting_for=waiting_for))
