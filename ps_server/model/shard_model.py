"""One shard's part of a model: memory, contributions, rules and step; how a step is applied. Knows no lock, epoch, clock or wire."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec, PsError, SlotNotFound, StepGone, StepMismatch, StepNotReady
from ps_protocol.model.differences import differences
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.spec import AVERAGE_SLOT
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.shard import ApplyRequest, HiddenState, OptimizerPowers, RowsRequest, ShardSettings, ShardSpec
from ps_protocol.shared_memory import words as at
from ps_server.contributions.inbox import Contribution, Inbox
from ps_server.contributions.shared_buffers import SharedBuffers
from ps_server.contributions.staging import StagedGradients, StagingMemory
from ps_server.model.snapshot import Snapshot, StateMemory, StateTensor, rule_keys, tensors_of
from ps_server.numbers.apply import ONE_THREAD, FusedApply, StepMemory, StripeRunner
from ps_server.numbers.arena import ShardArena, VersionedBuffer
from ps_server.numbers.memory import BufferPool, MemoryBudget, VariablesMemory, private_variables
from ps_server.numbers.tables import SparseStep, Table, TableGroup
from ps_server.optimizers.rule import RuleSettings, push_mode


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


def of_each(request: ApplyRequest, *, num_shares: int) -> list[tuple[float, ...]]:
    """Returns the shares of each contributor; empty if there are none. Raises InvalidSpec if they do not fit."""
    if request.shares and len(request.shares) != num_shares * len(request.contributors):
        raise InvalidSpec(
            f"step {request.step}: {len(request.shares)} shares of {len(request.contributors)} contributors with {num_shares} slices and"
            " tables; give one for each of each, or none"
        )
    return [request.shares[start : start + num_shares] for start in range(0, len(request.shares), num_shares)] if num_shares else []


def difference(mine: ShardSpec, theirs: ShardSpec) -> str:
    """Returns words for the first difference between `theirs` and the present model; empty if they are the same.

    The step at which each begins says nothing: a server that was brought back from a checkpoint began later than the others.
    """
    mine_by_part, theirs_by_part = (
        {
            "slices": (*spec.layout.slices, *spec.layout.tables),
            "optimizer": spec.optimizer,
            "averages": spec.averages,
            "clip": spec.clip,
        }
        for spec in (mine, theirs)
    )
    return next(differences(mine_by_part, theirs_by_part, whose="the shard's"), "")


def formulas_of(memories: Sequence[StagedGradients]) -> list[tuple[int, FormulaUpdate]]:
    """Returns the formulas of contributions, in their order, each with the position of its contribution."""
    return [(position, update) for position, memory in enumerate(memories) for update in memory.formulas]


# A step of such a model, or a copy of it, takes no longer than waking a thread for it.
SMALL_BYTES = 1 << 20

_NO_ROWS = SparseStep(gradients=(), weights=(), scales=())


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The memory that one apply reads and writes: the arenas, the rows, and the contributions that they come from."""

    fused: FusedApply
    dense: StepMemory
    sparse: SparseStep
    contributions: Sequence[Contribution]
    is_on_arrival: bool = False
    begins_phase: bool = False


