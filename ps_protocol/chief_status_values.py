"""What a chief reports of its cluster. Pure: words and numbers, no transport, no tensor."""

import enum
from dataclasses import dataclass

from ps_protocol.chief_values import ParticipantKind
from ps_protocol.shard import PushId


class ClusterState(enum.Enum):
    """Where the cluster is."""

    CONNECTING = 1
    WAITING_FOR_MODEL = 2
    TRAINING = 3
    FINISHED = 4
    FAILED = 5
    RECOVERING = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantStatus:
    """One participant as the chief knows it; `state` is "live", "lapsed" or "left"."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLink:
    """One parameter server as the chief knows it. `arena_bytes`: one copy of what lies there, in `num_slices` slices, tables included.

    `standby`: where its standby is that goes along; empty: there is none, for the reason in `standby_missing` if it was to have one.
    """

    index: int
    address: str
    is_reachable: bool
    step: int | None
    arena_bytes: int
    num_slices: int
    standby: str = ""
    standby_missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """What one applied step was made of; durations in seconds."""

    step: int
    contributors: tuple[PushId, ...]
    num_stale: int
    num_late: int
    duration_s: float
    apply_duration_s: float
    last_worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStatus:
    """How far a cluster is in its training data: the pass under way, and how many of its ranges are done, and leased."""

    name: str
    epoch: int
    num_done: int
    num_leased: int
    num_ranges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The cluster at one moment; `total_num_replicas` 0: any number; `waiting_for` is empty while nothing is waited for."""

    cluster: str
    epoch: int
    state: ClusterState
    reason: str
    global_step: int
    max_steps: int | None
    policy: str
    replicas_to_aggregate: int
    total_num_replicas: int
    num_contributions: int
    waiting_for: str
    step_age_s: float
    participants: tuple[ParticipantStatus, ...]
    shards: tuple[ShardLink, ...]
    ledger: tuple[LedgerEntry, ...]
    num_accepted: int
    num_stale: int
    num_late: int
    hyperparameters_version: int = 0
    optimizer: str = ""
    max_observed_staleness: int = 0
    chief_incarnation: int = 0
    checkpoint: CheckpointStatus | None = None
    num_rollbacks: int = 0
    last_rollback: str = ""
    min_replicas: int = 0
    data: DataStatus | None = None
