"""Contributions on their way into a step, and which push ids were seen and applied. Knows push ids, steps and buffers; no lock, no wire.

A contribution is open while its bytes arrive, then staged until its step is applied. If it ends in any other way it gets an outcome (a
reply or an error): its memory is freed, and its stream sees that at the next frame. Memory into which another thread is copying at that
moment goes back when that copy ends (`begin_write`, `end_write`). The caller holds its lock for every call.

Strictly, a contribution belongs to the step of its variables: when that is applied without it, it is stale. Where any step is accepted,
it stays until it is applied or discarded, whatever its step.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TypeVar

from ps_protocol.errors import Cancelled, ContributionMissing, InvalidSpec, LimitExceeded, PsError, PushIdReused, StepAhead, Superseded
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import check_name
from ps_protocol.roles.contribution import PushId, named_contributions
from ps_protocol.roles.shard import (
    LEAST_RESUMED_BYTES,
    MAX_METRICS,
    AppliedPush,
    Metric,
    MetricCell,
    PushHeader,
    PushReply,
    PushResult,
    WorkerPushes,
)
from ps_protocol.shared_memory.words import too_many_pushes
from ps_server.contributions.shared_buffers import SharedBuffer, SharedBuffers
from ps_server.contributions.staging import StagedGradients, StagingMemory

_NO_METRICS: Mapping[str, Metric] = {}

# Workers whose push ids are remembered. Of more, the one silent longest is forgotten; where applied, the one replaced longest ago.
MAX_WORKERS = 10_000
# Outcomes remembered per worker. An older push that comes again is known by its push id while it is staged, then stale by its step.
_OUTCOMES_KEPT = 64
# Applied contributions remembered per worker, for a new chief, to which it repeats those that it has no answer for.
PUSHES_KEPT = 16


@light_dataclass(slots=True)
class _Seen:
    """The pushes of one worker's newest incarnation: step and result by sequence. No step: one that it will not commit."""

    incarnation: int
    outcomes: dict[int, tuple[int | None, PushResult]] = field(default_factory=dict)


@light_dataclass(slots=True)
class _Applied:
    """Sequences and steps of the newest incarnation of a worker that had something applied, the latest last."""

    incarnation: int
    pushes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PUSHES_KEPT))


_Record = TypeVar("_Record", _Seen, _Applied)


class PushIds:
    """Outcomes of push ids, by worker. A new epoch forgets those seen; those applied stay, for a chief that takes the shard over."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._applied: dict[int, _Applied] = {}

    @property
    def workers(self) -> set[int]:
        """The workers whose pushes are remembered."""
        return set(self._seen)

    def check_incarnation(self, push_id: PushId) -> None:
        """Raises Superseded if a later incarnation of the worker has pushed."""
        seen = self._seen.get(push_id.worker)
        if seen is not None and push_id.incarnation < seen.incarnation:
            raise Superseded(
                f"worker {push_id.worker}: incarnation {seen.incarnation} has pushed, this is {push_id.incarnation};"
                " another process took its place; register again",
                facts={"worker": str(push_id.worker), "incarnation": str(seen.incarnation)},
            )

    def note_incarnation(self, push_id: PushId) -> None:
        """Notes the incarnation of a worker that pushes."""
        seen = self._seen.get(push_id.worker)
        if seen is None or seen.incarnation != push_id.incarnation:
            seen = _Seen(push_id.incarnation)
        _put_last(self._seen, push_id.worker, seen)

    def outcome(self, push_id: PushId) -> tuple[int | None, PushResult] | None:
        """Returns step and result of a push, if it was seen; a sequence number that was passed over was not."""
        seen = self._seen.get(push_id.worker)
        if seen is None or push_id.incarnation != seen.incarnation:
            return None
        return seen.outcomes.get(push_id.sequence)

    def refuse(self, push_id: PushId) -> None:
        """Notes that a worker will not commit a push, which may arrive yet."""
        self.remember(push_id, None, PushResult.STALE)

    def remember(self, push_id: PushId, step: int | None, result: PushResult) -> None:
        """Notes the outcome of a push, unless a later incarnation has pushed meanwhile."""
        seen = self._seen.get(push_id.worker)
        if seen is None or seen.incarnation != push_id.incarnation:
            return
        seen.outcomes[push_id.sequence] = step, result
        if len(seen.outcomes) > _OUTCOMES_KEPT:
            del seen.outcomes[next(iter(seen.outcomes))]

    def forget_seen(self) -> None:
        """Forgets the pushes that were seen."""
        self._seen.clear()

    def apply(self, push_id: PushId, *, step: int) -> None:
        """Notes that a contribution was applied as a part of `step`. One of an incarnation that has been followed is not kept."""
        known = self._applied.get(push_id.worker)
        if known is None or push_id.incarnation > known.incarnation:
            known = _Applied(push_id.incarnation)
            _put_last(self._applied, push_id.worker, known)
        if push_id.incarnation == known.incarnation:
            known.pushes.append((push_id.sequence, step))

    def lately_applied(self) -> tuple[WorkerPushes, ...]:
        """Returns the contributions applied lately by worker, each in order of sequences."""
        return tuple(
            WorkerPushes(
                worker=worker,
                incarnation=known.incarnation,
                applied=tuple(AppliedPush(sequence=sequence, step=step) for sequence, step in sorted(known.pushes)),
            )
            for worker, known in sorted(self._applied.items())
        )

    def resume(self, pushes: Iterable[WorkerPushes]) -> None:
        """Replaces the state by a result of `lately_applied`."""
        self._applied = {}
        for of_worker in pushes:
            for push in of_worker.applied:
                push_id = PushId(worker=of_worker.worker, incarnation=of_worker.incarnation, sequence=push.sequence)
                self.apply(push_id, step=push.step)


def _put_last(records: dict[int, _Record], worker: int, record: _Record) -> None:
    """Puts a worker's record behind all others, and drops the first if there are too many."""
    records.pop(worker, None)
    records[worker] = record
    if len(records) > MAX_WORKERS:
        del records[next(iter(records))]


