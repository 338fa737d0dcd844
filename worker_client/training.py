"""A worker's loop over the steps: what it reads and what it gives. Knows shards by their seam, and where it stands; no user's words."""

from collections.abc import Collection, Mapping, Sequence

from ps_protocol.chief import CommitResult, PushCommit
from ps_protocol.errors import EpochMismatch, InternalError, StepGone, TooManyPushes
from ps_protocol.shard import Metric, PushId, PushResult
from ps_protocol.tensors import Array
from worker_client.finite_gradients import FiniteGradients
from worker_client.gradient_memory import GradientMemory
from worker_client.gradients import Gradients, Updates
from worker_client.joining import Joined
from worker_client.membership import Membership
from worker_client.model_reader import ModelReader
from worker_client.outcomes import Push, push_of
from worker_client.outgoing import Metrics, Outgoing, ShardPart, as_metrics
from worker_client.patience import Patience
from worker_client.progress import Progress
from worker_client.variable_memory import VariableMemory

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

    def gradients(self) -> dict[str, Array]:
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
