"""A worker's loop over the steps: where it stands, what it reads, what it gives. Knows chief and shards by their seams; no user's words."""

from collections.abc import Collection, Mapping, Sequence

from ps_protocol.chief import DEFAULT_POLICY, CommitResult, PushCommit, PushOutcome
from ps_protocol.errors import InternalError, StepGone, TooManyPushes
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.shard import Metric, PushId, PushResult
from ps_protocol.tensors import Array
from worker_client.gradients import Gradients, Staging, Updates
from worker_client.joining import Joined, agree
from worker_client.membership import Membership
from worker_client.model_reader import ModelReader
from worker_client.outcomes import Push, push_of
from worker_client.outgoing import Metrics, Outgoing, ShardPart, as_metrics
from worker_client.patience import Patience
from worker_client.tokens import TokenWaiter


class Progress:
    """Where a worker stands: its step, the newest step it has heard of, the policy, and whether training is finished. For one thread."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._tokens = TokenWaiter(member.link, member.participant)
        self._joined: Joined | None = None
        self.local_step = self.global_step = member.registration.global_step
        self.policy: PolicySpec = DEFAULT_POLICY
        self.has_newest = False  # of the variables that were read as the newest: nothing has happened since
        self._settings_version = 0
        self.is_finished = False
        # Sequences of contributions that may lie on shards and that nobody will apply: the next push tells the shards.
        self.refused: list[int] = []

    @property
    def follows_reads(self) -> bool:
        """Whether gradients belong to the step that was read, whatever the token: where each contribution is a step by itself."""
        return self.policy.accepts_stale and not self.policy.applies_on_arrival

    def begin(self, joined: Joined, *, timeout_s: float | None) -> None:
        """Comes to the step that a new worker begins with; in strict sync waits for one that takes something from it."""
        self._joined, self.policy = joined, joined.policy
        if self.policy.reads_latest:
            self.local_step = max(self.local_step, joined.global_step)
        elif not self._member.registration.may_contribute or joined.global_step > self.local_step:
            self.await_token(None, timeout_s=timeout_s)

    def commit(self, commit: PushCommit) -> CommitResult:
        """Has a contribution counted."""
        self.has_newest = False
        link, participant = self._member.link, self._member.participant
        result = link.ask(lambda chief: chief.commit_push(participant, commit), what=f"count a push to step {commit.step}")
        self.global_step = max(self.global_step, result.global_step)
        self._note_refusal(commit, result)
        return result

    def await_token(self, commit: PushCommit | None, *, timeout_s: float | None) -> CommitResult | None:
        """Has the contribution counted, waits for a token, or the end, and moves on to it. Raises DeadlineExceeded."""
        self.has_newest = False
        grant = self._tokens.wait(local_step=self.local_step, commit=commit, timeout_s=timeout_s)
        self.is_finished, self.global_step = grant.is_finished, max(self.global_step, grant.global_step)
        if not grant.is_finished and (grant.settings_version, grant.reads_latest) != (self._settings_version, self.policy.reads_latest):
            self.hear_policy()
            self._settings_version = grant.settings_version
        if grant.is_finished or not self.follows_reads:
            self.local_step = grant.step
        if commit is not None and grant.commit is not None:
            self._note_refusal(commit, grant.commit)
        return grant.commit

    def _note_refusal(self, commit: PushCommit, result: CommitResult) -> None:
        outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE else result.outcome
        if outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self.refused.append(commit.push_id.sequence)

    def finish(self, reason: str) -> int:
        """Ends the training of all and returns the last step."""
        self.has_newest = False
        last_step = self._member.link.ask(lambda chief: chief.finish(reason=reason), what="finish")
        if not self.is_finished:
            self.local_step, self.is_finished = last_step, True
        return last_step

    def hear_policy(self) -> None:
        """Takes note of a policy that somebody else may have set: the answer on the agreed model has it. Asks for no token."""
        if self._joined is None:
            return
        link, participant, before = self._member.link, self._member.participant, self.policy
        reply = agree(self._joined.model, link=link, participant=participant, max_wait_s=0.0, create=False)
        self.policy, self.global_step = reply.policy, max(self.global_step, reply.global_step)
        if self.policy.reads_latest and not before.reads_latest:
            self.local_step = max(self.local_step, reply.global_step)


class Training:
    """Reads the variables of the worker's steps and gives contributions to them. For one thread."""

    def __init__(self, joined: Joined, *, member: Membership, progress: Progress) -> None:
        self._member = member
        self._progress = progress
        self._shards = member.shards()
        self._who = f"worker {member.participant.index}"
        self._timeout_s = member.link.timeout_s
        self._variables = joined.variables
        self._outgoing = Outgoing(joined.gradients)
        self.staging = Staging(joined.model, joined.gradients)
        self.reader = ModelReader(
            joined.model,
            layouts=joined.variables.layouts,
            shards=self._shards,
            who=self._who,
            timeout_s=self._timeout_s,
            applies_on_arrival=member.applies_on_arrival,
        )
        self._held_step: int | None = None
        self._sequence = 0

    def read(self) -> dict[str, Array]:
        """Returns the dense variables of the worker's step, or the newest."""
        self._hear_of_end()
        self._fetch()
        self._progress.has_newest = False  # the next asks anew
        return dict(self._variables.views)

    def read_rows(self, name: str, indices: object) -> Array:
        """Returns rows of a table, of the worker's step, or the newest."""
        self._hear_of_end()
        patience = Patience(f"{self._who} reads rows of {name!r}", timeout_s=self._timeout_s)
        while not self._progress.policy.reads_latest:
            try:
                return self.reader.rows(name, indices, step=self._progress.local_step).values
            except StepGone as error:
                if self._held_step == self._progress.local_step:
                    # The step has moved on by two since its variables were read; what is computed from them will be dropped anyway.
                    break
                self._move_on(patience, error)
        rows = self.reader.rows(name, indices, step=None, is_aligned=not self._progress.policy.applies_on_arrival)
        if not self._variables.views and rows.step is not None and self._progress.follows_reads:
            self._progress.local_step = rows.step
        return rows.values

    def stage(self, gradients: Gradients, *, updates: Updates | None, metrics: Metrics | None) -> PushCommit:
        """Gives all shards their parts of a contribution; it counts with the commit that is returned."""
        step = self._progress.local_step
        numbers = as_metrics(metrics) if metrics else {}
        parts = self._outgoing.parts(self.staging.stage(gradients, step=step, updates=updates))
        # A new number even if the last push failed: what that one left on some shards is never counted.
        self._sequence += 1
        participant = self._member.participant
        push_id = PushId(worker=participant.index, incarnation=participant.incarnation, sequence=self._sequence)
        try:
            results = self._push(parts, push_id=push_id, step=step, metrics=numbers)
        except BaseException:
            self._progress.refused.append(push_id.sequence)
            raise
        applies_on_arrival = self._progress.policy.applies_on_arrival
        if (PushResult.STAGED if applies_on_arrival else PushResult.APPLIED) in results:
            self._progress.hear_policy()
        is_whole, is_applied = _fate(results, applies_on_arrival=applies_on_arrival)
        return PushCommit(push_id=push_id, step=step, staged=is_whole, is_applied=is_applied)

    def _push(self, parts: Sequence[ShardPart], *, push_id: PushId, step: int, metrics: Mapping[str, Metric]) -> Collection[PushResult]:
        patience: Patience | None = None
        while True:
            try:
                results = self._shards.push(
                    parts,
                    layout_hashes=self._outgoing.layout_hashes,
                    push_id=push_id,
                    step=step,
                    metrics=metrics,
                    refused=tuple(self._progress.refused),
                )
                self._progress.refused.clear()
                return results
            except TooManyPushes as error:
                if not self._progress.policy.accepts_stale:
                    raise
                # Where nobody waits, what was given before may not be applied yet: a token comes when it is.
                patience = patience or Patience(f"{self._who} pushes to step {step}", timeout_s=self._timeout_s)
                patience.explain(error.message)
                self._progress.await_token(None, timeout_s=patience.left_s())
                if self._progress.is_finished or not self._progress.policy.accepts_stale:
                    return [PushResult.STALE]  # nobody will apply it any more

    def step(self, commit: PushCommit, *, timeout_s: float | None) -> Push:
        """Has a contribution counted, waits for the token and reads, in the fewest calls."""
        result = self._progress.await_token(commit, timeout_s=timeout_s)
        if result is None:
            raise InternalError("the chief gave a token and did not say what became of the contribution that rode along")
        push = push_of(result, step=commit.step)
        if not self._progress.is_finished:
            self._fetch()
        return push

    def _hear_of_end(self) -> None:
        if self._member.is_finished and not self._progress.is_finished:
            self._progress.await_token(None, timeout_s=self._timeout_s)  # answered at once, with the last step

    def _fetch(self) -> None:
        if self._held_step == self._progress.local_step and not self._progress.policy.reads_latest:
            return
        patience = Patience(f"{self._who} reads the variables", timeout_s=self._timeout_s)
        while not self._progress.policy.reads_latest:
            if self._held_step == self._progress.local_step:
                return
            self._held_step = None
            try:
                self._shards.read(self._variables, step=self._progress.local_step)
                self._held_step = self._progress.local_step
            except StepGone as error:
                self._move_on(patience, error)
        self._fetch_latest()

    def _move_on(self, patience: Patience, error: StepGone) -> None:
        """The worker's step is no longer kept: others went on without it, or the policy is no longer that of steps."""
        patience.explain(error.message)
        self._progress.hear_policy()
        if not self._progress.policy.reads_latest:
            self._progress.await_token(None, timeout_s=self._timeout_s)  # answered at once: the step has moved on

    def _fetch_latest(self) -> None:
        if self._progress.has_newest:
            return
        progress = self._progress
        self._held_step = None
        step = self._shards.read_latest(self._variables, is_aligned=not progress.policy.applies_on_arrival)
        progress.has_newest = True
        if progress.is_finished:
            return
        if progress.policy.applies_on_arrival or step is None:
            # Shards count arrivals, each its own; the chief's count is the step.
            progress.local_step = max(progress.local_step, progress.global_step)
        elif progress.follows_reads:
            progress.local_step = step


def _fate(results: Collection[PushResult], *, applies_on_arrival: bool) -> tuple[bool, bool]:
    """Whether a contribution can count, and whether it is applied: shards that are told of another policy meanwhile may disagree."""
    found = frozenset(results) - {PushResult.DUPLICATE}
    if len(found) > 1 or PushResult.STALE in found:
        return False, False
    # All of them had it before, and the answers were lost: what became of it then follows from the policy.
    return True, PushResult.APPLIED in found or (not found and applies_on_arrival)
