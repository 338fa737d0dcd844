"""The shard as many threads see it: owner of the only lock, of epoch and incarnations, and of the model. Knows no wire.

What takes long (copies of tensors, the apply) runs outside the lock; methods that need it held end in `_locked`.
"""

import threading
import time
from collections.abc import Callable

from ps_protocol.errors import (
    Cancelled,
    EpochMismatch,
    InternalError,
    InvalidSpec,
    LayoutMismatch,
    NotInitialized,
    PsError,
    ShuttingDown,
    Superseded,
    Unavailable,
    VariableExists,
    WrongRole,
)
from ps_protocol.shard import Adoption, ApplyReply, ApplyRequest, PushHeader, ShardSpec, ShardStatus
from ps_server.memory import MemoryBudget, format_bytes
from ps_server.shard_model import ShardModel
from ps_server.transactions import Creation, Push, Reading

# How long a call waits for an apply under way before it asks its caller to repeat it.
APPLY_WAIT_S = 20.0


class ParameterStore:
    """Holds one shard. Thread-safe. `process_incarnation` is random for each start; `memory_limit_bytes` None: no limit.

    `on_shutdown` is told the reason when the chief asks the process to end.
    """

    def __init__(
        self,
        *,
        index: int,
        process_incarnation: int,
        memory_limit_bytes: int | None = None,
        on_shutdown: Callable[[str], None] | None = None,
    ) -> None:
        self.index = index
        self.process_incarnation = process_incarnation
        self._name = f"ps {index}"
        self._on_shutdown = on_shutdown
        self._lock = threading.Condition()
        self._budget = MemoryBudget(memory_limit_bytes, owner=self._name)
        self._epoch = 0
        self._chief_incarnation = 0
        self._model: ShardModel | None = None
        self._creation: Creation | None = None
        self._is_applying = False
        self._last_apply_s = 0.0
        self._damage = ""
        self._shutdown_reason: str | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the cluster; 0 before a chief has adopted the shard."""
        return self._epoch

    def adopt(self, *, epoch: int, chief_incarnation: int) -> Adoption:
        """Puts the shard under a chief; a later epoch drops whatever is staged or under way."""
        if epoch < 1 or chief_incarnation < 1:
            raise InvalidSpec(f"{self._name}: epoch {epoch} and chief incarnation {chief_incarnation}: want both >= 1")
        with self._lock:
            self._check_running_locked()
            self._wait_for_apply_locked()
            self._check_chief_locked(chief_incarnation)
            if epoch < self._epoch:
                raise Superseded(
                    f"{self._name}: cluster epoch is {self._epoch}, you have {epoch}; a later chief has rolled the cluster back"
                )
            if epoch > self._epoch:
                self._drop_contributions_locked(epoch)
            self._epoch, self._chief_incarnation = epoch, chief_incarnation
            model = self._model
            return Adoption(step=model.step if model else None, layout_hash=model.spec.layout.hash if model else "")

    def open_creation(self, spec: ShardSpec) -> Creation:
        """Begins to create all variables of the shard. The attempt that came last displaces one under way."""
        with self._lock:
            self._wait_for_apply_locked()
            # Displacing may have to wait, and then everything may have changed.
            while True:
                self._check_caller_locked(spec.epoch)
                if self._is_created_locked(spec):
                    return Creation(self._lock, spec, None, end=self._end_creation)
                if self._creation is None:
                    break
                self._displace_creation_locked(self._creation, spec)
            model = self._model or ShardModel(spec, budget=self._budget)
            self._creation = Creation(self._lock, spec, model, end=self._end_creation)
            return self._creation

    def open_push(self, header: PushHeader) -> Push:
        """Begins to stage a contribution; the push is settled at once if its bytes are not wanted."""
        with self._lock:
            model = self._model_locked(header.epoch, header.layout_hash)
            contribution = model.accumulator.open(header.push_id, step=header.step, current_step=model.step)
            return Push(self._lock, model, contribution)

    def open_variables(self, *, epoch: int, step: int | None, layout_hash: str) -> Reading:
        """Begins to read the variables of `step` (None: the latest)."""
        with self._lock:
            buffer = self._model_locked(epoch, layout_hash).buffer(step)
            version, found = buffer.version, buffer.step
            assert found is not None
            return Reading(buffer.memory, step=found, is_intact=lambda: buffer.version == version, name="the copy of the variables")

    def open_slot(self, name: str, *, epoch: int, layout_hash: str) -> Reading:
        """Begins to read one slot, when no step is being applied."""
        with self._lock:
            self._model_locked(epoch, layout_hash).slot(name)
            self._wait_for_apply_locked()
            model = self._model_locked(epoch, layout_hash)
            arena, version = model.arena, model.arena.slots_version
            return Reading(model.slot(name), step=model.step, is_intact=lambda: arena.slots_version == version, name=f"slot {name!r}")

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Applies a step. A repetition, also one that comes while the first is at work, is answered when that is done."""
        with self._lock:
            self._begin_chief_call_locked(request)
            self._wait_for_apply_locked()
            self._begin_chief_call_locked(request)
            model = self._model_locked(request.epoch)
            if model.is_repeated(request):
                return ApplyReply(step=model.step, repeated_request=True)
            memory = model.begin_apply(request)
            self._is_applying = True
        started, num_nonfinite = time.perf_counter(), None
        try:
            num_nonfinite = model.run_apply(memory)
        finally:
            with self._lock:
                self._is_applying = False
                self._lock.notify_all()
                if num_nonfinite is None:
                    self._damage = (
                        f"{self._name}: applying step {request.step} failed half-way; its slots are lost, restart from a checkpoint"
                    )
                else:
                    model.finish_apply(request, num_nonfinite=num_nonfinite)
                    self._last_apply_s = time.perf_counter() - started
        return ApplyReply(step=request.step + 1, repeated_request=False)

    def list_slots(self, *, epoch: int) -> tuple[str, ...]:
        """Returns the names of the optimizer's slots, sorted."""
        with self._lock:
            return tuple(self._model_locked(epoch).arena.slots)

    def status(self) -> ShardStatus:
        """Reports step, memory and counters; also while the shard shuts down."""
        with self._lock:
            model = self._model
            accumulator = model.accumulator if model else None
            return ShardStatus(
                shard=self.index,
                process_incarnation=self.process_incarnation,
                epoch=self._epoch,
                chief_incarnation=self._chief_incarnation,
                step=model.step if model else None,
                num_slices=len(model.spec.layout.slices) if model else 0,
                arena_bytes=model.spec.layout.nbytes if model else 0,
                allocated_bytes=self._budget.allocated_bytes,
                num_staged=accumulator.num_staged if accumulator else 0,
                num_pushes=accumulator.num_pushes if accumulator else 0,
                num_stale=accumulator.num_stale if accumulator else 0,
                num_duplicates=accumulator.num_duplicates if accumulator else 0,
                num_nonfinite=model.num_nonfinite if model else 0,
                last_apply_s=self._last_apply_s,
            )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Refuses all calls from now on, and asks whoever runs the process to end it. Idempotent."""
        with self._lock:
            if epoch != self._epoch:
                raise self._other_epoch_locked(epoch)
        self.begin_shutdown(reason)
        if self._on_shutdown is not None:
            self._on_shutdown(reason)

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls but status and shutdown from now on. Idempotent: the first reason stays."""
        with self._lock:
            self._shutdown_reason = self._shutdown_reason or reason or "asked to"

    def _check_running_locked(self) -> None:
        if self._shutdown_reason is not None:
            raise ShuttingDown(f"{self._name} is shutting down: {self._shutdown_reason}")
        if self._damage:
            raise InternalError(self._damage)

    def _check_caller_locked(self, epoch: int) -> None:
        self._check_running_locked()
        if epoch != self._epoch or not self._epoch:
            raise self._other_epoch_locked(epoch)

    def _other_epoch_locked(self, epoch: int) -> EpochMismatch:
        stands = f"cluster epoch is {self._epoch}" if self._epoch else "no chief has adopted it since it started"
        return EpochMismatch(f"{self._name}: {stands}, you have epoch {epoch}; reconnect", facts={"epoch": str(self._epoch)})

    def _check_chief_locked(self, chief_incarnation: int) -> None:
        if chief_incarnation < self._chief_incarnation:
            raise Superseded(
                f"{self._name}: chief incarnation {self._chief_incarnation} has adopted it, you are {chief_incarnation}; end this chief",
                facts={"chief_incarnation": str(self._chief_incarnation)},
            )

    def _begin_chief_call_locked(self, request: ApplyRequest) -> None:
        self._check_caller_locked(request.epoch)
        self._check_chief_locked(request.chief_incarnation)
        self._chief_incarnation = request.chief_incarnation

    def _model_locked(self, epoch: int, layout_hash: str | None = None) -> ShardModel:
        self._check_caller_locked(epoch)
        if self._model is None:
            raise NotInitialized(f"{self._name}: the variables have no values yet; {self._awaited_locked()}")
        if layout_hash not in (None, self._model.spec.layout.hash):
            raise LayoutMismatch(
                f"{self._name}: its layout is {self._model.spec.layout.hash!r}, you have {layout_hash!r}; ask the chief for the model",
                facts={"layout_hash": self._model.spec.layout.hash},
            )
        return self._model

    def _awaited_locked(self) -> str:
        if self._creation is None:
            return "waiting for a worker to initialise the model"
        received, wanted = self._creation.progress
        spec = self._creation.spec
        share = f"{format_bytes(received)} of {format_bytes(wanted)} for {len(spec.layout.slices)} variables"
        return f"{share} received in attempt {spec.attempt}; waiting for the rest"

    def _wait_for_apply_locked(self) -> None:
        if not self._lock.wait_for(lambda: not self._is_applying, APPLY_WAIT_S):
            raise Unavailable(f"{self._name}: a step has been under way for {APPLY_WAIT_S:g} s; repeat the call")

    def _drop_contributions_locked(self, epoch: int) -> None:
        reason = EpochMismatch(f"{self._name}: cluster epoch rose to {epoch}; reconnect", facts={"epoch": str(epoch)})
        if self._model is not None:
            self._model.accumulator.clear(reason)
        while self._creation is not None:
            self._break_off_locked(self._creation, reason)

    def _is_created_locked(self, spec: ShardSpec) -> bool:
        if spec.shard != self.index:
            raise WrongRole(
                f"this is {self._name}, not ps {spec.shard}; check the addresses and their order", facts={"index": str(self.index)}
            )
        if self._model is None:
            return False
        difference = self._model.difference(spec)
        if difference:
            raise VariableExists(f"{self._name}: {difference}; use another cluster for another model")
        return spec.attempt <= self._model.spec.attempt or self._model.has_applied

    def _displace_creation_locked(self, creation: Creation, spec: ShardSpec) -> None:
        newest = max(spec.attempt, creation.spec.attempt)
        reason = Cancelled(
            f"{self._name}: initialisation attempt {spec.attempt} was broken off, attempt {newest} has begun on another stream"
        )
        if spec.attempt < newest:
            raise reason
        self._break_off_locked(creation, reason)

    def _break_off_locked(self, creation: Creation, reason: PsError) -> None:
        creation.failure = reason
        # Its buffer may be written anew by another; a copy into it that is at work, which takes a moment, must end first.
        self._lock.wait_for(lambda: not creation.is_writing)
        self._forget_creation_locked(creation)
        creation.let_go()

    def _end_creation(self, creation: Creation, is_whole: bool) -> None:
        with self._lock:
            if creation.failure is None and is_whole and creation.model is not None:
                creation.model.publish_initial(creation.spec)
                self._model, self._creation = creation.model, None
            else:
                self._forget_creation_locked(creation)

    def _forget_creation_locked(self, creation: Creation) -> None:
        if self._creation is creation:
            self._creation = None
            if creation.model is not None and creation.model is not self._model:
                creation.model.release()
