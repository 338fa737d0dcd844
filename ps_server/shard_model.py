"""Memory, contributions, rules and step together."""

from collections.abc import Callable, Sequence

from ps_protocol import shared_memory as at
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import PsError, StepMismatch
from ps_protocol.layout import aligned_bytes
from ps_protocol.shard import ApplyRequest, PushHeader, RowsRequest, ShardSettings, ShardSpec
from ps_protocol.tensors import Array
from ps_server.accumulator import Contribution, GradientAccumulator
from ps_server.applied_pushes import AppliedPushes
from ps_server.apply_factors import factors
from ps_server.arena import ShardArena, VersionedBuffer
from ps_server.fused_apply import FusedApply
from ps_server.gradient_slots import GradientSlots
from ps_server.last_step import LastStep
from ps_server.memory import BufferPool, MemoryBudget, VariablesMemory, private_variables
from ps_server.metrics import MetricCells
from ps_server.shard_settings import RuleSettings, push_mode
from ps_server.staging import StagedGradients, StagingMemory
from ps_server.step_memory import StepMemory
from ps_server.step_work import NO_ROWS, StepWork, no_slot, other_step, sparse_step
from ps_server.stripes import ONE_THREAD, StripeRunner
from ps_server.table_group import SparseStep, TableGroup

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
        self.accumulator = GradientAccumulator(self.staging, max_staged_per_worker=spec.max_staged_per_worker, shared=self.shared)
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
