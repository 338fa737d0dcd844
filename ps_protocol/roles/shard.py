"""The calls of chief and workers to a parameter server, and their values. Knows steps and bytes; no transport."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import ClassVar, Protocol

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.model.layout import Layout, Segments, check_disjoint
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.optimizers import OptimizerSpec, StepHyperparameter
from ps_protocol.model.spec import NO_CLIP, AverageSpec, ClipSpec
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS, PushId, StepAttachments
from ps_protocol.roles.fence import NOBODY, Era, Fence
from ps_protocol.roles.request import ADMIN, CHIEF, EVERYBODY, READERS, Answer, Request, asks

# What chief and workers say to a parameter server, and hear from it, as values.


# No call of any role waits longer at once: a caller that wants to wait on asks again.
MAX_WAIT_SLICE_S = 20.0
MAX_STEP = 1 << 62
# A transfer that broke off goes on where it did, if so many bytes had come.
LEAST_RESUMED_BYTES = 1 << 20


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SparsePart:
    """The gradient of one table (its position in `layout.tables`): so many rows."""

    table: int
    num_rows: int


# Of one contribution, and different names of a shard.
MAX_METRICS = 1_000


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One worker's report of a number, that counts `weight` times in a mean."""

    value: float
    weight: float = 1.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PushHeader:
    """The header of a contribution. `step` is that of the variables that its gradients were computed from.

    Its bytes are the arena (left out if `absent` has all slices, and where it lies in the shared `gradient_buffer`), in `encoding` and then
    `encoded_bytes` long; then for each of `sparse`, whose tables ascend, the indices (int64, little-endian, counted from
    the slice's first row) and the rows' values. The shard sorts the indices, and sums the rows of one index in the order given. `absent`:
    positions (in `layout.slices`, ascending) of the slices that it has no gradient for: their bytes mean nothing, and it does not count in
    their mean. A table that is not in `sparse` has no gradient. `metrics` go to shard 0, which counts them when it applies the
    contribution. `refused`: sequences of earlier contributions of this incarnation, which the chief has refused and the shard drops.
    `secret`: as in Participant. `formulas` are computed one after the other, after the step's plain updates; in the place of a slice that
    they write lies an array of theirs.
    """

    era: Era
    push_id: PushId
    step: int
    layout_hash: str
    sparse: tuple[SparsePart, ...] = ()
    absent: tuple[int, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    encoding: FloatEncoding = FloatEncoding.AS_IS
    encoded_bytes: int = 0
    gradient_buffer: int | None = None
    secret: int = field(default=0, repr=False)
    formulas: tuple[FormulaUpdate, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise InvalidSpec(f"local_step: got {self.step}, want 0 to 2^62")
        if self.push_id.incarnation < 1 or self.push_id.sequence < 1:
            raise InvalidSpec(f"push id: got {self.push_id}, want an incarnation and a sequence >= 1")


class PushResult(enum.Enum):
    """The outcome of a push at one shard."""

    STAGED = 1
    STALE = 2
    DUPLICATE = 3
    # In a shard that applies on arrival.
    APPLIED = 4

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PushReply:
    """The outcome of a push, and the shard's step at that moment."""

    result: PushResult
    step: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
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
        """Bytes of the first values that are sent."""
        return first_bytes(self.layout)


def first_bytes(layout: Layout) -> int:
    """Returns the bytes of the first values that a shard is sent: the arena, then the tables that have no initializer, in their order."""
    return layout.nbytes + sum(table.nbytes for table in layout.tables if table.variable.initializer is None)


def held_bytes(layout: Layout) -> int:
    """Returns the bytes of one copy of a shard's variables, its tables included."""
    return layout.nbytes + sum(table.nbytes for table in layout.tables)


def creation_words(layout: Layout, created_bytes: int) -> tuple[str, float]:
    """Returns what a shard does that has so much of its first values, and how far that is: ("fills the table 'users'", 0.43)."""
    sent = first_bytes(layout)
    filled = created_bytes - sent
    words, part = "receives its first values", min(1.0, created_bytes / sent) if sent else 0.0
    if filled < 0:
        return words, part
    for table in layout.tables:
        if table.variable.initializer is not None and table.nbytes:
            words, part = f"fills the table {table.variable.name!r}", min(1.0, filled / table.nbytes)
            if filled < table.nbytes:
                break
            filled -= table.nbytes
    return words, part


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """The settings of a shard from now on. A `version` that is not above the shard's changes nothing.

    `accepts_stale`: contributions of steps gone by are staged too, and stay until they are applied or discarded. `applies_on_arrival`: each
    contribution is applied as soon as it is whole, in place and without a lock; that cannot change once anything has been applied.
    `optimizers`: as the model has it, and as it is from now on; what is not named is as the model has it. `rejects_nonfinite`: a gradient
    with elements that are not finite is refused when it is pushed.
    """

    fence: Fence
    version: int
    accepts_stale: bool = False
    applies_on_arrival: bool = False
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    rejects_nonfinite: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReply:
    """The shard's step now, and whether this very request had been carried out before.

    `checksums`: one for what each contributor has given, by push id; empty if they were not asked for.
    """

    step: int
    repeated_request: bool
    checksums: tuple[int, ...] = ()


@asks("ParameterService", "Command", by=CHIEF, field="apply")
class ApplyRequest:
    """The step to apply and the contributions to average, sorted: the optimizer makes the next step of the mean.

    `weights`: how much each contributor counts in the mean of those that have a gradient, in the same order; of one alone: a factor; empty:
    all 1. `merge`: what takes the place of that mean. `shares`: where it goes by norms, a factor for each contributor's gradient of each
    slice and table, contributor by contributor, before the mean is made, as `model.spec.shares` has it; empty: all 1. `scales`: one factor
    for the mean of each slice, as `model.spec.scales` has it; empty: all 1. `discards`: contributions that will never be applied, to be
    dropped; a sequence of 0 stands for all of that incarnation. `ranges`: of the training data, those that are done with this step, and
    those done earlier that no record has yet; the shard keeps them for the chief's successor with the request. `without`: contributors that
    this shard has said it does not have; here they count as contributions that have no gradient. `attached`: what contributors have
    brought, kept as the ranges are. `wants_checksums`: another server applies the same step.
    """

    fence: Fence
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    discards: tuple[PushId, ...] = ()
    ranges: tuple[int, ...] = ()
    without: tuple[PushId, ...] = ()
    attached: StepAttachments = NO_STEP_ATTACHMENTS
    wants_checksums: bool = False
    merge: MergeSpec = MEAN
    shares: tuple[float, ...] = ()
    answer: ClassVar[type[ApplyReply]] = ApplyReply

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"step {self.step} to be applied"

    @property
    def hyperparameters(self) -> tuple[StepHyperparameter, ...]:
        """Hyper-parameters for this step only, in place of the settings: those of the lowest contribution that is here and has any."""
        return self.attached.hyperparameters(without=self.without) if self.attached is not NO_STEP_ATTACHMENTS else ()


@asks("ParameterService", "Command", by=CHIEF, field="prepare")
class PrepareRequest:
    """Asks for the sum of squares of the mean that a step would use, for each of `layout.slices` and `layout.tables`. No effect.

    If the step merges by norms and has no `shares` yet: for those of each contributor in turn, and -1 where it has no gradient. Raises what
    the step raises.
    """

    of: ApplyRequest
    answer: ClassVar[type[tuple[float, ...]]] = tuple[float, ...]

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"the norms of step {self.of.step}"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """How a chief counts on one of several replicas of a shard. The default: the shard has only this one.

    `version`: the chief numbers what it tells a replica, from 1, so that a copy that comes late changes nothing. `is_alone`: it counts on
    this one only. `forgets`: it does not count on this one any more, and the replica drops its variables.
    """

    version: int = 0
    is_alone: bool = False
    forgets: bool = False

    @property
    def has_twin(self) -> bool:
        """Whether the chief counts on another replica, too."""
        return self.version > 0 and not self.is_alone


ONLY_REPLICA = ReplicaState()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPush:
    """A contribution that was applied as a part of `step`, by its number among those of its incarnation."""

    sequence: int
    step: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPushes:
    """The latest applied contributions of one worker's newest incarnation, in order of sequences."""

    worker: int
    incarnation: int
    applied: tuple[AppliedPush, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The state of a shard when a chief takes it over; `step` is None and `layout_hash` empty before its variables exist.

    `record` is the latest that a chief has had kept there (empty: none), `last_apply` the step that was applied last in this epoch.
    `session_keys`: all that it knows of this life's. `was_alone`: of several replicas, the chief before counted on this one alone, up to
    the moment when this chief took it. `given_up`: by worker the latest incarnation that a chief of this epoch has given up, as sequence 0:
    the shard has dropped its contributions.
    """

    step: int | None
    layout_hash: str
    record: bytes = b""
    record_version: int = 0
    last_apply: ApplyRequest | None = None
    pushes: tuple[WorkerPushes, ...] = ()
    session_keys: tuple[bytes, ...] = field(default=(), repr=False)
    was_alone: bool = False
    given_up: tuple[PushId, ...] = ()


@asks("ParameterService", "AdoptShard", by=CHIEF)
class AdoptRequest:
    """Puts a shard under a chief, which listens at `chief_address`. Raises Superseded if a later one has it.

    A later epoch drops contributions staged or under way, and begins with the model's own settings. `session_keys`: those that the chief
    knows of this life's; a shard that knows none believes every worker. `replica`: how the chief counts on this replica, where the shard
    has several.
    """

    fence: Fence
    chief_address: str = ""
    session_keys: tuple[bytes, ...] = field(default=(), repr=False)
    replica: ReplicaState = ONLY_REPLICA
    answer: ClassVar[type[Adoption]] = Adoption
    awaited: ClassVar[str] = "its adoption"


@asks("ParameterService", "KeepRecord", by=CHIEF)
class KeepRecordRequest:
    """Has a record kept for the chief's successor, unless the shard has such or a newer one, and settings hold, if they are newer.

    Waits for a step under way if they are. Raises Superseded; LimitExceeded for the record, after the settings hold.
    """

    fence: Fence
    version: int
    settings: ShardSettings
    record: bytes = field(repr=False)
    answer: ClassVar[type[None]] = type(None)
    awaited: ClassVar[str] = "a record to be kept"


@asks("ParameterService", "KeepStory", by=CHIEF)
class KeepStoryRequest:
    """Has what a chief's page shows of the past kept, unless it is empty; answered with what was kept before. Raises LimitExceeded."""

    story: bytes = field(repr=False)
    answer: ClassVar[type[bytes]] = bytes
    awaited: ClassVar[str] = "the page's past"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Which variables are wanted (`step` None: the latest), how they are to travel, and which step of them the reader has already.

    `slot`: that slot of the dense variables instead, of the latest step; empty: the variables themselves. `averages.AVERAGE_SLOT` is the
    moving averages; a variable that has none, or whose optimizer has no such slot, has zeros there. Who carries it sets `encoding`.
    """

    epoch: int
    layout_hash: str
    step: int | None = None
    encoding: FloatEncoding = FloatEncoding.AS_IS
    held_step: int | None = None
    slot: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """Which table (its position in `layout.tables`), of which step (None: the latest), and which slot of it (empty: its values).

    Slots are only kept for the latest step. `is_prefetch`: no rows are copied; what a step with gradients for them needs is read from the
    disk, if it lies there.
    """

    epoch: int
    layout_hash: str
    table: int
    step: int | None
    slot: str = ""
    is_prefetch: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class MetricCell:
    """One worker's reports under one name in applied contributions: sum of value * weight, sum of weights, and how often."""

    name: str
    worker: int
    total: float
    weight: float
    count: int
    last: float


@light_dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPowers:
    """Powers of an optimizer's numbers, such as beta1 ** t; `key` is empty for the model's own optimizer."""

    key: str
    powers: tuple[float, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class HiddenState:
    """The numbers, besides tensors, that a shard's next steps depend on. `average_product`: of the averages' decays of the steps gone by.

    `phase`, `phase_step`: the number of the phase of training, and its first step. `table_rows`: the number of rows of each keyed table.
    """

    step: int
    powers: tuple[OptimizerPowers, ...] = ()
    phase: int = 0
    phase_step: int = 0
    average_product: float = 1.0
    num_nonfinite: int = 0
    table_rows: tuple[int, ...] = ()
    metrics: tuple[MetricCell, ...] = ()
    pushes: tuple[WorkerPushes, ...] = ()

    @property
    def powers_by_key(self) -> dict[str, tuple[float, ...]]:
        """The powers of each optimizer by its key."""
        return {one.key: one.powers for one in self.powers}


@asks("ParameterService", "ReadMetrics", by=READERS | CHIEF)
class ReadMetricsRequest:
    """Asks what workers have reported, by name and worker."""

    epoch: int
    answer: ClassVar[type[tuple[MetricCell, ...]]] = tuple[MetricCell, ...]
    awaited: ClassVar[str] = "the metrics"


@asks("ParameterService", "CountRows", by=READERS | CHIEF)
class CountRowsRequest:
    """Asks how many rows of a table with keys were used last 1 step ago (in the newest one), 2 to 3 steps ago, 4 to 7, and so on.

    Empty: nothing of such a table is here, or its rows keep no step of their last use. Holds up no step; rows that one is just making may
    count as older ones.
    """

    epoch: int
    name: str
    answer: ClassVar[type[tuple[int, ...]]] = tuple[int, ...]
    awaited: ClassVar[str] = "the number of rows"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A shard's counters since it got its variables, and its needs: the chief's status passes it on as it is, and all of it is shown.

    The name of a field says how it is shown: `num_…` a count, `…_bytes` memory, `…_s` a duration in seconds. `variables_bytes` (two copies)
    and `slots_bytes` (with averages) are parts of `allocated_bytes`; the rest is for contributions, and buffers that are used again. These
    are `limit_bytes` at most (0: no limit). `files_bytes`: of rows and slots that lie in files, which are not part of them.
    `created_bytes`: first values that have arrived or been made, while the model is being created. `cpu_s`: processor time of the server's
    process, of all threads; 0 where the shard is in the process of another role. `num_rows`: of tables with keys; `num_made` were made,
    `num_evicted` made room or grew too old, `num_refused` keys found none, and `num_unadmitted` were not to have one yet. `num_found`: keys
    of gradients that had a row, once for each step.
    """

    allocated_bytes: int = 0
    limit_bytes: int = 0
    variables_bytes: int = 0
    slots_bytes: int = 0
    files_bytes: int = 0
    num_staged: int = 0
    num_pushes: int = 0
    num_stale: int = 0
    num_duplicates: int = 0
    num_nonfinite: int = 0
    num_sharing: int = 0
    last_apply_s: float = 0.0
    created_bytes: int = 0
    cpu_s: float = 0.0
    num_rows: int = 0
    num_made: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    num_unadmitted: int = 0
    num_found: int = 0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """The owner of a shard, its step, and its report.

    `fence`: of the chief that has the shard; NOBODY before one has. `is_alone`: of several replicas, it counted on this one alone.
    `slots`: names of the optimizers' slots, sorted. `damage`: why its variables are lost, although it was not restarted.
    `is_leaving`: its process was asked to end, and waits some seconds for the chief to save.
    """

    shard: int
    process_incarnation: int
    fence: Fence
    step: int | None
    report: ShardReport
    settings_version: int = 0
    chief_address: str = ""
    chief_heard_ago_s: float | None = None
    is_alone: bool = False
    slots: tuple[str, ...] = ()
    damage: str = ""
    is_leaving: bool = False


@asks("ParameterService", "GetShardStatus", by=EVERYBODY)
class ShardStatusRequest:
    """Asks for step, memory and counters. The chief that has the shard says who it is, as a sign of life; others leave that out."""

    fence: Fence = NOBODY
    answer: ClassVar[type[ShardStatus]] = ShardStatus
    awaited: ClassVar[str] = "its status"


@asks("ParameterService", "ShutdownShard", by=CHIEF | ADMIN)
class ShutdownRequest:
    """Ends the server, which refuses all calls from then on. Idempotent. One that no chief has adopted obeys every fence."""

    fence: Fence
    reason: str
    answer: ClassVar[type[None]] = type(None)
    awaited: ClassVar[str] = "its end"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The address to connect a data socket to, and the secret to send first. `path` is that of a Unix socket; empty: the host, at `port`.

    A caller believes neither host nor path: it connects to the address that it calls the server by, and the port or suffix of its data.
    """

    nonce: bytes = field(repr=False)
    port: int = 0
    path: str = ""


@asks("ParameterService", "OpenDataSocket", by=READERS)
class DataSocketRequest:
    """Asks for a data socket beside gRPC."""

    answer: ClassVar[type[Invitation]] = Invitation
    awaited: ClassVar[str] = "a data socket"


# What a chief says to a parameter server about checkpoints, and hears from it, as values.


class SaveState(enum.Enum):
    """The state of a save: the values are copied and being written; the file is on stable storage; the save has failed."""

    WRITING = 1
    DONE = 2
    FAILED = 3


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: its name in the checkpoint's directory, whose it was, its size, and its SHA-256 in hexadecimal digits.

    `tag`: the checkpoint in whose directory it lies; empty: the one that names it. `is_delta`: it lacks rows of tables, which earlier files
    of the shard have.
    """

    name: str
    shard: int
    num_bytes: int
    sha256: str
    tag: str = ""
    is_delta: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """The state of a save; with DONE the file, with FAILED why."""

    state: SaveState
    file: CheckpointFile | None = None
    failure: PsError | None = None


@asks("ParameterService", "SaveShard", by=CHIEF)
class SaveRequest:
    """A step to save under the name `tag`: its values are copied, then written to storage in the background.

    Asked again, the shard waits for the end, `max_wait_s` at most. Idempotent per tag. `num_shards`: parameter servers of the cluster, for
    the file's name. `since`: rows of tables that have not changed since this step may be left out (-1: none may), and the shard notes
    from now on which do; None: all rows are written. Raises Superseded, StepMismatch, CheckpointStorageMissing.
    """

    fence: Fence
    step: int
    tag: str
    num_shards: int = 1
    since: int | None = None
    max_wait_s: float = 0.0
    answer: ClassVar[type[SaveProgress]] = SaveProgress

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"step {self.step} to be saved"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RestoreProgress:
    """The bytes of files that a restoration has read so far."""

    is_done: bool
    num_bytes_read: int = 0
    num_bytes: int = 0


@asks("ParameterService", "RestoreShard", by=CHIEF)
class RestoreRequest:
    """A checkpoint to bring a shard back to: what is to lie there, its epoch and step, and how it is to work then.

    It replaces whatever the shard has; asked again, the shard waits for the end, `max_wait_s` at most. Idempotent per epoch and tag.
    `manifest_sha256`: of the checkpoint's manifest as the chief has read it. `replica_version`: of the latest ReplicaState that the chief
    had given when it asked. Raises Superseded, DataLoss, CheckpointNotFound, CheckpointMismatch, CheckpointStorageMissing.
    """

    fence: Fence
    spec: ShardSpec
    tag: str
    manifest_sha256: str
    settings: ShardSettings
    replica_version: int = 0
    max_wait_s: float = 0.0
    answer: ClassVar[type[RestoreProgress]] = RestoreProgress

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"{self.tag} to be restored"


# The seam to a parameter server: what workers and the chief ask of a shard, whatever carries it.


class Shard(Protocol):
    """One parameter server. Every call may raise Unavailable, DeadlineExceeded or EpochMismatch.

    `timeout_s` bounds a call; None: the transport's default. All calls are idempotent, so a caller may repeat any that ended as
    Unavailable. Implementations are thread-safe.
    """

    @property
    def transport(self) -> str:
        """How dense variables and gradients travel: "shared_memory" (not at all), "sockets" once some have, "grpc", or "local"."""

    def know_layout(self, layout: Layout) -> None:
        """Notes how the variables lie; only then they can travel encoded."""

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks what has no payload, and returns the answer."""

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values, all or nothing; False if they exist already.

        Raises VariableExists if others stand.
        """

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        """Copies variables, or one slot of all dense ones, into the caller's memory and returns their step.

        If that is `request.held_step`, which the caller has there already, nothing is copied. Raises NotInitialized, StepGone,
        StepNotReady, SlotNotFound. After an error the contents of `into` are undefined.
        """

    def expect(self, request: ReadRequest) -> None:
        """Says that the caller will read this, of a step which need not be there yet: it may leave as soon as it is. Never fails."""

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, all or nothing. Memory that the shard has given for gradients is not copied."""

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

    def close(self) -> None:
        """Releases the caller's connection; the server continues."""
