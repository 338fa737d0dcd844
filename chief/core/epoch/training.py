"""Training in one epoch: contributions and tokens, ranges of the data, settings, and the tasks of the shards, one at a time.

It is made from a `Start`, and dropped when the cluster goes back to a checkpoint or begins anew. Knows no clock, thread or wire. All
shards have at most one task; when all have done it, the next one begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from chief.core.cluster.checkpoints import HeldStep
from chief.core.cluster.members import Member, merged_pushes, quorum
from chief.core.cluster.settings import Change
from chief.core.epoch.answers import Answers
from chief.core.messages import (
    ApplyStep,
    BringReplicasBack,
    Done,
    Failed,
    KeepRecord,
    Lacking,
    NoteKind,
    PrepareStep,
    ReplicaReady,
    ReplyValue,
)
from chief.core.waiting import Blocked, slice_s
from chief.core.wording import listed, printable
from chief.policies.base import Grant, Policy, Verdict
from chief.policies.factory import new_policy
from ps_protocol.errors import ContributionMissing, InvalidSpec, NotInitialized, PsError, StepAhead, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import scales, shares
from ps_protocol.roles.checkpoint import Checkpoint, ChosenPush
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    CommitPushRequest,
    CommitResult,
    DequeueTokenRequest,
    End,
    LeaseRangesRequest,
    LeaseReply,
    LeaseResult,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    TokenReply,
    TokenResult,
    check_weight,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, PushId
from ps_protocol.roles.shard import MAX_STEP, ApplyRequest, ShardSpec

if TYPE_CHECKING:
    from chief.core.state import Cluster

# The number of applied contributions to look through: each worker's latest are among them.
_MAX_PUSHES = 20_000
_MAX_DISCARDS = 10_000


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of training in an epoch, or its continuation: the step, and the state.

    Not `is_start`: workers are at work already. `counted`: contributions that are promised, and not applied. `tag_suffix`: tells its
    checkpoints from another chief's. `oldest_kept`: contributions of steps before that may have been dropped by shards. `awaited`:
    workers to which an earlier chief may have leased data, for whom the others wait until `wait_until`. `done`: ranges of the data that
    are done and that the record which shards keep may lack. `replicas_due`: shards whose lost replica is to be brought back.
    """

    step: int
    is_start: bool = True
    counted: tuple[ChosenPush, ...] = ()
    tag_suffix: str = ""
    oldest_kept: int = 0
    awaited: frozenset[int] = frozenset()
    wait_until: float = 0.0
    done: tuple[int, ...] = ()
    is_data_kept: bool = False
    replicas_due: frozenset[int] = frozenset()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _TokenAsk:
    """A worker's wait for a token; `commit` is the outcome of `push_id`, which was committed in the same call."""

    commit: CommitResult | None
    local_step: int
    request_id: int
    push_id: PushId | None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that is being applied, as all shards are asked for it. `is_redo`: some shards have applied it for an earlier chief.

    `norms`: what the mean of a variable is scaled to; see `shares` of `model.spec`.
    """

    request: ApplyRequest
    is_redo: bool = False
    norms: Mapping[str, float] = field(default_factory=dict)


class Discards:
    """Contributions that shards hold and that will never be applied: single ones, and those of incarnations that are gone.

    Only shards that keep contributions of earlier steps need to know them. At most _MAX_DISCARDS of each are remembered: more can only
    come from a caller that makes them up, or while nothing is applied for long.
    """

    def __init__(self) -> None:
        self._pushes: set[PushId] = set()
        self._gone: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._pushes or self._gone)

    def add(self, push_id: PushId) -> None:
        """Notes a contribution that will not be applied."""
        if len(self._pushes) < _MAX_DISCARDS:
            self._pushes.add(push_id)

    def add_incarnation(self, worker: int, incarnation: int) -> None:
        """Notes an incarnation that is gone."""
        if len(self._gone) < _MAX_DISCARDS:
            self._gone.add((worker, incarnation))

    def clear(self) -> None:
        """Forgets all."""
        self._pushes.clear()
        self._gone.clear()

    def take(self, counted: Iterable[ChosenPush]) -> tuple[PushId, ...]:
        """Takes out what shards may drop now, sorted; an incarnation, as sequence 0, once none of its contributions is `counted`."""
        busy = {(entry.push_id.worker, entry.push_id.incarnation) for entry in counted}
        ready = self._gone - busy
        whole = [PushId(worker=worker, incarnation=incarnation, sequence=0) for worker, incarnation in ready]
        single = [push_id for push_id in self._pushes if (push_id.worker, push_id.incarnation) not in ready]
        self._gone -= ready
        self._pushes.clear()
        return tuple(sorted([*whole, *single]))


class Training:
    """The training of one epoch, from a `Start` on."""

    def __init__(self, cluster: "Cluster", start: Start) -> None:
        self._cluster, self._ending, self._recovery = cluster, cluster.ending, cluster.recovery
        self._out, self._members, self._model, self._data = cluster.out, cluster.members, cluster.model, cluster.data
        self._ledger, self._settings, self._checkpoints = cluster.ledger, cluster.settings, cluster.checkpoints
        self._servers, self._attachments = cluster.servers, cluster.attachments
        self.fence = cluster.members.fence
        # Tells its checkpoints from those of the chief before.
        self.tag_suffix = start.tag_suffix
        # The task of all shards, unless they copy a step to save it; and the step that it is about, if it is.
        self._work: PrepareStep | ApplyStep | KeepRecord | BringReplicasBack | None = None
        self._step: _Step | None = None
        self._discards = Discards()
        # Shards may have dropped contributions to steps before this one, while their settings kept none of earlier steps.
        self._oldest_kept = start.oldest_kept
        # Workers whose latest contribution met a change of policy and counts for nothing: they may contribute to the open step.
        self._turned_away: set[int] = set()
        # Whether a step needs fewer contributions for now than it should.
        self.is_quorum_lowered = False
        # Shards with a lost replica that is there again, to be brought back between two steps.
        self._replicas_due = set(start.replicas_due)
        self._awaited = set(start.awaited)
        self._return_timer = cluster.timers.timer(self._stop_waiting_for_data)
        if self._awaited:
            self._return_timer.set(start.wait_until)
        self._tokens = cluster.waiting.line(self._token_expired)
        self._tokens.on_cancel = self._token_cancelled
        self._ranges = cluster.waiting.line(self._ranges_expired)
        self._grace_timer = cluster.timers.timer(self._grace_is_over)
        # The policy that holds, to be read.
        self.policy = self._new_policy(step=start.step, is_start=start.is_start, counted=start.counted)
        self.answers = Answers(cluster, start)
        self._lower_quorum()

    # -- queries

    @property
    def step(self) -> int:
        """The open step."""
        return self.policy.step

    @property
    def oldest_kept(self) -> int:
        """The oldest step whose contributions all shards still have, if they were given them."""
        return self._oldest_kept if self.policy.spec.accepts_stale else self.step

    @property
    def num_bytes(self) -> int:
        """The size of the variables; 0 before there is a model."""
        model = self._model.model
        return sum(variable.nbytes for variable in model.variables) if model is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way at the shards."""
        return self._work is None and not self._checkpoints.saving

    @property
    def is_configuring(self) -> bool:
        """Whether settings are on their way to the shards, for all to work by."""
        return isinstance(self._work, KeepRecord)

    @property
    def saving(self) -> str:
        """The reason why steps wait, as text; empty: they do not wait."""
        if isinstance(self._work, BringReplicasBack):
            named = listed([self._servers[shard].name for shard in self._work.shards])
            return f"{named}: a standby is being brought back to step {self.step + 1}"
        return self._checkpoints.saving

    @property
    def waiting_workers(self) -> frozenset[int]:
        """The workers that block on a token."""
        return self._tokens.who

    def must_push(self, member: Member) -> bool:
        """Whether the worker waits for a token that it gets only once it has pushed."""
        return member.is_live and member.index in self._tokens and not self.policy.has_contributed(member.index)

    @property
    def awaited(self) -> frozenset[int]:
        """The workers that may still have data which an earlier chief has leased to them."""
        return frozenset(self._awaited)

    @property
    def replicas_due(self) -> frozenset[int]:
        """The shards whose lost replica is brought back after the next step."""
        return frozenset(self._replicas_due)

    def draft(self, *, tag: str, step: int, extra: tuple[PushId, ...]) -> Checkpoint:
        """Returns the checkpoint of a step, without its files; `extra`: the contributions of the open step, if that is saved."""
        return Checkpoint(
            tag=tag,
            cluster=self._settings.config.cluster,
            fence=self.fence,
            step=step,
            num_shards=len(self._servers),
            record=self._cluster.record(step=step),
            placement=self._model.placement,
            files=(),
            pushes=merged_pushes([(self.step, extra), *self._ledger.contributors(_MAX_PUSHES)], earlier=self._members.remembered),
        )

    def shard_specs(self, step: int) -> tuple[ShardSpec, ...]:
        """Returns the specification of each shard that goes back to this step."""
        max_staged = self._settings.config.max_staged_per_worker
        return self._model.shard_specs(epoch=self.fence.epoch, step=step, max_staged_per_worker=max_staged)

    # -- the epoch

    def refuse_tokens(self, error: PsError) -> None:
        """All calls that wait for a token get this error."""
        self._tokens.refuse_all(error)

    def refuse_the_rest(self, error: PsError) -> None:
        """Refuses all that wait for data, and for answers that are not certain yet, with this error."""
        self._ranges.refuse_all(error)
        self.answers.refuse(error)

    def release(self) -> None:
        """Training is finished: answers all calls that wait here."""
        for blocked in self._tokens:
            self._tokens.answer(blocked.who, self._finished(blocked.ask.commit))
        self._ranges.answer_all(LeaseReply(result=LeaseResult.EXHAUSTED))
        self.answers.release()

    def end(self) -> None:
        """Ends this epoch because another begins, or the same one again. Waiting calls ask again."""
        self._return_timer.clear()
        self._grace_timer.clear()
        self._settings.hold_back()
        words = "the parameter servers have been brought to another step"
        for blocked in self._tokens:
            self._tokens.answer(blocked.who, self._wait(None, words))
        self._ranges.answer_all(LeaseReply(result=LeaseResult.WAIT, waiting_for=words))
        self.answers.end(Unavailable(words))

    # -- workers

    def join(self, member: Member, *, held: Sequence[int] | None, is_new_here: bool, now: float) -> None:
        """Adds a worker. `held`: its ranges, if it stays the same incarnation (None: it does not)."""
        self.policy.join(member.index, member.incarnation)
        member.counted_at, member.num_in_vain = now, 0
        if held is not None:
            if self._data.hold(member.index, member.incarnation, held):
                self._answer_about_ranges(now)
            if is_new_here and self.policy.spec.has_common_steps and not self.policy.has_contributed(member.index):
                # It may wait for a token, and its predecessor's contribution to the open step has gone with the chief before.
                self._turned_away.add(member.index)
        if member.index in self._awaited:
            self._awaited.discard(member.index)
            if not self._awaited:
                self._stop_waiting_for_data(now)
        self._lower_quorum()

    def leave(self, gone: Member, error: PsError, now: float) -> None:
        """Releases the tokens and ranges of a lost incarnation, and refuses its blocked calls."""
        self._tokens.refuse(gone.index, error)
        participant = self._members.participant(gone)
        for blocked in self._ranges:
            # It must get no ranges any more: nothing would ever return them.
            if blocked.ask.participant == participant:
                self._ranges.refuse(blocked.who, error)
        self._grant(self.policy.drop(gone.index), now)
        if self.policy.is_complete:
            self._out.afterwards(self._cluster.proceed)  # the step may have waited for this worker alone
        if self._data.drop(gone.index, gone.incarnation):
            self._answer_about_ranges(now)
        self._lower_quorum()
        self._turned_away.discard(gone.index)
        if self.policy.spec.accepts_stale:
            self._discards.add_incarnation(gone.index, gone.incarnation)

    def _lower_quorum(self) -> None:
        """Has the open step need as many contributions as it can get, where that may be fewer than ever."""
        config, policy = self._settings.config, self.policy
        if self._ending.is_finished:
            return  # workers leave then, and what the open step has would make one more
        if not policy.spec.needs_many_workers or (config.min_replicas is None and not self._data.starved and not self.is_quorum_lowered):
            return
        required = quorum(config, members=self._members, policy=policy, starved=self._data.starved)
        self.is_quorum_lowered = required < config.num_required
        if required < policy.num_required:
            self._out.afterwards(self._cluster.proceed)
        policy.require(required)

    # -- contributions and tokens

    def commit_push(self, call: int, request: CommitPushRequest, now: float) -> None:
        """Counts a contribution."""
        member = self._cluster.worker(request.participant, "contribute", now)
        self._recovery.refuse_if_under_way(now)
        before = len(self._out)
        result = self._commit(member, request.commit, now)
        self._members.renew(member, now=now)
        since = len(self._out)
        self._tell(call, result, request.commit, result, now)
        self._out.move_up(since=since, to=before)

    def dequeue_token(self, call: int, request: DequeueTokenRequest, now: float) -> None:
        """Counts the contribution that the request carries, and gives a token, or has the caller wait for one."""
        if self._ending.is_finished and not (gone := self._members.look_up(request.participant)).is_live:
            self._out.reply(call, self._finished(self._outcome_at_end(gone, request.commit)))
            return
        member = self._cluster.worker(request.participant, "take a token", now)
        self._recovery.refuse_if_under_way(now)
        self._check_step(request.local_step, now)
        commit, push_id = None, None
        if request.commit is not None:
            commit, push_id = self._commit(member, request.commit, now), request.commit.push_id
        self._members.renew(member, now=now)
        earlier = self._tokens.get(member.index)
        if earlier is not None:
            known = self.answers.if_certain(earlier.ask.push_id, earlier.ask.commit)
            self._tokens.answer(member.index, self._wait(known, "another call of the same worker"))
        if self._ending.is_finished:
            self._out.reply(call, self._finished(commit))
            return
        step = self._ask(member.index, local_step=request.local_step, request_id=request.request_id)
        if step is not None:
            self._tell(call, self._token(member.index, step, commit), request.commit, commit, now)
            return
        ask = _TokenAsk(commit=commit, local_step=request.local_step, request_id=request.request_id, push_id=push_id)
        wait_s = slice_s(request.max_wait_s)
        self._tokens.block(call, ask, until=now + wait_s if wait_s else None, who=member.index)
        if not wait_s:
            # Explained as if it waited: it may be the very one that should have contributed first.
            self.policy.forget_wish(member.index)
            self._tokens.answer(member.index, self._wait(self.answers.if_certain(push_id, commit), self._cluster.explain(now)))

    def _token_expired(self, blocked: Blocked[_TokenAsk], now: float) -> None:
        """Answers a call that has blocked as long as it may with the reason of the wait."""
        # Explained while it still waits: it may be the very one that should have contributed first.
        waiting_for = self._cluster.explain_to_many(now)
        self.policy.forget_wish(blocked.who)
        self._tokens.answer(blocked.who, self._wait(self.answers.if_certain(blocked.ask.push_id, blocked.ask.commit), waiting_for))

    def _token_cancelled(self, blocked: Blocked[_TokenAsk]) -> None:
        self.policy.forget_wish(blocked.who)

    def _tell(self, call: int, value: ReplyValue, commit: PushCommit | None, result: CommitResult | None, now: float) -> None:
        if commit is not None and commit.is_applied and (commit.ranges or commit.attached is not NO_ATTACHMENTS):
            self.answers.tell_of_data(call, value, now=now)
        else:
            self.answers.tell(call, value, push_id=commit.push_id if commit is not None else None, commit=result, now=now)

    def _grant(self, grants: Iterable[Grant], now: float) -> None:
        """Answers the waiting workers that have a token now."""
        for due in grants:
            blocked = self._tokens.take(due.worker)
            if blocked is not None:
                ask = blocked.ask
                token = self._token(due.worker, due.step, ask.commit)
                self.answers.tell(blocked.call, token, push_id=ask.push_id, commit=ask.commit, now=now)

    def _ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Asks the policy for a token on behalf of a worker; None: it must wait."""
        return self.policy.ask(worker, local_step=local_step - (worker in self._turned_away), request_id=request_id)

    def _token(self, worker: int, step: int, commit: CommitResult | None) -> TokenReply:
        return self._reply(TokenResult.TOKEN, step, commit, speed=self._members.speed_of(worker))

    def _wait(self, commit: CommitResult | None, waiting_for: str) -> TokenReply:
        return self._reply(TokenResult.WAIT, self.step, commit, waiting_for)

    def _finished(self, commit: CommitResult | None) -> TokenReply:
        return self._reply(TokenResult.FINISHED, self.step, commit, end=self._ending.end)

    def _reply(
        self,
        result: TokenResult,
        step: int,
        commit: CommitResult | None,
        waiting_for: str = "",
        end: End = End.NOT_YET,
        speed: float = 0.0,
    ) -> TokenReply:
        return TokenReply(
            result=result,
            step=step,
            commit=commit,
            waiting_for=waiting_for,
            global_step=self.policy.step,
            reads_latest=self.policy.spec.reads_latest,
            settings_version=self._settings.version,
            shards_version=self._servers.version_under(self._members.chief_incarnation),
            end=end,
            speed=speed,
        )

    def _commit(self, member: Member, commit: PushCommit, now: float) -> CommitResult:
        policy, push_id = self.policy, commit.push_id
        self._check_step(commit.step, now)
        if (push_id.worker, push_id.incarnation) != (member.index, member.incarnation) or push_id.sequence < 1:
            raise InvalidSpec(f"push id {push_id}: want worker {member.index}, incarnation {member.incarnation} and a sequence >= 1")
        check_weight(commit.weight)
        if commit.is_applied and not policy.spec.applies_on_arrival:
            raise InvalidSpec(f"push id {push_id}: it cannot have been applied on arrival; under the policy {policy.spec.text} it waits")
        if member.outcomes.is_repeated(push_id, step=commit.step):
            return _repeated(member.outcomes.first_result(push_id), global_step=policy.step)
        if not self._model.is_ready:
            raise NotInitialized(f"the variables have no values yet: {self._cluster.explain(now)}")
        if commit.attached is not NO_ATTACHMENTS:
            self._attachments.check(member.index, commit.attached, applies_on_arrival=policy.spec.applies_on_arrival)
        open_step = policy.step
        has_ranges = not commit.ranges or self._data.may_use(member.index, member.incarnation, commit.ranges)
        # Samples that others have, or had, would count twice: it comes from the time of an earlier chief.
        verdict = self._judge(commit) if has_ranges or commit.is_applied else Verdict(outcome=PushOutcome.LATE)
        result = _result_of(verdict, global_step=open_step)
        member.outcomes.record(push_id, step=commit.step, result=result)
        self._members.count(member, verdict.outcome, inner=commit.inner, now=now)
        self._ledger.count(verdict.outcome, worker=member.index, step=commit.step, staleness=verdict.staleness, now=now)
        if verdict.outcome is not PushOutcome.ACCEPTED and policy.spec.accepts_stale:
            self._discards.add(push_id)
        if verdict.outcome is PushOutcome.ACCEPTED:
            self._turned_away.discard(member.index)
            if commit.attached is not NO_ATTACHMENTS:
                self._attachments.count(push_id, commit.attached)
                if commit.is_applied:
                    self._attachments.applied((push_id,))
        elif not policy.spec.has_common_steps or ((not commit.staged or not has_ranges) and not policy.is_complete):
            self._turned_away.add(member.index)  # it has met a change of policy, or of the chief
        if commit.ranges or self._data.starved:
            self._count_ranges(member, commit, verdict)
        self._grant(policy.after_commit(member.index), now)
        if policy.step > open_step:
            self._counted_on_arrival(push_id, now)
        else:
            self.proceed(now)
        return result

    def _outcome_at_end(self, gone: Member, commit: PushCommit | None) -> CommitResult | None:
        """Returns what became of a contribution whose worker had lost its place when training finished; counts nothing any more."""
        if commit is None:
            return None
        if gone.outcomes.is_repeated(commit.push_id, step=commit.step):
            return _repeated(gone.outcomes.first_result(commit.push_id), global_step=self.step)
        return _result_of(self._judge(commit), global_step=self.step)

    def _count_ranges(self, member: Member, commit: PushCommit, verdict: Verdict) -> None:
        """The training data that a contribution was made from is done once that is applied, or free again."""
        if verdict.outcome is PushOutcome.ACCEPTED:
            self._data.count(commit.push_id, commit.ranges)
            if commit.is_applied:
                self.answers.finished_ranges(self._data.applied((commit.push_id,)))
        else:
            self._data.give_back(member.index, member.incarnation, commit.ranges)

    def _judge(self, commit: PushCommit) -> Verdict:
        policy, is_finished = self.policy, self._ending.is_finished
        behind = max(0, policy.step - commit.step)
        if commit.is_applied:
            if not is_finished:
                return policy.commit(commit.push_id, step=commit.step, weight=commit.weight)
            # Servers applied it that did not know yet that training had ended.
            return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=max(0, policy.step - 1), staleness=max(0, behind - 1))
        if not commit.staged or commit.step < self.oldest_kept:
            return Verdict(outcome=PushOutcome.STALE, staleness=behind)
        if is_finished or policy.spec.applies_on_arrival:
            return Verdict(outcome=PushOutcome.LATE, staleness=behind)
        return policy.commit(commit.push_id, step=commit.step, weight=commit.weight)

    def _check_step(self, step: int, now: float) -> None:
        if not 0 <= step <= MAX_STEP:
            raise InvalidSpec(f"local_step: got {step}, want 0 to 2^62")
        # If each contribution is a step, workers read steps that the chief does not know yet.
        if self.policy.spec.has_common_steps and step > self.policy.step:
            if not self._model.is_ready:  # another chief may have trained further than this one knows yet
                raise NotInitialized(f"the model is not known here yet: {self._cluster.explain(now)}")
            if self._step is not None and step == self.policy.step + 1:
                # Under the policy before, the worker read what the shards had applied already.
                raise Unavailable(f"step {step} is not open yet: the shards apply the one before, or save it")
            raise StepAhead(f"local_step {step} is ahead of global_step {self.policy.step}; read again")

    # -- ranges of the training data

    def lease_ranges(self, call: int, request: LeaseRangesRequest, now: float) -> None:
        """Leases ranges to a worker, or has it wait for other workers' ranges. Raises InvalidSpec, DataMismatch and every call's errors."""
        member = self._cluster.worker(request.participant, "lease training data", now)
        if request.max_ranges < 1:
            raise InvalidSpec(f"max_ranges: got {request.max_ranges}, want >= 1")
        self._recovery.refuse_if_under_way(now)
        self._data.check(request.data)
        self._members.renew(member, now=now)
        if self._ending.is_finished:
            self._out.reply(call, LeaseReply(result=LeaseResult.EXHAUSTED))
            return
        has_returned = self._data.compare(member.index, member.incarnation, request.held, request_id=request.request_id)
        before = len(self._out)
        is_late = self._data.is_answered(member.index, member.incarnation, request_id=request.request_id)
        for blocked in self._ranges if not is_late else ():
            # A worker waits in one call at a time: its client has lost an earlier one, or has given it up.
            if (blocked.ask.participant.index, blocked.ask.participant.incarnation) == (member.index, member.incarnation):
                is_late = is_late or blocked.ask.request_id >= request.request_id
                self._answer_without_ranges(blocked, "another call of the same worker")
        reply = self._try_to_lease(request) if not is_late else LeaseReply(result=LeaseResult.WAIT, waiting_for=self._explain_ranges())
        if has_returned:
            self._answer_about_ranges(now)
        since = len(self._out)
        if reply is not None:
            self.answers.tell_of_lease(call, reply, now=now)
            self._out.move_up(since=since, to=before)
            return
        self._lower_quorum()
        if self.policy.is_in_grace:
            self._out.afterwards(self._cluster.proceed)
        if slice_s(request.max_wait_s):
            self._ranges.block(call, request, until=now + slice_s(request.max_wait_s))
        else:
            self._data.waits_no_more(member.index, member.incarnation, request_id=request.request_id)
            self._out.reply(call, LeaseReply(result=LeaseResult.WAIT, waiting_for=self._explain_ranges()))
            self._out.move_up(since=since, to=before)

    def _answer_without_ranges(self, blocked: Blocked[LeaseRangesRequest], waiting_for: str) -> None:
        asked, worker = blocked.ask, blocked.ask.participant
        self._data.waits_no_more(worker.index, worker.incarnation, request_id=asked.request_id)
        self._ranges.answer(blocked.who, LeaseReply(result=LeaseResult.WAIT, waiting_for=waiting_for))

    def _answer_about_ranges(self, now: float) -> None:
        """Answers the calls that wait for ranges, as far as there are any; to be called when ranges were returned or are done."""
        for blocked in self._ranges:
            reply = self._try_to_lease(blocked.ask)
            if reply is not None:
                self._ranges.take(blocked.who)
                self.answers.tell_of_lease(blocked.call, reply, now=now)

    def _stop_waiting_for_data(self, now: float) -> None:
        """Ranges of workers that have not registered again by now may be leased to others."""
        self._awaited.clear()
        self._return_timer.clear()
        self._answer_about_ranges(now)

    def _ranges_expired(self, blocked: Blocked[LeaseRangesRequest], now: float) -> None:
        """Answers a call that has blocked as long as it may with the reason of the wait."""
        self._answer_without_ranges(blocked, self._explain_ranges())

    def _explain_ranges(self) -> str:
        if not self._awaited:
            return self._data.explain()
        names = listed([f"worker {worker}" for worker in sorted(self._awaited)], limit=5)
        return f"another chief has leased training data to {names}: whether they still have it is known once they come back"

    def _try_to_lease(self, ask: LeaseRangesRequest) -> LeaseReply | None:
        if self._awaited:
            return None
        who = ask.participant
        granted = self._data.lease(who.index, who.incarnation, ask.data, max_ranges=ask.max_ranges, request_id=ask.request_id)
        if granted:
            self._lower_quorum()
            return LeaseReply(result=LeaseResult.GRANTED, ranges=granted)
        return LeaseReply(result=LeaseResult.EXHAUSTED) if self._data.is_exhausted else None

    # -- one thing after another at the shards

    def proceed(self, now: float) -> None:
        """Begins the next thing, if there is one and nothing is under way."""
        if self._ending.is_failed or self._recovery.why:
            return
        # Before all servers are adopted, settings may be found that an earlier chief has left: they would undo a change.
        if self._servers.are_adopted and self._settings.next_change is not None:
            self._begin_changes(now)
        if self._checkpoints.is_due and self.is_idle:
            self._checkpoints.begin(now)
        policy, starved = self.policy, self._data.starved
        if starved and policy.is_in_grace:
            live = (member.index for member in self._members.live_workers)
            if all(worker in starved or policy.has_contributed(worker) for worker in live):
                policy.end_grace()  # the others have nothing to contribute, and may wait for what this step brings back
        # A finished training takes no further step; under the other policies it owes those that it has accepted.
        may_step = self._model.is_ready and not (policy.spec.has_common_steps and self._ending.is_finished)
        if self.is_idle and may_step and policy.is_complete:
            contributors, weights = policy.contributors, policy.weights
            request = ApplyRequest(fence=self.fence, step=policy.step, contributors=contributors, weights=weights, merge=policy.spec.merge)
            self._begin_step(_Step(request=request), policy.last_worker, now)
        if not policy.is_in_grace:
            self._grace_timer.clear()
        elif self._grace_timer.due is None:
            self._grace_timer.set(now + policy.spec.grace_s)

    def _grace_is_over(self, now: float) -> None:
        self.policy.end_grace()
        self.proceed(now)

    def redo(self, request: ApplyRequest, now: float) -> None:
        """Has all shards apply a step that some have applied already, with the same contributions."""
        request = replace(request, fence=self.fence, scales=(), shares=(), without=(), discards=(), wants_checksums=False)
        self._ledger.roll_back(request.step, now=now)
        self._begin_step(_Step(request=request, is_redo=True), request.contributors[-1].worker if request.contributors else 0, now)

    def _awaits(self, event: Done | Failed) -> bool:
        """Whether the event is about what all shards are at; if not, it is too late to matter."""
        return event.work is self._work and not self._ending.is_failed

    def prepared(self, event: Done, now: float) -> None:
        """The size of the mean is known: it is applied, scaled down if it is too large. Before that, the sizes of contributions may be."""
        work, step = self._work, self._step
        if not self._awaits(event) or not isinstance(work, PrepareStep) or step is None:
            return
        if isinstance(event.result, Lacking):
            self._do_without(work.of, event.result.missing, now)
            return
        layouts, model = self._model.layouts, self._model.model
        request, wanted = step.request, work.of
        is_of_each = request.merge.needs_norms and not wanted.shares
        for index, (sums, layout) in enumerate(zip(event.result, layouts, strict=True)):
            num_slices = (len(layout.slices) + len(layout.tables)) * (len(request.contributors) if is_of_each else 1)
            if len(sums) != num_slices:
                self._ending.fail(f"{self._servers[index].name}: reported {len(sums)} sums of squares of {num_slices} slices")
                return
        assert model is not None
        if is_of_each:
            weights = request.weights or (1.0,) * len(request.contributors)
            factors, norms = shares(request.merge, layouts=layouts, sums=event.result, weights=weights)
            self._step, wanted = replace(step, norms=norms), replace(wanted, shares=factors)
            if norms or model.clip.needs_norms:
                self._have(PrepareStep(of=wanted))
            else:
                self._apply(wanted)
            return
        self._apply(replace(wanted, scales=scales(model.clip, layouts=layouts, sums=event.result, norms=step.norms)))

    def refused(self, event: Failed) -> None:
        """A shard refuses what all are told to do: it is not what it should be."""
        if self._awaits(event):
            self._ending.fail(printable(event.error.message))

    def applied(self, event: Done, now: float) -> None:
        """All shards have applied the step: the next one is open."""
        step, work = self._step, self._work
        if not self._awaits(event) or step is None or not isinstance(work, ApplyStep):
            return
        if event.result is not None:
            self._do_without(work, event.result.missing, now)
            return
        request = step.request
        if step.is_redo:
            self._work = self._step = None
            self._ledger.close_step(now=now)
            self.policy = self._new_policy(step=request.step + 1, is_start=False, counted=self.policy.counted())
            self._turned_away.clear()
            self._lower_quorum()
            self._recovery.repeated(now)
            return
        is_held = (self._checkpoints.holds_steps or self._holds_for_replicas) and not self._ending.is_finished
        is_of_interest = self._data.has_counted or is_held or self.answers.is_of_interest()
        contributors = request.contributors if is_of_interest else ()
        if self._data.has_counted:
            self.answers.finished_ranges(self._data.applied(contributors))
        self._attachments.applied(request.contributors)
        self.answers.applied(contributors, is_held=is_held)
        if is_held:
            self._work = None
            self._checkpoints.hold(HeldStep(step=self.step + 1, contributors=contributors, then=self._held_step_saved))
        else:
            self._advance(now)
        if self._data.spec is not None:
            self._answer_about_ranges(now)

    def _begin_step(self, step: _Step, last_worker: int, now: float) -> None:
        model, request = self._model.model, step.request
        self._step = step
        self._ledger.complete_step(request.contributors, weights=request.weights, last_worker=last_worker, now=now)
        wanted = ApplyStep(request=request)
        if not request.merge.needs_norms and (model is None or not model.clip.needs_norms):
            self._apply(wanted)
        else:
            self._have(PrepareStep(of=wanted))

    def _have(self, work: PrepareStep | ApplyStep | BringReplicasBack) -> None:
        self._work = work
        self._out.add(work)

    def _apply(self, wanted: ApplyStep) -> None:
        """Has a step applied; but one that is repeated, with all that is known by now to be done with it."""
        assert self._step is not None
        if not self._step.is_redo:
            wanted = replace(wanted, request=self._completed(wanted.request, discards=self._take_discards()))
        self._have(wanted)

    def _completed(self, request: ApplyRequest, *, discards: tuple[PushId, ...]) -> ApplyRequest:
        """Returns a step's request with what its contributors bring besides gradients."""
        made_of = request.contributors
        ranges, attached = self.answers.ranges_of_step(made_of), self._attachments.of_step(made_of)
        return replace(request, ranges=ranges, attached=attached, discards=discards)

    def _do_without(self, wanted: ApplyStep, missing: Sequence[tuple[int, PushId]], now: float) -> None:
        """Has the step applied without contributions that shards lack, and expels their workers.

        So it makes no difference which shards have applied the step already. A contribution that no shard has does not count.
        """
        step = self._step
        assert step is not None
        known = [set(of_shard) for of_shard in wanted.without] or [set() for _ in range(len(self._servers))]
        without = [of_shard | {push_id for index, push_id in missing if index == shard} for shard, of_shard in enumerate(known)]
        if without == known or not set().union(*without) <= {*step.request.contributors}:
            self._ending.fail(f"step {step.request.step}: parameter servers lack other contributions than those that it is made of")
            return
        wanted = replace(wanted, without=tuple(tuple(sorted(of_shard)) for of_shard in without))
        nowhere = set[PushId].intersection(*without) if not step.is_redo else ()
        num_ranges = sum(self._data.uncount(push_id) for push_id in nowhere)
        num_attached = sum(self._attachments.uncount(push_id) for push_id in nowhere)
        is_prepared = isinstance(self._work, ApplyStep)
        if is_prepared and (num_ranges or num_attached):
            wanted = replace(wanted, request=self._completed(wanted.request, discards=wanted.request.discards))
        if num_ranges:
            self._answer_about_ranges(now)
        self._have(wanted if is_prepared else PrepareStep(of=wanted))
        for push_id in sorted({push_id for _, push_id in missing}):
            self._expel(push_id, [self._servers[shard].name for shard, one in missing if one == push_id], now)
        self._ending.lost_somebody(now)

    def _expel(self, push_id: PushId, shards: Sequence[str], now: float) -> None:
        """Expels the worker of a contribution that shards lack. Only it can have committed that: it has forged it, or has a defect."""
        what = f"it committed contribution {push_id} to step {self.step}, which {listed(shards)} never received"
        error = ContributionMissing(
            f"worker {push_id.worker}: {what}; push a contribution to every parameter server before it is committed",
            facts={"worker": str(push_id.worker), "step": str(self.step)},
        )
        self.answers.refuse_about((push_id,), error)
        member = self._members.find(ParticipantKind.WORKER, push_id.worker)
        if member is not None and member.incarnation == push_id.incarnation and member.is_live:
            self._members.expel(member, why=what, now=now)
            words = f"expelled {member.name} (incarnation {member.incarnation}) {member.where}: {what}"
            self._out.note(words, kind=NoteKind.LOST, is_warning=True)
            self._cluster.joining.release(member, error, now)

    def _take_discards(self) -> tuple[PushId, ...]:
        """Takes out the contributions that shards may drop with the step that begins now."""
        return self._discards.take(self.policy.counted()) if self._discards and self.policy.spec.accepts_stale else ()

    def _advance(self, now: float) -> None:
        """Announces the step that all shards have applied: the next one is open."""
        self._work = self._step = None
        self._ledger.close_step(now=now)
        granted = self.policy.advance()
        if self.is_quorum_lowered:
            self._lower_quorum()
        self._checkpoints.stepped(self.step)
        if self._ending.is_finishing and not self.policy.is_complete:
            self._ending.finish_as_asked(now)
        else:
            self._end_or_continue(granted, now)

    def _counted_on_arrival(self, push_id: PushId, now: float) -> None:
        """A contribution that the shards had applied on arrival has been counted as a step."""
        self._ledger.complete_step((push_id,), last_worker=push_id.worker, now=now)
        self._ledger.close_step(now=now)
        self.answers.finished_ranges(self._data.applied((push_id,)))
        self._checkpoints.stepped(self.step)
        self._end_or_continue([], now)

    def _end_or_continue(self, granted: Sequence[Grant], now: float) -> None:
        max_steps = self._settings.config.max_steps
        if max_steps is not None and self.step >= max_steps and not self._ending.is_finished:
            self._ending.finish(f"max_steps {max_steps} reached", now)
            return
        self._grant(granted, now)
        self.proceed(now)

    # -- checkpoints, and replicas that are restored between two steps

    def hold_failed(self, why: str, now: float) -> None:
        """A step that is held back could not be saved. Unless it must be, training continues, and replicas come back another time."""
        if self._replicas_due and not self._checkpoints.holds_steps:
            for shard in self._replicas_due:
                self._servers.miss_standby(shard, why=f"the step that it is to be brought back from could not be saved: {why}")
            self._replicas_due.clear()
            self._checkpoints.let_go(now)
            self._advance(now)

    @property
    def _holds_for_replicas(self) -> bool:
        """Whether the step just applied is announced only after replicas have been brought back."""
        is_ending = self._ending.is_finishing or self._ending.is_finished
        return bool(self._replicas_due) and not self.policy.spec.accepts_stale and not is_ending

    def _held_step_saved(self, tag: str, now: float) -> None:
        """The step is saved: replicas are restored from it first, and then it is announced."""
        if not self._holds_for_replicas:
            self._advance(now)
            return
        shards = tuple(sorted(self._replicas_due))
        step = self.step + 1
        specs = self.shard_specs(step)
        settings = self._settings.newest.for_shards(self.fence)
        self._have(
            BringReplicasBack(
                fence=self.fence,
                tag=tag,
                shards=shards,
                specs=tuple(specs[shard] for shard in shards),
                settings=settings,
            )
        )

    def replica_ready(self, event: ReplicaReady) -> None:
        """A lost replica could be brought back: it is after the next step, if that can be."""
        record = self._servers[event.shard]
        is_over = self._ending.is_failed or self._ending.is_finished
        if record.standby or is_over or self._recovery.why or event.shard in self._replicas_due:
            return
        if self._settings.config.checkpoints is None:
            why = "it runs again, but without its model; without --checkpoint-dir it stays out until the cluster is started again"
        elif self.policy.spec.accepts_stale:
            policy = self.policy.spec.text
            why = f"it runs again, but without its model; with the policy {policy} it cannot be brought back between two steps"
        else:
            why = "it runs again, and is brought back after the next step"
            self._replicas_due.add(event.shard)
        self._servers.miss_standby(event.shard, why=why)

    def replica_counts(self, shard: int) -> None:
        """Notes that a shard has an active replica again."""
        self._replicas_due.discard(shard)

    def replicas_back(self, event: Done | Failed, now: float) -> None:
        """Replicas have been brought back, or could not be: announces the step."""
        work = self._work
        if not self._awaits(event) or not isinstance(work, BringReplicasBack):
            return
        failures = event.result if isinstance(event, Done) else [(shard, event.error.message) for shard in work.shards]
        for shard, why in failures:
            self._servers.miss_standby(shard, why=f"it could not be brought back: {printable(why)}")
            self._out.note(f"the standby of {self._servers[shard].name} could not be brought back: {why}", is_warning=True)
        self._replicas_due.difference_update(work.shards)
        self.answers.keep()
        self._advance(now)

    # -- settings

    def change_settings(self, call: int, request: ChangeSettingsRequest, now: float) -> None:
        """Handles a request for other settings. Raises InvalidSpec, VariableNotFound, NotInitialized or TrainingFailed."""
        self._ending.refuse_changes_if_over()
        self._settings.ask(call, request)
        self.proceed(now)
        self._settings.wait(call, max_wait_s=request.max_wait_s, now=now)

    def begin(self) -> None:
        """The shards are at this step: training begins once all work by the settings, and keep a record that names them."""
        self._work = self.answers.keep()

    def kept(self, event: Done | Failed, now: float) -> None:
        """A record is kept, or cannot be: with the one that all shards were told of, training begins, or a change holds."""
        is_awaited = self._awaits(event)
        self.answers.kept(event)
        if not is_awaited:
            return
        if isinstance(event, Failed):
            self.refused(event)
            return
        self._work = None
        if self._model.is_ready:
            self._change_holds(now)
        elif not self._ending.is_over:
            self._recovery.complete(now)
        self.proceed(now)

    def _begin_changes(self, now: float) -> None:
        """Begins the next changes, as long as that is possible now; before there is a model they hold at once."""
        while (change := self._settings.next_change) is not None:
            is_possible = not isinstance(change.asked, PolicySpec) or self.policy.gives_way(change.asked)
            if not is_possible or not self.is_idle:
                return
            self._settings.introduce(change)
            if self._model.is_ready:
                self._work = self.answers.keep()
            else:
                self._change_holds(now)

    def _change_holds(self, now: float) -> None:
        """The shards know, and another chief would: from now on the change holds."""
        before = len(self._out)
        change = self._settings.put_in_force(step=self.step)
        if change is None:
            return
        if isinstance(change.asked, PolicySpec):
            self._install(now)
        since = len(self._out)
        self._out.note(self._words_of(change), kind=NoteKind.SETTINGS)
        self._out.move_up(since=since, to=before)

    def _words_of(self, change: Change) -> str:
        what = (
            f"policy {self.policy.spec.text}" if isinstance(change.asked, PolicySpec) else f"optimizer {self._settings.optimizer_words()}"
        )
        return f"settings version {self._settings.version} hold from step {self.step} on: {what}"

    def _install(self, now: float) -> None:
        """Replaces the policy by that of the settings, which takes over the counted contributions."""
        old = self.policy
        self.policy = new = self._new_policy(step=old.step, is_start=not self._model.is_ready, counted=old.counted())
        self._grace_timer.clear()
        if old.is_complete and old.spec.has_common_steps:
            new.stay_complete()  # however few it needed: who gave nothing to it may wait for the next step already
        if not new.spec.accepts_stale:
            self._discards.clear()  # the shards drop by themselves the contributions that they cannot apply any more
        if not old.spec.accepts_stale:
            self._oldest_kept = old.step
        self._lower_quorum()
        granted = []
        for blocked in self._tokens:
            local_step = min(blocked.ask.local_step, old.step)
            step = self._ask(blocked.who, local_step=local_step, request_id=blocked.ask.request_id)
            if step is not None:
                granted.append(Grant(blocked.who, step))
        self._grant(granted, now)

    def _new_policy(self, *, step: int, is_start: bool, counted: Sequence[ChosenPush] = ()) -> Policy:
        live = [member.index for member in self._members.workers() if member.is_live]
        return new_policy(self._settings.config, step=step, workers=live, is_start=is_start, counted=counted)


def _result_of(verdict: Verdict, *, global_step: int) -> CommitResult:
    return CommitResult(
        outcome=verdict.outcome,
        global_step=global_step,
        applied_step=verdict.applied_step,
        staleness=verdict.staleness,
        factor=verdict.factor,
    )


def _repeated(first: CommitResult | None, *, global_step: int) -> CommitResult:
    if first is None:
        return CommitResult(outcome=PushOutcome.DUPLICATE, global_step=global_step)
    return CommitResult(
        outcome=PushOutcome.DUPLICATE,
        global_step=global_step,
        first_outcome=first.outcome,
        applied_step=first.applied_step,
        staleness=first.staleness,
        factor=first.factor,
    )
