"""Contributions on their way into a step, and which push ids were seen and applied. Knows push ids, steps and buffers; no lock, no wire.

A contribution is open while its bytes arrive, then staged until its step is applied. Whatever ends it otherwise gives it an outcome (a
reply or an error): its memory goes back, and its stream is told at the next frame. Memory into which another thread is copying at that
moment goes back when that copy ends (`begin_write`, `end_write`). The caller holds its lock for every call.

Strictly, a contribution belongs to the step of its variables: when that is applied without it, it is stale. Where any step is accepted,
it stays until it is applied or discarded, whatever its step.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.errors import Cancelled, ContributionMissing, InvalidSpec, PsError, PushIdReused, StepAhead, Superseded
from ps_protocol.roles.shard import AppliedPush, Metric, PushHeader, PushId, PushReply, PushResult, WorkerPushes
from ps_protocol.shared_memory.words import too_many_pushes
from ps_server.contributions.slots import GradientSlot, GradientSlots
from ps_server.contributions.staging import StagedGradients, StagingMemory

# Which push ids were seen, and what became of them: the newest incarnation of each worker, and its latest outcomes.


# Workers whose push ids are remembered; beyond it the one silent longest is forgotten (what it repeats is stale, or still staged).
MAX_WORKERS = 10_000
# Outcomes remembered per worker. A push id older than that which comes again is recognised as long as it is staged, and by its step after.
_OUTCOMES_KEPT = 64


@dataclass(slots=True)
class _Seen:
    """What one worker's newest incarnation has pushed."""

    incarnation: int
    outcomes: dict[int, tuple[int, PushResult]] = field(default_factory=dict)


class SeenPushes:
    """What workers have pushed, by worker. As many as MAX_WORKERS."""

    def __init__(self) -> None:
        self._of: dict[int, _Seen] = {}

    @property
    def workers(self) -> set[int]:
        """Workers of whom something is remembered."""
        return set(self._of)

    def num_outcomes(self, worker: int) -> int:
        """Returns how many outcomes of a worker are remembered."""
        return len(self._of[worker].outcomes)

    def check_incarnation(self, push_id: PushId) -> None:
        """Raises Superseded if a later incarnation of the worker has pushed."""
        seen = self._of.get(push_id.worker)
        if seen is not None and push_id.incarnation < seen.incarnation:
            raise Superseded(
                f"worker {push_id.worker}: incarnation {seen.incarnation} has pushed, this is {push_id.incarnation};"
                " another process took its place; register again",
                facts={"worker": str(push_id.worker), "incarnation": str(seen.incarnation)},
            )

    def note_incarnation(self, push_id: PushId) -> None:
        """Notes who pushes."""
        # Taken out and put in again, so that the worker that has been silent longest comes first.
        seen = self._of.pop(push_id.worker, None)
        if seen is None or seen.incarnation != push_id.incarnation:
            seen = _Seen(push_id.incarnation)
        self._of[push_id.worker] = seen
        if len(self._of) > MAX_WORKERS:
            del self._of[next(iter(self._of))]

    def outcome(self, push_id: PushId) -> tuple[int, PushResult] | None:
        """Returns step and result of a push, if it was seen; a sequence number that was passed over was not."""
        seen = self._of.get(push_id.worker)
        if seen is None or push_id.incarnation != seen.incarnation:
            return None
        return seen.outcomes.get(push_id.sequence)

    def remember(self, push_id: PushId, step: int, result: PushResult) -> None:
        """Notes what became of a push, unless another incarnation has come meanwhile."""
        seen = self._of.get(push_id.worker)
        if seen is None or seen.incarnation != push_id.incarnation:
            return
        seen.outcomes[push_id.sequence] = step, result
        if len(seen.outcomes) > _OUTCOMES_KEPT:
            del seen.outcomes[next(iter(seen.outcomes))]

    def clear(self) -> None:
        """Forgets everything."""
        self._of.clear()


def check_same_step(push_id: PushId, *, first_step: int, step: int) -> None:
    """Raises PushIdReused if a push id came again for another step."""
    if first_step != step:
        raise PushIdReused(
            f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {first_step} and came again for step {step};"
            " give every contribution a sequence number of its own",
            facts={"worker": str(push_id.worker), "step": str(first_step)},
        )


# Which contributions were applied lately, worker by worker, for a chief that takes the shard over.


# A worker repeats its last commit; a few more cover those that it sent before it heard of anything.
PUSHES_KEPT = 16
# Beyond it the worker that has been applied longest ago is forgotten.
MAX_APPLIED_WORKERS = 10_000


@dataclass(slots=True)
class _Applied:
    """Sequences and steps of one worker's newest incarnation, the latest applied last."""

    incarnation: int
    pushes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PUSHES_KEPT))


