"""The loop over the steps of one participant: what it reads, gives and waits for. Knows shards and chief by their seams; no user's words.

Once the participant's epoch is over, every call raises what servers and chief raise then; `loop` begins the next one's.
"""

from collections.abc import Mapping, Sequence

from ps_protocol.errors import EpochMismatch, InternalError, StepGone, TooManyPushes
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.history import note_outcome
from ps_protocol.roles.chief import CommitResult, PushCommit, PushOutcome, TokenResult
from ps_protocol.roles.shard import Metric, PushId, PushResult
from worker_client.cluster.waiting import Wait
from worker_client.model.gradients import FiniteGradients, Gradients, Metrics, ShardPart, ShardParts, Updates, as_metrics
from worker_client.model.lending import GradientMemory
from worker_client.session.joining import Joined, agree
from worker_client.session.membership import Membership
from worker_client.session.outcomes import Push, push_of
from worker_client.session.reading import ModelReader, VariableMemory
from worker_client.session.state import WorkerState

_LOOK_AGAIN_S = 0.001


class Training:
    """Reads the variables of one participant's steps and gives contributions to them. For one thread. `state`: where it stands."""

    def __init__(self, joined: Joined, *, member: Membership, state: WorkerState) -> None:
        self.joined = joined
        self.state = state
        self.participant = state.participant
        self._member = member
        self._shards = member.shards()
        self._who = f"worker {state.participant.index}"
        self._timeout_s = member.link.transport.timeout_s
        self._layouts = joined.variables.layouts
        self._variables = VariableMemory(joined.model, joined.variables, self._shards)
        memories = self._shards.memories
        self._shard_parts = ShardParts(self._layouts, wire=member.link.transport.wire, travels=memories.travels)
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
        self._lent: PushCommit | None = None  # what was sent last from memory of shards that the user has

    def begin(self, *, may_contribute: bool, timeout_s: float | None) -> None:
        """Comes to the first step; in strict sync waits for one that takes something from this worker."""
        joined = self.joined
        if self.state.join(policy=joined.policy, global_step=joined.global_step, may_contribute=may_contribute):
            self._await_token(None, timeout_s=timeout_s)

    def check_place(self) -> None:
        """Raises EpochMismatch if the worker has become another participant. Makes no call."""
        if self._member.participant is not self.participant:
            raise EpochMismatch(f"{self._who} has registered again since it read its variables")

    def release(self) -> None:
        """Whatever was under way is over: the user may write again into all memory that he has."""
        self._gradients.unlock(is_over=True)
        self._lent = None

    # -- reading

    def views(self) -> dict[str, Array]:
        """Returns the dense variables of the worker's step, or the newest, where they are."""
        self._hear_of_end()
        self._fetch()
        self.state.has_newest = False  # the next asks anew
        return dict(self._variables.views)

    def read(self) -> dict[str, Array]:
        """Returns the same in arrays of the caller's own."""
        self._hear_of_end()
        self._fetch()
        self.state.has_newest = False  # the next asks anew
        wait = Wait(f"{self._who} reads the variables", timeout_s=self._timeout_s)
        while True:
            try:
                return self._variables.copied()
            except StepGone as error:
                self._variables.step = None
                self._move_on(wait, error)
                self._fetch()

    def read_rows(self, name: str, indices: object) -> Array:
        """Returns rows of a table, of the worker's step, or the newest."""
        self._hear_of_end()
        state, wait = self.state, Wait(f"{self._who} reads rows of {name!r}", timeout_s=self._timeout_s)
        while not state.reads_latest:
            try:
                return self.reader.rows(name, indices, step=state.local_step).values
            except StepGone as error:
                if self._variables.step == state.local_step:
                    # The step has moved on by two since its variables were read; what is computed from them will be dropped anyway.
                    break
                self._move_on(wait, error)
        rows = self.reader.rows(name, indices, step=None, is_aligned=not state.policy.applies_on_arrival)
        if not self._variables.views and rows.step is not None and state.follows_reads:
            state.local_step = rows.step
        return rows.values

    def look(self) -> None:
        """Holds the variables of the worker's step, as a step leaves them; nothing once training is finished."""
        if not self.state.is_finished:
            self._fetch()

    # -- giving

    def gradient_buffers(self) -> dict[str, Array]:
        """Returns arrays to write the next contribution into."""
        self._unlock_lent()
        return dict(self._gradients.ask(may_overlap=self._may_overlap).views)

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
        self.check_place()
        self._unlock_lent()
        state = self.state
        step, numbers = state.local_step, as_metrics(metrics) if metrics else {}
        staging = self._gradients.staging_for(gradients or {}, may_lend=is_waited_for and not self._may_overlap)
        staged = staging.nothing() if gradients is None else staging.stage(gradients, step=step, updates=updates)
        if self._member.registration.rejects_nonfinite and gradients is not None:
            self._finite.check(staged, who=f"{self._who}, step {step}")
        parts = self._shard_parts.parts(staged, is_last_counted=state.num_pushes not in state.refused)
        push_id, hashes = state.number_push(), self._shard_parts.layout_hashes
        try:
            try:
                refused = tuple(state.refused)
                results = self._shards.push(parts, layout_hashes=hashes, push_id=push_id, step=step, metrics=numbers, refused=refused)
                state.refused.clear()
            except TooManyPushes as error:
                if not state.policy.accepts_stale:
                    raise
                results = self._push_when_there_is_room(parts, error.message, push_id=push_id, step=step, metrics=numbers)
        except BaseException:
            state.refused.append(push_id.sequence)
            raise
        if state.contradicts(results):
            self._hear_policy()
        commit = state.pushed(push_id, results, step=step, ranges=ranges)
        if self._gradients.note_push(staging):
            self._lent = commit
        return commit

    def _push_when_there_is_room(
        self, parts: Sequence[ShardPart], why: str, *, push_id: PushId, step: int, metrics: Mapping[str, Metric]
    ) -> list[PushResult]:
        """Without a policy that waits, earlier contributions may not be applied yet: a token comes when they are."""
        state, hashes = self.state, self._shard_parts.layout_hashes
        wait = Wait(f"{self._who} pushes to step {step}", timeout_s=self._timeout_s)
        while True:
            wait.explain(why)
            self._await_token(None, timeout_s=wait.left_s())
            if state.is_finished or not state.policy.accepts_stale:
                return [PushResult.STALE]  # it will never be applied
            try:
                refused = tuple(state.refused)
                results = self._shards.push(parts, layout_hashes=hashes, push_id=push_id, step=step, metrics=metrics, refused=refused)
                state.refused.clear()
                return results
            except TooManyPushes as error:
                why = error.message

    # -- counting and waiting

    def count(self, commit: PushCommit) -> Push:
        """Has a contribution counted."""
        state = self.state
        state.has_newest = False
        failpoint("worker.commit.before")
        state.commits.sent(commit)
        result = self._ask_to_count(commit)
        self._note_answer(commit, result)
        return push_of(result, step=commit.step, is_finished=self.state.is_finished)

    def outcome_of(self, question: PushCommit) -> CommitResult:
        """Asks what became of a contribution whose giver is no more; see `WorkerState.outcome_at_move`."""
        return self._ask_to_count(question)

    def step(self, commit: PushCommit, *, timeout_s: float | None) -> Push:
        """Has a contribution counted, waits for the token and reads, in the fewest calls."""
        if not self.state.reads_latest:
            self._shards.expect(self._layouts, step=commit.step + 1)
        result = self._await_token(commit, timeout_s=timeout_s)
        if result is None:
            raise InternalError("the chief gave a token and did not say what became of the contribution that rode along")
        self.look()
        return push_of(result, step=commit.step, is_finished=self.state.is_finished)

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits for a token, or the end of training."""
        if not self.state.is_finished:
            self._await_token(None, timeout_s=timeout_s)

    def _await_token(self, commit: PushCommit | None, *, timeout_s: float | None) -> CommitResult | None:
        """Has the contribution counted, waits for a token, or the end, and moves on to it. Raises DeadlineExceeded.

        Without one, it is the one of a call that ended before the chief had answered, if there is such.
        """
        state, member = self.state, self._member
        state.has_newest = False
        if commit is None:
            commit = state.commits.unanswered()
        else:
            failpoint("worker.commit.before")
        if commit is not None:
            state.commits.sent(commit)
        participant, local_step, request_id = state.participant, state.local_step, state.request_id
        wait = Wait(f"{self._who} wants a token after step {local_step}", timeout_s=timeout_s)
        result: CommitResult | None = None
        try:
            while True:
                max_wait_s, sent = wait.slice_s(), commit if result is None else None
                reply = member.ask(
                    lambda chief, sent=sent, max_wait_s=max_wait_s: chief.dequeue_token(  # type: ignore[misc]
                        participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=sent
                    ),
                    participant=participant,
                    what=f"a token after step {local_step}",
                    timeout_s=wait.left_s(),
                    expected_s=max_wait_s,
                )
                if result is None and commit is not None and reply.commit is not None:
                    result = reply.commit
                    self._note_answer(commit, result)
                if reply.result is not TokenResult.WAIT:
                    break
                wait.explain(reply.waiting_for)
            has_other_policy = state.granted(reply)
            failpoint("worker.token.after")
            if reply.shards_version != member.registration.shards_version:
                member.hear_of_shards(reply.shards_version)
            if has_other_policy:
                self._hear_policy()
            state.move_on(reply)
        except BaseException:
            self._unlock_lent()
            self._gradients.protect()
            raise
        if not self._unlock_lent():
            self._await_end_of_lent(timeout_s)
        return result

    def _ask_to_count(self, commit: PushCommit) -> CommitResult:
        participant = self.participant
        return self._member.ask(
            lambda chief: chief.commit_push(participant, commit), participant=participant, what=f"count a push to step {commit.step}"
        )

    def _note_answer(self, commit: PushCommit, result: CommitResult) -> None:
        self.state.counted(commit, result)
        if (history := self._member.link.transport.history) is not None:
            outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE and result.first_outcome else result.outcome
            note_outcome(
                history,
                commit.push_id,
                epoch=self.participant.epoch,
                outcome=outcome.name,
                step=commit.step,
                applied_step=result.applied_step,
            )

    def _hear_policy(self) -> None:
        """Learns the policy, which another client may have set, from the answer on the agreed model. Asks for no token."""
        reply = agree(self.joined.model, member=self._member, participant=self.participant, max_wait_s=0.0, create=False)
        self.state.hear_policy(reply.policy, global_step=reply.global_step)

    # -- memory of shards that the user writes into

    @property
    def _may_overlap(self) -> bool:
        """Whether a contribution may be under way when the worker computes the next one: any but strict sync with at most one a step."""
        return self.state.reads_latest or self._gives_several

    def _unlock_lent(self) -> bool:
        """Lets the user write again into the shards' memory that he has, if what was sent from there is over; returns whether it is."""
        lent, state = self._lent, self.state
        if lent is None:
            return True
        is_next_step = not state.reads_latest and state.local_step > lent.step
        is_refused = lent.push_id.sequence in state.refused
        if self._gradients.unlock(is_over=is_next_step or lent.is_applied or state.is_finished or is_refused):
            self._lent = None
        return self._lent is None

    def _await_end_of_lent(self, timeout_s: float | None) -> None:
        """There is a token, and what was sent from the user's arrays is still under way: he must not write there before it is over."""
        if not self.state.reads_latest:
            # The step's token once more: this worker gives several contributions to a step, and from now on each is copied.
            self._gives_several = True
        # Another policy came meanwhile; what had been counted is applied soon, unless that takes more from this worker.
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        wait = Wait(f"{self._who} waits for the end of its last contribution", timeout_s=limit_s)
        while not self._gives_several and not self._unlock_lent() and wait.left_s() and not self._member.is_finished:
            wait.pause(_LOOK_AGAIN_S)
        self._gradients.protect()

    # -- variables

    def _hear_of_end(self) -> None:
        if self._member.is_finished and not self.state.is_finished:
            self._await_token(None, timeout_s=self._timeout_s)  # answered at once, with the last step

    def _fetch(self) -> None:
        state, variables = self.state, self._variables
        if self._holds_step():
            return
        wait: Wait | None = None
        while not state.reads_latest:
            try:
                # Nothing is written there later, but the servers go away.
                variables.fetch(state.local_step, may_view=not state.is_finished)
                return
            except StepGone as error:
                wait = wait or Wait(f"{self._who} reads the variables", timeout_s=self._timeout_s)
                self._move_on(wait, error)
        if not state.has_newest:
            state.read_newest(variables.fetch_latest(is_aligned=not state.policy.applies_on_arrival))

    def _holds_step(self) -> bool:
        state, variables = self.state, self._variables
        if variables.step != state.local_step or state.reads_latest:
            return False
        return not (state.is_finished and variables.is_lent)

    def _move_on(self, wait: Wait, error: StepGone) -> None:
        """The worker's step is no longer kept: others went on without it, or the policy is no longer that of steps."""
        wait.explain(error.message)
        self._hear_policy()
        if not self.state.reads_latest:
            self._await_token(None, timeout_s=self._timeout_s)  # answered at once: the step has moved on
