"""Where a worker stands in the training, and how it moves on. Knows the chief by its seam; no variables and no shards."""

from dataclasses import replace

from ps_protocol.chief import DEFAULT_POLICY, CommitResult, PushCommit, PushOutcome, Registration
from ps_protocol.failpoints import failpoint
from ps_protocol.policy_spec import PolicySpec
from worker_client.joining import Joined, agree
from worker_client.membership import Membership
from worker_client.tokens import TokenWaiter


class Progress:
    """Where a worker stands: its step, the newest step it has heard of, the policy, and whether training is finished. For one thread."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._tokens = TokenWaiter(member)
        self._joined: Joined | None = None
        # Whom this is the progress of: it stays so until it is begun again, whatever has become of the member.
        self.participant = member.participant
        self.local_step = self.global_step = member.registration.global_step
        self.policy = DEFAULT_POLICY
        self.has_newest = False  # of the variables that were read as the newest: nothing has happened since
        self._settings_version = 0
        self.is_finished = False
        # Sequences of contributions that may lie on shards and that nobody will apply: the next push tells the shards.
        self.refused: list[int] = []

    @property
    def policy(self) -> PolicySpec:
        """How the workers are coordinated, as far as this one has heard."""
        return self._policy

    @policy.setter
    def policy(self, policy: PolicySpec) -> None:
        # Asked for several times a step.
        self._policy, self.reads_latest = policy, policy.reads_latest

    @property
    def follows_reads(self) -> bool:
        """Whether gradients belong to the step that was read, whatever the token: where each contribution is a step by itself."""
        return self.policy.accepts_stale and not self.policy.applies_on_arrival

    def begin(self, joined: Joined, *, may_contribute: bool, timeout_s: float | None) -> None:
        """Comes to the step that a new worker begins with; in strict sync waits for one that takes something from it."""
        self._joined, self.policy = joined, joined.policy
        if self.reads_latest:
            self.local_step = max(self.local_step, joined.global_step)
        elif not may_contribute or joined.global_step > self.local_step:
            self.await_token(None, timeout_s=timeout_s)

    def begin_again(self, joined: Joined, registration: Registration, *, timeout_s: float | None) -> None:
        """Comes to the step that the cluster has gone back to, or for a new incarnation to the open one."""
        self.participant = registration.participant
        self._member.commits.begin(self.participant)
        self._tokens.forget()
        self.refused.clear()
        self.has_newest = self.is_finished = False
        self._settings_version = 0
        # Registered before the servers were brought back, it may have been told the step that was open then.
        self.local_step = min(registration.global_step, joined.global_step)
        self.global_step = joined.global_step
        self.begin(joined, may_contribute=registration.may_contribute, timeout_s=timeout_s)

    def commit(self, commit: PushCommit) -> CommitResult:
        """Has a contribution counted."""
        self.has_newest = False
        failpoint("worker.commit.before")
        commits = self._member.commits
        commits.sent(commit)
        result = self._ask_to_count(commit)
        commits.answered(commit, result, global_step=result.global_step)
        self._member.link.note_outcome(commit, result, epoch=self.participant.epoch)
        self.global_step = max(self.global_step, result.global_step)
        self._note_refusal(commit, result)
        return result

    def fate(self, commit: PushCommit) -> CommitResult:
        """Asks what became of a contribution that was not answered before the epoch rose; one that nobody knows is not counted now."""
        return self._ask_to_count(replace(commit, staged=False, is_applied=False, ranges=()))

    def _ask_to_count(self, commit: PushCommit) -> CommitResult:
        participant = self.participant
        return self._member.ask(
            lambda chief: chief.commit_push(participant, commit), participant=participant, what=f"count a push to step {commit.step}"
        )

    def await_token(self, commit: PushCommit | None, *, timeout_s: float | None) -> CommitResult | None:
        """Has the contribution counted, waits for a token, or the end, and moves on to it. Raises DeadlineExceeded.

        Without one, it is the one of a call that ended before the chief had answered, if there is such.
        """
        self.has_newest = False
        if commit is not None:
            failpoint("worker.commit.before")
        else:
            commit = self._member.commits.unanswered()
        grant = self._tokens.wait(self.participant, local_step=self.local_step, commit=commit, timeout_s=timeout_s)
        self.is_finished, self.global_step = grant.is_finished, max(self.global_step, grant.global_step)
        failpoint("worker.token.after")
        if grant.shards_version != self._member.registration.shards_version:
            self._member.hear_of_shards(grant.shards_version)
        self._member.commits.advance(grant.global_step)
        if not grant.is_finished and (grant.settings_version, grant.reads_latest) != (self._settings_version, self.reads_latest):
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
        before = self.policy
        reply = agree(self._joined.model, member=self._member, participant=self.participant, max_wait_s=0.0, create=False)
        self.policy, self.global_step = reply.policy, max(self.global_step, reply.global_step)
        if self.reads_latest and not before.reads_latest:
            self.local_step = max(self.local_step, reply.global_step)
