"""The seam to a parameter server: what chief and workers ask of a shard, whatever carries it. Knows steps and bytes; no transport."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, check_disjoint
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.segments import Segments

MAX_STEP = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PushId:
    """Names one contribution for ever; sorts by worker, then incarnation, then sequence: the order of every sum."""

    worker: int
    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """What a contribution is and belongs to. `step` is that of the variables that its gradients were computed from."""

    epoch: int
    push_id: PushId
    step: int
    layout_hash: str

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise InvalidSpec(f"local_step: got {self.step}, want 0 to 2^62")
        if self.push_id.incarnation < 1 or self.push_id.sequence < 1:
            raise InvalidSpec(f"push id: got {self.push_id}, want an incarnation and a sequence >= 1")


class PushResult(enum.Enum):
    """What became of a push at one shard."""

    STAGED = 1
    STALE = 2
    DUPLICATE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReply:
    """What became of a push, and the shard's step at that moment."""

    result: PushResult
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """All that a shard must know of its part of the model."""

    epoch: int
    shard: int
    layout: Layout
    optimizer: OptimizerSpec
    initial_step: int = 0
    attempt: int = 1
    max_staged_per_worker: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.initial_step <= MAX_STEP:
            raise InvalidSpec(f"initial_step: got {self.initial_step}, want 0 to 2^62")
        if self.max_staged_per_worker < 1:
            raise InvalidSpec(f"max_staged_per_worker: got {self.max_staged_per_worker}, want >= 1")
        check_disjoint(self.layout.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Where a shard stands when a chief takes it over; `step` is None and `layout_hash` empty before its variables exist."""

    step: int | None
    layout_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """The step to apply and the contributions to average, sorted."""

    epoch: int
    chief_incarnation: int
    step: int
    contributors: tuple[PushId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReply:
    """The shard's step now, and whether this very request had been carried out before."""

    step: int
    repeated_request: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard's step, memory (bytes) and counters since its start. `last_apply_s` is in seconds."""

    shard: int
    process_incarnation: int
    epoch: int
    chief_incarnation: int
    step: int | None
    num_slices: int
    arena_bytes: int
    allocated_bytes: int
    num_staged: int
    num_pushes: int
    num_stale: int
    num_duplicates: int
    num_nonfinite: int
    last_apply_s: float


class Shard(Protocol):
    """One parameter server. Every call may raise Unavailable, DeadlineExceeded or EpochMismatch.

    `timeout_s` bounds a call; None: the transport's default. All calls are idempotent, so a caller may repeat any that ended as
    Unavailable. Implementations are thread-safe.
    """

    def adopt(self, *, epoch: int, chief_incarnation: int) -> Adoption:
        """Puts the shard under a chief. Raises Superseded if a later one has it."""

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values, all or nothing; False if they stood already.

        Raises VariableExists if others stand.
        """

    def read_variables(self, into: Segments, *, epoch: int, step: int | None, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies the variables of `step` (None: the latest) into the caller's memory and returns their step.

        Raises NotInitialized, StepGone, StepNotReady. After an error the contents of `into` are undefined.
        """

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, all or nothing."""

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Averages the contributions and lets the optimizer make the next step."""

    def list_slots(self, *, epoch: int) -> Sequence[str]:
        """Returns the names of the optimizer's slots, sorted."""

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies one slot of all variables into the caller's memory and returns its step. Raises SlotNotFound."""

    def status(self) -> ShardStatus:
        """Reports step, memory and counters."""

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""

    def close(self) -> None:
        """Releases the caller's connection; the server goes on."""