def check_same_step(push_id: PushId, *, first_step: int, step: int) -> None:
    """Raises PushIdReused if a push id came again for another step."""
    if first_step != step:
        raise PushIdReused(
            f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {first_step} and came again for step {step};"
            " give every contribution a sequence number of its own",
            facts={"worker": str(push_id.worker), "step": str(first_step)},
        )


@light_dataclass(slots=True)
class _Cell:
    total: float = 0.0
    weight: float = 0.0
    count: int = 0
    last: float = 0.0


class MetricCells:
    """The metrics reported in contributions that were applied."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._cells: dict[tuple[str, int], _Cell] = {}

    def admit(self, metrics: Mapping[str, Metric]) -> None:
        """Adds the names, all or nothing; raises LimitExceeded if there are too many, InvalidSpec for an invalid one."""
        if metrics.keys() <= self._names:
            return
        for name in metrics:
            check_name(name)
        names = self._names | metrics.keys()
        if len(names) > MAX_METRICS:
            raise LimitExceeded(f"metrics: {len(names)} different names, {MAX_METRICS} at most; use fewer names")
        self._names = names

    def count(self, worker: int, metrics: Mapping[str, Metric]) -> None:
        """Counts a worker's metrics of one contribution; their names have been admitted."""
        for name, metric in metrics.items():
            cell = self._cells.setdefault((name, worker), _Cell())
            cell.total += metric.value * metric.weight
            cell.weight += metric.weight
            cell.count += 1
            cell.last = metric.value

    def cells(self) -> Iterable[MetricCell]:
        """Returns all cells, by name and worker."""
        for (name, worker), cell in sorted(self._cells.items()):
            yield MetricCell(name=name, worker=worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)

    def resume(self, cells: Iterable[MetricCell]) -> None:
        """Replaces the state by a result of `cells`. Raises LimitExceeded, InvalidSpec."""
        self._names, self._cells = set(), {}
        for cell in cells:
            self.admit({cell.name: Metric(value=cell.last, weight=0.0)})
            self._cells[cell.name, cell.worker] = _Cell(total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)


@light_dataclass(slots=True, eq=False)
class Contribution:
    """One push. `outcome` is its answer, once there is one; `memory` is None when it has none.

    `buffer`: where its arena lies, if its worker shares memory; `is_found`: and nothing was known of it until it was applied. `is_empty`:
    it stands for one that is not here. `is_suspended`: its stream broke, and nobody writes it until it comes again.
    """

    push_id: PushId
    step: int
    metrics: Mapping[str, Metric]
    memory: StagedGradients | None = None
    outcome: PushReply | PsError | None = None
    is_writing: bool = False
    buffer: SharedBuffer | None = None
    is_found: bool = False
    is_empty: bool = False
    header: PushHeader | None = None
    is_suspended: bool = False

    @property
    def num_received(self) -> int:
        """Bytes that have arrived."""
        return 0 if self.memory is None else self.memory.writer.num_written


