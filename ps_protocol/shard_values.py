"""What chief and workers say to a parameter server, and hear from it, as values. Knows steps and bytes; no transport."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, check_disjoint
from ps_protocol.optimizer_spec import OptimizerSpec

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
    incarnation that the chief has refused: nobody will apply them, and the shard lets go of those that it still holds. `life`: of the
    cluster that the worker is registered in; 0: it knows none.
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
    life: int = 0

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
class ShardSettings:
    """How a shard is to work from now on; a `version` that is not higher than the shard's changes nothing.

    `accepts_stale`: contributions of steps gone by are staged too, and stay until they are applied or discarded. `applies_on_arrival`: each
    contribution is applied as soon as it is whole, in place and without a lock. `step`: where the shard is from now on, when it has applied
    on arrival until now. `optimizers`: as the model has it, and as it is from now on; what is not named is as the model has it.
    `rejects_nonfinite`: a gradient with elements that are not finite is refused when it is pushed.
    """

    epoch: int
    chief_incarnation: int
    version: int
    step: int
    accepts_stale: bool = False
    applies_on_arrival: bool = False
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    rejects_nonfinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """The step to apply and the contributions to average, sorted.

    `weights`: one factor for each contributor's gradients, in the same order; empty: all 1. They do not change what the sum is divided by.
    `scales`: one factor for the mean of each slice, as `clipping.scales` has it; empty: all 1. `discards`: contributions that will never
    be applied, to be dropped; a sequence of 0 stands for all of that incarnation. `ranges`: of the training data, those that are done with
    this step, and those done earlier that no record has yet; the shard keeps them for the chief's successor with the request.
    """

    epoch: int
    chief_incarnation: int
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    discards: tuple[PushId, ...] = ()
    ranges: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPush:
    """A contribution that was applied as a part of `step`, by its number among those of its incarnation."""

    sequence: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPushes:
    """What has been applied of one worker lately, by its newest incarnation; in order of sequences."""

    worker: int
    incarnation: int
    applied: tuple[AppliedPush, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Where a shard stands when a chief takes it over; `step` is None and `layout_hash` empty before its variables exist.

    `record` is the latest that a chief has had kept there (empty: none), `last_apply` the step that was applied last in this epoch.
    """

    step: int | None
    layout_hash: str
    record: bytes = b""
    record_version: int = 0
    last_apply: ApplyRequest | None = None
    pushes: tuple[WorkerPushes, ...] = ()


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
    """A shard's step, memory (bytes) and counters since its start. `last_apply_s` is in seconds.

    `is_alone`: of several replicas of the shard, the chief counted on this one alone. `life`: of the cluster, as a chief has told it.
    """

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
    chief_address: str = ""
    chief_heard_ago_s: float | None = None
    is_alone: bool = False
    life: int = 0
