"""One shard's part of a model: memory, contributions, rules and step; how a step is applied. Knows no lock, epoch, clock or wire."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec, LimitExceeded, PsError, SlotNotFound, StepGone, StepMismatch, StepNotReady
from ps_protocol.model.layout import VariableSlice, aligned_bytes
from ps_protocol.model.spec import AVERAGE_SLOT
from ps_protocol.model.variables import Array, check_name
from ps_protocol.roles.shard import ApplyRequest, Metric, MetricCell, PushHeader, PushId, RowsRequest, ShardSettings, ShardSpec
from ps_protocol.shared_memory import words as at
from ps_server.contributions.inbox import AppliedPushes, Contribution, Inbox
from ps_server.contributions.slots import GradientSlots
from ps_server.contributions.staging import StagedGradients, StagingMemory
from ps_server.numbers.apply import ONE_THREAD, FusedApply, StepMemory, StripeRunner
from ps_server.numbers.arena import ShardArena, VersionedBuffer
from ps_server.numbers.memory import BufferPool, MemoryBudget, VariablesMemory, private_variables
from ps_server.numbers.tables import SparseStep, TableGroup
from ps_server.optimizers.rule import RuleSettings, UpdateRule, push_mode

# The factors that a step's gradients and means are multiplied by, as the chief asks for them.


def factors(request: ApplyRequest, *, num_scales: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the weights, in the order of the push ids, and the scales; empty if all are 1. Raises InvalidSpec if they do not fit."""
    weights, scales = request.weights, request.scales
    if not weights and not scales:
        return (), ()
    if weights and len(weights) != len(request.contributors):
        raise InvalidSpec(
            f"step {request.step}: {len(weights)} weights of {len(request.contributors)} contributors; give one for each, or none"
        )
    if scales and len(scales) != num_scales:
        raise InvalidSpec(f"step {request.step}: {len(scales)} scales of {num_scales} slices and tables; give one for each, or none")
    if weights and all(weight == 1 for weight in weights):
        weights = ()
    by_id: Sequence[tuple[PushId, float]] = sorted(zip(request.contributors, weights, strict=False))
    return tuple(weight for _, weight in by_id), () if all(scale == 1 for scale in scales) else scales


# How the step that was applied last had been asked for, so that the same may be asked again.


@dataclass(slots=True)
class LastStep:
    """`request` is None until a step has been applied."""

    request: ApplyRequest | None = None
    _prepared: tuple[ApplyRequest, list[float]] | None = None

    def check_repeated(self, request: ApplyRequest, *, at: int, has_applied: bool) -> None:
        """Raises StepMismatch unless this very request has been carried out; `at` is the step that the shard is at."""
        if request.step == at - 1 and self.request is not None and _are_same(self.request, request):
            return
        what = "was applied with other contributors" if request.step == at - 1 and has_applied else "is not the one to apply"
        raise StepMismatch(f"step {request.step} {what}: the shard is at step {at}; ask for its status", facts={"step": str(at)})

    def prepare(self, request: ApplyRequest, sums: list[float]) -> None:
        """Keeps what was prepared for the step that comes next."""
        self._prepared = request, sums

    def prepared(self, request: ApplyRequest, *, at: int) -> list[float]:
        """Returns what was prepared for a step that has been applied; raises StepMismatch if it was not prepared."""
        if self._prepared is not None and _are_same(self._prepared[0], request):
            return self._prepared[1]
        raise StepMismatch(f"step {request.step} was applied without being prepared; ask for the status", facts={"step": str(at)})


def _are_same(one: ApplyRequest, other: ApplyRequest) -> bool:
    return (one.step, one.contributors) == (other.step, other.contributors)


# Numbers that workers report along with contributions, one cell for each name and worker.


MAX_METRICS = 1000


@dataclass(slots=True)
class _Cell:
    total: float = 0.0
    weight: float = 0.0
    count: int = 0
    last: float = 0.0