class Inbox:
    """The contributions of one shard. `max_staged_per_worker` bounds those of one incarnation that are open or staged.

    `accepts_any_step`: contributions of steps gone by, or ahead of this shard's, are taken too. `rejects_nonfinite`: those that are not
    finite are refused. `wants_checksums`: each will be asked for its checksum, which is computed while it is put in order. The caller
    serialises all calls but `complete`. No call announces what workers write into `shared` memory, and nothing here checks it: their
    sessions have done so, and a step finds it there.
    """

    def __init__(self, staging: StagingMemory, *, max_staged_per_worker: int, shared: SharedBuffers | None = None) -> None:
        self.max_staged_per_worker = max_staged_per_worker
        self.accepts_any_step = False
        self.rejects_nonfinite = False
        self.wants_checksums = False
        self.metrics = MetricCells()
        self.push_ids = PushIds()
        # Those that came too late, and those that came again.
        self.num_stale = self.num_duplicates = 0
        self._num_pushes = 0
        self._staging = staging
        self._open: set[Contribution] = set()
        self._staged: dict[PushId, Contribution] = {}
        self._shared = shared if shared is not None else SharedBuffers(release=lambda _: None)
        self._num_held: Counter[tuple[int, int]] = Counter()
        self._given_up: dict[int, PushId] = {}

    @property
    def given_up(self) -> tuple[PushId, ...]:
        """By worker the latest incarnation that was discarded as a whole since an epoch began, as sequence 0."""
        return tuple(self._given_up.values())

    @property
    def num_staged(self) -> int:
        """Contributions that are whole and wait for their step to be applied."""
        return len(self._staged) + self._shared.num_staged

    @property
    def num_pushes(self) -> int:
        """Contributions that were staged or applied."""
        return self._num_pushes + self._shared.num_pushes

    def claim(self, *, worker: int, incarnation: int) -> None:
        """Notes an incarnation that will push through shared memory. Raises Superseded if a later one has pushed."""
        push_id = PushId(worker=worker, incarnation=incarnation, sequence=1)
        self.push_ids.check_incarnation(push_id)
        self.push_ids.note_incarnation(push_id)

    def share(self, buffers: Sequence[SharedBuffer]) -> None:
        """Has contributions looked for in memory that a worker shares."""
        self._shared.add(buffers)

    def unshare(self, buffers: Sequence[SharedBuffer], *, is_lost: bool = False) -> None:
        """Notes that a worker has given its memory up, or was lost: whole contributions in it may still be applied."""
        self._shared.remove(buffers, is_lost=is_lost)

    def open(self, header: PushHeader, *, current_step: int, resumes: bool = False) -> Contribution:
        """Takes up a push; with an `outcome` already if there is no use for its bytes. `resumes`: with those that are here of it.

        Raises Superseded, PushIdReused, StepAhead, TooManyPushes, LimitExceeded, InvalidSpec. Then it has only noted the incarnation, the
        names of metrics, and the pushes that the worker will not commit.
        """
        push_id, step = header.push_id, header.step
        if header.metrics:
            self.metrics.admit(header.metrics)
        contribution = Contribution(push_id, step, header.metrics, header=header)
        self.push_ids.check_incarnation(push_id)
        result = self._repeated(push_id, step)
        if result is not None:
            contribution.outcome = PushReply(result=result, step=current_step)
            return contribution
        if step > current_step and not self.accepts_any_step:
            raise StepAhead(
                f"local_step {step} is ahead of global_step {current_step}; read the variables again", facts={"step": str(current_step)}
            )
        self.push_ids.note_incarnation(push_id)
        self._drop_refused(header, current_step)
        if step < current_step and not self.accepts_any_step:
            contribution.outcome = self._stale(contribution, current_step)
            return contribution
        if resumes and self._take_over(contribution):
            return contribution
        self._displace(push_id)
        self._check_room(header)
        try:
            self._lend(contribution, header)
        except LimitExceeded:
            suspended = [c for c in self._open if c.is_suspended]
            if not suspended:
                raise
            # Perhaps nobody will go on with these.
            for other in suspended:
                self._answer(other, Cancelled(f"worker {push_id.worker} needed the memory of what had arrived; send all of it"))
            self._lend(contribution, header)
        return contribution

    def begin_write(self, contribution: Contribution) -> StagedGradients | None:
        """Returns the memory, which the caller may write until `end_write`; None if no more bytes are needed."""
        if contribution.outcome is not None or contribution.memory is None:
            return None
        contribution.is_writing = True
        return contribution.memory

    def complete(self, contribution: Contribution, memory: StagedGradients) -> None:
        """Puts a contribution whose bytes were all written in order; between `begin_write` and `end_write`. Takes long.

        Raises TruncatedStream, MalformedMessage, IndexOutOfRange, and NonFiniteGradient where that is refused.
        """
        memory.writer.finish()
        self._staging.put_in_order(memory)
        if self.rejects_nonfinite:
            self._staging.check_finite(memory, who=f"worker {contribution.push_id.worker}, step {contribution.step}")
        if self.wants_checksums:
            self._staging.checksum(memory)

    def end_write(self, contribution: Contribution) -> None:
        """Ends the write that `begin_write` began."""
        contribution.is_writing = False
        if contribution.outcome is not None:
            self._give_back(contribution)

    def stage(self, contribution: Contribution, *, current_step: int) -> PushReply:
        """Ends a push whose bytes are all there, and returns its answer: staged, or one given meanwhile. Raises the error that ended it."""
        if contribution.outcome is None:
            self._open.discard(contribution)
            self._staged[contribution.push_id] = contribution
            self._num_pushes += 1
            self._remember(contribution, PushResult.STAGED)
            contribution.outcome = PushReply(result=PushResult.STAGED, step=current_step)
        if isinstance(contribution.outcome, PsError):
            raise contribution.outcome
        return contribution.outcome

    def begin_arrival(self, contribution: Contribution, *, step: int) -> StagedGradients:
        """Takes out a push whose bytes are all there, to be applied at once; from now on it counts as applied, as the update of `step`."""
        assert contribution.memory is not None and contribution.outcome is None
        self._open.discard(contribution)
        self._num_pushes += 1
        self._remember(contribution, PushResult.APPLIED)
        contribution.outcome = PushReply(result=PushResult.APPLIED, step=step)
        return contribution.memory

    def abandon(self, contribution: Contribution) -> None:
        """Ends a push without effect unless it is staged or answered; may be called at any time by its own thread."""
        if contribution.outcome is None:
            self._answer(contribution, Cancelled("the push was broken off; nothing was changed"))

    def suspend(self, contribution: Contribution) -> None:
        """Ends a push whose stream broke; if much has arrived, that is kept until the push comes again.

        It goes when its worker pushes another, when its step is over, or when any push needs the memory. What lies in shared memory is
        always sent again.
        """
        if contribution.outcome is None and contribution.buffer is None and contribution.num_received >= LEAST_RESUMED_BYTES:
            contribution.is_suspended = True
        else:
            self.abandon(contribution)

    def select(self, contributors: Sequence[PushId], *, step: int, without: Collection[PushId] = ()) -> list[Contribution]:
        """Returns the staged contributions of `contributors`, in the order of their push ids; raises ContributionMissing with the others.

        Those in `without` count as contributions that have no gradient.
        """
        selected = [
            self._empty(push_id, step) if push_id in without else self._staged.get(push_id) or self._found(push_id)
            for push_id in sorted(contributors)
        ]
        staged = [contribution for contribution in selected if contribution is not None]
        if staged and len({id(contribution.memory) for contribution in staged}) == len(contributors):
            return staged
        if not contributors or len(set(contributors)) < len(contributors):
            raise InvalidSpec(f"step {step}: {len(contributors)} contributors, want at least one, and each once")
        here = {contribution.push_id for contribution in staged}
        missing = [push_id for push_id in contributors if push_id not in here]
        if not missing:
            raise InvalidSpec(f"step {step}: two contributions of one worker lie in one gradient buffer; use one for each")
        names = ", ".join(map(str, missing[:10]))
        raise ContributionMissing(
            f"step {step}: {len(missing)} of {len(contributors)} contributions are not staged here: {names}"
            " (worker/incarnation/sequence); apply only what was staged on every shard",
            facts=named_contributions(missing),
        )

    def checksums(self, contributions: Iterable[Contribution]) -> tuple[int, ...]:
        """Returns the checksum of each contribution that `select` has returned. Takes long on the first call."""
        return tuple(self._staging.checksum(contribution.memory) for contribution in contributions if contribution.memory is not None)

    def end(self, contributions: Iterable[Contribution], *, step: int) -> None:
        """Counts contributions that have been applied as a part of `step`, and drops them: their memory is free again."""
        for contribution in contributions:
            self.metrics.count(contribution.push_id.worker, contribution.metrics)
            self.push_ids.apply(contribution.push_id, step=step)
            if contribution.is_empty:
                self._drop_late(contribution.push_id)
            elif contribution.is_found and contribution.buffer is not None:
                self._remember(contribution, PushResult.STAGED)
                self._shared.end(contribution.buffer, contribution.push_id.sequence)
            else:
                self._drop(contribution)

    def advance(self, current_step: int) -> None:
        """Begins a step: unless any step is accepted, drops contributions to earlier ones, whole or under way."""
        if not self.accepts_any_step:
            for contribution in [c for c in self._staged.values() if c.step < current_step]:
                self._drop(contribution)
            for contribution in [c for c in self._open if c.step < current_step]:
                self._answer(contribution, self._stale(contribution, current_step))
        self._shared.advance(current_step, accepts_any_step=self.accepts_any_step)
        self._staging.end_step()

    def begin(self, step: int) -> None:
        """Looks for contributions to `step`, the first one."""
        self._shared.advance(step, accepts_any_step=self.accepts_any_step)

    def discard(self, push_ids: Iterable[PushId], *, current_step: int) -> None:
        """Drops contributions that will never be applied, whole or under way; sequence 0 means all of that incarnation."""
        for push_id in push_ids:
            if not push_id.sequence:
                self._given_up[push_id.worker] = max(push_id, self._given_up.get(push_id.worker, push_id))
            self._shared.discard(push_id)
            for contribution in [c for c in self._staged.values() if _is_named(c.push_id, push_id)]:
                self._drop(contribution)
            for contribution in [c for c in self._open if _is_named(c.push_id, push_id)]:
                gone = Superseded(f"worker {push_id.worker}: the chief has given up incarnation {push_id.incarnation}; register again")
                self._answer(contribution, self._stale(contribution, current_step) if push_id.sequence else gone)

    def clear(self, reason: PsError) -> None:
        """Drops everything, and forgets which push ids were seen: a new epoch begins. Streams under way end with `reason`."""
        for contribution in list(self._open):
            self._answer(contribution, reason)
        for contribution in list(self._staged.values()):
            self._drop(contribution)
        self._shared.clear()
        self._given_up.clear()
        self.push_ids.forget_seen()

    def close(self) -> None:
        """Lets go of all memory that is not lent, and of the rest as soon as it comes back; the model goes."""
        self._shared.clear()
        self._staging.close()

    def _drop_refused(self, header: PushHeader, current_step: int) -> None:
        push_id = header.push_id
        for sequence in header.refused:
            refused = PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=sequence)
            if refused in self._staged:
                self._drop(self._staged[refused])
            for contribution in [c for c in self._open if c.push_id == refused]:
                self._answer(contribution, self._stale(contribution, current_step))
            self._shared.discard(refused)
            # Its worker says so once, and a copy that arrives later would take a place for good.
            self.push_ids.refuse(refused)

    def _repeated(self, push_id: PushId, step: int) -> PushResult | None:
        # A sequence number that was passed over is not a repetition: to call it one would claim that its gradients are here.
        first = self.push_ids.outcome(push_id)
        if push_id in self._staged:
            first = self._staged[push_id].step, PushResult.STAGED
        elif (found := self._shared.find(push_id)) is not None:
            first = found[1], PushResult.STAGED
        if first is None:
            return None
        first_step, first_result = first
        if first_step is not None:
            check_same_step(push_id, first_step=first_step, step=step)
        self.num_duplicates += 1
        return PushResult.STALE if first_result is PushResult.STALE else PushResult.DUPLICATE

    def _take_over(self, contribution: Contribution) -> bool:
        """Gives a push what has arrived of it on another stream, which may not have noticed that it broke; False: nothing has."""
        for other in self._open:
            if other.header == contribution.header and not other.is_writing and other.buffer is None:
                contribution.memory, other.memory = other.memory, None
                self._answer(other, _came_again(other.push_id))
                self._hold(contribution)
                return True
        return False

    def _displace(self, push_id: PushId) -> None:
        for other in [c for c in self._open if c.push_id.worker == push_id.worker]:
            if other.push_id.incarnation < push_id.incarnation:
                self._answer(
                    other, Superseded(f"worker {push_id.worker}: incarnation {push_id.incarnation} has begun to push; register again")
                )
            elif other.push_id == push_id:
                # The caller lost that stream and sends it anew, before this side has noticed.
                self._answer(other, _came_again(push_id))
            elif other.is_suspended:
                self._answer(other, Cancelled(f"worker {push_id.worker} has gone on to push {push_id.sequence}"))

    def _check_room(self, header: PushHeader) -> None:
        push_id = header.push_id
        in_flight = self._num_held[push_id.worker, push_id.incarnation] + self._shared.num_waiting(push_id, but=header.gradient_buffer)
        if in_flight >= self.max_staged_per_worker:
            error = too_many_pushes(push_id.worker, in_flight=in_flight, limit=self.max_staged_per_worker)
            if held := self._held_of(push_id):
                # The worker can name those that it will not commit with its next push.
                error.facts |= named_contributions(held)
            raise error

    def _held_of(self, push_id: PushId) -> list[PushId]:
        """Returns the contributions that are held of the worker that pushes."""
        everything = push_id._replace(sequence=0)
        known = {one.push_id for one in (*self._staged.values(), *self._open) if _is_named(one.push_id, everything)}
        shared = self._shared.waiting((push_id.worker, push_id.incarnation))
        return sorted(known.union(push_id._replace(sequence=sequence) for sequence in shared))

    def _lend(self, contribution: Contribution, header: PushHeader) -> None:
        push_id = contribution.push_id
        buffer = None if header.gradient_buffer is None else self._shared.buffer(push_id, header.gradient_buffer)
        contribution.memory = self._staging.lend(
            header.sparse,
            header.absent,
            encoding=header.encoding,
            encoded_bytes=header.encoded_bytes,
            dense=None if buffer is None else buffer.memory,
            formulas=header.formulas,
            purpose=f"a push of worker {push_id.worker}",
        )
        if buffer is not None:
            contribution.buffer = buffer
            buffer.num_held += 1
        self._hold(contribution)

    def _hold(self, contribution: Contribution) -> None:
        self._open.add(contribution)
        self._num_held[contribution.push_id.worker, contribution.push_id.incarnation] += 1

    def _found(self, push_id: PushId) -> Contribution | None:
        found = self._shared.find(push_id)
        if found is None:
            return None
        buffer, step = found
        # This is the first look at it.
        self._staging.clear_padding(buffer.staged)
        return Contribution(push_id, step, _NO_METRICS, memory=buffer.staged, buffer=buffer, is_found=True)

    def _empty(self, push_id: PushId, step: int) -> Contribution:
        return Contribution(push_id, step, _NO_METRICS, memory=self._staging.nothing(), is_empty=True)

    def _drop_late(self, push_id: PushId) -> None:
        """Drops a contribution whose bytes arrived after its step had been applied without it."""
        if push_id in self._staged:
            self._drop(self._staged[push_id])
        self._shared.discard(push_id)

    def _stale(self, contribution: Contribution, current_step: int) -> PushReply:
        self.num_stale += 1
        self._remember(contribution, PushResult.STALE)
        return PushReply(result=PushResult.STALE, step=current_step)

    def _remember(self, contribution: Contribution, result: PushResult) -> None:
        self.push_ids.remember(contribution.push_id, contribution.step, result)

    def _answer(self, contribution: Contribution, outcome: PushReply | PsError) -> None:
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
            if contribution.buffer is not None:
                contribution.buffer.num_held -= 1
                self._shared.end(contribution.buffer, contribution.push_id.sequence)


def _came_again(push_id: PushId) -> Cancelled:
    return Cancelled(f"push {push_id.sequence} of worker {push_id.worker} came again on another stream")


def _is_named(push_id: PushId, pattern: PushId) -> bool:
    is_incarnation = (push_id.worker, push_id.incarnation) == (pattern.worker, pattern.incarnation)
    return is_incarnation and pattern.sequence in (0, push_id.sequence)
