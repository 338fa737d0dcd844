"""The typed errors of the system, each with a stable reason, and others' texts made fit for a log. Knows no gRPC.

PsError
├── InvalidSpec, ShapeMismatch, DtypeMismatch, IncompletePush, IndexOutOfRange    wrong whatever the state
├── NonFiniteGradient, MalformedMessage, TruncatedStream, FrameOutOfOrder, PushIdReused
├── VariableNotFound, SlotNotFound, AccumulatorNotFound, VariableExists, AccumulatorExists, ModelMismatch
├── WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull, LimitExceeded, TooManyPushes
├── NotInitialized, NotInitializer, LayoutMismatch, LeaseExpired          wrong now; do something first
├── StepGone, StepNotReady, StepAhead, StepMismatch, ContributionMissing
├── WrongCluster, WrongRole, ProtocolMismatch, TrainingFailed
├── CheckpointNotFound, CheckpointMismatch, CheckpointStorageMissing, StorageFull, StorageFailed
├── DataLoss, DataMismatch
├── EpochMismatch, Superseded                                            fenced: start again
├── Unauthenticated, PermissionDenied
└── Unavailable, ShuttingDown, DeadlineExceeded, Cancelled, Unimplemented, InternalError
"""

from collections.abc import Mapping


class PsError(Exception):
    """An error that a user can act on: a text that says what, which and what to do, and facts for programs.

    `reason` is what programs and other languages know it by, and stays; `status` is the gRPC status that a call ends with.
    """

    reason = "INTERNAL"
    status = "INTERNAL"

    def __init__(self, message: str, *, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, str] = dict(facts or {})


class CheckpointNotFound(PsError):
    """There is no whole checkpoint, or none of this name."""

    reason = "CHECKPOINT_NOT_FOUND"
    status = "NOT_FOUND"


class CheckpointMismatch(PsError):
    """A checkpoint is not one of this model."""

    reason = "CHECKPOINT_MISMATCH"
    status = "FAILED_PRECONDITION"


class CheckpointStorageMissing(PsError):
    """The process was given no place for checkpoints."""

    reason = "CHECKPOINT_STORAGE_MISSING"
    status = "FAILED_PRECONDITION"


class StorageFull(PsError):
    """There is no room for a checkpoint. Training continues, but a step that has to be saved waits for room."""

    reason = "STORAGE_FULL"
    status = "RESOURCE_EXHAUSTED"


class StorageFailed(PsError):
    """The place for checkpoints could not be read or written; the text has the reason that the system gave."""

    reason = "STORAGE_FAILED"
    # Not UNAVAILABLE: another attempt of the same call would only meet the same disk.
    status = "FAILED_PRECONDITION"


class DataLoss(PsError):
    """A file is not what was written."""

    reason = "DATA_LOSS"
    status = "DATA_LOSS"


class InvalidSpec(PsError):
    """A variable, optimizer, placement or option is not one that any server could accept."""

    reason = "INVALID_SPEC"
    status = "INVALID_ARGUMENT"


class ShapeMismatch(PsError):
    """A gradient or value has another shape than its variable."""

    reason = "SHAPE_MISMATCH"
    status = "INVALID_ARGUMENT"


class DtypeMismatch(PsError):
    """A gradient or value has another element type than its variable."""

    reason = "DTYPE_MISMATCH"
    status = "INVALID_ARGUMENT"


class IncompletePush(PsError):
    """A push lacks variables of the model."""

    reason = "INCOMPLETE_PUSH"
    status = "INVALID_ARGUMENT"


class IndexOutOfRange(PsError):
    """A row that the variable does not have."""

    reason = "INDEX_OUT_OF_RANGE"
    status = "INVALID_ARGUMENT"


class NonFiniteGradient(PsError):
    """A gradient has elements that are not finite, and the cluster takes none of those."""

    reason = "NON_FINITE_GRADIENT"
    status = "INVALID_ARGUMENT"


class MalformedMessage(PsError):
    """A message is not what its place in the protocol asks for."""

    reason = "MALFORMED_MESSAGE"
    status = "INVALID_ARGUMENT"


class TruncatedStream(PsError):
    """A stream ended before all bytes had come; it had no effect."""

    reason = "TRUNCATED_STREAM"
    status = "INVALID_ARGUMENT"


class FrameOutOfOrder(PsError):
    """A frame leaves a gap, overlaps, or lies beyond the end."""

    reason = "FRAME_OUT_OF_ORDER"
    status = "INVALID_ARGUMENT"


class PushIdReused(PsError):
    """A push id came again for another step."""

    reason = "PUSH_ID_REUSED"
    status = "INVALID_ARGUMENT"


class VariableNotFound(PsError):
    """The model has no variable of this name."""

    reason = "VARIABLE_NOT_FOUND"
    status = "NOT_FOUND"


class SlotNotFound(PsError):
    """The optimizer has no slot of this name."""

    reason = "SLOT_NOT_FOUND"
    status = "NOT_FOUND"


class AccumulatorNotFound(PsError):
    """There is no named accumulator of this name."""

    reason = "ACCUMULATOR_NOT_FOUND"
    status = "NOT_FOUND"


class AccumulatorExists(PsError):
    """A named accumulator of this name exists with another specification."""

    reason = "ACCUMULATOR_EXISTS"
    status = "ALREADY_EXISTS"


class VariableExists(PsError):
    """The shard holds variables of another specification."""

    reason = "VARIABLE_EXISTS"
    status = "ALREADY_EXISTS"


