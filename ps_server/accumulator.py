"""What is open, staged and shared, and what of it makes a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.errors import Cancelled, ContributionMissing, InvalidSpec, PsError, StepAhead, Superseded
from ps_protocol.shard import Metric, PushHeader, PushId, PushReply, PushResult
from ps_protocol.shared_memory import too_many_pushes
from ps_server.gradient_slots import GradientSlot, GradientSlots
from ps_server.seen_pushes import SeenPushes, check_same_step
from ps_server.staging import StagedGradients, StagingMemory

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


class GradientAccumulator:
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
