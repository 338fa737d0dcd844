"""What the coordinator wants done. Plain values: no behaviour, no transport.

`call` numbers a caller that wants an answer, as in `events`.
"""

from dataclasses import dataclass

from chief.recovery_events import RecoveryInstruction
from ps_protocol.chief import AgreedModel, CommitResult, LeaseReply, ModelReply, Registration, SavedCheckpoint, SettingsReply, TokenReply
from ps_protocol.errors import PsError
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.shard import PushId

Answer = (
    Registration | ModelReply | AgreedModel | CommitResult | TokenReply | SettingsReply | SavedCheckpoint | LeaseReply | bool | int | None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a caller."""

    call: int
    value: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer a blocked caller with an error."""

    call: int
    error: PsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStep:
    """Have all shards apply a step, and report StepApplied when all have. `contributors` are sorted.

    `weights` are parallel to them, or empty: all 1. `scales` has the factors of each shard's slices, or is empty: all 1. `ranges`: see
    ApplyRequest.
    """

    epoch: int
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[tuple[float, ...], ...] = ()
    discards: tuple[PushId, ...] = ()
    ranges: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStep:
    """Have all shards say how large the mean of a step is, and report StepPrepared when all have."""

    epoch: int
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureShards:
    """Have all shards work otherwise from now on, and report ShardsConfigured when all do; the fields are those of ShardSettings."""

    epoch: int
    version: int
    step: int
    accepts_stale: bool
    applies_on_arrival: bool
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...]
    rejects_nonfinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptShard:
    """Adopt a shard that was restarted before it held anything, and report ShardAdopted."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcesses:
    """Nobody needs the cluster any more: shut down the shards, then end with this exit code."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something happened that belongs in the log, in words; `is_detail`: only where somebody looks closely."""

    text: str
    is_warning: bool = False
    is_detail: bool = False


ShardWork = PrepareStep | ApplyStep | ConfigureShards
Instruction = Reply | Refuse | PrepareStep | ApplyStep | ConfigureShards | AdoptShard | EndProcesses | Note | RecoveryInstruction
