"""What a chief takes over, saves and restores: lock, epoch and model."""

import logging
import threading
import time
from collections.abc import Callable

from ps_protocol.checkpoint_storage import CheckpointStorage
from ps_protocol.errors import (
    EpochMismatch,
    LayoutMismatch,
    NotInitialized,
    ShuttingDown,
    Superseded,
)
from ps_protocol.failpoints import failpoint
from ps_protocol.history import HistoryWriter
from ps_protocol.memory_segments import SegmentMaker
from ps_protocol.quick_condition import QuickCondition
from ps_protocol.shard import (
    Adoption,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
)
from ps_server.background import RunInBackground, run_in_thread, run_quietly_in_thread
from ps_server.chief_notes import ChiefNotes
from ps_server.creations import Creations
from ps_server.fences import Fences
from ps_server.listeners import Listeners
from ps_server.memory import MemoryBudget, VariablesMemory, private_variables
from ps_server.shard_history import ShardHistory
from ps_server.shard_model import ShardModel
from ps_server.shard_restores import ShardRestores
from ps_server.shard_saves import ShardSaves
from ps_server.sharing import Sharings
from ps_server.stripes import ONE_THREAD, StripeRunner
from ps_server.turns import Turns

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
        last = model.last.request if model else None
        return Adoption(
            step=model.step if model else None,
            layout_hash=model.spec.layout.hash if model else "",
            record=notes.record,
            record_version=notes.record_version,
            last_apply=last if last is not None and last.epoch == self._fences.epoch else None,
            pushes=model.applied.lately() if model else (),
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
