"""The calls of workers and observers to the chief, and their values. Knows words and numbers; no transport, no tensor."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId
from ps_protocol.roles.fence import Era
from ps_protocol.roles.request import EVERYBODY, OPERATORS, READERS, WORKER, Answer, Request, asks
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S, ShardReport
from ps_protocol.roles.weights import KeptWeights

# What workers and observers say to the chief, and hear from it, as values.


DEFAULT_POLICY = PolicySpec()
MAX_INDEX = (1 << 31) - 1
MAX_SHARDS = 10_000
# Of contributions: so that what is divided by their sum stays a number.
_MIN_WEIGHT, _MAX_WEIGHT = 1e-12, 1e12
_MAX_INNER, _MAX_INNER_S = 10**9, 1e9
# In seconds: what a chief grants, and what a process can wait.
MIN_LEASE_S, MAX_LEASE_S = 0.1, 1e9


class ParticipantKind(enum.Enum):
    """A worker computes gradients; an observer only reads."""

    WORKER = 1
    OBSERVER = 2

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """The identity of a caller, given by registration. `secret` proves it, and is no part of the identity."""

    era: Era
    kind: ParticipantKind
    index: int
    incarnation: int
    secret: int = field(default=0, compare=False, repr=False)

    @property
    def name(self) -> str:
        """For messages: its kind and index."""
        return f"{self.kind.name.lower()} {self.index}"

    def shares_era(self, other: "Participant") -> bool:
        """Whether outcomes of the one's contributions hold for the other: an answer of one era holds in no other."""
        return self.era == other.era


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The answer to a registration. `may_contribute` is False if its index has given its share to the open step already.

    `shards_version`: grows when other processes hold the shards than before; 0: there are no standbys, and it stays so.
    `rejects_nonfinite`: gradients with elements that are not finite are refused.
    """

    participant: Participant
    lease_s: float
    shard_addresses: tuple[str, ...]
    global_step: int
    may_contribute: bool
    chief_incarnation: int = 0
    standby_addresses: tuple[str, ...] = ()
    shards_version: int = 0
    rejects_nonfinite: bool = False


class ModelState(enum.Enum):
    """What a worker is to do about the model: see the members."""

    ABSENT = 1
    INITIALIZE = 2
    WAIT = 3
    READY = 4


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The state of the model for the caller; `placement` is empty while ABSENT. `shards_version` is as in Registration.

    `attached`, with READY: what lasts of what contributions of the caller's index have brought, up to the last one that counts.
    """

    state: ModelState
    placement: Placement
    attempt: int
    max_staged_per_worker: int
    global_step: int
    waiting_for: str = ""
    policy: PolicySpec = DEFAULT_POLICY
    attached: Attachments = NO_ATTACHMENTS
    shards_version: int = 0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AgreedModel:
    """The agreed model; `model` is None while ABSENT. `optimizers` with other numbers by now: as the model has them, and as they are.

    `kept`: what a relay has of the variables for followers; None: servers give all of them, in each encoding.
    """

    state: ModelState
    model: ModelSpec | None
    placement: Placement
    global_step: int
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    policy: PolicySpec = DEFAULT_POLICY
    kept: KeptWeights | None = None


class PushOutcome(enum.Enum):
    """The outcome of a contribution: in its step; its step was applied before; seen before; or its step takes no more from this worker.

    ROLLED_BACK is what a session makes of one whose epoch is over, or whose worker was taken for gone: it is in no step.
    """

    ACCEPTED = 1
    STALE = 2
    DUPLICATE = 3
    LATE = 4
    ROLLED_BACK = 5

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


