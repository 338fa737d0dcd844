"""The shard as many threads see it: owner of the only lock, and of the model. Knows no wire.

What takes long (copies of tensors, the apply) runs outside the lock; methods that need it held end in `_locked`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ps_protocol.errors import (
    EpochMismatch,
    LayoutMismatch,
    NotInitialized,
)
from ps_protocol.memory_segments import SegmentMaker
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    MetricCell,
    PushHeader,
    PushReply,
    RowsRequest,
    ShardSettings,
    ShardSpec,
    ShardStatus,
)
from ps_server.accumulator import Contribution
from ps_server.creations import Creations
from ps_server.fences import Fences
from ps_server.memory import MemoryBudget, VariablesMemory, private_variables
from ps_server.readings import begin_rows, begin_slot, begin_variables
from ps_server.shard_model import ShardModel
from ps_server.shard_status import shard_status
from ps_server.sharing import Claim, Sharing, Sharings
from ps_server.stripes import ONE_THREAD, StripeRunner
from ps_server.transactions import Creation, Push, Reading, RowReading
from ps_server.turns import Turns

log = logging.getLogger(__name__)


class ParameterStore:
    """Holds one shard. Thread-safe. `process_incarnation` is random for each start; `memory_limit_bytes` None: no limit.

    `on_shutdown` is told the reason when the chief asks the process to end. `apply_threads` share the work
    of a step; they are the caller's.
    `segments` makes memory that workers of the same host may share; None: there is none.
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
    ) -> None:
        self.index = index
        self.process_incarnation = process_incarnation
        self._name = f"ps {index}"
        self._on_shutdown = on_shutdown
        self._lock = threading.Condition()
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
        )
        self._listeners: set[Callable[[], object]] = set()
        self._last_apply_s = 0.0

    @property
    def epoch(self) -> int:
        """Epoch of the cluster; 0 before a chief has adopted the shard."""
        return self._fences.epoch

    def adopt(self, *, epoch: int, chief_incarnation: int) -> Adoption:
        """Puts the shard under a chief; a later epoch drops whatever is staged or under way, and begins with the model's own settings."""
        with self._lock:
            self._fences.check_running()
        with self._turns.alone(), self._lock:
            self._fences.check_running()
            is_new_epoch = self._fences.adopt(epoch=epoch, chief_incarnation=chief_incarnation)
            if is_new_epoch:
                self._creations.drop_locked(
                    EpochMismatch(f"{self._name}: cluster epoch rose to {epoch}; reconnect", facts={"epoch": str(epoch)})
                )
            model = self._creations.model
            if is_new_epoch and model is not None:
                model.configure(ShardSettings(epoch=epoch, chief_incarnation=0, version=0, step=model.step))
            self._publish_locked()
            say_so = self._sharings.end_locked(self._sharings.open if is_new_epoch else ())
            adoption = Adoption(step=model.step if model else None, layout_hash=model.spec.layout.hash if model else "")
        say_so()
        self._tell()
        return adoption

    def open_creation(self, spec: ShardSpec) -> Creation:
        """Begins to create all variables of the shard. The attempt that came last displaces one under way."""
        with self._lock:
            self._turns.wait_locked()
            return self._creations.open_locked(spec, check=lambda: self._fences.check_caller(spec.epoch))

    def open_push(self, header: PushHeader) -> Push:
        """Begins to stage a contribution; the push is settled at once if its bytes are not wanted."""
        with self._lock:
            model = self._model_locked(header.epoch, header.layout_hash)
            return Push(self._lock, model, model.open_push(header), end=self._end_push)

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
            self._listeners.add(listener)
            return None

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        with self._lock:
            self._listeners.discard(listener)

    @property
    def num_listeners(self) -> int:
        """Readers that wait for a step."""
        return len(self._listeners)

    @property
    def is_quick(self) -> bool:
        """Whether what is asked of the model now, also a step, is done in a moment: it is small, and nobody is at work on it."""
        model = self._creations.model
        return model is None or (model.is_small and self._turns.is_free)

    def _tell(self) -> None:
        """Calls the listeners. The lock is not held."""
        if self._listeners:
            with self._lock:
                told, self._listeners = self._listeners, set()
            for listener in told:
                listener()

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
            self._fences.check_chief_call(settings.epoch, settings.chief_incarnation)
        with self._turns.alone(), self._lock:
            self._fences.check_chief_call(settings.epoch, settings.chief_incarnation)
            self._model_locked(settings.epoch).configure(settings)
        self._tell()

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's means. No effect."""
        with self._lock:
            self._fences.check_chief_call(request.epoch, request.chief_incarnation)
        with self._turns.alone():
            with self._lock:
                self._fences.check_chief_call(request.epoch, request.chief_incarnation)
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
            reply = self._apply_step(request)
            if on_applied is not None:
                on_applied(reply)
            return reply
        finally:
            self._tell()

    def _apply_step(self, request: ApplyRequest) -> ApplyReply:
        with self._lock:
            self._fences.check_chief_call(request.epoch, request.chief_incarnation)
        with self._turns.alone():
            with self._lock:
                self._fences.check_chief_call(request.epoch, request.chief_incarnation)
                model = self._model_locked(request.epoch)
                if model.is_repeated(request):
                    return ApplyReply(step=model.step, repeated_request=True)
                if model.settings.current.accepts_stale:
                    # Steps come as fast as they can, and each overwrites the copy before the last: a slow reader would never come through.
                    self._turns.wait_for_readers_locked(before=model.step)
                work = model.begin_apply(request)
            started, num_nonfinite = time.perf_counter(), None
            try:
                num_nonfinite = model.run_apply(work)
            finally:
                with self._lock:
                    if num_nonfinite is None:
                        self._fences.note_damage(request.step)
                        self._publish_locked()
                    else:
                        model.finish_apply(request, work, num_nonfinite=num_nonfinite)
                        self._last_apply_s = time.perf_counter() - started
        return ApplyReply(step=request.step + 1, repeated_request=False)

    def read_metrics(self, *, epoch: int) -> tuple[MetricCell, ...]:
        """Returns what workers have reported, by name and worker."""
        with self._lock:
            return tuple(self._model_locked(epoch).metrics.cells())

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
            )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Refuses all calls from now on, and asks whoever runs the process to end it. Idempotent."""
        with self._lock:
            self._fences.check_epoch(epoch)
        self.begin_shutdown(reason)
        if self._on_shutdown is not None:
            self._on_shutdown(reason)

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls but status and shutdown from now on. Idempotent: the first reason stays."""
        with self._lock:
            self._fences.refuse_from_now_on(reason)
            self._publish_locked()
            self._lock.notify_all()
        self._tell()

    def _end_push(self, model: ShardModel, contribution: Contribution) -> PushReply:
        """Stages a contribution that has all its bytes, or applies it at once, beside others."""
        with self._lock:
            if model.settings.current.applies_on_arrival:
                self._turns.wait_locked()
            if contribution.outcome is not None or not model.settings.current.applies_on_arrival:
                return model.accumulator.stage(contribution, current_step=model.step)
            work = model.begin_arrival(contribution)
            self._turns.share_locked()
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
            self._tell()
        with self._lock:
            return model.accumulator.stage(contribution, current_step=model.step)

    def _allocate(self, arena_bytes: int) -> VariablesMemory:
        if self._segments is not None:
            try:
                return self._segments.variables(arena_bytes)
            except OSError as error:
                log.warning("%s: no memory that workers could share: %s; gradients and variables travel", self._name, error)
        return private_variables(arena_bytes)

    def _on_model_locked(self) -> None:
        if self._creations.model is not None:
            self._publish_locked()
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
