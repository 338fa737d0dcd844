"""What one apply of a shard reads and writes; and the words for a step or slot that is not there."""

from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.averages import AVERAGE_SLOT
from ps_protocol.errors import PsError, SlotNotFound, StepGone, StepNotReady
from ps_protocol.shard import ShardSpec
from ps_server.accumulator import Contribution
from ps_server.fused_apply import FusedApply
from ps_server.staging import StagedGradients
from ps_server.step_memory import StepMemory
from ps_server.table_group import SparseStep
from ps_server.update_rule import UpdateRule

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