def check_weight(weight: float) -> None:
    """Raises InvalidSpec unless a contribution may count so much."""
    if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
        raise InvalidSpec(f"weight: got {weight:g}, want a number from {_MIN_WEIGHT:g} to {_MAX_WEIGHT:g}")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class InnerSteps:
    """Steps of its own optimizer that a worker made for a contribution: how many, and how long they took."""

    num: int
    duration_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.num <= _MAX_INNER or not 0 < self.duration_s < _MAX_INNER_S:
            raise InvalidSpec(f"inner steps: got {self.num} in {self.duration_s:g} s, want 1 to {_MAX_INNER} in more than 0 s")

    @property
    def pace_s(self) -> float:
        """How long one takes, in the mean."""
        return self.duration_s / self.num


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PushCommit:
    """A contribution to be counted; `staged` is False if a shard dropped it as stale, `is_applied` True if shards have applied it.

    `ranges`: ids of the leased ranges of the training data that it was made from. `weight`: how much it counts in the mean of its step.
    `inner`: the worker's own steps that it was made by; None: not known.
    """

    push_id: PushId
    step: int
    staged: bool
    is_applied: bool = False
    ranges: tuple[int, ...] = ()
    attached: Attachments = NO_ATTACHMENTS
    weight: float = 1.0
    inner: InnerSteps | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """The outcome; with DUPLICATE, `first_outcome` is the first outcome of this push id.

    `applied_step`: the step that the contribution is a part of, if it is accepted: the variables of the step after it have it. `staleness`:
    how many steps older the variables were that it was computed from. `factor`: what its gradients are multiplied with.
    """

    outcome: PushOutcome
    global_step: int
    first_outcome: PushOutcome | None = None
    applied_step: int | None = None
    staleness: int = 0
    factor: float = 1.0

    @property
    def original_outcome(self) -> PushOutcome:
        """The outcome that the push id had when it was counted or refused; DUPLICATE: that is no longer known."""
        return self.first_outcome or self.outcome if self.outcome is PushOutcome.DUPLICATE else self.outcome


class TokenResult(enum.Enum):
    """The outcome of a wait for a token."""

    TOKEN = 1
    WAIT = 2
    FINISHED = 3

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


class End(enum.Enum):
    """Whether training has ended, and how: as planned (the last step, a client's request, no worker left), or by a stop before that."""

    NOT_YET = 0
    FINISHED = 1
    INTERRUPTED = 2

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self is not End.NOT_YET


@light_dataclass(frozen=True, slots=True, kw_only=True)
class TokenReply:
    """With TOKEN its step, with FINISHED the last step and how training has `end`ed, with WAIT the open step and what it waits for.

    `settings_version` grows when the policy changes: then register the model again to hear of it. `global_step` is the open step.
    `reads_latest`: the worker shall read the newest variables there are, not exactly those of `step`. `shards_version` is as in
    Registration: when it changes, register again. `speed`: how fast the worker's own steps are beside those of the fastest worker, at most
    1; 0: not known.
    """

    result: TokenResult
    step: int
    commit: CommitResult | None = None
    waiting_for: str = ""
    global_step: int = 0
    reads_latest: bool = False
    settings_version: int = 0
    shards_version: int = 0
    end: End = End.NOT_YET
    speed: float = 0.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A whole checkpoint; with an empty tag: not whole yet, and what is waited for."""

    tag: str
    step: int
    waiting_for: str = ""


class LeaseResult(enum.Enum):
    """The outcome of a request for ranges of the training data."""

    GRANTED = 1
    WAIT = 2
    EXHAUSTED = 3


@light_dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """Ranges of the training data (GRANTED), or what is waited for (WAIT)."""

    result: LeaseResult
    ranges: tuple[DataRange, ...] = ()
    waiting_for: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class HyperparameterChange:
    """New values for one optimizer of the model: the model's own, or (`variable` not empty) that of this variable.

    `learning_rate` None leaves it. What is not named stays as it is.
    """

    variable: str = ""
    learning_rate: Schedule | None = None
    hyperparameters: Mapping[str, float] = field(default_factory=dict)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReply:
    """The version of the settings that a change has made, and the step from which on it holds."""

    version: int
    step: int


# What the chief is asked, each a value that says what it is answered with. `max_wait_s`: how long the chief may have the caller wait, 20 s
# at most. `request_id`: the same in repetitions, which have their effect once.


@asks("ChiefService", "RegisterWorker", by=READERS)
class RegisterRequest:
    """Asks to take part; `index` None: the lowest free one. `request_id` is random. Raises WorkerIndexTaken, WorkerIndexOutOfRange,
    ClusterFull.

    `former`: who the caller was before the epoch rose or another chief took over; it stays that incarnation if its place was not taken.
    `held`: ranges of the training data that it was leased as that one, and still has.
    """

    kind: ParticipantKind
    index: int | None
    host: str
    pid: int
    request_id: int
    takeover: bool = False
    former: Participant | None = None
    held: tuple[int, ...] = ()
    answer: ClassVar[type[Registration]] = Registration
    awaited: ClassVar[str] = "a place"

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index <= MAX_INDEX:
            raise InvalidSpec(f"{self.kind.name.lower()} index: got {self.index}, want 0 to {MAX_INDEX}")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FollowerReport:
    """What a follower of the weights has, by its own count.

    `step`: of the weights that its program has; None: it has taken none. `lag`: how many steps that is behind the newest that it had heard
    of; `behind_s`: for how long it has been behind, or has taken none of those that were there. `num_patches`, `num_wholes`: answers of
    servers by their kind. `whole_bytes`: what all of the weights take.
    """

    step: int | None = None
    lag: int = 0
    behind_s: float = 0.0
    num_patches: int = 0
    num_wholes: int = 0
    whole_bytes: int = 0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTraffic:
    """The processor time and bytes that a worker has used since it joined, by its own count.

    Through shared memory no bytes move. `received_bytes`: as they lie in its memory. `reading_s`: how long it took to read variables,
    `num_reads` times. `cpu_s`: processor time of its process, of all threads. `follower`: what it follows, if it does.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    num_reads: int = 0
    reading_s: float = 0.0
    cpu_s: float = 0.0
    follower: FollowerReport | None = None

    def __post_init__(self) -> None:
        for name, seconds in (("reading", self.reading_s), ("processor time", self.cpu_s)):
            if not seconds >= 0.0:
                raise InvalidSpec(f"{name}: got {seconds:g} s, want 0 or more")