class MetricCells:
    """What has been reported in contributions that were applied."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._cells: dict[tuple[str, int], _Cell] = {}

    def admit(self, metrics: Mapping[str, Metric]) -> None:
        """Takes up the names, all or nothing; raises LimitExceeded if there are too many, InvalidSpec if one is none."""
        if metrics.keys() <= self._names and all(_is_weight(metric.weight) for metric in metrics.values()):
            return
        for name, metric in metrics.items():
            check_name(name)
            if not _is_weight(metric.weight):
                raise InvalidSpec(f"metric {name!r}: weight = {metric.weight!r}, want a finite number >= 0")
        names = self._names | metrics.keys()
        if len(names) > MAX_METRICS:
            raise LimitExceeded(f"metrics: {len(names)} different names, {MAX_METRICS} at most; use fewer names")
        self._names = names

    def count(self, worker: int, metrics: Mapping[str, Metric]) -> None:
        """Counts what a worker reported in one contribution; its names have been admitted."""
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
        """Goes on from what `cells` has returned, in place of what is here. Raises LimitExceeded, InvalidSpec."""
        self._names, self._cells = set(), {}
        for cell in cells:
            self.admit({cell.name: Metric(value=cell.last, weight=0.0)})
            self._cells[cell.name, cell.worker] = _Cell(total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)


def _is_weight(weight: float) -> bool:
    return 0 <= weight < float("inf")


# In which words one specification of a shard differs from another.


def difference(mine: ShardSpec, theirs: ShardSpec) -> str:
    """Says in words where `theirs` differs from what stands; empty if it is the same again."""
    my_slices, their_slices = ((*spec.layout.slices, *spec.layout.tables) for spec in (mine, theirs))
    for old, new in zip(my_slices, their_slices, strict=False):
        if old != new:
            return f"{_described(old)} exists, asked for is {_described(new)}"
    if len(my_slices) != len(their_slices):
        return f"{len(my_slices)} slices exist, asked for are {len(their_slices)}"
    if mine.optimizer != theirs.optimizer:
        return f"the optimizer is {mine.optimizer}, asked for is {theirs.optimizer}"
    if mine.initial_step != theirs.initial_step:
        return f"the variables began at step {mine.initial_step}, asked for is {theirs.initial_step}"
    if mine.averages != theirs.averages:
        return f"the moving averages are {mine.averages or 'none'}, asked for are {theirs.averages or 'none'}"
    if mine.clip != theirs.clip:
        return f"the limits on the gradient are {mine.clip}, asked for are {theirs.clip}"
    return ""


def _described(piece: VariableSlice) -> str:
    variable = piece.variable
    rows = "" if piece.is_whole else f" rows {piece.start} to {piece.stop}"
    options = {
        "sparse": variable.is_sparse,
        f"optimizer {variable.optimizer}": variable.optimizer,
        f"initializer {variable.initializer}": variable.initializer,
        f"constraint {variable.constraint}": variable.constraint,
        f"mean {variable.sparse_mean.name}": variable.is_sparse,
        f"axis {piece.axis}": piece.axis,
    }
    words = "".join(f", {word}" for word, is_given in options.items() if is_given)
    return f"variable {variable.name!r} with shape {variable.shape} {variable.data_type.value}{rows}{words}"


# What one apply of a shard reads and writes; and the words for a step or slot that is not there.


NO_ROWS = SparseStep(gradients=(), weights=(), scales=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one apply reads and writes: the arenas, the rows, and the contributions that they come from."""

    fused: FusedApply
    dense: StepMemory
    sparse: SparseStep
    contributions: Sequence[Contribution]
    is_on_arrival: bool = False


def sparse_step(memories: Sequence[StagedGradients], *, weights: Sequence[float], scales: Sequence[float]) -> SparseStep:
    """Returns what a step means for the tables."""
    return SparseStep(gradients=[memory.rows for memory in memories], weights=weights or (1.0,) * len(memories), scales=scales)


def other_step(step: int | None, *, at: int) -> PsError:
    """Returns the error for a reader of a step (None: the latest) that a shard, which is at step `at`, does not have."""
    facts = {"step": str(at)}
    if step is not None and step > at:
        return StepNotReady(f"step {step} is not there yet, the shard is at step {at}; wait for its token", facts=facts)
    return StepGone(f"step {step} is gone, the shard is at step {at} and keeps at most the one before; read a later one", facts=facts)


