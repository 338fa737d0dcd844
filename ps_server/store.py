"""What workers and every step ask for."""

import time
from collections.abc import Callable, Sequence

from ps_protocol.errors import (
    Unavailable,
)
from ps_protocol.failpoints import failpoint
from ps_protocol.shard import (
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
from ps_server.adoptable_store import AdoptableStore
from ps_server.readings import begin_rows, begin_slot, begin_variables
from ps_server.shard_model import ShardModel
from ps_server.shard_status import shard_status
from ps_server.sharing import Claim, Sharing
from ps_server.transactions import Creation, Push, Reading, RowReading


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
                if model.settings.current.accepts_stale:
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
            if model.settings.current.applies_on_arrival:
                self._turns.wait_locked()
            is_arrival = contribution.outcome is None and model.settings.current.applies_on_arrival
            if is_arrival:
                work = model.begin_arrival(contribution)
                self._turns.share_locked()
            else:
                reply = model.accumulator.stage(contribution, current_step=model.step)
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
            reply = model.accumulator.stage(contribution, current_step=model.step)
        failpoint("ps.push.staged_before_ack")
        return reply

    def _check_creator_locked(self, spec: ShardSpec) -> None:
        self._fences.check_caller(spec.epoch)
        if self._restores.is_under_way:
            raise Unavailable(f"{self._name}: {self._creations.awaited_locked()}; its variables come from there")