@asks("ChiefService", "Heartbeat", by=READERS)
class HeartbeatRequest:
    """A participant is alive. Answered with whether training has ended, and how. `transports`: how its gradients and variables travel."""

    participant: Participant
    transports: tuple[str, ...] = ()
    traffic: WorkerTraffic | None = None
    answer: ClassVar[type[End]] = End
    awaited: ClassVar[str] = "the lease to be renewed"


@asks("ChiefService", "DeregisterWorker", by=READERS)
class DeregisterRequest:
    """A participant leaves; `failure` is empty if it does so of its own accord."""

    participant: Participant
    failure: str = ""
    answer: ClassVar[type[None]] = type(None)
    awaited: ClassVar[str] = "the lease to be ended"


@asks("ChiefService", "RegisterModel", by=WORKER)
class RegisterModelRequest:
    """A worker presents its model, and waits until it is agreed on. Raises ModelMismatch.

    `joins_only`: the caller never gets INITIALIZE, and its model becomes the agreed one only where the parameter servers hold values of it
    already.
    """

    participant: Participant
    model: ModelSpec
    max_wait_s: float = MAX_WAIT_SLICE_S
    joins_only: bool = False
    answer: ClassVar[type[ModelReply]] = ModelReply
    awaited: ClassVar[str] = "the model to be agreed on"


@asks("ChiefService", "CompleteInitialization", by=WORKER)
class CompleteInitializationRequest:
    """A worker says that the shards hold their initial values. Raises NotInitializer."""

    participant: Participant
    attempt: int
    answer: ClassVar[type[None]] = type(None)
    awaited: ClassVar[str] = "the initialisation to be noted"


@asks("ChiefService", "GetModel", by=READERS)
class GetModelRequest:
    """A request for the agreed model, which waits for it to be initialised."""

    max_wait_s: float = MAX_WAIT_SLICE_S
    answer: ClassVar[type[AgreedModel]] = AgreedModel
    awaited: ClassVar[str] = "the model"


@asks("ChiefService", "Converse", by=WORKER, field="commit")
class CommitPushRequest:
    """A contribution is staged on all shards (or was found stale by one), and is to be counted. Never waits."""

    participant: Participant
    commit: PushCommit
    answer: ClassVar[type[CommitResult]] = CommitResult
    awaited: ClassVar[str] = "a contribution to be counted"


@asks("ChiefService", "Converse", by=WORKER, field="token")
class DequeueTokenRequest:
    """A worker waits for a token newer than that of `local_step`; `commit` is counted first. `request_id` grows with each token wanted."""

    participant: Participant
    local_step: int
    request_id: int
    max_wait_s: float = MAX_WAIT_SLICE_S
    commit: PushCommit | None = None
    answer: ClassVar[type[TokenReply]] = TokenReply

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"a token after step {self.local_step}"