def no_slot(name: str, known: Sequence[str], *, spec: ShardSpec, rules: Sequence[UpdateRule]) -> SlotNotFound:
    """Returns the error for a slot that a shard does not have."""
    if name == AVERAGE_SLOT:
        return SlotNotFound(f"ps {spec.shard}: no variable here has a moving average; ask for one when the model is created")
    names = " and ".join(sorted({repr(rule.spec.name) for rule in rules})) or repr(spec.optimizer.name)
    return SlotNotFound(f"optimizer {names} has no slot {name!r}; it has {', '.join(known) or 'none'}")


# Memory, contributions, rules and step together.


# A step of such a model, or a copy of it, takes no longer than a thread takes to be woken for it.
SMALL_BYTES = 1 << 20


class ShardModel:
    """Holds what `spec` names. The caller serialises the calls; those that say that they take long it may run beside others.

    `half_done` is called in each apply when the dense variables have been made, and the tables have not.
    """

    def __init__(
        self,
        spec: ShardSpec,
        *,
        budget: MemoryBudget,
        stripes: StripeRunner = ONE_THREAD,
        allocate: Callable[[int], VariablesMemory] = private_variables,
        half_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._half_done = half_done
        self.spec = spec
        self.is_small = spec.layout.nbytes + sum(table.nbytes for table in spec.layout.tables) <= SMALL_BYTES
        self.budget = budget
        self.settings = RuleSettings(spec)
        rules = self.settings.rules
        self.tables = TableGroup(spec.layout, rules, clip=spec.clip, budget=budget, step=spec.initial_step)
        try:
            self.arena = ShardArena(spec.layout, rules=rules, averages=spec.averages, budget=budget, allocate=allocate)
        except PsError:
            self.tables.release()
            raise
        self.pool = BufferPool(spec.layout.nbytes, budget=budget)
        self.staging = StagingMemory(spec.layout, self.pool, budget=budget)
        self.shared = GradientSlots(release=lambda slot: budget.release(slot.memory.nbytes))
        self.accumulator = Inbox(self.staging, max_staged_per_worker=spec.max_staged_per_worker, shared=self.shared)
        self.metrics = MetricCells()
        self.applied = AppliedPushes()
        self.step = spec.initial_step
        self.num_nonfinite = 0
        self.has_applied = False
        self.fused = FusedApply(spec.layout, rules, clip=spec.clip, averages=spec.averages, initial_step=spec.initial_step, stripes=stripes)
        # Of applies on arrival, each with scratch memory of its own.
        self._idle_fused: list[FusedApply] = []
        self.last = LastStep()

    @property
    def first_values(self) -> list[Array]:
        """The memories that the first values are to be copied into, one after the other; readers know that they are gone."""
        return [self.arena.begin_next().memory, *self.tables.first_values]

    def fill_initial(self, memory: Array) -> None:
        """Completes what the first values have been copied into; `memory` is that of the arena. Takes long; touches no bookkeeping."""
        self.arena.clear_padding(memory)
        self.arena.fill_slots(memory)
        self.tables.fill_initial(self.spec.initial_step)

    def publish_initial(self, spec: ShardSpec) -> None:
        """Makes the values in the arena's other copy the variables of the initial step."""
        self.spec = spec
        self.accumulator.max_staged_per_worker = spec.max_staged_per_worker
        self.arena.publish_next(spec.initial_step)
        self.shared.advance(self.step, accepts_any_step=self.accumulator.accepts_any_step)
        self._publish()

    def publish_restored(self, settings: ShardSettings) -> None:
        """Does the same for values that come from a checkpoint, which nobody's first values may replace. Raises InvalidSpec."""
        self.publish_initial(self.spec)
        self.has_applied = True
        self.configure(settings)

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works, unless it has such or newer settings; no step may be under way. Raises InvalidSpec.

        What is staged for steps gone by is dropped where they are not accepted any more; otherwise the chief may come back to it.
        """
        if not self.settings.is_news(settings):
            return
        was_on_arrival = self.settings.current.applies_on_arrival
        self.settings.change(settings)
        if was_on_arrival and not settings.applies_on_arrival:
            self._rebase(settings.step)
        elif settings.applies_on_arrival and not was_on_arrival:
            # The copy that changes in place from now on is no more what its readers have begun to copy.
            self.arena.current.renew()
            self._rebase(self.step)
        self.accumulator.accepts_any_step = settings.accepts_stale or settings.applies_on_arrival
        # Where steps are strict again, what belongs to earlier ones is not wanted any more.
        self.accumulator.advance(self.step)
        self._publish()

    def open_push(self, header: PushHeader) -> Contribution:
        """Takes up a contribution; see GradientAccumulator.open."""
        if header.metrics:
            self.metrics.admit(header.metrics)
        return self.accumulator.open(header, current_step=self.step)

    def complete(self, memory: StagedGradients) -> None:
        """Puts a contribution that has all its bytes in order; raises IndexOutOfRange. Takes long; touches no bookkeeping."""
        self.staging.put_in_order(memory)
        if memory.dense.size and memory.encoding is FloatEncoding.AS_IS:
            self.arena.clear_padding(memory.dense)

    def buffer(self, step: int | None) -> VersionedBuffer:
        """Returns the copy that holds `step` (None: the latest); raises StepGone or StepNotReady."""
        found = self.arena.find(self.step if step is None else step)
        if found is not None:
            return found
        raise other_step(step, at=self.step)

    def slot(self, name: str) -> Array:
        """Returns a slot's memory, for all dense variables; raises SlotNotFound."""
        found = self.arena.readable_slot(name)
        if found is not None:
            return found
        if name in self.slot_names:
            return aligned_bytes(self.spec.layout.nbytes)
        raise no_slot(name, self.slot_names, spec=self.spec, rules=self.settings.rules)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots of all variables, sorted."""
        return tuple(sorted(self.tables.slot_names.union(self.arena.slots)))

    def step_of_rows(self, request: RowsRequest) -> int:
        """Returns the step whose rows are asked for; raises InvalidSpec, SlotNotFound, StepGone or StepNotReady."""
        self.tables.table(request.table)
        if request.slot:
            self.tables.slot(request.table, request.slot)
        step = self.step if request.step is None else request.step
        if step > self.step or (request.slot and step < self.step) or step < self.step - 1:
            raise other_step(step, at=self.step)
        return step

    def is_repeated(self, request: ApplyRequest) -> bool:
        """Whether this very request has been carried out; raises StepMismatch if it is for another step than the one to apply now."""
        if self.settings.current.applies_on_arrival:
            raise StepMismatch(f"step {request.step}: the shard applies on arrival; configure it first", facts={"step": str(self.step)})
        if request.step == self.step:
            return False
        self.last.check_repeated(request, at=self.step, has_applied=self.has_applied)
        return True

    def begin_prepare(self, request: ApplyRequest) -> StepWork:
        """Returns what `run_prepare` reads. Touches nothing that readers see."""
        return self._work(request, begin_out=lambda: self.arena.current)

    def run_prepare(self, request: ApplyRequest, work: StepWork) -> list[float]:
        """Returns the sums of squares of the step's means, slice by slice and table by table. Takes long."""
        sums = [*self.fused.sums_of_squares(work.dense), *self.tables.sums_of_squares(work.sparse)]
        self.last.prepare(request, sums)
        return sums

    def prepared(self, request: ApplyRequest) -> list[float]:
        """Returns what was prepared for a step that has been applied; raises StepMismatch if it was not prepared."""
        return self.last.prepared(request, at=self.step)

    def begin_apply(self, request: ApplyRequest) -> StepWork:
        """Returns what `run_apply` reads and writes; readers of the copy that it overwrites, and of slots, know from now on."""
        return self._work(request, begin_out=self._begin_out)

    def begin_arrival(self, contribution: Contribution) -> StepWork:
        """Returns what `run_apply` reads and writes to apply one contribution, in place."""
        # First of all, for want of memory may end this here, without effect.
        fused = self._idle_fused.pop() if self._idle_fused else self.fused.clone()
        memory = self.accumulator.begin_arrival(contribution, step=self.step)
        self.settings.begin(self.step)
        return StepWork(
            fused=fused,
            dense=self._dense([memory], out=self.arena.current.memory),
            sparse=SparseStep(gradients=[memory.rows], weights=(1.0,), scales=()),
            contributions=[contribution],
            is_on_arrival=True,
        )

    def run_apply(self, work: StepWork) -> int:
        """Makes the next step's variables; returns how many elements of the mean are not finite. Takes long; touches no bookkeeping."""
        num_nonfinite = work.fused.run(work.dense)
        self.arena.clear_padding(work.dense.out)
        self._half_done()
        return num_nonfinite + self.tables.apply(work.sparse, on_arrival=work.is_on_arrival)

    def finish_apply(self, request: ApplyRequest, work: StepWork, *, num_nonfinite: int) -> None:
        """Makes the new variables the latest, and drops what was staged for the step."""
        self.last.request = request
        self._count(work, num_nonfinite)
        self.arena.publish_next(self.step)
        self.tables.settle_journals()
        self.accumulator.end(work.contributions)
        self.accumulator.discard(request.discards, current_step=self.step)
        self.accumulator.advance(self.step)
        self._publish()

    def finish_arrival(self, work: StepWork, *, num_nonfinite: int) -> None:
        """Counts a contribution that has been applied on arrival."""
        self._count(work, num_nonfinite)
        self.arena.current.hold(self.step)
        self.accumulator.end(work.contributions)
        self.accumulator.advance(self.step)
        self._publish()
        self._idle_fused.append(work.fused)

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self.serve(0)
        self.shared.clear()
        self.pool.close()
        self.staging.close()
        self.arena.release()
        self.tables.release()

    def _count(self, work: StepWork, num_nonfinite: int) -> None:
        self.settings.advance()
        self.has_applied = True
        self.num_nonfinite = num_nonfinite
        for contribution in work.contributions:
            self.metrics.count(contribution.push_id.worker, contribution.metrics)
            self.applied.count(contribution.push_id, step=self.step)
        self.step += 1

    def _rebase(self, step: int) -> None:
        self.step = step
        self.arena.current.hold(step)
        self.arena.begin_next()
        self.arena.begin_slots()
        self.tables.rebase(step)
        self.last = LastStep()

    def serve(self, epoch: int) -> None:
        """Publishes for whom what lies in shared memory is meant; 0: for nobody."""
        self.arena.words[at.EPOCH] = epoch

    def _publish(self) -> None:
        words = self.arena.words
        words[at.MODE] = push_mode(self.settings.current)
        words[at.MAX_SLOTS] = self.spec.max_staged_per_worker
        words[at.OPEN_STEP] = self.step

    def _begin_out(self) -> VersionedBuffer:
        self.arena.begin_slots()
        return self.arena.begin_next()

    def _work(self, request: ApplyRequest, *, begin_out: Callable[[], VersionedBuffer]) -> StepWork:
        """The work of a step; `begin_out` is called when nothing can fail any more."""
        num_slices, num_tables = len(self.spec.layout.slices), len(self.spec.layout.tables)
        weights, scales = factors(request, num_scales=num_slices + num_tables)
        contributions = self.accumulator.contributions(request.contributors, step=request.step)
        memories = [contribution.memory for contribution in contributions if contribution.memory is not None]
        for contribution in contributions:
            if contribution.is_found and contribution.memory is not None:
                # Nobody has looked at it until now.
                self.arena.clear_padding(contribution.memory.dense)
        self.settings.begin(request.step)
        return StepWork(
            fused=self.fused,
            dense=self._dense(memories, out=begin_out().memory, weights=weights, scales=scales[:num_slices]),
            sparse=sparse_step(memories, weights=weights, scales=scales[num_slices:]) if num_tables else NO_ROWS,
            contributions=contributions,
        )

    def _dense(
        self, memories: Sequence[StagedGradients], *, out: Array, weights: Sequence[float] = (), scales: Sequence[float] = ()
    ) -> StepMemory:
        encodings = [memory.encoding for memory in memories]
        return StepMemory(
            value=self.arena.current.memory,
            out=out,
            slots=self.arena.slots,
            average=self.arena.average,
            gradients=[memory.dense for memory in memories],
            encodings=encodings if any(one is not FloatEncoding.AS_IS for one in encodings) else (),
            absent=[memory.absent for memory in memories],
            weights=weights,
            scales=scales,
            step=self.step,
        )
