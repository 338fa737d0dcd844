"""What the coordinator is told of checkpoints, restored shards and training data, and what it wants done about them. Plain values."""

from dataclasses import dataclass

from ps_protocol.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.chief import Participant
from ps_protocol.data_ranges import DataSpec
from ps_protocol.shard import CheckpointFile, ShardSettings, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFinding:
    """What a shard says of itself before a chief has it; `step` None: it holds nothing."""

    process_incarnation: int
    epoch: int
    chief_incarnation: int
    step: int | None
    settings_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsFound:
    """All shards have been looked at, by index; nothing has been done to them."""

    findings: tuple[ShardFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFound:
    """What an earlier chief had kept at the shards that this one adopts now; reported before the last ShardAdopted, if there is any."""

    record: ChiefRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound:
    """The newest whole checkpoint, with the SHA-256 of its manifest, or None; `skipped`: newer ones with what is wrong with them.

    `highest_epoch`: of all that is there, whole or not; a cluster that begins anew must begin above it, or the old ones would be newer.
    """

    checkpoint: Checkpoint | None
    manifest_sha256: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    highest_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRestored:
    """All shards hold a checkpoint's values under this epoch, and obey this chief."""

    epoch: int
    tag: str
    process_incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed:
    """A shard could not be brought back; `is_damaged`: since the checkpoint is not whole, so that an older one may do."""

    epoch: int
    tag: str
    why: str
    is_damaged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopied:
    """All shards have copied the step that is to be saved: the next one may be applied."""

    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSaved:
    """All shards have written their files, by index."""

    tag: str
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The manifest stands: the checkpoint is whole."""

    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint has come to nothing; what there was of it is removed."""

    tag: str
    why: str
    is_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Somebody wants a checkpoint; `call` None: nobody wants the answer."""

    call: int | None
    request_id: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRanges:
    """A worker wants ranges of the training data; `returned` are those that it holds and will not use."""

    call: int
    participant: Participant
    data: DataSpec
    max_ranges: int
    request_id: int
    max_wait_s: float
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptShards:
    """Put all shards under this chief, and report ShardAdopted for each, with what it says; RecordFound before the last one."""

    epoch: int
    chief_incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRecord:
    """Have shards keep this for the chief's successor. Nothing waits for it; a later one of a higher version takes its place."""

    epoch: int
    version: int
    record: ChiefRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint:
    """Look for the newest whole checkpoint but for those `excluded` (or the one of this name `only`), and report CheckpointFound."""

    excluded: tuple[str, ...] = ()
    only: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShards:
    """Put all shards under this chief and epoch, give them a checkpoint's values, and report ShardsRestored or RestoreFailed.

    What is still under way at shards for an older epoch is to be given up without a report.
    """

    epoch: int
    chief_incarnation: int
    tag: str
    manifest_sha256: str
    specs: tuple[ShardSpec, ...]
    settings: ShardSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStep:
    """Have all shards save the step: report StepCopied as soon as all have copied it, then StepSaved, or SaveFailed."""

    epoch: int
    step: int
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest, then remove all but the newest `keep` checkpoints; report CheckpointCommitted or SaveFailed."""

    checkpoint: Checkpoint
    keep: int


RecoveryEvent = (
    ShardsFound
    | RecordFound
    | CheckpointFound
    | ShardsRestored
    | RestoreFailed
    | StepCopied
    | StepSaved
    | CheckpointCommitted
    | SaveFailed
    | SaveCheckpoint
    | LeaseRanges
)
RecoveryInstruction = AdoptShards | KeepRecord | FindCheckpoint | RestoreShards | SaveStep | CommitCheckpoint