class AppliedPushes:
    """The newest of each worker. The caller serialises the calls."""

    def __init__(self) -> None:
        self._of: dict[int, _Applied] = {}

    def count(self, push_id: PushId, *, step: int) -> None:
        """Notes that a contribution was applied as a part of `step`. One of an incarnation that has been followed is not kept."""
        known = self._of.get(push_id.worker)
        if known is None or known.incarnation != push_id.incarnation:
            if known is not None and push_id.incarnation < known.incarnation:
                return
            # Taken out and put in again, so that the worker that was replaced longest ago comes first.
            self._of.pop(push_id.worker, None)
            known = self._of[push_id.worker] = _Applied(push_id.incarnation)
            if len(self._of) > MAX_APPLIED_WORKERS:
                del self._of[next(iter(self._of))]
        known.pushes.append((push_id.sequence, step))

    def lately(self) -> tuple[WorkerPushes, ...]:
        """Returns them by worker, each in order of sequences."""
        return tuple(
            WorkerPushes(
                worker=worker,
                incarnation=known.incarnation,
                applied=tuple(AppliedPush(sequence=sequence, step=step) for sequence, step in sorted(known.pushes)),
            )
            for worker, known in sorted(self._of.items())
        )

    def resume(self, pushes: Iterable[WorkerPushes]) -> None:
        """Goes on from what `lately` has returned, in place of what is here."""
        self._of = {}
        for of_worker in pushes:
            for push in of_worker.applied:
                push_id = PushId(worker=of_worker.worker, incarnation=of_worker.incarnation, sequence=push.sequence)
                self.count(push_id, step=push.step)


# What is open, staged and shared, and what of it makes a step.


_NO_METRICS: Mapping[str, Metric] = {}


@dataclass(slots=True, eq=False)
class Contribution:
    """One push. `outcome` is what to answer, once that is settled; `memory` is None when it has none.

    `slot`: where its arena lies, if its worker shares memory; `is_found`: and nothing was known of it until it was applied.
    """

    push_id: PushId
    step: int
    metrics: Mapping[str, Metric]
    memory: StagedGradients | None = None
    outcome: PushReply | PsError | None = None
    is_writing: bool = False
    slot: GradientSlot | None = None
    is_found: bool = False