@asks("ChiefService", "ChangeSettings", by=OPERATORS)
class ChangeSettingsRequest:
    """A request for another `policy`, or other `hyperparameters` of an optimizer, at the next moment when no step is being applied.

    Answered with None if that has not come in time. Contributions counted and not applied go over to the new policy. Raises InvalidSpec,
    VariableNotFound, NotInitialized.
    """

    request_id: int
    max_wait_s: float = MAX_WAIT_SLICE_S
    policy: PolicySpec | None = None
    hyperparameters: HyperparameterChange | None = None
    answer: ClassVar[type[SettingsReply | None]] = cast("type[SettingsReply | None]", SettingsReply | None)

    def __post_init__(self) -> None:
        if (self.policy is None) == (self.hyperparameters is None):
            raise InvalidSpec("a change of settings: want a policy, or an optimizer's hyper-parameters, and not both")

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"the policy {self.policy.text}" if self.policy is not None else "the optimizer's change"


@asks("ChiefService", "SaveCheckpoint", by=OPERATORS)
class SaveCheckpointRequest:
    """A request for a checkpoint when no step is being applied, which waits until it is whole.

    Raises CheckpointStorageMissing, NotInitialized, StorageFull.
    """

    request_id: int
    max_wait_s: float = MAX_WAIT_SLICE_S
    answer: ClassVar[type[SavedCheckpoint]] = SavedCheckpoint
    awaited: ClassVar[str] = "a checkpoint"


@asks("ChiefService", "LeaseRanges", by=WORKER)
class LeaseRangesRequest:
    """A request for ranges of the training data, which waits while all that is left is leased to others. Raises InvalidSpec, DataMismatch.

    `held`: those that the worker has, of all that it knows to be leased to it.
    """

    participant: Participant
    data: DataSpec
    max_ranges: int
    request_id: int
    max_wait_s: float = MAX_WAIT_SLICE_S
    held: tuple[int, ...] = ()
    answer: ClassVar[type[LeaseReply]] = LeaseReply
    awaited: ClassVar[str] = "ranges of the training data"


@asks("ChiefService", "FinishTraining", by=OPERATORS)
class FinishTrainingRequest:
    """A client ends training, or `interrupts` it before its time. Answered with the last step."""

    reason: str
    interrupts: bool = False
    answer: ClassVar[type[int]] = int
    awaited: ClassVar[str] = "the end of training"


# What a chief reports of its cluster.


class ClusterState(enum.Enum):
    """The state of the cluster."""

    CONNECTING = 1
    WAITING_FOR_MODEL = 2
    TRAINING = 3
    FINISHED = 4
    FAILED = 5
    RECOVERING = 6


