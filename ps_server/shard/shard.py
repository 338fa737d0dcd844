"""The shard as many threads see it: what is pushed to it, read from it and asked of it with every step. Knows no wire.

What takes long (copies of tensors, files, the apply) runs outside the lock; methods that need it held end in `_locked`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import (
    EpochMismatch,
    LayoutMismatch,
    NotInitialized,
    ShuttingDown,
    Superseded,
    Unavailable,
)
from ps_protocol.process import history as events
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.waiting import QuickCondition
from ps_protocol.roles.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    MetricCell,
    PushHeader,
    PushId,
    PushReply,
    RestoreProgress,
    RestoreRequest,
    RowsRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardSpec,
    ShardStatus,
)
from ps_protocol.shared_memory.segment import SegmentMaker
from ps_server.contributions.inbox import Contribution
from ps_server.model.shard_model import ShardModel
from ps_server.numbers.apply import ONE_THREAD, StripeRunner
from ps_server.numbers.memory import MemoryBudget, VariablesMemory, private_variables
from ps_server.shard.checkpoints import RunInBackground, ShardRestores, ShardSaves, run_in_thread, run_quietly_in_thread
from ps_server.shard.gate import ChiefNotes, Fences, Listeners, Turns
from ps_server.shard.handles import Creation, Creations, Push, Reading, RowReading
from ps_server.shard.sharing import Claim, Sharing, Sharings

# What a shard writes into its history: the values that it began with, its settings, and each step with the digest of its values.


class ShardHistory:
    """The history of one shard; without a writer nothing is written, at no price. The caller serialises what changes the model."""

    def __init__(self, writer: HistoryWriter | None, *, process_incarnation: int) -> None:
        self._writer = writer
        self._process = process_incarnation

    def created(self, model: ShardModel) -> None:
        """The variables have their first values."""
        if self._writer is not None:
            events.note_created(self._writer, model.spec, model.sent_contents, process=self._process)

    def restored(self, model: ShardModel, request: RestoreRequest, from_epoch: int) -> None:
        """The variables are those of a checkpoint, which was saved in `from_epoch`."""
        if self._writer is not None:
            events.note_restored(
                self._writer,
                model.spec,
                request.settings,
                process=self._process,
                tag=request.tag,
                from_epoch=from_epoch,
                sha256=_digest(model),
            )

    def configured(self, model: ShardModel, settings: ShardSettings) -> None:
        """The shard works otherwise from now on."""
        if self._writer is not None:
            events.note_configured(self._writer, settings, shard=model.spec.shard)

    def applied(self, model: ShardModel, request: ApplyRequest) -> None:
        """A step has been applied, and nobody has been told yet."""
        if self._writer is not None:
            events.note_applied(self._writer, request, shard=model.spec.shard, sha256=_digest(model))

    def arrived(self, model: ShardModel, push_id: PushId, *, epoch: int) -> None:
        """A contribution has been applied as it came."""
        if self._writer is not None:
            events.note_arrived(self._writer, push_id, shard=model.spec.shard, epoch=epoch, step=model.step)


def _digest(model: ShardModel) -> str:
    values, *tables = model.contents
    return events.digest(values, tables)


# What a shard reports of itself.


def shard_status(
    model: ShardModel | None,
    fences: Fences,
    *,
    shard: int,
    process_incarnation: int,
    allocated_bytes: int,
    last_apply_s: float,
    num_sharing: int = 0,
    chief_address: str = "",
    chief_heard_ago_s: float | None = None,
    is_alone: bool = False,
) -> ShardStatus:
    """Returns step, memory and counters; zeros for what there is not before the variables stand."""
    inbox = model.inbox if model else None
    layout = model.spec.layout if model else None
    return ShardStatus(
        shard=shard,
        process_incarnation=process_incarnation,
        epoch=fences.epoch,
        chief_incarnation=fences.chief_incarnation,
        step=model.step if model else None,
        num_slices=len(layout.slices) + len(layout.tables) if layout else 0,
        arena_bytes=model.num_bytes if model else 0,
        allocated_bytes=allocated_bytes,
        num_staged=inbox.num_staged if inbox else 0,
        num_pushes=inbox.num_pushes if inbox else 0,
        num_stale=inbox.num_stale if inbox else 0,
        num_duplicates=inbox.num_duplicates if inbox else 0,
        num_nonfinite=model.num_nonfinite if model else 0,
        last_apply_s=last_apply_s,
        settings_version=model.settings_version if model else 0,
        num_sharing=num_sharing,
        chief_address=chief_address,
        chief_heard_ago_s=chief_heard_ago_s,
        is_alone=is_alone,
        life=fences.life,
    )


# How each reading begins: of the variables, a slot, or rows.


def begin_variables(model: ShardModel, turns: Turns, *, step: int | None) -> Reading:
    """Begins to read the variables of `step` (None: the latest); raises StepGone or StepNotReady."""
    buffer = model.buffer(step)
    found = buffer.step
    assert found is not None
    return Reading(
        buffer.memory,
        layout=model.spec.layout,
        step=found,
        is_intact=model.watch(buffer),
        hold=turns.reading,
        name="the copy of the variables",
    )


def begin_slot(model: ShardModel, turns: Turns, *, name: str) -> Reading:
    """Begins to read one slot of the dense variables; no step may be under way. Raises SlotNotFound."""
    return Reading(
        model.slot(name),
        layout=model.spec.layout,
        step=model.step,
        is_intact=model.watch_slots(),
        hold=turns.reading,
        name=f"slot {name!r}",
    )


def begin_rows(model: ShardModel, turns: Turns, request: RowsRequest) -> RowReading:
    """Begins to read rows of a table, or of a slot of it while no step is under way. Raises what `ShardModel.step_of_rows` raises."""
    step = model.step_of_rows(request)
    return RowReading(
        model.table(request.table),
        slot=model.table_slot(request.table, request.slot),
        step=step,
        is_torn_allowed=model.applies_on_arrival,
        is_intact=model.watch_slots(),
        hold=turns.reading(step),
    )


# What a chief takes over, saves and restores: lock, epoch and model.


log = logging.getLogger("lockstep.server")


class AdoptableStore:
    """The base of ParameterStore. Thread-safe. `process_incarnation` is random for each start; `memory_limit_bytes` None: no limit.

    `on_shutdown` is told the reason when the chief asks the process to end. `apply_threads` share the work of a step, and are the caller's.
    `segments` makes memory that workers of the same host may share; None: there is none. `storage` is where checkpoints are; None: nowhere.
    `run_in_background` begins the writing and the reading of checkpoints (None: in threads). `history` is kept if it is given.
    """

    def __init__(
        self,
        *,
        index: int,
        process_incarnation: int,
        memory_limit_bytes: int | None = None,
        on_shutdown: Callable[[str], None] | None = None,
        apply_threads: StripeRunner = ONE_THREAD,
        segments: SegmentMaker | None = None,
        storage: CheckpointStorage | None = None,
        run_in_background: RunInBackground | None = None,
        history: HistoryWriter | None = None,
    ) -> None:
        self.index = index
        self.process_incarnation = process_incarnation
        self._name = f"ps {index}"
        self._history = ShardHistory(history, process_incarnation=process_incarnation)
        self._on_shutdown = on_shutdown
        self._lock = QuickCondition()
        self.budget = MemoryBudget(memory_limit_bytes, owner=self._name, lock=threading.Lock())
        self._fences = Fences(self._name)
        self._turns = Turns(self._lock, name=self._name)
        self._segments = segments
        self._sharings = Sharings(self._lock, segments, name=self._name)
        self._creations = Creations(
            self._lock,
            index=index,
            name=self._name,
            budget=self.budget,
            stripes=apply_threads,
            allocate=self._allocate,
            on_model=self._on_model_locked,
            half_done=lambda: failpoint("ps.apply.mid"),
        )
        self._saves = ShardSaves(
            self._lock,
            self._turns,
            index=index,
            budget=self.budget,
            storage=storage,
            find_model=lambda request: self._model_locked(request.epoch),
            run_in_background=run_in_background or run_quietly_in_thread,
            stripes=apply_threads,
        )
        self._listeners = Listeners(self._lock)
        self._restores = ShardRestores(
            self._lock,
            self._turns,
            self._creations,
            index=index,
            storage=storage,
            run_in_background=run_in_background or run_in_thread,
            on_restored=self._history.restored,
            on_done=self._listeners.tell,
        )
        self._chief = ChiefNotes(budget=self.budget)
        self._last_apply_s = 0.0

    @property
    def epoch(self) -> int:
        """Epoch of the cluster; 0 before a chief has adopted the shard."""
        return self._fences.epoch

    def adopt(
        self,
        *,
        epoch: int,
        chief_incarnation: int,
        chief_address: str = "",
        life: int = 0,
        is_alone: bool = False,
        forgets: bool = False,
    ) -> Adoption:
        """Puts the shard under a chief; a later epoch drops whatever is staged or under way, and begins with the model's own settings.

        `is_alone`: of several replicas, the chief counts on this one only. `forgets`: not on this one any more, so its model is dropped.
        """
        with self._lock:
            self._fences.check_not_ending()
        with self._turns.alone(), self._lock:
            self._fences.check_not_ending()
            is_damaged = self._fences.is_damaged
            self._check_same_chief_locked(chief_incarnation, chief_address)
            is_new_epoch = self._fences.adopt(epoch=epoch, chief_incarnation=chief_incarnation, life=life)
            self._fences.check_running()
            self._chief.address = chief_address
            self._chief.heard(time.monotonic())
            if is_new_epoch:
                self._end_epoch_locked(is_damaged=is_damaged)
            self._chief.is_alone = is_alone
            if forgets:
                reason = NotInitialized(f"{self._name}: another replica holds the shard, this one has dropped its variables; ask the chief")
                self._restores.forget_locked(reason)
                self._creations.drop_model_locked(reason)
            self._publish_locked()
            say_so = self._sharings.end_locked(self._sharings.open if is_new_epoch else ())
            adoption = self._adoption_locked()
        say_so()
        self._listeners.tell()
        return adoption

    def _check_same_chief_locked(self, chief_incarnation: int, chief_address: str) -> None:
        """Two chiefs that have started at one moment have chosen one number; whoever came first keeps it."""
        known = self._chief.address
        if chief_incarnation == self._fences.chief_incarnation and known and chief_address and chief_address != known:
            raise Superseded(
                f"{self._name}: the chief at {known} has adopted it as incarnation {chief_incarnation}; end this chief",
                facts={"chief_incarnation": str(chief_incarnation)},
            )

    def hear_chief(self, chief_incarnation: int) -> None:
        """Notes a sign of life, if it is one of the chief that has the shard."""
        with self._lock:
            if self._fences.epoch and chief_incarnation == self._fences.chief_incarnation:
                self._chief.heard(time.monotonic())

    def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes) -> None:
        """Keeps a record for the chief's successor, unless there is such or a newer one."""
        with self._lock:
            self._check_chief_locked(epoch, chief_incarnation)
            self._chief.keep(record, version=version)

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Copies a step, and has it written; or says how far that is, also while the shard shuts down."""
        with self._lock:
            self._fences.check_chief(request.chief_incarnation)
            self._fences.check_epoch(request.epoch)
            self._chief.heard(time.monotonic())
        return self._saves.save(request, max_wait_s=max_wait_s)

    def wait_for_save(self, timeout_s: float) -> None:
        """Waits until no checkpoint is being written, but not longer than this."""
        self._saves.wait_until_over(timeout_s)

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Begins to bring the shard back to a checkpoint, or says how far that is. Adopts it if the epoch is a new one."""
        epoch, chief_incarnation = request.spec.epoch, request.chief_incarnation
        if epoch > self._fences.epoch:
            self.adopt(epoch=epoch, chief_incarnation=chief_incarnation, chief_address=self._chief.address, life=request.life)
        with self._lock:
            self._fences.check_chief_life(request.life)
            self._check_chief_locked(epoch, chief_incarnation)
        return self._restores.restore(request, max_wait_s=max_wait_s)

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls but status and shutdown from now on. Idempotent: the first reason stays."""
        with self._lock:
            self._fences.refuse_from_now_on(reason)
            self._restores.break_off_locked(ShuttingDown(f"{self._name} is shutting down: {reason}"))
            self._publish_locked()
            self._lock.notify_all()
        self._listeners.tell()

    def _end_epoch_locked(self, *, is_damaged: bool) -> None:
        """Drops what belongs to the epoch before: all of it, if only half of a step was made."""
        epoch = self._fences.epoch
        reason = EpochMismatch(f"{self._name}: cluster epoch rose to {epoch}; reconnect", facts={"epoch": str(epoch)})
        self._saves.break_off_locked()
        self._restores.break_off_locked(reason)
        if is_damaged:
            self._creations.drop_model_locked(reason)
        self._creations.drop_locked(reason)
        model = self._creations.model
        if model is not None:
            model.configure(ShardSettings(epoch=epoch, chief_incarnation=0, version=0, step=model.step))

    def _adoption_locked(self) -> Adoption:
        model, notes = self._creations.model, self._chief
        last = model.last_request if model else None
        return Adoption(
            step=model.step if model else None,
            layout_hash=model.spec.layout.hash if model else "",
            record=notes.record,
            record_version=notes.record_version,
            last_apply=last if last is not None and last.epoch == self._fences.epoch else None,
            pushes=model.inbox.ledger.lately_applied() if model else (),
        )

    def _check_chief_locked(self, epoch: int, chief_incarnation: int) -> None:
        self._fences.check_chief_call(epoch, chief_incarnation)
        self._chief.heard(time.monotonic())

    def _allocate(self, arena_bytes: int) -> VariablesMemory:
        if self._segments is not None:
            try:
                return self._segments.variables(arena_bytes)
            except OSError as error:
                log.warning("%s: no memory that workers could share: %s; gradients and variables travel", self._name, error)
        return private_variables(arena_bytes)

    def _on_model_locked(self) -> None:
        model = self._creations.model
        if model is not None:
            self._publish_locked()
            if not model.has_applied:  # one that was restored counts as such
                self._history.created(model)
        else:
            # Without a model nobody calls back into the store.
            self._sharings.end_locked(self._sharings.open)()

    def _publish_locked(self) -> None:
        """Tells those who share memory whether they are still served."""
        if self._creations.model is not None:
            self._creations.model.serve(self._fences.served_epoch)

    def _model_locked(self, epoch: int, layout_hash: str | None = None) -> ShardModel:
        self._fences.check_caller(epoch)
        model = self._creations.model
        if model is None:
            raise NotInitialized(f"{self._name}: the variables have no values yet; {self._creations.awaited_locked()}")
        if layout_hash not in (None, model.spec.layout.hash):
            raise LayoutMismatch(
                f"{self._name}: its layout is {model.spec.layout.hash!r}, you have {layout_hash!r}; ask the chief for the model",
                facts={"layout_hash": model.spec.layout.hash},
            )
        return model


# What workers and every step ask for.


class ParameterStore(AdoptableStore):
    """Holds one shard: an AdoptableStore, and what workers and every step ask for. Thread-safe."""

    def open_creation(self, spec: ShardSpec) -> Creation:
        """Begins to create all variables of the shard. The attempt that came last displaces one under way."""
        with self._lock:
            self._turns.wait_locked()
            return self._creations.open_locked(spec, check=lambda: self._check_creator_locked(spec))

    def open_push(self, header: PushHeader) -> Push:
        """Begins to stage a contribution; the push is settled at once if its bytes are not wanted."""
        with self._lock:
            model = self._model_locked(header.epoch, header.layout_hash)
            self._fences.check_life(header.life)
            return Push(self._lock, model, model.inbox.open(header, current_step=model.step), end=self._end_push)

    def open_variables(self, *, epoch: int, step: int | None, layout_hash: str) -> Reading:
        """Begins to read the variables of `step` (None: the latest)."""
        with self._lock:
            return begin_variables(self._model_locked(epoch, layout_hash), self._turns, step=step)

    def await_variables(self, listener: Callable[[], object], *, epoch: int, step: int | None, layout_hash: str) -> Reading | None:
        """Begins to read the variables of `step`; None if it is not there yet.

        The listener is then called once, without the lock, perhaps before this returns, when anything has changed; it must not wait.
        """
        with self._lock:
            model = self._model_locked(epoch, layout_hash)
            if step is None or step <= model.step:
                return begin_variables(model, self._turns, step=step)
            self._listeners.add_locked(listener)
            return None

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        self._listeners.forget(listener)

    @property
    def num_listeners(self) -> int:
        """Readers that wait for a step."""
        return len(self._listeners)

    @property
    def is_quick(self) -> bool:
        """Whether what is asked of the model now, also a step, is done in a moment: it is small, and nobody is at work on it."""
        model = self._creations.model
        return model is None or (model.is_small and self._turns.is_free)

    def open_sharing(self, claim: Claim, *, on_end: Callable[[], object]) -> Sharing:
        """Begins to share memory with a worker; `on_end` is called if that must end before the worker wants it."""
        with self._lock:
            model = self._model_locked(claim.epoch, claim.layout_hash)
            return self._sharings.open_locked(model, claim, on_end=on_end)

    def open_rows(self, request: RowsRequest) -> RowReading:
        """Begins to read rows of a table (without waiting), or of a slot of it, when no step is being applied."""
        with self._lock:
            model = self._model_locked(request.epoch, request.layout_hash)
            if request.slot:
                model.step_of_rows(request)
                self._turns.wait_locked()
                model = self._model_locked(request.epoch, request.layout_hash)
            return begin_rows(model, self._turns, request)

    def open_slot(self, name: str, *, epoch: int, layout_hash: str) -> Reading:
        """Begins to read one slot of the dense variables, when no step is being applied."""
        with self._lock:
            self._model_locked(epoch, layout_hash).slot(name)
            self._turns.wait_locked()
            return begin_slot(self._model_locked(epoch, layout_hash), self._turns, name=name)

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works, unless it has such or newer settings; waits for steps and arrivals under way."""
        with self._lock:
            self._check_chief_locked(settings.epoch, settings.chief_incarnation)
        with self._turns.alone(), self._lock:
            self._check_chief_locked(settings.epoch, settings.chief_incarnation)
            model = self._model_locked(settings.epoch)
            model.configure(settings)
            self._history.configured(model, settings)
        self._listeners.tell()

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's means. No effect."""
        with self._lock:
            self._check_chief_locked(request.epoch, request.chief_incarnation)
        with self._turns.alone():
            with self._lock:
                self._check_chief_locked(request.epoch, request.chief_incarnation)
                model = self._model_locked(request.epoch)
                if model.is_repeated(request):
                    return model.prepared(request)
                work = model.begin_prepare(request)
            return model.run_prepare(request, work)

    def apply_step(self, request: ApplyRequest, *, on_applied: Callable[[ApplyReply], object] | None = None) -> ApplyReply:
        """Applies a step. A repetition, also one that comes while the first is at work, is answered when that is done.

        `on_applied` is told before those who wait for the step.
        """
        try:
            failpoint("ps.apply.before")
            reply = self._apply_step(request)
            failpoint("ps.apply.before_ack")
            if on_applied is not None:
                on_applied(reply)
            return reply
        finally:
            self._listeners.tell()

    def _apply_step(self, request: ApplyRequest) -> ApplyReply:
        with self._lock:
            self._check_chief_locked(request.epoch, request.chief_incarnation)
        with self._turns.alone():
            with self._lock:
                self._check_chief_locked(request.epoch, request.chief_incarnation)
                model = self._model_locked(request.epoch)
                if model.is_repeated(request):
                    return ApplyReply(step=model.step, repeated_request=True)
                if model.accepts_stale:
                    # Steps come as fast as they can, and each overwrites the copy before the last: a slow reader would never come through.
                    self._turns.wait_for_readers_locked(before=model.step)
                work = model.begin_apply(request)
            started, num_nonfinite = time.perf_counter(), None
            try:
                num_nonfinite = model.run_apply(work)
                failpoint("ps.apply.before_publish")
            finally:
                with self._lock:
                    if num_nonfinite is None:
                        self._fences.note_damage(request.step)
                        self._publish_locked()
                    else:
                        model.finish_apply(request, work, num_nonfinite=num_nonfinite)
                        self._history.applied(model, request)
                        self._last_apply_s = time.perf_counter() - started
        return ApplyReply(step=request.step + 1, repeated_request=False)

    def read_metrics(self, *, epoch: int) -> tuple[MetricCell, ...]:
        """Returns what workers have reported, by name and worker."""
        with self._lock:
            return tuple(self._model_locked(epoch).inbox.metrics.cells())

    def list_slots(self, *, epoch: int) -> tuple[str, ...]:
        """Returns the names of the optimizers' slots, sorted."""
        with self._lock:
            return self._model_locked(epoch).slot_names

    def status(self) -> ShardStatus:
        """Reports step, memory and counters; also while the shard shuts down."""
        with self._lock:
            return shard_status(
                self._creations.model,
                self._fences,
                shard=self.index,
                process_incarnation=self.process_incarnation,
                allocated_bytes=self.budget.allocated_bytes,
                last_apply_s=self._last_apply_s,
                num_sharing=self._sharings.num_sharing,
                chief_address=self._chief.address,
                chief_heard_ago_s=self._chief.heard_ago_s(time.monotonic()),
                is_alone=self._chief.is_alone,
            )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Refuses all calls from now on, and asks whoever runs the process to end it. Idempotent."""
        with self._lock:
            self._fences.check_epoch(epoch)
        self.begin_shutdown(reason)
        if self._on_shutdown is not None:
            self._on_shutdown(reason)

    def _end_push(self, model: ShardModel, contribution: Contribution) -> PushReply:
        """Stages a contribution that has all its bytes, or applies it at once, beside others."""
        with self._lock:
            if model.applies_on_arrival:
                self._turns.wait_locked()
            is_arrival = contribution.outcome is None and model.applies_on_arrival
            if is_arrival:
                work = model.begin_arrival(contribution)
                self._turns.share_locked()
            else:
                reply = model.inbox.stage(contribution, current_step=model.step)
        if not is_arrival:
            failpoint("ps.push.staged_before_ack")
            return reply
        num_nonfinite = None
        try:
            num_nonfinite = model.run_apply(work)
        finally:
            with self._lock:
                self._turns.end_shared_locked()
                if num_nonfinite is None:
                    self._fences.note_damage(work.dense.step)
                    self._publish_locked()
                else:
                    model.finish_arrival(work, num_nonfinite=num_nonfinite)
                    self._history.arrived(model, contribution.push_id, epoch=self._fences.epoch)
            self._listeners.tell()
        with self._lock:
            reply = model.inbox.stage(contribution, current_step=model.step)
        failpoint("ps.push.staged_before_ack")
        return reply

    def _check_creator_locked(self, spec: ShardSpec) -> None:
        self._fences.check_caller(spec.epoch)
        if self._restores.is_under_way:
            raise Unavailable(f"{self._name}: {self._creations.awaited_locked()}; its variables come from there")
