"""What workers and observers say to the chief, and hear from it, as values. Knows words and numbers; no transport, no tensor."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.data_ranges import DataRange
from ps_protocol.errors import InvalidSpec
from ps_protocol.model import ModelSpec, Placement
from ps_protocol.optimizer_spec import Schedule
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.shard import PushId

MAX_WAIT_SLICE_S = 20.0
DEFAULT_POLICY = PolicySpec()
MAX_INDEX = (1 << 31) - 1


class ParticipantKind(enum.Enum):
    """A worker computes gradients; an observer only reads."""

    WORKER = 1
    OBSERVER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """Who calls: given by registration.

    `life`: random for each life of a cluster. Another one begins where no server knows of the one before: then epochs and incarnations
    may be given that were given in it. 0: none is known.
    """

    epoch: int
    kind: ParticipantKind
    index: int
    incarnation: int
    life: int = 0

    @property
    def era(self) -> tuple[int, int]:
        """Names all that becomes of what is contributed: life and epoch. What was said in one holds in no other."""
        return self.life, self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRequest:
    """Asks to take part; `index` None: the lowest free one. `request_id` is random, and the same in repetitions.

    `former`: who the caller was before the epoch rose or another chief took over; it stays that incarnation if nobody took its place.
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

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index <= MAX_INDEX:
            raise InvalidSpec(f"{self.kind.name.lower()} index: got {self.index}, want 0 to {MAX_INDEX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a participant gets. `may_contribute` is False if its index has given its share to the open step already.

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
    """What a worker shall do about the model."""

    ABSENT = 1
    INITIALIZE = 2
    WAIT = 3
    READY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The state of the model for the caller; `placement` is empty while ABSENT."""

    state: ModelState
    placement: Placement
    attempt: int
    max_staged_per_worker: int
    global_step: int
    waiting_for: str = ""
    policy: PolicySpec = DEFAULT_POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedModel:
    """The agreed model; `model` is None while ABSENT."""

    state: ModelState
    model: ModelSpec | None
    placement: Placement
    global_step: int


class PushOutcome(enum.Enum):
    """What became of a contribution: in its step; its step was applied before; seen before; or its step takes no more from this worker.

    ROLLED_BACK is what a session makes of one whose epoch is over, or whose worker was taken for gone: it is in no step.
    """

    ACCEPTED = 1
    STALE = 2
    DUPLICATE = 3
    LATE = 4
    ROLLED_BACK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCommit:
    """A contribution to be counted; `staged` is False if a shard dropped it as stale, `is_applied` True if shards have applied it.

    `ranges`: ids of the leased ranges of the training data that it was made from.
    """

    push_id: PushId
    step: int
    staged: bool
    is_applied: bool = False
    ranges: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """The outcome; with DUPLICATE, `first_outcome` is the one that this push id had.

    `applied_step`: the step that the contribution is a part of, if it is accepted: the variables of the step after it have it. `staleness`:
    how many steps older the variables were that it was computed from. `weight`: what its gradients are multiplied with.
    """

    outcome: PushOutcome
    global_step: int
    first_outcome: PushOutcome | None = None
    applied_step: int | None = None
    staleness: int = 0
    weight: float = 1.0


class TokenResult(enum.Enum):
    """How a wait for a token ended."""

    TOKEN = 1
    WAIT = 2
    FINISHED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReply:
    """With TOKEN its step, with FINISHED the last step, with WAIT the open step and what it waits for.

    `settings_version` grows when the policy changes: then register the model again to hear of it. `global_step` is the open step.
    `reads_latest`: the worker shall read the newest variables there are, not exactly those of `step`. `shards_version` is as in
    Registration: when it changes, register again.
    """

    result: TokenResult
    step: int
    commit: CommitResult | None = None
    waiting_for: str = ""
    global_step: int = 0
    reads_latest: bool = False
    settings_version: int = 0
    shards_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A whole checkpoint; with an empty tag: not whole yet, and what is waited for."""

    tag: str
    step: int
    waiting_for: str = ""


class LeaseResult(enum.Enum):
    """How a wish for ranges of the training data ended."""

    GRANTED = 1
    WAIT = 2
    EXHAUSTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """Ranges of the training data (GRANTED), or what is waited for (WAIT)."""

    result: LeaseResult
    ranges: tuple[DataRange, ...] = ()
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperparameterChange:
    """New values for one optimizer of the model: the model's own, or (`variable` not empty) that of this variable.

    `learning_rate` None leaves it. What is not named stays as it is.
    """

    variable: str = ""
    learning_rate: Schedule | None = None
    hyperparameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsReply:
    """The version of the settings that a change has made, and the step from which on it holds."""

    version: int
    step: int