class ModelMismatch(PsError):
    """The cluster trains another model than the caller's."""

    reason = "MODEL_MISMATCH"
    status = "ALREADY_EXISTS"


class WorkerIndexTaken(PsError):
    """A living worker has this index."""

    reason = "WORKER_INDEX_TAKEN"
    status = "ALREADY_EXISTS"


class WorkerIndexOutOfRange(PsError):
    """The cluster expects no worker of this index."""

    reason = "WORKER_INDEX_OUT_OF_RANGE"
    status = "OUT_OF_RANGE"


class ClusterFull(PsError):
    """All worker places are taken."""

    reason = "CLUSTER_FULL"
    status = "RESOURCE_EXHAUSTED"


class LimitExceeded(PsError):
    """A size or count is beyond a limit of the server."""

    reason = "LIMIT_EXCEEDED"
    status = "RESOURCE_EXHAUSTED"


class TooManyPushes(PsError):
    """A worker has more contributions staged or under way than it may."""

    reason = "TOO_MANY_PUSHES"
    status = "RESOURCE_EXHAUSTED"


class NotInitialized(PsError):
    """The variables have no values yet."""

    reason = "NOT_INITIALIZED"
    status = "FAILED_PRECONDITION"


class NotInitializer(PsError):
    """Another worker has been given the task of initialising the model."""

    reason = "NOT_INITIALIZER"
    status = "FAILED_PRECONDITION"


class LayoutMismatch(PsError):
    """The caller believes in another arena layout than the shard's."""

    reason = "LAYOUT_MISMATCH"
    status = "FAILED_PRECONDITION"


class LeaseExpired(PsError):
    """The caller is not registered, or its lease has ended."""

    reason = "LEASE_EXPIRED"
    status = "FAILED_PRECONDITION"


class StepGone(PsError):
    """The variables of this step have been overwritten; read a later one."""

    reason = "STEP_GONE"
    status = "FAILED_PRECONDITION"


class StepNotReady(PsError):
    """The variables of this step do not exist yet."""

    reason = "STEP_NOT_READY"
    status = "FAILED_PRECONDITION"


class StepAhead(PsError):
    """A gradient claims a step that has not come yet."""

    reason = "STEP_AHEAD"
    status = "FAILED_PRECONDITION"


class StepMismatch(PsError):
    """The step to apply is not the shard's step."""

    reason = "STEP_MISMATCH"
    status = "FAILED_PRECONDITION"


class ContributionMissing(PsError):
    """A contribution to be applied is not staged here."""

    reason = "CONTRIBUTION_MISSING"
    status = "FAILED_PRECONDITION"


class WrongCluster(PsError):
    """The process belongs to another cluster."""

    reason = "WRONG_CLUSTER"
    status = "FAILED_PRECONDITION"


class WrongRole(PsError):
    """The process at the address has another role or index."""

    reason = "WRONG_ROLE"
    status = "FAILED_PRECONDITION"


class ProtocolMismatch(PsError):
    """Client and server speak different major versions."""

    reason = "PROTOCOL_MISMATCH"
    status = "FAILED_PRECONDITION"


class TrainingFailed(PsError):
    """The cluster cannot continue."""

    reason = "TRAINING_FAILED"
    status = "FAILED_PRECONDITION"


class DataMismatch(PsError):
    """The cluster goes through other training data than the caller's."""

    reason = "DATA_MISMATCH"
    status = "FAILED_PRECONDITION"


class Unauthenticated(PsError):
    """The caller has no token, or none that is known."""

    reason = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"


class PermissionDenied(PsError):
    """The caller's role or cluster may not do this."""

    reason = "PERMISSION_DENIED"
    status = "PERMISSION_DENIED"


class EpochMismatch(PsError):
    """The cluster has rolled back to another epoch than the caller's."""

    reason = "EPOCH_MISMATCH"
    status = "ABORTED"


class Superseded(PsError):
    """A newer incarnation of the caller exists."""

    reason = "SUPERSEDED"
    status = "ABORTED"


class Unavailable(PsError):
    """The process cannot be reached."""

    reason = "UNAVAILABLE"
    status = "UNAVAILABLE"


class ShuttingDown(PsError):
    """The process is about to end."""

    reason = "SHUTTING_DOWN"
    status = "UNAVAILABLE"


class DeadlineExceeded(PsError):
    """The caller's deadline passed; the text says what was being waited for."""

    reason = "DEADLINE_EXCEEDED"
    status = "DEADLINE_EXCEEDED"


class Cancelled(PsError):
    """The caller went away or cancelled."""

    reason = "CANCELLED"
    status = "CANCELLED"


class Unimplemented(PsError):
    """The server does not know this method or option."""

    reason = "UNIMPLEMENTED"
    status = "UNIMPLEMENTED"


class InternalError(PsError):
    """A defect of the server; its log has the details under the number in the text."""

    reason = "INTERNAL"
    status = "INTERNAL"


# Each is a row of the one table: class, reason, status. Clients make an error of its reason again by it.
ERRORS: tuple[type[PsError], ...] = tuple(PsError.__subclasses__())

# Texts of others as they may stand in a log or a status.


_MAX_TEXT = 300


def printable(text: str) -> str:
    """Returns a caller's text in one line of bounded length, so that it can neither forge nor flood a log or a status."""
    line = "".join(character if character.isprintable() else "?" for character in text[: _MAX_TEXT + 1])
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "…"