class ShardModel:
    """Holds the variables of `spec`. The caller serialises the calls; calls documented as slow may run beside others.

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
        self.spec = spec
        self.budget = budget
        self.step = spec.initial_step
        # Since which step variables have the values of the step before the latest, and those of the latest.
        self._same_since = self.step, self.step
        self.has_applied = False
        # Whether a second chief of this epoch has found these values, which no creation may change any more.
        self.is_fixed = False
        # Elements of the latest mean that are not finite.
        self.num_nonfinite = 0
        self.num_bytes = spec.layout.nbytes + sum(table.nbytes for table in spec.layout.tables)
        self.is_small = self.num_bytes <= SMALL_BYTES
        self._half_done = half_done
        self._settings = RuleSettings(spec)
        rules = self._settings.rules
        self._tables = TableGroup(spec.layout, rules, clip=spec.clip, budget=budget, step=spec.initial_step)
        try:
            self._arena = ShardArena(spec.layout, rules=rules, averages=spec.averages, budget=budget, allocate=allocate)
        except PsError:
            self._tables.release()
            raise
        staging = StagingMemory(
            spec.layout,
            BufferPool(spec.layout.nbytes, budget=budget),
            budget=budget,
            padding=self._arena.padding,
            new_rows=self._tables.bytes_per_new_row,
            await_rows=self._tables.await_rows,
        )
        shared = SharedBuffers(release=lambda buffer: budget.release(buffer.memory.nbytes))
        self.inbox = Inbox(staging, max_staged_per_worker=spec.max_staged_per_worker, shared=shared)
        self._fused = FusedApply(
            spec.layout, rules, clip=spec.clip, averages=spec.averages, initial_step=spec.initial_step, stripes=stripes
        )
        # Of applies on arrival, each with scratch memory of its own.
        self._idle_fused: list[FusedApply] = []
        # How the latest step was asked for, answered, and prepared, so that the same may be asked again.
        self._last: ApplyRequest | None = None
        self.last_checksums: tuple[int, ...] = ()
        # Of each contribution (False) and of the mean (True).
        self._prepared: dict[bool, tuple[ApplyRequest, list[float]]] = {}

    # How it comes to its values

    @property
    def first_values(self) -> list[Array]:
        """The memories for the first values, to be filled one after the other; readers find their former values gone."""
        return [self._arena.begin_next().memory, *self._tables.first_values]

    @property
    def filled_bytes(self) -> int:
        """How much of the tables' first values that are not sent `fill_initial` has made. Any thread may ask."""
        return self._tables.filled_bytes

    def fill_initial(self, memory: Array) -> None:
        """Completes the memory with the copied first values; `memory` is that of the arena. Takes long; touches no bookkeeping."""
        self._arena.padding.clear(memory)
        self._arena.fill_slots(memory)
        self._tables.fill_initial(self.spec.initial_step)

    def publish_initial(self, spec: ShardSpec) -> None:
        """Makes the values in the arena's other copy the variables of the initial step."""
        for table in self._tables:
            table.filled_bytes = 0
        self.spec = spec
        self.inbox.max_staged_per_worker = spec.max_staged_per_worker
        self._arena.publish_next(spec.initial_step)
        self.inbox.begin(self.step)
        self._publish()

    def begin_restore(self) -> list[StateTensor]:
        """Returns the tensors that a checkpoint is to fill, but for those of `keyed_tables`. Takes long."""
        values = self._arena.begin_next().memory
        # The padding, and elements without a slot, begin as in a model that was created.
        self._arena.fill_slots(values)
        tensors = tensors_of(self.spec, self._settings.rules, self._state(values))
        return [tensor for tensor in tensors if tensor.piece.variable.keys is None]

    @property
    def tables(self) -> list[Table]:
        """All tables, in the layout's order."""
        return [*self._tables]

    @property
    def keyed_tables(self) -> list[Table]:
        """The tables that have no size."""
        return [table for table in self._tables if table.piece.variable.keys is not None]

    def publish_restored(self, hidden: HiddenState, settings: ShardSettings) -> None:
        """Continues from a checkpoint whose tensors have been filled; first values may no longer replace them.

        Raises InvalidSpec, LimitExceeded if `hidden` is not a state of this model.
        """
        for key, rule in zip(rule_keys(self.spec.layout), self._settings.rules, strict=True):
            rule.resume(hidden.powers_by_key.get(key, rule.powers))
        self._settings.resume_phase(hidden.phase, hidden.phase_step)
        self._fused.resume_averages(hidden.average_product)
        self.inbox.metrics.resume(hidden.metrics)
        self.inbox.push_ids.resume(hidden.pushes)
        self.num_nonfinite = hidden.num_nonfinite
        self.publish_initial(self.spec)
        self.configure(settings)
        self.has_applied = True

    @property
    def state(self) -> StateMemory:
        """The memories of the latest step, as they are."""
        return self._state(self._arena.current.memory)

    def state_since(self, since: int | None) -> StateMemory:
        """Returns memories of the latest step as large as a copy of what may have changed since then; see SaveRequest.

        Of a table of which a part is enough, the memories have the numbers of the rows, and else nothing of use.
        """
        # Where contributions are applied as they arrive, other shards are at other steps.
        if since is None or self.applies_on_arrival:
            return self.state
        return replace(self.state, tables=[table.parts_of(table.changed_since(since)) for table in self._tables])

    def snapshot(self, memory: StateMemory | None = None, *, step: int | None = None) -> Snapshot:
        """Returns the state that later steps depend on: tensors in `memory` (None: in place), saved as `step` (None: the model's own)."""
        hidden = HiddenState(
            step=self.step if step is None else step,
            powers=tuple(
                OptimizerPowers(key=key, powers=rule.powers)
                for key, rule in zip(rule_keys(self.spec.layout), self._settings.rules, strict=True)
            ),
            phase=self._settings.phase,
            phase_step=self._settings.phase_step,
            average_product=self._fused.average_product(self.step),
            num_nonfinite=self.num_nonfinite,
            table_rows=tuple(table.num_rows for table in self.keyed_tables),
            metrics=tuple(self.inbox.metrics.cells()),
            pushes=self.inbox.push_ids.lately_applied(),
        )
        return Snapshot(self.spec, self._settings.rules, hidden, self.state if memory is None else memory)

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self.serve(0)
        self.inbox.close()
        self._arena.release()
        self._tables.release()

    # How it works at present

    @property
    def settings(self) -> ShardSettings:
        """Those in force."""
        return self._settings.current

    @property
    def applies_on_arrival(self) -> bool:
        """Whether each contribution is applied as it comes, in place."""
        return self._settings.current.applies_on_arrival

    @property
    def accepts_stale(self) -> bool:
        """Whether contributions of any step are taken, so that steps come as fast as they can."""
        return self._settings.current.accepts_stale

    def lacks(self, settings: ShardSettings) -> bool:
        """Whether these are newer than those in force."""
        return self._settings.is_news(settings)

    def configure(self, settings: ShardSettings) -> None:
        """Changes the shard's settings, unless it has these or newer ones; no step may be under way. Raises InvalidSpec.

        Drops contributions staged for earlier steps if the new settings do not accept them; else the chief may still use them.
        """
        if not self._settings.is_news(settings):
            return
        if self.has_applied and settings.applies_on_arrival is not self.applies_on_arrival:
            raise InvalidSpec("applies_on_arrival: it cannot change once anything has been applied; choose it when the cluster is started")
        begins_in_place = settings.applies_on_arrival and not self.applies_on_arrival
        self._settings.change(settings)
        if begins_in_place:
            # From now on values change in place: copies that readers have begun are void.
            self._arena.current.renew()
            self._arena.begin_slots()
        self.inbox.accepts_any_step = settings.accepts_stale or settings.applies_on_arrival
        self.inbox.rejects_nonfinite = settings.rejects_nonfinite
        # If steps are strict again, contributions to earlier ones are useless.
        self.inbox.advance(self.step)
        self._publish()

    def begin_epoch(self, fence: Fence) -> None:
        """Another epoch begins with the settings of the model; whether contributions are applied on arrival stays."""
        self.is_fixed = False
        self.configure(ShardSettings(fence=fence, version=0, applies_on_arrival=self.applies_on_arrival))

    def serve(self, epoch: int) -> None:
        """Publishes the epoch that shared memory serves; 0: none."""
        self._arena.words[at.EPOCH] = epoch

    # -- reading

    @property
    def memory(self) -> VariablesMemory:
        """The memory of both copies of the variables."""
        return self._arena.memory

    @property
    def contents(self) -> list[Array]:
        """The bytes of the latest variables: the arena's, and each table's."""
        return [self._arena.current.memory, *self._tables.contents]

    @property
    def sent_contents(self) -> list[Array]:
        """The bytes of `contents` that workers send as first values; the others are made here."""
        return [self._arena.current.memory, *self._tables.first_values]

    def buffer(self, step: int | None) -> VersionedBuffer:
        """Returns the copy that holds `step` (None: the latest); raises StepGone or StepNotReady."""
        found = self._arena.find(self.step if step is None else step)
        if found is not None:
            return found
        raise self._other_step(step)

    def copy_before(self, buffer: VersionedBuffer, held_step: int | None) -> VersionedBuffer | None:
        """Returns the copy of the step before the latest one, where that is in the buffer and a reader has the same values; else None."""
        if held_step is None or buffer.step != self.step or self.applies_on_arrival or not self._same_since[0] <= held_step < self.step:
            return None
        return self._arena.find(self.step - 1)

    def slot(self, name: str) -> Array:
        """Returns a slot's memory, for all dense variables; raises SlotNotFound."""
        found = self._arena.readable_slot(name)
        if found is not None:
            return found
        if name in self.slot_names:
            return aligned_bytes(self.spec.layout.nbytes)
        raise self._no_slot(name)

    @property
    def variables_bytes(self) -> int:
        """Bytes of the variables, with second copies, and the rows that the last step overwrote."""
        return 2 * self.spec.layout.nbytes + sum(table.values_bytes for table in self._tables)

    @property
    def slots_bytes(self) -> int:
        """Bytes of the optimizers' slots and the averages."""
        return self._arena.slots_bytes + sum(table.slots_bytes for table in self._tables)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the slots of all variables, sorted."""
        return tuple(sorted(self._tables.slot_names.union(self._arena.slots)))

    def table(self, position: int) -> Table:
        """Returns a table; raises InvalidSpec if there is none."""
        return self._tables.table(position)

    def step_of_rows(self, request: RowsRequest) -> int:
        """Returns the step whose rows are requested; raises InvalidSpec, SlotNotFound, StepGone or StepNotReady."""
        self._tables.table(request.table)
        if request.slot:
            self._tables.check_slot(request.table, request.slot)
        step = self.step if request.step is None else request.step
        if step > self.step or (request.slot and step < self.step) or step < self.step - 1:
            raise self._other_step(step)
        return step

    def watch(self, buffer: VersionedBuffer) -> Callable[[], bool]:
        """Returns an object that tells whether a copy is still unchanged; if values change in place, any values will do."""
        version, is_torn_allowed = buffer.version, self.applies_on_arrival
        return lambda: is_torn_allowed or buffer.version == version

    def watch_slots(self) -> Callable[[], bool]:
        """Returns an object that tells whether the slots are unchanged since now."""
        arena, version, is_torn_allowed = self._arena, self._arena.slots_version, self.applies_on_arrival
        return lambda: is_torn_allowed or arena.slots_version == version

    # How a step is made

    @property
    def last_request(self) -> ApplyRequest | None:
        """The request of the latest step; None until a step has been applied."""
        return self._last

    def is_repeated(self, request: ApplyRequest) -> bool:
        """Whether this very request has been carried out; raises StepMismatch if it is for another step than the one to apply now."""
        if self.applies_on_arrival:
            raise StepMismatch(f"step {request.step}: the shard applies on arrival; configure it first", facts={"step": str(self.step)})
        if request.step == self.step:
            return False
        is_latest = request.step == self.step - 1
        if is_latest and self._last is not None and _are_same(self._last, request):
            return True
        what = "was applied with other contributors" if is_latest and self.has_applied else "is not the one to apply"
        raise StepMismatch(
            f"step {request.step} {what}: the shard is at step {self.step}; ask for its status", facts={"step": str(self.step)}
        )

    def begin_prepare(self, request: ApplyRequest) -> StepWork:
        """Returns the memory that `run_prepare` reads. Touches nothing that readers see."""
        return self._work(request, begin_out=lambda: self._arena.current)

    def run_prepare(self, request: ApplyRequest, work: StepWork) -> list[float]:
        """Returns the sums of squares that `PrepareRequest` asks for, slice by slice and table by table. Takes long."""
        is_of_mean = _is_of_mean(request)
        if is_of_mean:
            sums = [*self._fused.sums_of_squares(work.dense), *self._tables.sums_of_squares(work.sparse)]
        else:
            by_id = {one.push_id: one.memory for one in work.contributions}
            sums = [square for push_id in request.contributors for square in self._squares_of(by_id.get(push_id))]
        self._prepared[is_of_mean] = request, sums
        return sums

    def _squares_of(self, memory: StagedGradients | None) -> list[float]:
        num_slices, num_tables = len(self.spec.layout.slices), len(self.spec.layout.tables)
        if memory is None:
            return [-1.0] * (num_slices + num_tables)
        rows = SparseStep(gradients=[memory.rows], weights=(1.0,), scales=())
        sums = self._fused.sums_of_squares(self._dense([memory], out=self._arena.current.memory))
        sums += self._tables.sums_of_squares(rows) if num_tables else []
        lacking = {*memory.absent, *(num_slices + table for table in range(num_tables) if table not in memory.rows)}
        return [-1.0 if index in lacking else square for index, square in enumerate(sums)]

    def prepared(self, request: ApplyRequest) -> list[float]:
        """Returns the prepared sums of a step that has been applied; raises StepMismatch if it was not prepared."""
        if (prepared := self._prepared.get(_is_of_mean(request))) is not None and _are_same(prepared[0], request):
            return prepared[1]
        facts = {"step": str(self.step)}
        raise StepMismatch(f"step {request.step} was applied without being prepared; ask for the status", facts=facts)

    def begin_apply(self, request: ApplyRequest) -> StepWork:
        """Returns the memory that `run_apply` reads and writes; from now on, readers of the overwritten copy and of slots find it gone."""
        work = self._work(request, begin_out=self._begin_out)
        return replace(work, begins_phase=True) if self._settings.begin_phase(request.step) else work

    def begin_arrival(self, contribution: Contribution) -> StepWork:
        """Returns the memory that `run_apply` reads and writes to apply one contribution, in place."""
        # First of all, for want of memory may end this here, without effect.
        fused = self._idle_fused.pop() if self._idle_fused else self._fused.clone()
        memory = self.inbox.begin_arrival(contribution, step=self.step)
        # One thread at a time may make rows, and several apply.
        self._tables.make_rows(memory.rows, step=self.step)
        self._settings.begin(self.step)
        return StepWork(
            fused=fused,
            dense=self._dense([memory], out=self._arena.current.memory),
            sparse=SparseStep(gradients=[memory.rows], weights=(1.0,), scales=()),
            contributions=[contribution],
            is_on_arrival=True,
        )

    def run_apply(self, work: StepWork) -> int:
        """Makes the next step's variables; returns how many elements of the mean are not finite. Takes long; touches no bookkeeping."""
        if work.begins_phase:
            self._arena.renew_slots()
            self._tables.renew_slots()
        num_nonfinite = work.fused.run(work.dense)
        self._arena.padding.clear(work.dense.out)
        self._half_done()
        return num_nonfinite + self._tables.apply(work.sparse, on_arrival=work.is_on_arrival)

    def finish_apply(self, request: ApplyRequest, work: StepWork, *, num_nonfinite: int, checksums: tuple[int, ...] = ()) -> None:
        """Makes the new variables the latest, and drops the contributions staged for the step."""
        self._last, self.last_checksums = request, checksums
        self.inbox.wants_checksums = request.wants_checksums
        self._count(num_nonfinite)
        self._arena.publish_next(self.step)
        self._same_since = self._same_since[1], self._same_since[1] if self._is_still(work.dense) else self.step
        self._tables.count_growth()
        self.inbox.end(work.contributions, step=self.step - 1)
        self.inbox.discard(request.discards, current_step=self.step)
        self.inbox.advance(self.step)
        self._publish()

    def _is_still(self, dense: StepMemory) -> bool:
        """Whether a step has nothing for any variable, as that of another server's fragment."""
        num_slices = len(self.spec.layout.slices)
        return bool(dense.absent) and not dense.formulas and all(len(absent) == num_slices for absent in dense.absent)

    def finish_arrival(self, work: StepWork, *, num_nonfinite: int) -> None:
        """Counts a contribution that has been applied on arrival."""
        self._count(num_nonfinite)
        self._arena.current.hold(self.step)
        self._tables.count_growth()
        self.inbox.end(work.contributions, step=self.step - 1)
        self.inbox.advance(self.step)
        self._publish()
        self._idle_fused.append(work.fused)

    def _count(self, num_nonfinite: int) -> None:
        self._settings.advance()
        self.has_applied = True
        self.num_nonfinite = num_nonfinite
        self.step += 1

    def _publish(self) -> None:
        words = self._arena.words
        words[at.MODE] = push_mode(self._settings.current)
        words[at.MAX_BUFFERS] = self.spec.max_staged_per_worker
        words[at.OPEN_STEP] = self.step

    def _begin_out(self) -> VersionedBuffer:
        self._arena.begin_slots()
        return self._arena.begin_next()

    def _work(self, request: ApplyRequest, *, begin_out: Callable[[], VersionedBuffer]) -> StepWork:
        """The work of a step; `begin_out` is called when nothing can fail any more."""
        num_slices, num_tables = len(self.spec.layout.slices), len(self.spec.layout.tables)
        weights, scales = factors(request, num_scales=num_slices + num_tables)
        contributions = self.inbox.select(request.contributors, step=request.step, without=request.without)
        memories = [contribution.memory for contribution in contributions if contribution.memory is not None]
        self._settings.begin(request.step, request.hyperparameters)
        if weights:
            by_id = dict(zip(sorted(request.contributors), weights, strict=True))
            weights = tuple(by_id[one.push_id] for one in contributions if one.memory is not None)
            # Beside contributions without a gradient, the only one that has some is the mean.
            weights = () if len(weights) == 1 < len(request.contributors) else weights
        by_position = dict(zip(request.contributors, of_each(request, num_shares=num_slices + num_tables), strict=False))
        shares = [by_position[one.push_id] for one in contributions if one.memory is not None] if by_position else []
        rows = _NO_ROWS
        if num_tables:
            gradients = [memory.rows for memory in memories]
            rows = SparseStep(
                gradients=gradients,
                weights=weights or (1.0,) * len(memories),
                scales=scales[num_slices:],
                merge=request.merge,
                shares=[of[num_slices:] for of in shares],
            )
        return StepWork(
            fused=self._fused,
            dense=self._dense(
                memories,
                out=begin_out().memory,
                weights=weights,
                scales=scales[:num_slices],
                merge=request.merge,
                shares=[of[:num_slices] for of in shares],
            ),
            sparse=rows,
            contributions=contributions,
        )

    def _dense(
        self,
        memories: Sequence[StagedGradients],
        *,
        out: Array,
        weights: Sequence[float] = (),
        scales: Sequence[float] = (),
        merge: MergeSpec = MEAN,
        shares: Sequence[Sequence[float]] = (),
    ) -> StepMemory:
        encodings = [memory.encoding for memory in memories]
        return StepMemory(
            value=self._arena.current.memory,
            out=out,
            slots=self._arena.slots,
            average=self._arena.average,
            gradients=[memory.dense for memory in memories],
            encodings=encodings if any(one is not FloatEncoding.AS_IS for one in encodings) else (),
            absent=[memory.absent for memory in memories],
            weights=weights,
            scales=scales,
            merge=merge,
            shares=shares,
            formulas=formulas_of(memories) if any(memory.formulas for memory in memories) else (),
            step=self.step,
        )

    def _state(self, values: Array) -> StateMemory:
        tables = [table.parts for table in self._tables]
        return StateMemory(values=values, slots=self._arena.slots, average=self._arena.average, tables=tables)

    def _other_step(self, step: int | None) -> PsError:
        """Returns the error for a reader of a step (None: the latest) that is not here."""
        facts = {"step": str(self.step)}
        if step is not None and step > self.step:
            return StepNotReady(f"step {step} is not there yet, the shard is at step {self.step}; wait for its token", facts=facts)
        return StepGone(
            f"step {step} is gone, the shard is at step {self.step} and keeps at most the one before; read a later one", facts=facts
        )

    def _no_slot(self, name: str) -> SlotNotFound:
        if name == AVERAGE_SLOT:
            return SlotNotFound(f"ps {self.spec.shard}: no variable here has a moving average; ask for one when the model is created")
        names = " and ".join(sorted({repr(rule.spec.name) for rule in self._settings.rules})) or repr(self.spec.optimizer.name)
        return SlotNotFound(f"optimizer {names} has no slot {name!r}; it has {', '.join(self.slot_names) or 'none'}")


def _is_of_mean(request: ApplyRequest) -> bool:
    return not request.merge.needs_norms or bool(request.shares)


def _are_same(one: ApplyRequest, other: ApplyRequest) -> bool:
    return (one.step, one.contributors) == (other.step, other.contributors)