class Level(enum.Enum):
    """How well a cluster is: as it should be; in need of a look, now or soon; at a standstill until somebody acts."""

    GREEN = 1
    AMBER = 2
    RED = 3


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that is to be said of a cluster: what and who in a `line`, what to do in `advice`, and `commands` for a shell, apart.

    `name` is that of its row in the table of conditions. `is_standstill`: training stands while it holds.
    """

    name: str
    level: Level
    line: str
    advice: str = ""
    commands: tuple[str, ...] = ()
    is_standstill: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantStatus:
    """One participant as the chief knows it; `state` is "live", "lapsed", "left" or "expelled".

    `transport` and `traffic`: how its gradients and variables travel, and how much has, as it has said; empty and None: it has not yet.
    `is_silent`: it is live and has missed a heartbeat, for which half a lease is time enough; it may compute all the same. `doing`: what is
    known of it, in words. `inner`: its own steps in its latest contribution that counts, if it tells; `utilisation`: the share of the time
    since the one before in which it made them.
    """

    kind: ParticipantKind
    index: int
    incarnation: int
    host: str
    pid: int
    state: str
    seen_ago_s: float
    num_accepted: int
    num_stale: int
    num_late: int
    is_waiting: bool
    failure: str
    transport: str = ""
    traffic: WorkerTraffic | None = None
    is_silent: bool = False
    doing: str = ""
    inner: InnerSteps | None = None
    utilisation: float = 0.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """All steps that this chief has had applied, also those that a rollback took back: how many, and how long they took together.

    `apply_s`: the part of that between the last contribution and the end of the apply.
    """

    num_steps: int = 0
    duration_s: float = 0.0
    apply_s: float = 0.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One parameter server as the chief knows it. `arena_bytes`: one copy of what lies there, in `num_slices` slices, tables included.

    `standby`: where its standby is that goes along; empty: there is none, for the reason in `standby_missing` if it was to have one.
    `report`: what it said of itself when the chief looked at it last; None: it has not yet.
    """

    index: int
    address: str
    is_reachable: bool
    step: int | None
    arena_bytes: int
    num_slices: int
    standby: str = ""
    standby_missing: str = ""
    report: ShardReport | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The record of one applied step; durations in seconds.

    `duration_s`: from its opening to its end. `wait_duration_s`: of that, from its first contribution to the last that it needed;
    `apply_duration_s`: from then on. Before its first contribution, workers read variables and computed. `arrivals_us`: microseconds from
    its opening to each contributor's contribution, in their order; 0 for one that came before. `weights`: how much each counted in the
    mean, as it was pushed, and for one alone a factor; empty: all the same.
    """

    step: int
    contributors: tuple[PushId, ...]
    num_stale: int
    num_late: int
    duration_s: float
    apply_duration_s: float
    last_worker: int
    wait_duration_s: float = 0.0
    arrivals_us: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """Checkpoints of a cluster: the latest whole one of this run (an empty tag: none yet), and the one that is being written.

    `durability` is "none", "interval" or "step". `failure`: why the last attempt failed; empty: it did not.
    """

    durability: str
    tag: str = ""
    step: int = 0
    age_s: float = 0.0
    saving: str = ""
    failure: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataStatus:
    """The position of a cluster in its training data: the pass under way, and how many of its ranges are done, and leased."""

    name: str
    epoch: int
    num_done: int
    num_leased: int
    num_ranges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionCounts:
    """Contributions that counted, and that did not."""

    accepted: int = 0
    stale: int = 0
    late: int = 0

    def __add__(self, other: "ContributionCounts") -> "ContributionCounts":
        return ContributionCounts(accepted=self.accepted + other.accepted, stale=self.stale + other.stale, late=self.late + other.late)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The cluster at one moment; `total_num_replicas` 0: any number; `waiting_for` is empty while nothing is waited for.

    `conditions`: all that are to be said of it, the most urgent first; that one is its headline.
    `num_accepted`, `num_stale` and `num_late` begin again with each chief. `earlier`: what those before have counted, as far as a page
    kept it; None: nothing is known. `chief_cpu_s`: processor time of the chief's process, of all threads. `page_url`: of its page for a
    browser; empty: there is none.
    """

    cluster: str
    epoch: int
    state: ClusterState
    reason: str
    global_step: int
    max_steps: int | None
    policy: PolicySpec
    replicas_to_aggregate: int
    total_num_replicas: int
    num_contributions: int
    waiting_for: str
    step_age_s: float
    participants: tuple[ParticipantStatus, ...]
    shards: tuple[ServerStatus, ...]
    ledger: tuple[LedgerEntry, ...]
    num_accepted: int
    num_stale: int
    num_late: int
    conditions: tuple[Condition, ...]
    settings_version: int = 0
    optimizer: str = ""
    max_observed_staleness: int = 0
    chief_incarnation: int = 0
    checkpoint: CheckpointStatus | None = None
    num_rollbacks: int = 0
    last_rollback: str = ""
    min_replicas: int = 0
    data: DataStatus | None = None
    chief_cpu_s: float = 0.0
    page_url: str = ""
    earlier: ContributionCounts | None = None

    @property
    def counts(self) -> ContributionCounts:
        """The contributions to this chief, and to those before it as far as they are known."""
        own = ContributionCounts(accepted=self.num_accepted, stale=self.num_stale, late=self.num_late)
        return own + self.earlier if self.earlier is not None else own

    @property
    def headline(self) -> Condition:
        """The first thing to say of the cluster."""
        return self.conditions[0]


@asks("ChiefService", "GetClusterStatus", by=EVERYBODY)
class ClusterStatusRequest:
    """Reports the cluster, with so many entries of the ledger, the newest first."""

    max_ledger_entries: int = 0
    answer: ClassVar[type[ClusterStatus]] = ClusterStatus
    awaited: ClassVar[str] = "the status"


# The seam to the chief: what workers and observers ask of it, whatever carries it.


class Chief(Protocol):
    """The chief. Every call may raise Unavailable, DeadlineExceeded, EpochMismatch, Superseded, LeaseExpired or TrainingFailed.

    Thread-safe. All calls are idempotent, so a caller may repeat any that ended as Unavailable.
    """

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer. `timeout_s`: how long that may take at most, if it is less than such a call takes anyway."""

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        return self.call(ClusterStatusRequest(max_ledger_entries=max_ledger_entries))

    def close(self) -> None:
        """Releases the caller's connection; the chief continues."""
