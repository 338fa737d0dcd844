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
    SavedCheckpoint,
    SettingsReply,
    TokenReply,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.request import Request
from ps_protocol.roles.shard import Adoption, ApplyRequest, ShardReport, ShardSettings, ShardSpec, ShardStatus

# -- events


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An instruction, this very one, has been carried out; `result` is what its docstring names, None if that names nothing."""

    work: "Work"
    result: Any = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An instruction, this very one, could not be carried out, and repeating it is of no use."""

    work: "Work"
    error: PsError


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardsFound:
    """The statuses of all shards, by index; nothing has been changed there."""

    statuses: tuple[ShardStatus, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardRestoring:
    """The bytes of a checkpoint that a shard has read so far (`num_bytes` 0: it has only begun)."""

    shard: int
    num_bytes_read: int
    num_bytes: int


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
class SessionKeysFound:
    """Shards know these keys of chiefs of this life. Reported as soon as this chief has adopted a shard."""

    keys: tuple[bytes, ...] = field(repr=False)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardSeen:
    """A shard answered with its status; `damage`: why it has lost its variables in this epoch, although it is the same process.

    `is_leaving`: its process is about to end.
    """

    shard: int
    process_incarnation: int
    damage: str = ""
    is_leaving: bool = False
    report: ShardReport = field(default_factory=ShardReport)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnreachable:
    """A shard did not answer; the shell keeps trying."""

    shard: int
    why: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """A shard answers that it is not what it should be, and asking again is of no use."""

    shard: int
    why: str


Event = (
    Done
    | Failed
    | ShardsFound
    | ShardRestoring
    | ReplicasChanged
    | ContributionsDiffer
    | ReplicaReady
    | Asked
    | AskedToEnd
    | CallCancelled
    | TimerFired
    | SessionKeysFound
    | ShardSeen
    | ShardUnreachable
    | ShardFailed
)


# -- instructions


ReplyValue = (
    Registration | ModelReply | AgreedModel | CommitResult | TokenReply | SettingsReply | SavedCheckpoint | LeaseReply | End | int | None
)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AdoptShards:
    """Put all shards under this chief. Its result: an `Adopted`. It fails if a shard refuses, once all others obey."""

    fence: Fence


@light_dataclass(frozen=True, slots=True, kw_only=True)
class KeepRecord:
    """Have shards work by these settings, and keep this for the chief's successor; a later one takes its place.

    Its result: why a shard does not keep it, although it works by the settings; None: all keep it. `is_for_all` False: the first shard is
    enough, since all have the settings.
    """

    fence: Fence
    version: int
    settings: ShardSettings
    record: ChiefRecord
    is_for_all: bool = True


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint:
    """Look for the newest whole checkpoint but for those `excluded` (or the one of this name `only`). Its result: a `Found`.

    All shards obey this chief by then, so that no earlier one makes a newer checkpoint whole meanwhile and tells of it.
    """

    excluded: tuple[str, ...] = ()
    only: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShards:
    """Put all shards under this chief and epoch, and give them a checkpoint's values. Its result: the incarnation of each process.

    Work at shards for an older epoch is to be given up without a report.
    """

    fence: Fence
    tag: str
    manifest_sha256: str
    specs: tuple[ShardSpec, ...]
    settings: ShardSettings


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """Have all shards copy the values of a step, and write them. It is done once all have copied: the next step may be applied.

    `since`: see SaveRequest.
    """

    fence: Fence
    step: int
    tag: str
    since: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class WriteStep:
    """Wait until all shards have written their copies of a step. Its result: their files, by index.

    If this fails, or the copying, the files of the checkpoint are removed.
    """

    fence: Fence
    step: int
    tag: str
    since: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest, which makes the checkpoint whole, or remove its files; then remove those older than the newest `keep` full ones.

    `is_awaited`: a step is announced once it is whole. Then a shard must still obey this chief afterwards: one that comes later
    puts the shards under it and looks for checkpoints then, so that it finds this one.
    """

    checkpoint: Checkpoint
    keep: int
    is_awaited: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class BringReplicasBack:
    """Give the lost replicas of these shards the values of a checkpoint, which the others have now.

    Its result: why replicas are not back, each with its shard.
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
    value: ReplyValue


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer a blocked caller with an error."""

    call: int
    error: PsError


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStep:
    """Have all shards apply a step. Its result: None, or what is `Lacking`; then it is not applied everywhere.

    `request`: what all of them are asked. `scales`, `shares` and `without`: those of each shard; empty: as in the request.
    """

    request: ApplyRequest
    scales: tuple[tuple[float, ...], ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()
    without: tuple[tuple[PushId, ...], ...] = ()

    @property
    def fence(self) -> Fence:
        """Of the chief that has it applied."""
        return self.request.fence


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStep:
    """Have all shards say how large the mean of a step is. Its result: the sums of squares of each shard's slices, or what is `Lacking`.

    Without shares, of a merge by norms: the sums of each contribution; see PrepareRequest.
    """

    of: ApplyStep

    @property
    def fence(self) -> Fence:
        """Of the chief that prepares it."""
        return self.of.fence


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


# -- what becomes of instructions


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The incarnation of each shard's process and its report about itself, by index; and the record of an earlier chief, if one is kept."""

    process_incarnations: tuple[int, ...]
    adoptions: tuple[Adoption, ...]
    record: ChiefRecord | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """Shards do not have contributions to a step, each with its shard."""

    missing: tuple[tuple[int, PushId], ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest whole checkpoint, with the SHA-256 of its manifest, or None; `skipped`: newer ones with their faults.

    `highest_epoch`: of all that is there, whole or not; a cluster that begins anew must begin above it, or the old ones would be newer.
    """

    checkpoint: Checkpoint | None
    manifest_sha256: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    highest_epoch: int = 0


Work = (
    PrepareStep
    | ApplyStep
    | AdoptShards
    | KeepRecord
    | FindCheckpoint
    | RestoreShards
    | CopyStep
    | WriteStep
    | CommitCheckpoint
    | BringReplicasBack
)
Instruction = Reply | Refuse | EndProcesses | Note | Work
