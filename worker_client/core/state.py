"""One worker's state in the training, and the effect of each answer on it. Pure: no call, no thread, no clock and no log.

A session or a simulated worker makes the calls and passes the answers on.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import (
    DEFAULT_POLICY,
    CommitResult,
    End,
    InnerSteps,
    Participant,
    PushCommit,
    PushOutcome,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId
from ps_protocol.roles.shard import PushResult
from worker_client.core.outcomes import Push, push_of


class OpenCommits:
    """Commits of this participant that a new chief would need again; few at a time. One thread writes; any may take a copy."""

    def __init__(self, owner: Participant) -> None:
        self.owner = owner
        self._commits: dict[int, PushCommit] = {}
        self._applied_steps: dict[int, int] = {}
        # The last accepted contribution, and the chief's answer.
        self._latest: tuple[PushId, CommitResult] | None = None
        self._leased: dict[int, None] = {}

    def lease(self, ranges: Iterable[int]) -> None:
        """Notes that the participant holds these ranges of the training data, until a contribution made from them is answered."""
        self._leased.update(dict.fromkeys(ranges))

    @property
    def held(self) -> tuple[int, ...]:
        """The ranges that the participant holds, including those of unanswered contributions."""
        return tuple(self._leased)

    def sent(self, commit: PushCommit) -> None:
        """Notes a commit that is being sent: from now on the chief may have counted it."""
        self._commits[commit.push_id.sequence] = commit

    def answered(self, commit: PushCommit, result: CommitResult, *, global_step: int) -> None:
        """Notes the outcome of a commit, while `global_step` is open."""
        sequence = commit.push_id.sequence
        for identity in commit.ranges:
            self._leased.pop(identity, None)
        if result.original_outcome is not PushOutcome.ACCEPTED or result.applied_step is None:
            self._commits.pop(sequence, None)
        else:
            self._applied_steps[sequence] = result.applied_step
            self._latest = commit.push_id, result
        self.advance(global_step)

    def advance(self, global_step: int) -> None:
        """Notes that a step is open: contributions to earlier ones are applied."""
        if not self._commits:
            return
        if not self._applied_steps:
            return
        for sequence in [sequence for sequence, step in self._applied_steps.items() if step < global_step]:
            self._commits.pop(sequence, None)
            del self._applied_steps[sequence]

    def accepted(self, commit: PushCommit) -> CommitResult | None:
        """Returns the chief's answer about this commit if it is the last accepted one, applied or not."""
        return self._latest[1] if self._latest is not None and self._latest[0] == commit.push_id else None

    def unanswered(self) -> PushCommit | None:
        """The latest commit without an answer: the chief may not have received it."""
        return next((commit for sequence, commit in reversed(self._commits.items()) if sequence not in self._applied_steps), None)

    def all(self) -> tuple[PushCommit, ...]:
        """Returns all open commits, oldest first."""
        return tuple(self._commits.values())

    def begin(self, owner: Participant) -> None:
        """Drops the commits of an earlier epoch or incarnation; `owner` makes the next ones."""
        self._commits.clear()
        self._applied_steps.clear()
        self._latest = None
        self._leased.clear()
        self.owner = owner


