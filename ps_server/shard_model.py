"""One shard's part of a model: memory, contributions, optimizer and step; how a step is applied. Knows no lock, epoch, clock or wire."""

from ps_protocol.errors import SlotNotFound, StepGone, StepMismatch, StepNotReady
from ps_protocol.layout import VariableSlice
from ps_protocol.shard import ApplyRequest, PushId, ShardSpec
from ps_protocol.tensors import Array
from ps_server.accumulator import GradientAccumulator
from ps_server.arena import ShardArena, VersionedBuffer
from ps_server.fused_apply import FusedApply, StepMemory
from ps_server.memory import BufferPool, MemoryBudget
from ps_server.optimizers import make_optimizer
from ps_server.schedules import learning_rate


class ShardModel:
    """Holds what `spec` names. The caller serialises the calls, but for `run_apply`, which it may run beside all others."""

    def __init__(self, spec: ShardSpec, *, budget: MemoryBudget) -> None:
        optimizer = make_optimizer(spec.optimizer)
        self.spec = spec
        self.arena = ShardArena(spec.layout, slots=optimizer.slots, budget=budget)
        self.pool = BufferPool(spec.layout.nbytes, budget=budget)
        self.accumulator = GradientAccumulator(self.pool, max_staged_per_worker=spec.max_staged_per_worker)
        self.step = spec.initial_step
        self.num_nonfinite = 0
        self._fused = FusedApply(spec.layout, optimizer)
        self._last_applied: tuple[PushId, ...] = ()

    @property
    def has_applied(self) -> bool:
        """Whether a step was applied since the initial values came."""
        return bool(self._last_applied)

    def difference(self, spec: ShardSpec) -> str:
        """Says in words where `spec` differs from what stands; empty if it is the same again."""
        mine, theirs = self.spec.layout, spec.layout
        for old, new in () if mine.hash == theirs.hash else zip(mine.slices, theirs.slices, strict=False):
            if old != new:
                return f"{_described(old)} exists, asked for is {_described(new)}"
        if len(mine.slices) != len(theirs.slices):
            return f"{len(mine.slices)} slices exist, asked for are {len(theirs.slices)}"
        if self.spec.optimizer != spec.optimizer:
            return f"the optimizer is {self.spec.optimizer}, asked for is {spec.optimizer}"
        if self.spec.initial_step != spec.initial_step:
            return f"the variables began at step {self.spec.initial_step}, asked for is {spec.initial_step}"
        return ""

    def fill_initial(self, memory: Array) -> None:
        """Completes what the initial values have been copied into. Takes as long as a copy; touches no bookkeeping."""
        self.arena.clear_padding(memory)
        self.arena.fill_slots()

    def publish_initial(self, spec: ShardSpec) -> None:
        """Makes the values in the arena's other copy the variables of the initial step."""
        self.spec = spec
        self.accumulator.max_staged_per_worker = spec.max_staged_per_worker
        self.arena.publish_next(spec.initial_step)

    def buffer(self, step: int | None) -> VersionedBuffer:
        """Returns the copy that holds `step` (None: the latest); raises StepGone or StepNotReady."""
        found = self.arena.find(self.step if step is None else step)
        if found is not None:
            return found
        facts = {"step": str(self.step)}
        if step is not None and step > self.step:
            raise StepNotReady(f"step {step} is not there yet, the shard is at step {self.step}; wait for its token", facts=facts)
        raise StepGone(
            f"step {step} is gone, the shard is at step {self.step} and keeps at most the one before; read a later one", facts=facts
        )

    def slot(self, name: str) -> Array:
        """Returns a slot's memory; raises SlotNotFound."""
        if name not in self.arena.slots:
            known = ", ".join(self.arena.slots) or "none"
            raise SlotNotFound(f"optimizer {self.spec.optimizer.name!r} has no slot {name!r}; it has {known}")
        return self.arena.slots[name]

    def is_repeated(self, request: ApplyRequest) -> bool:
        """Whether this very request has been carried out; raises StepMismatch if it is for another step than the one to apply now."""
        if request.step == self.step:
            return False
        if request.step == self.step - 1 and request.contributors == self._last_applied:
            return True
        what = "was applied with other contributors" if request.step == self.step - 1 and self.has_applied else "is not the one to apply"
        raise StepMismatch(
            f"step {request.step} {what}: the shard is at step {self.step}; ask for its status", facts={"step": str(self.step)}
        )

    def begin_apply(self, request: ApplyRequest) -> StepMemory:
        """Returns what `run_apply` reads and writes; readers of the copy that it overwrites, and of slots, know from now on."""
        gradients = self.accumulator.gradients(request.contributors, step=request.step)
        self.arena.begin_slots()
        return StepMemory(
            value=self.arena.current.memory, out=self.arena.begin_next().memory, slots=list(self.arena.slots.values()), gradients=gradients
        )

    def run_apply(self, memory: StepMemory) -> int:
        """Makes the next step's variables; returns how many elements of the mean are not finite. Takes long; touches no bookkeeping."""
        num_nonfinite = self._fused.run(memory, learning_rate=learning_rate(self.spec.optimizer.learning_rate, step=self.step))
        self.arena.clear_padding(memory.out)
        return num_nonfinite

    def finish_apply(self, request: ApplyRequest, *, num_nonfinite: int) -> None:
        """Makes the new variables the latest, and drops what was staged for the step."""
        self._fused.advance_powers()
        self._last_applied = request.contributors
        self.num_nonfinite = num_nonfinite
        self.step += 1
        self.arena.publish_next(self.step)
        self.accumulator.advance(self.step)

    def release(self) -> None:
        """Takes its memory off the budget; the owner must not use it again."""
        self.pool.release_all()
        self.arena.release()


def _described(piece: VariableSlice) -> str:
    rows = "" if piece.is_whole else f" rows {piece.start} to {piece.stop}"
    return f"variable {piece.variable.name!r} with shape {piece.variable.shape} {piece.variable.data_type.value}{rows}"
