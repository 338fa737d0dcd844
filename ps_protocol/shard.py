"""The seam to a parameter server: what chief and workers ask of a shard, whatever carries it. Knows steps and bytes; no transport."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, check_disjoint
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.segments import Segments
from ps_protocol.tensors import Array

MAX_STEP = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PushId:
    """Names one contribution for ever; sorts by worker, then incarnation, then sequence: the order of every sum."""

    worker: int
    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePart:
    """The gradient of one table (its position in `layout.tables`): so many rows."""

    table: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One worker's report of a number, that counts `weight` times in a mean."""

    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """What a contribution is and belongs to. `step` is that of the variables that its gradients were computed from.

    Its bytes are, one after the other: the arena (left out if `absent` has all slices); then for each of `sparse`, whose tables ascend, the
    indices (int64, little-endian, counted from the slice's first row) and the rows' values; what is not strictly ascending is sorted, and
    the rows of one index are summed in the order given. `absent` are the positions (in `layout.slices`, ascending) of the slices that it
    has no gradient for: their bytes mean nothing, and it does not count in their mean. A table that is not in `sparse` has no gradient.
    `metrics` go to shard 0 and are counted when the contribution is applied. `refused` are sequences of earlier contributions of this
    incarnation that the chief has refused: nobody will apply them, and the shard lets go of those that it still holds.
    """

    epoch: int
    push_id: PushId
    step: int
    layout_hash: str
    sparse: tuple[SparsePart, ...] = ()
    absent: tuple[int, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    encoding: FloatEncoding = FloatEncoding.AS_IS
    encoded_bytes: int = 0
    memory_slot: int | None = None

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
    # In a shard that applies on arrival.
    APPLIED = 4


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
    averages: AverageSpec | None = None
    clip: ClipSpec = NO_CLIP

    def __post_init__(self) -> None:
        if not 0 <= self.initial_step <= MAX_STEP:
            raise InvalidSpec(f"initial_step: got {self.initial_step}, want 0 to 2^62")
        if self.max_staged_per_worker < 1:
            raise InvalidSpec(f"max_staged_per_worker: got {self.max_staged_per_worker}, want >= 1")
        check_disjoint((*self.layout.slices, *self.layout.tables))

    @property
    def content_bytes(self) -> int:
        """Bytes of the first values that are sent: the arena, then the tables that have no initializer, in their order."""
        return self.layout.nbytes + sum(table.nbytes for table in self.layout.tables if table.variable.initializer is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Where a shard stands when a chief takes it over; `step` is None and `layout_hash` empty before its variables exist."""

    step: int | None
    layout_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """How a shard is to work from now on; a `version` that is not higher than the shard's changes nothing.

    `accepts_stale`: contributions of steps gone by are staged too, and stay until they are applied or discarded. `applies_on_arrival`: each
    contribution is applied as soon as it is whole, in place and without a lock. `step`: where the shard is from now on, when it has applied
    on arrival until now. `optimizers`: as the model has it, and as it is from now on; what is not named is as the model has it.
    """

    epoch: int
    chief_incarnation: int
    version: int
    step: int
    accepts_stale: bool = False
    applies_on_arrival: bool = False
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """The step to apply and the contributions to average, sorted.

    `weights`: one factor for each contributor's gradients, in the same order; empty: all 1. They do not change what the sum is divided by.
    `scales`: one factor for the mean of each slice, as `clipping.scales` has it; empty: all 1. `discards`: contributions that will never
    be applied, to be dropped; a sequence of 0 stands for all of that incarnation.
    """

    epoch: int
    chief_incarnation: int
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    discards: tuple[PushId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReply:
    """The shard's step now, and whether this very request had been carried out before."""

    step: int
    repeated_request: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """Which table (its position in `layout.tables`), of which step (None: the latest), and which slot of it (empty: its values).

    Slots are only kept for the latest step.
    """

    epoch: int
    layout_hash: str
    table: int
    step: int | None
    slot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCell:
    """What one worker has reported under one name in applied contributions: sum of value * weight, sum of weights, and how often."""

    name: str
    worker: int
    total: float
    weight: float
    count: int
    last: float


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
    settings_version: int = 0
    num_sharing: int = 0


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

    def read_variables(
        self,
        into: Segments,
        *,
        epoch: int,
        step: int | None,
        layout_hash: str,
        held_step: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Copies the variables of `step` (None: the latest) into the caller's memory and returns their step.

        If that is `held_step`, which the caller has there already, nothing is copied. Raises NotInitialized, StepGone, StepNotReady. After
        an error the contents of `into` are undefined.
        """

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """Says that the caller will read `step`, which need not be there yet: it may leave as soon as it is. A hint; never fails."""

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns the arena of a step where the shard has it, read-only; None if this transport copies: then `read_variables` does.

        It is overwritten as soon as the step after the next is being made. There are two such arrays, and they stay the same ones. Raises
        what `read_variables` raises.
        """

    def gradient_memory(self) -> Array | None:
        """Returns an arena to write the next gradients into, that `push_gradients` then need not copy; None if this transport copies.

        The same one until it has been pushed, and never one whose contribution may still be applied. It is not cleared. Raises
        TooManyPushes if there is none that is free, and no more can be had.
        """

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, all or nothing. `gradients` may begin with what `gradient_memory` gave: then that is not copied."""

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works; waits for a step that is being applied. Raises Superseded."""

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sum of squares of the mean that `apply_step` would use, for each of `layout.slices` and `layout.tables`. No effect.

        Raises what `apply_step` raises.
        """

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Averages the contributions and lets the optimizer make the next step."""

    def read_rows(
        self,
        request: RowsRequest,
        indices: Array,
        into: Segments,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Copies rows of one table, or of one of its slots, into the caller's memory, and returns their step.

        `indices`: int64, counted from the slice's first row, any order, repetitions allowed. `into` has as many bytes as those rows.
        `meanwhile`, only where these are some, is called with the step while the shard counts the caller among the readers of that step.
        Raises IndexOutOfRange, SlotNotFound, NotInitialized, StepGone, StepNotReady. After an error the contents of `into` are undefined.
        """

    def read_metrics(self, *, epoch: int) -> Sequence[MetricCell]:
        """Returns what workers have reported, by name and worker."""

    def list_slots(self, *, epoch: int) -> Sequence[str]:
        """Returns the names of the optimizer's slots, sorted."""

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies one slot of all dense variables into the caller's memory and returns its step. Raises SlotNotFound.

        `averages.AVERAGE_SLOT` gives the moving averages; a variable that has none, or whose optimizer has no such slot, has zeros there.
        """

    def status(self) -> ShardStatus:
        """Reports step, memory and counters."""

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""

    def close(self) -> None:
        """Releases the caller's connection; the server goes on."""
