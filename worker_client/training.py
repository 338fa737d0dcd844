"""A worker's loop over the steps: what it reads and what it gives. Knows shards by their seam, and where it stands; no user's words."""

from collections.abc import Collection, Mapping, Sequence

from ps_protocol.chief import PushCommit
from ps_protocol.errors import InternalError, StepGone, TooManyPushes
from ps_protocol.shard import Metric, PushId, PushResult
from ps_protocol.tensors import Array
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


class Training:
    """Reads the variables of the worker's steps and gives contributions to them. For one thread."""

    def __init__(self, joined: Joined, *, member: Membership, progress: Progress) -> None:
        self._member = member
        self._progress = progress
        self._shards = member.shards()
        self._who = f"worker {member.participant.index}"
        self._timeout_s = member.link.timeout_s
        self._layouts = joined.variables.layouts
        self._variables = VariableMemory(joined.model, joined.variables, self._shards)
        self._outgoing = Outgoing(self._layouts, wire=member.link.wire, travels=self._shards.memories.travels)
        self._gradients = GradientMemory(joined.model, joined.gradients, self._shards.memories.gradients)
        self._gives_several = joined.gives_several
        self.reader = ModelReader(
            joined.model,
            layouts=self._layouts,
            shards=self._shards,
            who=self._who,
            timeout_s=self._timeout_s,
            applies_on_arrival=member.applies_on_arrival,
        )
        self._sequence = 0
        self._last: PushCommit | None = None  # what was staged last
        self._was_strict = False  # whether it was under the strict policy sync

    def read(self, *, copy: bool) -> dict[str, Array]:
        """Returns the dense variables of the worker's step, or the newest; with `copy` in arrays of the caller's own."""
        self._hear_of_end()
        self._fetch()
        self._progress.has_newest = False  # the next asks anew
        return self._copied() if copy else dict(self._variables.views)

    def gradients(self) -> dict[str, Array]:
        """Returns arrays to write the next contribution into."""
        policy = self._progress.policy
        may_overlap = self._gives_several or (policy.reads_latest and not policy.applies_on_arrival)
        return dict(self._gradients.ask(may_overlap=may_overlap).views)

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

    def stage(self, gradients: Gradients, *, updates: Updates | None, metrics: Metrics | None) -> PushCommit:
        """Gives all shards their parts of a contribution; it counts with the commit that is returned."""
        step = self._progress.local_step
        numbers = as_metrics(metrics) if metrics else {}
        staged = self._gradients.staging_for(gradients).stage(gradients, step=step, updates=updates)
        parts = self._outgoing.parts(staged, is_last_counted=self._sequence not in self._progress.refused)
        # A new number even if the last push failed: what that one left on some shards is never counted.
        self._sequence += 1
        participant = self._member.participant
        push_id = PushId(worker=participant.index, incarnation=participant.incarnation, sequence=self._sequence)
        try:
            results = self._push(parts, push_id=push_id, step=step, metrics=numbers)
        except BaseException:
            self._progress.refused.append(push_id.sequence)
            raise
        finally:
            self._gradients.note_push()
        policy = self._progress.policy
        applies_on_arrival, self._was_strict = policy.applies_on_arrival, not self._progress.reads_latest
        if (PushResult.STAGED if applies_on_arrival else PushResult.APPLIED) in results:
            self._progress.hear_policy()
        is_whole, is_applied = _fate(results, applies_on_arrival=applies_on_arrival)
        self._last = PushCommit(push_id=push_id, step=step, staged=is_whole, is_applied=is_applied)
        return self._last

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
        try:
            result = progress.await_token(commit, timeout_s=timeout_s)
        finally:
            self.settle()
        if result is None:
            raise InternalError("the chief gave a token and did not say what became of the contribution that rode along")
        push = push_of(result, step=commit.step)
        if not progress.is_finished:
            self._fetch()
        return push

    def settle(self) -> None:
        """Sees to it that nobody writes into a contribution that may be under way, and that the user can write where it is over."""
        last, progress = self._last, self._progress
        is_next_step = self._was_strict and not progress.reads_latest and last is not None and progress.local_step > last.step
        if is_next_step or last is None or last.is_applied or progress.is_finished:
            self._gradients.release()
        else:
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
