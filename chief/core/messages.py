"""Events, which the coordinator handles, and instructions, which the shell carries out. Plain values: no behaviour, no transport.

`call` numbers a caller that wants an answer; the shell chooses it, and gets it back in `Reply` or `Refuse`.
"""

import enum
from dataclasses import field
from typing import Any

from ps_protocol.errors import PsError, ShuttingDown, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.roles.chief import (
    AgreedModel,
    CommitResult,
    End,
    LeaseReply,
    ModelReply,
    Registration,
    Request,
    SavedCheckpoint,
    SettingsReply,
    TokenReply,
)
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS, PushId, StepAttachments
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.shard import Adoption, CheckpointFile, ShardReport, ShardSettings, ShardSpec, ShardStatus

# -- events


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardsFound:
    """The statuses of all shards, by index; nothing has been changed there."""

    statuses: tuple[ShardStatus, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RecordFound:
    """The record of an earlier chief at the shards that this one adopts now; reported before the last ShardAdopted, if there is one."""

    record: ChiefRecord


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RecordKept:
    """Shards keep the record of this version, or cannot, for this reason."""

    epoch: int
    version: int
    failure: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound:
    """The newest whole checkpoint, with the SHA-256 of its manifest, or None; `skipped`: newer ones with their faults.

    `highest_epoch`: of all that is there, whole or not; a cluster that begins anew must begin above it, or the old ones would be newer.
    `failure`: why that is unknown: storage cannot be read now.
    """

    checkpoint: Checkpoint | None
    manifest_sha256: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    highest_epoch: int = 0
    failure: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRestored:
    """All shards hold a checkpoint's values under this epoch, and obey this chief."""

    epoch: int
    tag: str
    process_incarnations: tuple[int, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardRestoring:
    """The bytes of a checkpoint that a shard has read so far (`num_bytes` 0: it has only begun)."""

    shard: int
    num_bytes_read: int
    num_bytes: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed:
    """A shard could not be brought back; `is_damaged`: since the checkpoint is not whole, so that an older one may do.

    `is_passing`: since storage cannot be read now, so that the same may do later.
    """

    epoch: int
    tag: str
    why: str
    is_damaged: bool
    is_passing: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepCopied:
    """All shards have copied the step that is to be saved: the next one may be applied."""

    tag: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepSaved:
    """All shards have written their files, by index."""

    tag: str
    files: tuple[CheckpointFile, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The manifest is written: the checkpoint is whole."""

    tag: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be saved; its files have been removed."""

    tag: str
    why: str
    is_full: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasChanged:
    """The processes of a shard with a standby: the primary and the active standby (empty: none, for that reason)."""

    shard: int
    address: str
    standby: str
    missing: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ContributionsDiffer:
    """The two servers of a shard have applied a step, and of these contributions they had not been given the same."""

    shard: int
    step: int
    contributions: tuple[PushId, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReady:
    """An empty process is at the place of a lost replica of a shard: it can be brought back."""

    shard: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasBack:
    """BringReplicasBack is over in this epoch; `failures`: why replicas are not back, with the shard."""

    epoch: int
    failures: tuple[tuple[int, str], ...] = ()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A caller's request; `call` None: it needs no answer."""

    call: int | None
    request: Request[Any]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AskedToEnd:
    """The process was asked to end, for example by SIGTERM, which ends no training."""

    why: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CallCancelled:
    """A blocked caller has gone away."""

    call: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """Time has passed: at the latest at `Coordinator.next_deadline()`."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardAdopted:
    """A shard obeys this chief; `adoption`: its report about itself (None: it holds nothing)."""

    shard: int
    process_incarnation: int
    adoption: Adoption | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeysFound:
    """Shards know these keys of chiefs of this life. Reported as soon as this chief has adopted a shard."""

    keys: tuple[bytes, ...] = field(repr=False)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardSeen:
    """A shard answered with its status; `damage`: why it has lost its variables in this epoch, although it is the same process."""

    shard: int
    process_incarnation: int
    damage: str = ""
    report: ShardReport = field(default_factory=ShardReport)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnreachable:
    """A shard did not answer; the shell keeps trying."""

    shard: int
    why: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """A shard refused an instruction of this epoch (None: of any), and repeating it is of no use."""

    shard: int
    why: str
    epoch: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepPrepared:
    """All shards have reported the sums of squares of a step's mean, each by its slices, in this epoch (None: whichever it is now)."""

    step: int
    sums: tuple[tuple[float, ...], ...]
    epoch: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardsConfigured:
    """All shards work by these settings, in this epoch (None: whichever it is now)."""

    version: int
    epoch: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ContributionsMissing:
    """Shards do not have contributions to the step that is under way, each with its shard; so that step is not done."""

    missing: tuple[tuple[int, PushId], ...]
    epoch: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepApplied:
    """All shards have applied a step, in this epoch (None: whichever it is now)."""

    step: int
    epoch: int | None = None


Event = (
    ShardsFound
    | RecordFound
    | RecordKept
    | CheckpointFound
    | ShardsRestored
    | ShardRestoring
    | RestoreFailed
    | StepCopied
    | StepSaved
    | CheckpointCommitted
    | SaveFailed
    | ReplicasChanged
    | ContributionsDiffer
    | ReplicaReady
    | ReplicasBack
    | Asked
    | AskedToEnd
    | CallCancelled
    | TimerFired
    | ShardAdopted
    | SessionKeysFound
    | ShardSeen
    | ShardUnreachable
    | ShardFailed
    | StepPrepared
    | ShardsConfigured
    | ContributionsMissing
    | StepApplied
)


# -- instructions


Answer = (
    Registration | ModelReply | AgreedModel | CommitResult | TokenReply | SettingsReply | SavedCheckpoint | LeaseReply | End | int | None
)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AdoptShards:
    """Put all shards under this chief, and report ShardAdopted for each, with its report; RecordFound before the last one."""

    fence: Fence


@light_dataclass(frozen=True, slots=True, kw_only=True)
class KeepRecord:
    """Have shards keep this for the chief's successor, and report RecordKept; a later one takes its place.

    `is_for_all` False: the first shard is enough.
    """

    fence: Fence
    version: int
    record: ChiefRecord
    is_for_all: bool = True


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint:
    """Look for the newest whole checkpoint but for those `excluded` (or the one of this name `only`), and report CheckpointFound.

    `fence`: put all shards under the chief with it first, so that no earlier one makes a newer checkpoint whole meanwhile and tells of it.
    """

    excluded: tuple[str, ...] = ()
    only: str = ""
    fence: Fence | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShards:
    """Put all shards under this chief and epoch, give them a checkpoint's values, and report ShardsRestored or RestoreFailed.

    Work at shards for an older epoch is to be given up without a report.
    """

    fence: Fence
    tag: str
    manifest_sha256: str
    specs: tuple[ShardSpec, ...]
    settings: ShardSettings


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SaveStep:
    """Have all shards save the step: report StepCopied as soon as all have copied it, then StepSaved, or SaveFailed."""

    fence: Fence
    step: int
    tag: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest, then remove all but the newest `keep` checkpoints; report CheckpointCommitted or SaveFailed.

    `is_awaited`: a step is announced once it is whole. Then a shard must still obey this chief afterwards: one that comes later
    puts the shards under it and looks for checkpoints then, so that it finds this one.
    """

    checkpoint: Checkpoint
    keep: int
    is_awaited: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class BringReplicasBack:
    """Give the lost replicas of these shards the values of a checkpoint, which the others have now, and report ReplicasBack.

    `specs` and `settings` are as in RestoreShards, `specs` one for each of `shards`. No step is applied meanwhile.
    """

    fence: Fence
    tag: str
    shards: tuple[int, ...]
    specs: tuple[ShardSpec, ...]
    settings: ShardSettings


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a caller."""

    call: int
    value: Answer


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer a blocked caller with an error."""

    call: int
    error: PsError


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStep:
    """Have all shards apply a step, and report StepApplied when all have, or ContributionsMissing. `contributors` are sorted.

    `weights` are parallel to them, or empty: all 1. `scales` has the factors of each shard's slices, or is empty: all 1. `ranges`
    and `attached`: see ApplyRequest. `without` has the contributors that each shard does not have, or is empty: all have all.
    """

    fence: Fence
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    scales: tuple[tuple[float, ...], ...] = ()
    discards: tuple[PushId, ...] = ()
    ranges: tuple[int, ...] = ()
    without: tuple[tuple[PushId, ...], ...] = ()
    attached: StepAttachments = NO_STEP_ATTACHMENTS


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStep:
    """Have all shards say how large the mean of a step is, and report StepPrepared when all have; or ContributionsMissing.

    `without`: see ApplyStep.
    """

    fence: Fence
    step: int
    contributors: tuple[PushId, ...]
    weights: tuple[float, ...] = ()
    without: tuple[tuple[PushId, ...], ...] = ()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureShards:
    """Have all shards work by these settings from now on, and report ShardsConfigured when all do."""

    settings: ShardSettings

    @property
    def fence(self) -> Fence:
        """The fence of the commands."""
        return self.settings.fence


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AdoptShard:
    """Adopt a shard that was restarted before it held anything, and report ShardAdopted."""

    shard: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class EndProcesses:
    """The cluster is no longer needed: shut down the shards, then end with this exit code.

    `has_successor`: it is needed, and only this process ends: leave the shards to the next chief.
    """

    exit_code: int
    reason: str
    has_successor: bool = False

    @property
    def refusal(self) -> PsError:
        """What callers get from then on. If there is a successor: as if this process were gone, so that they ask again, and find it."""
        if self.has_successor:
            return Unavailable(f"the chief has ended ({self.reason}); waiting for the next one")
        return ShuttingDown(f"the chief is shutting down: {self.reason}")


class NoteKind(enum.Enum):
    """The subject of a note, for showing notes in the course of a training. The value is its word."""

    OTHER = "other"
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    ROLLED_BACK = "rolled back"
    SETTINGS = "settings"
    CHECKPOINT = "checkpoint"
    NOT_SAVED = "not saved"
    FINISHED = "finished"
    CHIEF = "chief"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log; `is_detail`: only at the level DEBUG."""

    text: str
    kind: NoteKind = NoteKind.OTHER
    is_warning: bool = False
    is_detail: bool = False


ShardWork = PrepareStep | ApplyStep | ConfigureShards
RecoveryInstruction = AdoptShards | KeepRecord | FindCheckpoint | RestoreShards | SaveStep | CommitCheckpoint | BringReplicasBack
Instruction = Reply | Refuse | PrepareStep | ApplyStep | ConfigureShards | AdoptShard | EndProcesses | Note | RecoveryInstruction