class WorkerState:
    """The counters and flags of one participant. For one thread. A worker that becomes another participant gets a new one, made from this.

    `local_step`: the step of its variables and of its next contribution. `global_step`: the newest step that it has heard of. `has_newest`:
    the newest variables were read, and no call has been made since. `refused`: sequence numbers of contributions that may lie on shards and
    will never be applied; the next push names them to the shards. `inner`: the worker's own steps for its next contribution, if it tells.
    `speed`: how fast they are beside the fastest worker's, as far as it is known; at most 1.
    """

    def __init__(
        self,
        participant: Participant,
        *,
        step: int,
        global_step: int | None = None,
        commits: OpenCommits,
        former: "WorkerState | None" = None,
    ) -> None:
        self.participant = participant
        self.commits = commits
        self.local_step = step
        self.global_step = step if global_step is None else global_step
        self.policy = DEFAULT_POLICY if former is None else former.policy
        self.is_finished, self.end = False, End.NOT_YET
        self.has_newest = False
        self.refused: list[int] = []
        # A sequence number is used once, whatever the outcome of its contribution.
        self.num_pushes: int = 0 if former is None else former.num_pushes
        self.request_id: int = 1 if former is None else former.request_id + 1
        self._settings_version = 0
        self.inner: InnerSteps | None = None if former is None else former.inner
        self.speed: float = 1.0 if former is None else former.speed

    @property
    def policy(self) -> PolicySpec:
        """The policy of the cluster, as far as this worker knows."""
        return self._policy

    @policy.setter
    def policy(self, policy: PolicySpec) -> None:
        # Copies the properties that are read several times per step.
        self._policy, self.reads_latest, self.applies_on_arrival = policy, policy.reads_latest, policy.applies_on_arrival
        # Whether gradients belong to the step that was read and not to the token's: where each contribution is a step by itself.
        self.follows_reads = policy.accepts_stale and policy.reads_latest and not policy.applies_on_arrival

    def join(self, *, policy: PolicySpec, global_step: int, may_contribute: bool) -> bool:
        """Notes the agreed model; returns whether the worker must first wait for a token, since the open step takes nothing from it."""
        self.policy = policy
        if self.reads_latest:
            self.local_step = max(self.local_step, global_step)
            return False
        return not may_contribute or global_step > self.local_step

    def hear_policy(self, policy: PolicySpec, *, global_step: int) -> None:
        """Notes the cluster's policy, which another client may have set."""
        had_steps = not self.reads_latest
        self.policy, self.global_step = policy, max(self.global_step, global_step)
        if self.reads_latest and had_steps:
            self.local_step = max(self.local_step, global_step)

    def finish(self, last_step: int) -> None:
        """Notes that training has ended at this worker's request."""
        self.has_newest = False
        if not self.is_finished:
            self.local_step, self.is_finished, self.end = last_step, True, End.FINISHED

    # -- contributions

    def number_push(self) -> PushId:
        """Returns the next push id: a new one even after a push that failed, since shards may hold parts of that one."""
        self.num_pushes += 1
        return PushId(worker=self.participant.index, incarnation=self.participant.incarnation, sequence=self.num_pushes)

    def pushed(
        self,
        push_id: PushId,
        results: Collection[PushResult],
        *,
        step: int,
        ranges: tuple[int, ...],
        attached: Attachments = NO_ATTACHMENTS,
        weight: float = 1.0,
    ) -> PushCommit:
        """Returns the request to count a contribution, once all shards have answered it."""
        is_whole = PushResult.STALE not in results
        is_applied = is_whole and self.applies_on_arrival
        inner, self.inner = self.inner, None
        return PushCommit(
            push_id=push_id,
            step=step,
            staged=is_whole,
            is_applied=is_applied,
            ranges=ranges,
            attached=attached,
            weight=weight,
            inner=inner,
        )

    def counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Notes the chief's outcome of a contribution."""
        self.commits.answered(commit, result, global_step=result.global_step)
        self.global_step = max(self.global_step, result.global_step)
        self.note_refusal(commit, result)

    def note_refusal(self, commit: PushCommit, result: CommitResult) -> None:
        """Remembers a contribution that no step takes, so that shards drop it."""
        if result.original_outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self.refused.append(commit.push_id.sequence)

    def refuse_uncommitted(self, held: Iterable[PushId]) -> bool:
        """Remembers the contributions at a shard, besides the last push, that will never be committed; returns whether any is new."""
        mine = self.participant.index, self.participant.incarnation
        known = {commit.push_id.sequence for commit in self.commits.all()}.union(self.refused)
        earlier = [one.sequence for one in held if (one.worker, one.incarnation) == mine and one.sequence < self.num_pushes]
        unwanted = [sequence for sequence in earlier if sequence not in known]
        self.refused += unwanted
        return bool(unwanted)

    # -- tokens

    def granted(self, reply: TokenReply) -> bool:
        """Notes a token, or the end. Returns whether the policy has changed, so that the caller must learn it before `move_on`."""
        self.request_id += 1  # a request that timed out keeps its number, so that no token is granted twice
        self.is_finished, self.end = reply.result is TokenResult.FINISHED, reply.end
        self.global_step = max(self.global_step, reply.step, reply.global_step)
        self.commits.advance(max(reply.step, reply.global_step))
        self.speed = reply.speed or self.speed
        return not self.is_finished and (reply.settings_version, reply.reads_latest) != (self._settings_version, self.reads_latest)

    def move_on(self, reply: TokenReply) -> None:
        """Moves on to the token's step, or to the last one."""
        if not self.is_finished:
            self._settings_version = reply.settings_version
        if self.is_finished or not self.follows_reads:
            self.local_step = reply.step

    # -- variables that were read

    def read_newest(self, step: int | None) -> None:
        """Notes that the newest variables were read, of this step on all shards; None: the model has none to read."""
        self.has_newest = True
        if self.is_finished:
            return
        if self.applies_on_arrival or step is None:
            # Each shard counts its own arrivals; the chief's count is the step.
            self.local_step = max(self.local_step, self.global_step)
        elif self.follows_reads:
            self.local_step = step

    # -- after the participant has become another one

    def outcome_at_move(
        self, commit: PushCommit | None, *, step: int, giver: Participant, accepted: CommitResult | None
    ) -> Push | PushCommit:
        """Returns the outcome of a contribution whose worker has lost its place, or a commit to ask the chief about, for `outcome_of`.

        `accepted`: the chief's answer, if the contribution counts.
        """
        if commit is not None and commit.staged:
            if giver.shares_era(self.participant) and accepted is not None:
                # Neither epoch nor life has changed since.
                return push_of(accepted, step=step, is_finished=self.is_finished)
            is_mine = (commit.push_id.worker, commit.push_id.incarnation) == (self.participant.index, self.participant.incarnation)
            if is_mine and step < self.local_step and not self.reads_latest:
                # The checkpoint may be of a step with this contribution, whose answer was lost. If the chief does not know the
                # contribution, it does not count.
                return replace(commit, staged=False, is_applied=False, ranges=(), attached=NO_ATTACHMENTS)
        return self.rolled_back(step)

    def outcome_of(self, result: CommitResult, *, step: int) -> Push:
        """Returns the outcome by the chief's answer about the commit."""
        push = push_of(result, step=step, is_finished=self.is_finished)
        return push if push.is_accepted else self.rolled_back(step)

    def rolled_back(self, step: int) -> Push:
        """Returns the outcome of a contribution that was rolled back."""
        return Push(outcome=PushOutcome.ROLLED_BACK, step=step, global_step=self.global_step, is_finished=self.is_finished)
