"""Contributions on their way into a step, and which push ids were seen. Knows push ids, steps and buffers; no lock, no wire.

A contribution is open while its bytes arrive, then staged until its step is applied. Whatever ends it otherwise settles it: it gets an
outcome (a reply or an error), its memory goes back, and its stream is told at the next frame. Memory into which another thread is copying
at that moment goes back when that copy ends (`begin_write`, `end_write`). The caller holds its lock for every call.

Strictly, a contribution belongs to the step of its variables: when that is applied without it, it is stale. Where any step is accepted,
it stays until it is applied or discarded, whatever its step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import Cancelled, ContributionMissing, InvalidSpec, PsError, PushIdReused, StepAhead, Superseded, TooManyPushes
from ps_protocol.shard import Metric, PushHeader, PushId, PushReply, PushResult
from ps_server.staging import StagedGradients, StagingMemory

# Workers whose push ids are remembered; beyond it the one silent longest is forgotten (what it repeats is stale, or still staged).
MAX_WORKERS = 10_000
# Outcomes remembered per worker. A push id older than that which comes again is recognised as long as it is staged, and by its step after.
_OUTCOMES_KEPT = 64


@dataclass(slots=True, eq=False)
class Contribution:
    """One push. `outcome` is what to answer, once that is settled; `memory` is None when it has none."""

    push_id: PushId
    step: int
    metrics: Mapping[str, Metric]
    memory: StagedGradients | None = None
    outcome: PushReply | PsError | None = None
    is_writing: bool = False


@dataclass(slots=True)
class _Seen:
    """What one worker's newest incarnation has pushed."""

    incarnation: int
    outcomes: dict[int, tuple[int, PushResult]] = field(default_factory=dict)


