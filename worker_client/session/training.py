"""One worker's loop over the steps: what it reads, gives and waits for, and how it goes on where the cluster does. Knows no options."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ps_protocol.errors import Cancelled, EpochMismatch, InternalError, PsError, StepGone, StepNotReady, TooManyPushes
from ps_protocol.model.data import DataRange
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.chief import (
    DEFAULT_POLICY,
    CommitResult,
    Participant,
    PushCommit,
    PushOutcome,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.shard import Metric, PushId, PushResult
from worker_client.cluster.waiting import Patience
from worker_client.model.declarations import Declared
from worker_client.model.gradients import FiniteGradients, Gradients, Metrics, Outgoing, ShardPart, Updates, as_metrics, no_gradients
from worker_client.model.lending import GradientMemory
from worker_client.session.joining import Joined, agree, join_again, join_model
from worker_client.session.membership import LOST, Membership
from worker_client.session.outcomes import Push, push_of
from worker_client.session.reading import ModelReader, VariableMemory

# Waits for the chief's tokens, and says what for. Knows the chief and requests; no variables and no shards.


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How a wait ended: the step of the token, or the last step if training is finished; and what became of the commit that rode along.

    `global_step` is the open step; `settings_version` grows whenever the cluster's policy is changed; `reads_latest`: the newest variables
    are to be read, not exactly those of `step`. `shards_version` grows whenever other servers hold the shards than before.
    """

    step: int
    is_finished: bool
    commit: CommitResult | None
    global_step: int
    settings_version: int
    reads_latest: bool
    shards_version: int = 0


