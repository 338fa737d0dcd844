"""What a chief says to a parameter server about checkpoints, and hears from it, as values. Knows steps and bytes; no file, no transport."""

import enum
from dataclasses import dataclass

from ps_protocol.errors import PsError
from ps_protocol.shard_values import ShardSettings, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A step to save under the name `tag`. `num_shards`: parameter servers of the cluster, for the file's name."""

    epoch: int
    chief_incarnation: int
    step: int
    tag: str
    num_shards: int = 1


class SaveState(enum.Enum):
    """How far a save is: the values are copied and being written; the file is on stable storage; it has come to nothing."""

    WRITING = 1
    DONE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: its name in the checkpoint's directory, whose it was, its size, and its SHA-256 in hexadecimal digits."""

    name: str
    shard: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress:
    """How far a save is; with DONE the file, with FAILED why."""

    state: SaveState
    file: CheckpointFile | None = None
    failure: PsError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """A checkpoint to bring a shard back to: what is to lie there, its epoch and step, and how it is to work then.

    `manifest_sha256`: of the checkpoint's manifest as the chief has read it. `life`: of the cluster.
    """

    chief_incarnation: int
    spec: ShardSpec
    tag: str
    manifest_sha256: str
    settings: ShardSettings
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreProgress:
    """How far a restoration is, in bytes of files."""

    is_done: bool
    num_bytes_read: int = 0
    num_bytes: int = 0