class Inbox:
    """The contributions of one shard. `max_staged_per_worker` bounds those of one incarnation that are open or staged.

    `accepts_any_step`: contributions of steps gone by, or ahead of this shard's, are taken too.
    """

    def __init__(self, staging: StagingMemory, *, max_staged_per_worker: int, shared: GradientSlots | None = None) -> None:
        self.max_staged_per_worker = max_staged_per_worker
        self.accepts_any_step = False
        self.num_pushes = 0
        self.num_stale = 0
        self.num_duplicates = 0
        self._staging = staging
        self._open: set[Contribution] = set()
        self._staged: dict[PushId, Contribution] = {}
        self._seen = SeenPushes()
        self._shared = shared if shared is not None else GradientSlots(release=lambda _: None)
        self._num_held: Counter[tuple[int, int]] = Counter()

    @property
    def num_staged(self) -> int:
        """Contributions that are whole and wait for their step to be applied."""
        return len(self._staged) + self._shared.num_staged

    def claim(self, *, worker: int, incarnation: int) -> None:
        """Notes an incarnation that will push through shared memory. Raises Superseded if a later one has pushed."""
        push_id = PushId(worker=worker, incarnation=incarnation, sequence=1)
        self._seen.check_incarnation(push_id)
        self._seen.note_incarnation(push_id)

    def open(self, header: PushHeader, *, current_step: int) -> Contribution:
        """Takes up a push; with an `outcome` already if there is no use for its bytes.

        Raises Superseded, PushIdReused, StepAhead, TooManyPushes, LimitExceeded, InvalidSpec, and then has changed nothing but what
        supersedes what.
        """
        push_id, step = header.push_id, header.step
        contribution = Contribution(push_id, step, header.metrics)
        self._seen.check_incarnation(push_id)
        result = self._repeated(push_id, step)
        if result is not None:
            contribution.outcome = PushReply(result=result, step=current_step)
            return contribution
        if step > current_step and not self.accepts_any_step:
            raise StepAhead(
                f"local_step {step} is ahead of global_step {current_step}; read the variables again", facts={"step": str(current_step)}
            )
        self._seen.note_incarnation(push_id)
        self._drop_refused(header)
        if step < current_step and not self.accepts_any_step:
            contribution.outcome = self._stale(contribution, current_step)
            return contribution
        self._displace(push_id)
        self._check_room(header)
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
        found = [self._staged.get(push_id) or self._found(push_id) for push_id in sorted(contributors)]
        staged = [contribution for contribution in found if contribution is not None]
        if staged and len({id(contribution.memory) for contribution in staged}) == len(contributors):
            return staged
        if not contributors or len(set(contributors)) < len(contributors):
            raise InvalidSpec(f"step {step}: {len(contributors)} contributors, want at least one, and each once")
        here = {contribution.push_id for contribution in staged}
        missing = [push_id for push_id in contributors if push_id not in here]
        if not missing:
            raise InvalidSpec(f"step {step}: two contributions of one worker lie in one slot; use a slot for each")
        names = ", ".join(f"{p.worker}/{p.incarnation}/{p.sequence}" for p in missing[:10])
        raise ContributionMissing(
            f"step {step}: {len(missing)} of {len(contributors)} contributions are not staged here: {names}"
            " (worker/incarnation/sequence); apply only what was staged on every shard",
            facts={"worker": str(missing[0].worker)},
        )

    def end(self, contributions: Iterable[Contribution]) -> None:
        """Drops contributions that have been applied: their memory is free again."""
        for contribution in contributions:
            if contribution.is_found and contribution.slot is not None:
                self._remember(contribution, PushResult.STAGED)
                self._shared.end(contribution.slot, contribution.push_id.sequence)
            else:
                self._drop(contribution)

    def advance(self, current_step: int) -> None:
        """Begins a step: unless any step is accepted, what belongs to earlier ones is dropped, whole or under way."""
        if not self.accepts_any_step:
            for contribution in [c for c in self._staged.values() if c.step < current_step]:
                self._drop(contribution)
            for contribution in [c for c in self._open if c.step < current_step]:
                self._settle(contribution, self._stale(contribution, current_step))
        self._shared.advance(current_step, accepts_any_step=self.accepts_any_step)
        self._staging.end_step()

    def discard(self, push_ids: Iterable[PushId], *, current_step: int) -> None:
        """Drops contributions that nobody will apply, whole or under way; a sequence of 0 stands for all of that incarnation."""
        for push_id in push_ids:
            self._shared.discard(push_id)
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
            self._shared.discard(refused)

    def clear(self, reason: PsError) -> None:
        """Drops everything, and forgets every push id: a new epoch begins. Streams under way end with `reason`."""
        for contribution in list(self._open):
            self._settle(contribution, reason)
        for contribution in list(self._staged.values()):
            self._drop(contribution)
        self._shared.clear()
        self._seen.clear()

    def _repeated(self, push_id: PushId, step: int) -> PushResult | None:
        # A sequence number that was passed over is not a repetition: to call it one would claim that its gradients are here.
        first = self._seen.outcome(push_id)
        if push_id in self._staged:
            first = self._staged[push_id].step, PushResult.STAGED
        elif (found := self._shared.find(push_id)) is not None:
            first = found[1], PushResult.STAGED
        if first is None:
            return None
        first_step, first_result = first
        check_same_step(push_id, first_step=first_step, step=step)
        self.num_duplicates += 1
        return PushResult.STALE if first_result is PushResult.STALE else PushResult.DUPLICATE

    def _displace(self, push_id: PushId) -> None:
        for other in [c for c in self._open if c.push_id.worker == push_id.worker]:
            if other.push_id.incarnation < push_id.incarnation:
                self._settle(
                    other, Superseded(f"worker {push_id.worker}: incarnation {push_id.incarnation} has begun to push; register again")
                )
            elif other.push_id == push_id:
                # The caller lost that stream and sends it anew, before this side has noticed.
                self._settle(other, Cancelled(f"push {push_id.sequence} of worker {push_id.worker} came again on another stream"))

    def _check_room(self, header: PushHeader) -> None:
        push_id = header.push_id
        in_flight = self._num_held[push_id.worker, push_id.incarnation] + self._shared.num_waiting(push_id, but=header.memory_slot)
        if in_flight >= self.max_staged_per_worker:
            raise too_many_pushes(push_id.worker, in_flight=in_flight, limit=self.max_staged_per_worker)

    def _lend(self, contribution: Contribution, header: PushHeader) -> None:
        push_id = contribution.push_id
        slot = None if header.memory_slot is None else self._shared.slot(push_id, header.memory_slot)
        contribution.memory = self._staging.lend(
            header.sparse,
            header.absent,
            encoding=header.encoding,
            encoded_bytes=header.encoded_bytes,
            dense=None if slot is None else slot.memory,
            purpose=f"a push of worker {push_id.worker}",
        )
        if slot is not None:
            contribution.slot = slot
            slot.num_held += 1
        self._open.add(contribution)
        self._num_held[push_id.worker, push_id.incarnation] += 1

    def _found(self, push_id: PushId) -> Contribution | None:
        found = self._shared.find(push_id)
        if found is None:
            return None
        slot, step = found
        return Contribution(push_id, step, _NO_METRICS, memory=slot.staged, slot=slot, is_found=True)

    def _stale(self, contribution: Contribution, current_step: int) -> PushReply:
        self.num_stale += 1
        self._remember(contribution, PushResult.STALE)
        return PushReply(result=PushResult.STALE, step=current_step)

    def _remember(self, contribution: Contribution, result: PushResult) -> None:
        self._seen.remember(contribution.push_id, contribution.step, result)

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
            if contribution.slot is not None:
                contribution.slot.num_held -= 1
                self._shared.end(contribution.slot, contribution.push_id.sequence)


def _is_named(push_id: PushId, pattern: PushId) -> bool:
    is_incarnation = (push_id.worker, push_id.incarnation) == (pattern.worker, pattern.incarnation)
    return is_incarnation and pattern.sequence in (0, push_id.sequence)