class TokenWaiter:
    """One worker's wishes for a token. A wish that timed out is taken up again by the next wait, so that none is granted twice."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._commits = member.commits
        self._request_id = 1

    def wait(self, participant: Participant, *, local_step: int, commit: PushCommit | None, timeout_s: float | None) -> Grant:
        """Counts the commit, then blocks until there is a token or the end of training; after 2 s it logs what it waits for.

        Raises DeadlineExceeded with the same words; the commit has been counted nevertheless.
        """
        patience = Patience(f"worker {participant.index} wants a token after step {local_step}", timeout_s=timeout_s)
        committed: CommitResult | None = None
        if commit is not None:
            self._commits.sent(commit)
        while True:
            reply = self._ask(participant, local_step, commit if committed is None else None, patience)
            if committed is None and reply.commit is not None and commit is not None:
                committed = reply.commit
                self._commits.answered(commit, committed, global_step=reply.global_step)
                self._member.link.note_outcome(commit, committed, epoch=participant.epoch)
            if reply.result is not TokenResult.WAIT:
                self._request_id += 1
                return Grant(
                    step=reply.step,
                    is_finished=reply.result is TokenResult.FINISHED,
                    commit=committed,
                    global_step=max(reply.step, reply.global_step),
                    settings_version=reply.settings_version,
                    reads_latest=reply.reads_latest,
                    shards_version=reply.shards_version,
                )
            patience.explain(reply.waiting_for)

    def forget(self) -> None:
        """A wish that was under way is of an epoch that is over."""
        self._request_id += 1

    def _ask(self, participant: Participant, local_step: int, commit: PushCommit | None, patience: Patience) -> TokenReply:
        max_wait_s, request_id = patience.slice_s(), self._request_id
        return self._member.ask(
            lambda chief: chief.dequeue_token(
                participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
            participant=participant,
            what=f"a token after step {local_step}",
            timeout_s=patience.left_s(),
            expected_s=max_wait_s,
        )


# Where a worker stands in the training, and how it moves on. Knows the chief by its seam; no variables and no shards.


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


# A worker's loop over the steps: what it reads and what it gives. Knows shards by their seam, and where it stands; no user's words.


_STAGED = frozenset({PushResult.STAGED})
_LOOK_AGAIN_S = 0.001


class Training:
    """Reads the variables of the worker's steps and gives contributions to them. For one thread.

    It is the training of one participant: once that one's epoch is over, every call raises what servers and chief raise then.
    `num_pushes`: how many contributions had their numbers before.
    """

    def __init__(self, joined: Joined, *, member: Membership, progress: Progress, num_pushes: int = 0) -> None:
        self._member = member
        self.joined = joined
        self.participant = progress.participant
        self._progress = progress
        self._shards = member.shards()
        self._who = f"worker {member.participant.index}"
        self._timeout_s = member.link.timeout_s
        self._layouts = joined.variables.layouts
        self._variables = VariableMemory(joined.model, joined.variables, self._shards)
        self._outgoing = Outgoing(self._layouts, wire=member.link.wire, travels=self._shards.memories.travels)
        memories = self._shards.memories
        self._gradients = GradientMemory(joined.model, joined.gradients, give=memories.gradients, give_kept=memories.kept)
        self._gives_several = joined.gives_several
        self._finite = FiniteGradients(joined.model)
        self.reader = ModelReader(
            joined.model,
            layouts=self._layouts,
            shards=self._shards,
            who=self._who,
            timeout_s=self._timeout_s,
            applies_on_arrival=member.applies_on_arrival,
        )
        self.num_pushes = num_pushes
        self._lent: PushCommit | None = None  # what was sent last from memory of shards that the user has

    def read(self, *, copy: bool) -> dict[str, Array]:
        """Returns the dense variables of the worker's step, or the newest; with `copy` in arrays of the caller's own."""
        self._hear_of_end()
        self._fetch()
        self._progress.has_newest = False  # the next asks anew
        return self._copied() if copy else dict(self._variables.views)

    def gradient_buffers(self) -> dict[str, Array]:
        """Returns arrays to write the next contribution into."""
        self._settle()
        return dict(self._gradients.ask(may_overlap=self._may_overlap).views)

    @property
    def _may_overlap(self) -> bool:
        """Whether a contribution may be under way when the worker computes the next one: any but strict sync with at most one a step."""
        return self._progress.reads_latest or self._gives_several

    def read_rows(self, name: str, indices: object) -> Array:
        """Returns rows of a table, of the worker's step, or the newest."""
        self._hear_of_end()
        patience = Patience(f"{self._who} reads rows of {name!r}", timeout_s=self._timeout_s)
        while not self._progress.reads_latest:
            try:
                return self.reader.rows(name, indices, step=self._progress.local_step).values
            except StepGone as error:
                if self._variables.step == self._progress.local_step:
                    # The step has moved on by two since its variables were read; what is computed from them will be dropped anyway.
                    break
                self._move_on(patience, error)
        rows = self.reader.rows(name, indices, step=None, is_aligned=not self._progress.policy.applies_on_arrival)
        if not self._variables.views and rows.step is not None and self._progress.follows_reads:
            self._progress.local_step = rows.step
        return rows.values

    def check_place(self) -> None:
        """Raises EpochMismatch if the worker has become another participant; asks nobody."""
        if self._member.participant is not self.participant:
            raise EpochMismatch(f"{self._who} has registered again since it read its variables")

    def release(self) -> None:
        """Whatever was under way is over: the user may write again into all memory that he has."""
        self._gradients.settle(is_over=True)
        self._lent = None

    def stage(
        self,
        gradients: Gradients | None,
        *,
        updates: Updates | None,
        metrics: Metrics | None,
        is_waited_for: bool,
        ranges: tuple[int, ...] = (),
    ) -> PushCommit:
        """Gives all shards their parts of a contribution; it counts with the commit that is returned.

        `gradients` None: for no variable. `is_waited_for`: the user gets no word before there is a token; so in strict sync what he has of
        the shards' memory is not copied. `ranges`: what it was made from.
        """
        participant = self.participant
        self.check_place()
        self._settle()
        step = self._progress.local_step
        numbers = as_metrics(metrics) if metrics else {}
        staging = self._gradients.staging_for(gradients or {}, may_lend=is_waited_for and not self._may_overlap)
        staged = staging.nothing() if gradients is None else staging.stage(gradients, step=step, updates=updates)
        if self._member.registration.rejects_nonfinite and gradients is not None:
            self._finite.check(staged, who=f"{self._who}, step {step}")
        parts = self._outgoing.parts(staged, is_last_counted=self.num_pushes not in self._progress.refused)
        # A new number even if the last push failed: what that one left on some shards is never counted.
        self.num_pushes += 1
        push_id = PushId(worker=participant.index, incarnation=participant.incarnation, sequence=self.num_pushes)
        try:
            results = self._push(parts, push_id=push_id, step=step, metrics=numbers)
        except BaseException:
            self._progress.refused.append(push_id.sequence)
            raise
        applies_on_arrival = self._progress.policy.applies_on_arrival
        if (PushResult.STAGED if applies_on_arrival else PushResult.APPLIED) in results:
            self._progress.hear_policy()
        is_whole, is_applied = _fate(results, applies_on_arrival=applies_on_arrival)
        commit = PushCommit(push_id=push_id, step=step, staged=is_whole, is_applied=is_applied, ranges=ranges)
        if self._gradients.note_push(staging):
            self._lent = commit
        return commit

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
        progress = self._progress
        if not progress.reads_latest:
            self._shards.expect(self._layouts, step=commit.step + 1)
        result = self._await_token(commit, timeout_s=timeout_s)
        if result is None:
            raise InternalError("the chief gave a token and did not say what became of the contribution that rode along")
        push = push_of(result, step=commit.step)
        self.look()
        return push

    def look(self) -> None:
        """Holds the variables of the worker's step, as a step leaves them; nothing once training is finished."""
        if not self._progress.is_finished:
            self._fetch()

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits for a token, or the end of training."""
        if not self._progress.is_finished:
            self._await_token(None, timeout_s=timeout_s)

    def _await_token(self, commit: PushCommit | None, *, timeout_s: float | None) -> CommitResult | None:
        try:
            result = self._progress.await_token(commit, timeout_s=timeout_s)
        except BaseException:
            self._settle()
            self._gradients.protect()
            raise
        if not self._settle():
            self._await_end_of_lent(timeout_s)
        return result

    def _settle(self) -> bool:
        """Lets the user write again into the shards' memory that he has, if what was sent from there is over; returns whether it is."""
        lent, progress = self._lent, self._progress
        if lent is None:
            return True
        is_next_step = not progress.reads_latest and progress.local_step > lent.step
        is_refused = lent.push_id.sequence in progress.refused
        if self._gradients.settle(is_over=is_next_step or lent.is_applied or progress.is_finished or is_refused):
            self._lent = None
        return self._lent is None

    def _await_end_of_lent(self, timeout_s: float | None) -> None:
        """There is a token, and what was sent from the user's arrays is still under way: he must not write there before it is over."""
        if not self._progress.reads_latest:
            # The step's token once more: this worker gives several contributions to a step, and from now on each is copied.
            self._gives_several = True
        # Another policy came meanwhile; what had been counted is applied soon, unless that takes more from this worker.
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        patience = Patience(f"{self._who} waits for the end of its last contribution", timeout_s=limit_s)
        while not self._gives_several and not self._settle() and patience.left_s() and not self._member.is_finished:
            patience.pause(_LOOK_AGAIN_S)
        self._gradients.protect()

    def _hear_of_end(self) -> None:
        if self._member.is_finished and not self._progress.is_finished:
            self._progress.await_token(None, timeout_s=self._timeout_s)  # answered at once, with the last step

    def _fetch(self) -> None:
        progress, variables = self._progress, self._variables
        if self._holds_step():
            return
        patience: Patience | None = None
        while not progress.reads_latest:
            try:
                # Later nobody writes there again, but the servers go away.
                variables.fetch(progress.local_step, may_view=not progress.is_finished)
                return
            except StepGone as error:
                patience = patience or Patience(f"{self._who} reads the variables", timeout_s=self._timeout_s)
                self._move_on(patience, error)
        self._fetch_latest()

    def _holds_step(self) -> bool:
        progress, variables = self._progress, self._variables
        if variables.step != progress.local_step or progress.reads_latest:
            return False
        return not (progress.is_finished and variables.is_lent)

    def _copied(self) -> dict[str, Array]:
        patience = Patience(f"{self._who} copies the variables", timeout_s=self._timeout_s)
        while self._variables.is_lent:
            try:
                return self._variables.copied(self._progress.local_step)
            except StepGone as error:
                self._variables.step = None
                self._move_on(patience, error)
                self._fetch()
        return self._variables.copied_held()

    def _move_on(self, patience: Patience, error: StepGone) -> None:
        """The worker's step is no longer kept: others went on without it, or the policy is no longer that of steps."""
        patience.explain(error.message)
        self._progress.hear_policy()
        if not self._progress.reads_latest:
            self._progress.await_token(None, timeout_s=self._timeout_s)  # answered at once: the step has moved on

    def _fetch_latest(self) -> None:
        if self._progress.has_newest:
            return
        progress = self._progress
        step = self._variables.fetch_latest(is_aligned=not progress.policy.applies_on_arrival)
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
    found = frozenset(results)
    if found == _STAGED:
        return True, False
    found -= {PushResult.DUPLICATE}
    if len(found) > 1 or PushResult.STALE in found:
        return False, False
    # All of them had it before, and the answers were lost: what became of it then follows from the policy.
    return True, PushResult.APPLIED in found or (not found and applies_on_arrival)


