"""The seam to the chief: what workers and observers ask of it, whatever carries it. Knows words and numbers; no transport, no tensor."""

from typing import Protocol

from ps_protocol.chief_status_values import CheckpointStatus as CheckpointStatus
from ps_protocol.chief_status_values import ClusterState as ClusterState
from ps_protocol.chief_status_values import ClusterStatus as ClusterStatus
from ps_protocol.chief_status_values import DataStatus as DataStatus
from ps_protocol.chief_status_values import LedgerEntry as LedgerEntry
from ps_protocol.chief_status_values import ParticipantStatus as ParticipantStatus
from ps_protocol.chief_status_values import ShardLink as ShardLink
from ps_protocol.chief_values import DEFAULT_POLICY as DEFAULT_POLICY
from ps_protocol.chief_values import MAX_INDEX as MAX_INDEX
from ps_protocol.chief_values import MAX_WAIT_SLICE_S as MAX_WAIT_SLICE_S
from ps_protocol.chief_values import AgreedModel as AgreedModel
from ps_protocol.chief_values import CommitResult as CommitResult
from ps_protocol.chief_values import HyperparameterChange as HyperparameterChange
from ps_protocol.chief_values import LeaseReply as LeaseReply
from ps_protocol.chief_values import LeaseResult as LeaseResult
from ps_protocol.chief_values import ModelReply as ModelReply
from ps_protocol.chief_values import ModelState as ModelState
from ps_protocol.chief_values import Participant as Participant
from ps_protocol.chief_values import ParticipantKind as ParticipantKind
from ps_protocol.chief_values import PushCommit as PushCommit
from ps_protocol.chief_values import PushOutcome as PushOutcome
from ps_protocol.chief_values import RegisterRequest as RegisterRequest
from ps_protocol.chief_values import Registration as Registration
from ps_protocol.chief_values import SavedCheckpoint as SavedCheckpoint
from ps_protocol.chief_values import SettingsReply as SettingsReply
from ps_protocol.chief_values import TokenReply as TokenReply
from ps_protocol.chief_values import TokenResult as TokenResult
from ps_protocol.data_ranges import DataSpec
from ps_protocol.model import ModelSpec
from ps_protocol.policy_spec import PolicySpec


class Chief(Protocol):
    """The chief. Every call may raise Unavailable, DeadlineExceeded, EpochMismatch, Superseded, LeaseExpired or TrainingFailed.

    Thread-safe. All calls are idempotent, so a caller may repeat any that ended as Unavailable.
    """

    def register_worker(self, request: RegisterRequest) -> Registration:
        """Takes a participant in. Raises WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull."""

    def heartbeat(self, participant: Participant) -> bool:
        """Renews the lease; True once training is finished."""

    def deregister_worker(self, participant: Participant, *, failure: str = "") -> None:
        """Ends the lease."""

    def register_model(self, participant: Participant, model: ModelSpec, *, max_wait_s: float, may_initialize: bool = True) -> ModelReply:
        """Agrees on the model; blocks at most `max_wait_s` (and 20 s). Raises ModelMismatch.

        Without `may_initialize` the caller is never told to INITIALIZE, and its model becomes the agreed one only where the
        parameter servers hold values of it already.
        """

    def complete_initialization(self, participant: Participant, *, attempt: int) -> None:
        """Tells that the shards hold their initial values. Raises NotInitializer."""

    def get_model(self, *, max_wait_s: float) -> AgreedModel:
        """Returns the agreed model; blocks at most `max_wait_s` (and 20 s) for it to be initialised."""

    def commit_push(self, participant: Participant, commit: PushCommit) -> CommitResult:
        """Counts a contribution. Never blocks."""

    def dequeue_token(
        self, participant: Participant, *, local_step: int, request_id: int, max_wait_s: float, commit: PushCommit | None = None
    ) -> TokenReply:
        """Waits for a token, at most `max_wait_s` (and 20 s); counts `commit` first."""

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""

    def set_policy(self, policy: PolicySpec, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes how workers are coordinated, at the next moment when no step is being applied; None if that has not come in time.

        Contributions counted and not applied go over to the new policy. Idempotent per `request_id`. Raises InvalidSpec.
        """

    def set_hyperparameters(self, change: HyperparameterChange, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes an optimizer, at the next moment when no step is being applied; None if that has not come in time.

        Idempotent per `request_id`. Raises InvalidSpec, VariableNotFound, NotInitialized.
        """

    def save_checkpoint(self, *, request_id: int, max_wait_s: float) -> SavedCheckpoint:
        """Saves a checkpoint when no step is being applied, and waits until it is whole; blocks at most `max_wait_s` (and 20 s).

        Idempotent per `request_id`. Raises CheckpointStorageMissing, NotInitialized, StorageFull.
        """

    def lease_ranges(
        self,
        participant: Participant,
        data: DataSpec,
        *,
        max_ranges: int,
        request_id: int,
        max_wait_s: float,
        returned: tuple[int, ...] = (),
    ) -> LeaseReply:
        """Leases ranges of the training data; blocks at most `max_wait_s` (and 20 s) while all that is left is leased to others.

        Idempotent per `request_id`. `returned`: what the caller holds and will not use. Raises InvalidSpec, DataMismatch.
        """

    def finish(self, *, reason: str) -> int:
        """Ends training; returns the last step."""

    def close(self) -> None:
        """Releases the caller's connection; the chief goes on."""
