"""What the coordinator is told; what it then wants done is in `instructions`. Plain values: no behaviour, no transport.

`call` numbers a caller that wants an answer; the shell chooses it, and gets it back in `Reply` or `Refuse`.
"""

from dataclasses import dataclass

from chief.instructions import AdoptShard as AdoptShard
from chief.instructions import Answer as Answer
from chief.instructions import ApplyStep as ApplyStep
from chief.instructions import ConfigureShards as ConfigureShards
from chief.instructions import EndProcesses as EndProcesses
from chief.instructions import Instruction as Instruction
from chief.instructions import Note as Note
from chief.instructions import PrepareStep as PrepareStep
from chief.instructions import Refuse as Refuse
from chief.instructions import Reply as Reply
from chief.instructions import ShardWork as ShardWork
from chief.recovery_events import RecoveryEvent
from ps_protocol.chief import (
    HyperparameterChange,
    Participant,
    PushCommit,
    RegisterRequest,
)
from ps_protocol.model import ModelSpec
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.shard import Adoption


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterWorker:
    """Somebody wants to take part."""

    call: int
    request: RegisterRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A participant is alive."""

    call: int
    participant: Participant


@dataclass(frozen=True, slots=True, kw_only=True)
class DeregisterWorker:
    """A participant leaves; `failure` is empty if it does so of its own accord."""

    call: int
    participant: Participant
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterModel:
    """A worker presents the model that it wants to train; it may be told to initialise it only if `may_initialize`."""

    call: int
    participant: Participant
    model: ModelSpec
    max_wait_s: float
    may_initialize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteInitialization:
    """A worker says that the shards hold their initial values."""

    call: int
    participant: Participant
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetModel:
    """Somebody wants to know the agreed model."""

    call: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPush:
    """A contribution is staged on all shards (or was found stale by one)."""

    call: int
    participant: Participant
    commit: PushCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class DequeueToken:
    """A worker waits for a token; `commit` is counted first."""

    call: int
    participant: Participant
    local_step: int
    request_id: int
    max_wait_s: float
    commit: PushCommit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPolicy:
    """Somebody wants workers to be coordinated otherwise."""

    call: int
    policy: PolicySpec
    request_id: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetHyperparameters:
    """Somebody wants an optimizer to have other numbers."""

    call: int
    change: HyperparameterChange
    request_id: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTraining:
    """Somebody ends training; `call` None: nobody wants the answer."""

    call: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCancelled:
    """A blocked caller has gone away."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """Time has passed: at the latest at `Coordinator.next_deadline()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAdopted:
    """A shard obeys this chief; `adoption` is what it says of itself (None: it holds nothing)."""

    shard: int
    process_incarnation: int
    adoption: Adoption | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSeen:
    """A shard answered."""

    shard: int
    process_incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnreachable:
    """A shard did not answer; the shell keeps trying."""

    shard: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """A shard refused what it had to do in this epoch (None: whichever it is now), and repeating it is of no use."""

    shard: int
    why: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrepared:
    """All shards have reported the sums of squares of a step's mean, each by its slices, in this epoch (None: whichever it is now)."""

    step: int
    sums: tuple[tuple[float, ...], ...]
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsConfigured:
    """All shards work by these settings, in this epoch (None: whichever it is now)."""

    version: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepApplied:
    """All shards have applied a step, in this epoch (None: whichever it is now)."""

    step: int
    epoch: int | None = None


Event = (
    RegisterWorker
    | Heartbeat
    | DeregisterWorker
    | RegisterModel
    | CompleteInitialization
    | GetModel
    | CommitPush
    | DequeueToken
    | SetPolicy
    | SetHyperparameters
    | FinishTraining
    | CallCancelled
    | TimerFired
    | ShardAdopted
    | ShardSeen
    | ShardUnreachable
    | ShardFailed
    | StepPrepared
    | ShardsConfigured
    | StepApplied
    | RecoveryEvent
)