# A session's way through the training, on which it goes on where the cluster goes on. Knows the place, the training and its results.
#
# A training belongs to one participant. When the epoch rises (the cluster was brought back to a checkpoint), or the worker had been taken
# for gone, its place is taken again, and a new training begins at the step that stands then. What was pushed before that is rolled back.


log = logging.getLogger("lockstep.worker")

Result = TypeVar("Result")

# What a worker's own reading ends with besides: it has a token for its step, so a server that has come less far has begun anew.
_LOST_OR_BEHIND = (*LOST, StepNotReady)
# How long the chief may take to say why it has gone back.
_STATUS_S = 1.0


class Course:
    """Does what a user asks of the training, at the worker's present place. For one thread.

    `num_rollbacks`: how often it has begun again in another epoch, or another life of the cluster.
    """

    def __init__(self, member: Membership) -> None:
        self.progress = Progress(member)
        self.num_rollbacks = 0
        # Of the training data: what the next contribution is made from, whether some of it has gone back to the chief, and what the worker
        # still has of a contribution that was not sent for that.
        self._ranges: tuple[DataRange, ...] = ()
        self._has_lost_ranges = False
        self._unused: tuple[DataRange, ...] = ()
        self._skipped: tuple[DataRange, ...] = ()
        self._member = member
        self._who = f"worker {member.participant.index}"
        self.training: Training | None = None  # at the present place; None before there is a model

    def use(self, given: DataRange) -> None:
        """The next contribution is made from this range as well."""
        self._ranges += (given,)

    def take_back(self) -> tuple[DataRange, ...]:
        """Returns the ranges that no contribution is going to be made from, though this worker has them still; forgets them."""
        unused, self._unused = self._unused, ()
        return unused

    def join(self, declared: Declared, *, create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it."""
        member, patience = self._member, Patience(f"{self._who} joins the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_model(declared, member=member, create=create, patience=patience)
                self.progress.begin(joined, may_contribute=registration.may_contribute, timeout_s=timeout_s)
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
                self.progress = Progress(member)
        self.training = Training(joined, member=member, progress=self.progress)
        member.note_model(joined.model)
        return joined.has_initialized

    def do(self, act: Callable[[Training], Result]) -> Result:
        """Returns what `act` returns; does it again where the worker has come back elsewhere."""
        while True:
            training = self._present()
            try:
                return act(training)
            except _LOST_OR_BEHIND as error:
                self._come_back(training, error, timeout_s=None)

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits for a token; after a rollback there is one for the step that stands."""
        training = self._present()
        try:
            training.wait(timeout_s=timeout_s)
        except LOST as error:
            self._come_back(training, error, timeout_s=timeout_s)

    def push(self, gradients: Gradients, *, updates: Updates | None, metrics: Metrics | None) -> Push:
        """Gives one contribution and has it counted."""
        if gradients is None:
            raise no_gradients()

        def give(training: Training, commit: PushCommit) -> Push:
            return push_of(self.progress.commit(commit), step=commit.step)

        return self._contribute(give, gradients, updates=updates, metrics=metrics, is_waited_for=False, timeout_s=None)

    def step(
        self, gradients: Gradients, *, updates: Updates | None = None, metrics: Metrics | None = None, timeout_s: float | None = None
    ) -> Push:
        """Gives one contribution, has it counted, waits for a token and reads."""
        if gradients is None:
            raise no_gradients()
        give = partial(Training.step, timeout_s=timeout_s)
        return self._contribute(give, gradients, updates=updates, metrics=metrics, is_waited_for=True, timeout_s=timeout_s)

    def step_with_nothing(self, *, timeout_s: float | None) -> Push:
        """As `step()`, with a contribution that has no gradient for any variable, and so counts in no mean."""
        give = partial(Training.step, timeout_s=timeout_s)
        return self._contribute(give, None, updates=None, metrics=None, is_waited_for=True, timeout_s=timeout_s)

    @property
    def num_unnamed(self) -> int:
        """How many ranges have no contribution made from them yet."""
        return len(self._ranges)

    def skip(self, *, timeout_s: float | None) -> None:
        """Has the ranges count as done that no contribution was made from: with one that has no gradient for any variable."""
        ranges, self._ranges = self._ranges, ()
        self._skipped = ranges
        try:
            self.step_with_nothing(timeout_s=timeout_s)
        finally:
            self._skipped = ()

    def _contribute(
        self,
        give: Callable[[Training, PushCommit], Push],
        gradients: Gradients | None,
        *,
        updates: Updates | None,
        metrics: Metrics | None,
        is_waited_for: bool,
        timeout_s: float | None,
    ) -> Push:
        training, step = self._present(), self.progress.local_step
        if gradients is not None and self._has_lost_ranges:
            # Made from samples that others may get now: it would count them twice.
            self._has_lost_ranges, self._unused, self._ranges = False, self._ranges, ()
            return Push(outcome=PushOutcome.ROLLED_BACK, step=step, global_step=self.progress.global_step)
        commit: PushCommit | None = None
        ranges = self._ranges if gradients is not None else self._skipped
        try:
            ids = tuple(given.id for given in ranges)
            commit = training.stage(gradients, updates=updates, metrics=metrics, is_waited_for=is_waited_for, ranges=ids)
            if gradients is not None:
                self._ranges = ()
            return give(training, commit)
        except _LOST_OR_BEHIND as error:
            known = commit is not None and self._member.commits.is_accepted(commit)
            if gradients is not None:
                self._ranges = ()  # what becomes of this contribution becomes of them
            self._come_back(training, error, timeout_s=timeout_s)
            push = self._fate(commit, step=step, giver=training.participant, is_known=known)
        if is_waited_for:
            self.do(Training.look)
        return push

    def _fate(self, commit: PushCommit | None, *, step: int, giver: Participant, is_known: bool) -> Push:
        """What became of a contribution whose participant is no more."""
        progress = self.progress
        result: CommitResult | None = None
        if commit is not None and commit.staged and giver.era == progress.participant.era and is_known:
            # The chief has said so, and no epoch has risen since, nor has the cluster begun anew.
            result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=progress.global_step, applied_step=commit.step)
        elif commit is not None and commit.staged and step < progress.local_step and not progress.reads_latest:
            result = self._asked_fate(commit)
        if result is not None:
            push = push_of(result, step=step)
            if push.is_accepted:
                return push
        return Push(outcome=PushOutcome.ROLLED_BACK, step=step, global_step=progress.global_step)

    def _asked_fate(self, commit: PushCommit) -> CommitResult | None:
        """The checkpoint may be of a step that has it, whose answer was on its way."""
        participant = self.progress.participant
        if (commit.push_id.worker, commit.push_id.incarnation) != (participant.index, participant.incarnation):
            return None
        try:
            return self.progress.fate(commit)
        except LOST:
            return None

    def _present(self) -> Training:
        training = self.training
        assert training is not None
        return training

    def _come_back(self, training: Training, cause: PsError, *, timeout_s: float | None) -> None:
        """Takes the training up at the worker's new place; raises the cause if it has none. May be called again after an error."""
        cause = self._leave_place_of(training.participant, cause)
        member, former = self._member, training.participant
        patience = Patience(f"{self._who} comes back to the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_again(training.joined, member=member, patience=patience)
                self.progress.begin_again(joined, registration, timeout_s=patience.left_s())
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
        training.release()
        self._has_lost_ranges, self._ranges, self._unused = self._has_lost_ranges or bool(self._ranges), (), ()
        self.training = Training(joined, member=member, progress=self.progress, num_pushes=training.num_pushes)
        if registration.participant.era != former.era:
            self.num_rollbacks += 1
        log.warning("%s: %s", self._who, self._words(registration.participant, former, cause))
        # It holds the frames that it came through, and so this one: if that held it too, the variables of servers that are gone would stay.
        del cause

    def _words(self, participant: Participant, former: Participant, cause: PsError) -> str:
        """Says where the worker goes on, and why there."""
        step = self.progress.local_step
        if participant.era == former.era:
            # What was closed under it was closed because of that.
            why = "its lease had ended" if isinstance(cause, Cancelled) else _without_advice(cause)
            return f"goes on at step {step} as incarnation {participant.incarnation}: {why}"
        with suppress(PsError):
            found = self._member.status(max_ledger_entries=0, timeout_s=_STATUS_S)
            if found.epoch == participant.epoch and f"(epoch {found.epoch})" in found.last_rollback:
                is_there = found.last_rollback.startswith(f"rolled back to step {step} ")
                return found.last_rollback if is_there else f"{found.last_rollback}; goes on at step {step}"
        return f"rolled back to step {step} (epoch {participant.epoch}): {_without_advice(cause)}"

    def _leave_place_of(self, participant: Participant, cause: PsError) -> PsError:
        """Returns, with the best words for why, once the member is another participant; raises the cause if it stays this one."""
        member = self._member
        if member.participant is not participant:
            return cause
        if isinstance(cause, Cancelled):
            raise cause
        return member.await_new_place(participant, cause)


def _without_advice(cause: PsError) -> str:
    """What its last words ask for has been done."""
    return cause.message.removesuffix(" Connect again").removesuffix(" Register again").rstrip(".")
