"""Contributions and waits for tokens: methods of the coordinator. Knows the cluster; no clock, thread or wire."""

from chief import assurance
from chief.cluster import Cluster
from chief.events import CommitPush, DequeueToken, Instruction, Reply
from chief.member import Member
from chief.policy import Verdict
from chief.shard_sequence import ShardSequence
from chief.token_replies import finished, grant, token, wait
from chief.waiting_calls import TokenCall, slice_s
from ps_protocol.chief import CommitResult, PushCommit, PushOutcome
from ps_protocol.errors import InvalidSpec, NotInitialized, StepAhead
from ps_protocol.shard import MAX_STEP


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
            known = assurance.is_told(cluster, earlier.push_id, earlier.commit)
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
            known = assurance.is_told(cluster, push_id, commit)
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
        known = assurance.is_told(cluster, waiting.push_id, waiting.commit)
        return [Reply(call=waiting.call, value=wait(cluster, known, waiting_for))]

    def cancel(self, call: int) -> None:
        """A blocked caller has gone away."""
        worker = self._cluster.waiting.worker_of(call)
        if worker is not None:
            self._cluster.waiting.take_token_call(worker)
            self._cluster.policy.forget_wish(worker)

    def _tell(self, reply: Reply, commit: PushCommit | None, result: CommitResult | None, now: float) -> list[Instruction]:
        if commit is not None and commit.is_applied and commit.ranges:
            return assurance.tell_of_data(self._cluster, reply, now=now)
        push_id = commit.push_id if commit is not None else None
        return assurance.tell(self._cluster, reply, push_id=push_id, commit=result, now=now)

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