class GradientAccumulator:
    """The contributions of one shard. `max_staged_per_worker` bounds those of one incarnation that are open or staged.

    `accepts_any_step`: contributions of steps gone by, or ahead of this shard's, are taken too.
    """

    def __init__(self, staging: StagingMemory, *, max_staged_per_worker: int) -> None:
        self.max_staged_per_worker = max_staged_per_worker
        self.accepts_any_step = False
        self.num_pushes = 0
        self.num_stale = 0
        self.num_duplicates = 0
        self._staging = staging
        self._open: set[Contribution] = set()
        self._staged: dict[PushId, Contribution] = {}
        self._seen: dict[int, _Seen] = {}
        self._num_held: Counter[tuple[int, int]] = Counter()

    @property
    def num_staged(self) -> int:
        """Contributions that are whole and wait for their step to be applied."""
        return len(self._staged)

    def open(self, header: PushHeader, *, current_step: int) -> Contribution:
        """Takes up a push; with an `outcome` already if there is no use for its bytes.

        Raises Superseded, PushIdReused, StepAhead, TooManyPushes, LimitExceeded, InvalidSpec, and then has changed nothing but what
        supersedes what.
        """
        push_id, step = header.push_id, header.step
        contribution = Contribution(push_id, step, header.metrics)
        self._check_incarnation(push_id)
        result = self._repeated(push_id, step)
        if result is not None:
            contribution.outcome = PushReply(result=result, step=current_step)
            return contribution
        if step > current_step and not self.accepts_any_step:
            raise StepAhead(
                f"local_step {step} is ahead of global_step {current_step}; read the variables again", facts={"step": str(current_step)}
            )
        self._note_incarnation(push_id)
        self._drop_refused(header)
        if step < current_step and not self.accepts_any_step:
            contribution.outcome = self._stale(contribution, current_step)
            return contribution
        self._displace(push_id)
        self._check_room(push_id)
        self._lend(contribution, header)
        return contribution

    def begin_write(self, contribution: Contribution) -> StagedGradients | None:
        """Returns the memory, the caller's to write until `end_write`; None if no more bytes are wanted."""
        if contribution.outcome is not None or contribution.memory is None:
            return None
        contribution.is_writing = True
        return contribution.memory

    def end_write(self, contribution: Contribution) -> None:
        """Ends what `begin_write` began."""
        contribution.is_writing = False
        if contribution.outcome is not None:
            self._give_back(contribution)

    def stage(self, contribution: Contribution, *, current_step: int) -> PushReply:
        """Ends a push whose bytes are all there: staged, or whatever has been settled meanwhile. Raises the error that settled it."""
        if contribution.outcome is None:
            self._open.discard(contribution)
            self._staged[contribution.push_id] = contribution
            self.num_pushes += 1
            self._remember(contribution, PushResult.STAGED)
            contribution.outcome = PushReply(result=PushResult.STAGED, step=current_step)
        if isinstance(contribution.outcome, PsError):
            raise contribution.outcome
        return contribution.outcome

    def begin_arrival(self, contribution: Contribution, *, step: int) -> StagedGradients:
        """Takes out a push whose bytes are all there, to be applied at once; from now on it counts as applied, as the update of `step`."""
        assert contribution.memory is not None and contribution.outcome is None
        self._open.discard(contribution)
        self.num_pushes += 1
        self._remember(contribution, PushResult.APPLIED)
        contribution.outcome = PushReply(result=PushResult.APPLIED, step=step)
        return contribution.memory

    def abandon(self, contribution: Contribution) -> None:
        """Ends a push without effect unless it is staged or settled; may be called at any time by its own thread."""
        if contribution.outcome is None:
            self._settle(contribution, Cancelled("the push was broken off; nothing was changed"))

    def contributions(self, contributors: Sequence[PushId], *, step: int) -> list[Contribution]:
        """Returns what `contributors` have staged, in the order of their push ids; raises ContributionMissing, naming the others."""
        found = [self._staged.get(push_id) for push_id in sorted(contributors)]
        staged = [contribution for contribution in found if contribution is not None]
        if staged and len(set(staged)) == len(contributors):
            return staged
        if not contributors or len(set(contributors)) < len(contributors):
            raise InvalidSpec(f"step {step}: {len(contributors)} contributors, want at least one, and each once")
        missing = [push_id for push_id in contributors if push_id not in self._staged]
        names = ", ".join(f"{p.worker}/{p.incarnation}/{p.sequence}" for p in missing[:10])
        raise ContributionMissing(
            f"step {step}: {len(missing)} of {len(contributors)} contributions are not staged here: {names}"
            " (worker/incarnation/sequence); apply only what was staged on every shard",
            facts={"worker": str(missing[0].worker)},
        )

    def end(self, contributions: Iterable[Contribution]) -> None:
        """Drops contributions that have been applied: their memory is free again."""
        for contribution in contributions:
            self._drop(contribution)

    def advance(self, current_step: int) -> None:
        """Begins a step: unless any step is accepted, what belongs to earlier ones is dropped, whole or under way."""
        if not self.accepts_any_step:
            for contribution in [c for c in self._staged.values() if c.step < current_step]:
                self._drop(contribution)
            for contribution in [c for c in self._open if c.step < current_step]:
                self._settle(contribution, self._stale(contribution, current_step))
        self._staging.end_step()

    def discard(self, push_ids: Iterable[PushId], *, current_step: int) -> None:
        """Drops contributions that nobody will apply, whole or under way; a sequence of 0 stands for all of that incarnation."""
        for push_id in push_ids:
            for contribution in [c for c in self._staged.values() if _is_named(c.push_id, push_id)]:
                self._drop(contribution)
            for contribution in [c for c in self._open if _is_named(c.push_id, push_id)]:
                gone = Superseded(f"worker {push_id.worker}: the chief has given up incarnation {push_id.incarnation}; register again")
                self._settle(contribution, self._stale(contribution, current_step) if push_id.sequence else gone)

    def _drop_refused(self, header: PushHeader) -> None:
        push_id = header.push_id
        for sequence in header.refused:
            refused = PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=sequence)
            if refused in self._staged:
                self._drop(self._staged[refused])

    def clear(self, reason: PsError) -> None:
        """Drops everything, and forgets every push id: a new epoch begins. Streams under way end with `reason`."""
        for contribution in list(self._open):
            self._settle(contribution, reason)
        for contribution in list(self._staged.values()):
            self._drop(contribution)
        self._seen.clear()

    def _check_incarnation(self, push_id: PushId) -> None:
        seen = self._seen.get(push_id.worker)
        if seen is not None and push_id.incarnation < seen.incarnation:
            raise Superseded(
                f"worker {push_id.worker}: incarnation {seen.incarnation} has pushed, this is {push_id.incarnation};"
                " another process took its place; register again",
                facts={"worker": str(push_id.worker), "incarnation": str(seen.incarnation)},
            )

    def _repeated(self, push_id: PushId, step: int) -> PushResult | None:
        seen = self._seen.get(push_id.worker)
        # A sequence number that was passed over is not a repetition: to call it one would claim that its gradients are here.
        if push_id in self._staged:
            first_step, first_result = self._staged[push_id].step, PushResult.STAGED
        elif seen is not None and push_id.incarnation == seen.incarnation and push_id.sequence in seen.outcomes:
            first_step, first_result = seen.outcomes[push_id.sequence]
        else:
            return None
        if first_step != step:
            raise PushIdReused(
                f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {first_step} and came again for step {step};"
                " give every contribution a sequence number of its own",
                facts={"worker": str(push_id.worker), "step": str(first_step)},
            )
        self.num_duplicates += 1
        return PushResult.STALE if first_result is PushResult.STALE else PushResult.DUPLICATE

    def _note_incarnation(self, push_id: PushId) -> None:
        # Taken out and put in again, so that the worker that has been silent longest comes first.
        seen = self._seen.pop(push_id.worker, None)
        if seen is None or seen.incarnation != push_id.incarnation:
            seen = _Seen(push_id.incarnation)
        self._seen[push_id.worker] = seen
        if len(self._seen) > MAX_WORKERS:
            del self._seen[next(iter(self._seen))]

    def _displace(self, push_id: PushId) -> None:
        for other in [c for c in self._open if c.push_id.worker == push_id.worker]:
            if other.push_id.incarnation < push_id.incarnation:
                self._settle(
                    other, Superseded(f"worker {push_id.worker}: incarnation {push_id.incarnation} has begun to push; register again")
                )
            elif other.push_id == push_id:
                # The caller lost that stream and sends it anew, before this side has noticed.
                self._settle(other, Cancelled(f"push {push_id.sequence} of worker {push_id.worker} came again on another stream"))

    def _check_room(self, push_id: PushId) -> None:
        in_flight = self._num_held[push_id.worker, push_id.incarnation]
        if in_flight >= self.max_staged_per_worker:
            raise TooManyPushes(
                f"worker {push_id.worker}: {in_flight} pushes in flight, limit {self.max_staged_per_worker};"
                " wait until a step is applied, or send the same push id again",
                facts={"worker": str(push_id.worker), "in_flight": str(in_flight), "limit": str(self.max_staged_per_worker)},
            )

    def _lend(self, contribution: Contribution, header: PushHeader) -> None:
        purpose = f"a push of worker {contribution.push_id.worker}"
        contribution.memory = self._staging.lend(header.sparse, header.absent, purpose=purpose)
        self._open.add(contribution)
        self._num_held[contribution.push_id.worker, contribution.push_id.incarnation] += 1

    def _stale(self, contribution: Contribution, current_step: int) -> PushReply:
        self.num_stale += 1
        self._remember(contribution, PushResult.STALE)
        return PushReply(result=PushResult.STALE, step=current_step)

    def _remember(self, contribution: Contribution, result: PushResult) -> None:
        seen, push_id = self._seen.get(contribution.push_id.worker), contribution.push_id
        if seen is None or seen.incarnation != push_id.incarnation:
            return
        seen.outcomes[push_id.sequence] = contribution.step, result
        if len(seen.outcomes) > _OUTCOMES_KEPT:
            del seen.outcomes[next(iter(seen.outcomes))]

    def _settle(self, contribution: Contribution, outcome: PushReply | PsError) -> None:
        contribution.outcome = outcome
        self._drop(contribution)

    def _drop(self, contribution: Contribution) -> None:
        self._open.discard(contribution)
        self._staged.pop(contribution.push_id, None)
        key = contribution.push_id.worker, contribution.push_id.incarnation
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        if not contribution.is_writing:
            self._give_back(contribution)

    def _give_back(self, contribution: Contribution) -> None:
        if contribution.memory is not None:
            self._staging.take_back(contribution.memory)
            contribution.memory = None


def _is_named(push_id: PushId, pattern: PushId) -> bool:
    is_incarnation = (push_id.worker, push_id.incarnation) == (pattern.worker, pattern.incarnation)
    return is_incarnation and pattern.sequence in (0, push_id.sequence)
