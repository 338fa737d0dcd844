"""The typed errors of the system, each with a stable reason, and others' texts made fit for a log. Knows no gRPC.

PsError
├── InvalidSpec, ShapeMismatch, DtypeMismatch, IncompletePush, IndexOutOfRange    wrong whatever the state
├── NonFiniteGradient, MalformedMessage, TruncatedStream, FrameOutOfOrder, PushIdReused
├── VariableNotFound, SlotNotFound, AccumulatorNotFound, VariableExists, AccumulatorExists, ModelMismatch
├── WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull, LimitExceeded, TooManyPushes
├── NotInitialized, NotInitializer, LayoutMismatch, LeaseExpired          wrong now; do something first
├── StepGone, StepNotReady, StepAhead, StepMismatch, ContributionMissing
├── WrongCluster, WrongRole, ProtocolMismatch, TrainingFailed, TrainingInterrupted
├── CheckpointNotFound, CheckpointMismatch, CheckpointStorageMissing, StorageFull, StorageFailed
├── DataLoss, DataMismatch
├── EpochMismatch, Superseded                                            fenced: start again
├── Unauthenticated, PermissionDenied
└── Unavailable, ClusterNotStarted, ShuttingDown, DeadlineExceeded, Cancelled, Unimplemented, InternalError
"""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

# Those that a program may catch; the others tell it no more than their text.
__all__ = [
    "ClusterFull",
    "ClusterNotStarted",
    "DataMismatch",
    "DeadlineExceeded",
    "DtypeMismatch",
    "EpochMismatch",
    "IncompletePush",
    "IndexOutOfRange",
    "InvalidSpec",
    "ModelMismatch",
    "NonFiniteGradient",
    "NotInitialized",
    "PermissionDenied",
    "PsError",
    "ShapeMismatch",
    "SlotNotFound",
    "StepGone",
    "StepNotReady",
    "Superseded",
    "TrainingFailed",
    "TrainingInterrupted",
    "Unauthenticated",
    "Unavailable",
    "VariableNotFound",
    "WorkerIndexOutOfRange",
    "WorkerIndexTaken",
    "WrongCluster",
    "WrongRole",
]

# Where programs find these errors, and what tracebacks call them by.
PUBLIC_MODULE = "lockstep.errors"


class PsError(Exception):
    """An error that a user can act on: a text that says what, which and what to do, and facts for programs.

    `reason` is what programs and other languages know it by, and stays: the class's name in capitals. `status` is the gRPC status that a
    call ends with. Both are inherited by a class that names no status.
    """

    reason = "INTERNAL"
    status = "INTERNAL"

    def __init_subclass__(cls, *, status: str = "") -> None:
        if cls.__module__ == __name__:  # a program's own error stays where that has it
            cls.__module__ = PUBLIC_MODULE
        if status:
            cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
            cls.status = status

    def __init__(self, message: str, *, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, str] = dict(facts or {})


class CheckpointNotFound(PsError, status="NOT_FOUND"):
    """There is no whole checkpoint, or none of this name."""


class CheckpointMismatch(PsError, status="FAILED_PRECONDITION"):
    """A checkpoint is not one of this model."""


class CheckpointStorageMissing(PsError, status="FAILED_PRECONDITION"):
    """The process was given no place for checkpoints."""


class StorageFull(PsError, status="RESOURCE_EXHAUSTED"):
    """There is no room for a checkpoint. Training continues, but a step that has to be saved waits for room."""


# Not UNAVAILABLE: another attempt of the same call would only meet the same disk.
class StorageFailed(PsError, status="FAILED_PRECONDITION"):
    """The place for checkpoints could not be read or written; the text has the reason that the system gave."""


class DataLoss(PsError, status="DATA_LOSS"):
    """A file is not what was written."""


class InvalidSpec(PsError, status="INVALID_ARGUMENT"):
    """A variable, optimizer, placement or option is not one that any server could accept."""


class ShapeMismatch(PsError, status="INVALID_ARGUMENT"):
    """A gradient or value has another shape than its variable."""


class DtypeMismatch(PsError, status="INVALID_ARGUMENT"):
    """A gradient or value has another element type than its variable."""


class IncompletePush(PsError, status="INVALID_ARGUMENT"):
    """A push lacks variables of the model."""


class IndexOutOfRange(PsError, status="INVALID_ARGUMENT"):
    """A row that the variable does not have."""


class NonFiniteGradient(PsError, status="INVALID_ARGUMENT"):
    """A gradient has elements that are not finite, and the cluster takes none of those."""


class MalformedMessage(PsError, status="INVALID_ARGUMENT"):
    """A message is not what its place in the protocol asks for."""


class TruncatedStream(PsError, status="INVALID_ARGUMENT"):
    """A stream ended before all bytes had come; it had no effect."""


class FrameOutOfOrder(PsError, status="INVALID_ARGUMENT"):
    """A frame leaves a gap, overlaps, or lies beyond the end."""


class PushIdReused(PsError, status="INVALID_ARGUMENT"):
    """A push id came again for another step."""


class VariableNotFound(PsError, status="NOT_FOUND"):
    """The model has no variable of this name."""


class SlotNotFound(PsError, status="NOT_FOUND"):
    """The optimizer has no slot of this name."""


class AccumulatorNotFound(PsError, status="NOT_FOUND"):
    """There is no named accumulator of this name."""


class AccumulatorExists(PsError, status="ALREADY_EXISTS"):
    """A named accumulator of this name exists with another specification."""


class VariableExists(PsError, status="ALREADY_EXISTS"):
    """The shard holds variables of another specification."""


class ModelMismatch(PsError, status="ALREADY_EXISTS"):
    """The cluster trains another model than the caller's."""


class WorkerIndexTaken(PsError, status="ALREADY_EXISTS"):
    """A living worker has this index."""


class WorkerIndexOutOfRange(PsError, status="OUT_OF_RANGE"):
    """The cluster expects no worker of this index."""


class ClusterFull(PsError, status="RESOURCE_EXHAUSTED"):
    """All worker places are taken."""


class LimitExceeded(PsError, status="RESOURCE_EXHAUSTED"):
    """A size or count is beyond a limit of the server."""


class TooManyPushes(PsError, status="RESOURCE_EXHAUSTED"):
    """A worker has more contributions staged or under way than it may."""


class NotInitialized(PsError, status="FAILED_PRECONDITION"):
    """The variables have no values yet."""


class NotInitializer(PsError, status="FAILED_PRECONDITION"):
    """Another worker has been given the task of initialising the model."""


class LayoutMismatch(PsError, status="FAILED_PRECONDITION"):
    """The caller believes in another arena layout than the shard's."""


class LeaseExpired(PsError, status="FAILED_PRECONDITION"):
    """The caller is not registered, or its lease has ended."""


class StepGone(PsError, status="FAILED_PRECONDITION"):
    """The variables of this step have been overwritten; read a later one."""


class StepNotReady(PsError, status="FAILED_PRECONDITION"):
    """The variables of this step do not exist yet."""


class StepAhead(PsError, status="FAILED_PRECONDITION"):
    """A gradient claims a step that has not come yet."""


class StepMismatch(PsError, status="FAILED_PRECONDITION"):
    """The step to apply is not the shard's step."""


class ContributionMissing(PsError, status="FAILED_PRECONDITION"):
    """A contribution to be applied is not staged here."""


class WrongCluster(PsError, status="FAILED_PRECONDITION"):
    """The process belongs to another cluster."""


class WrongRole(PsError, status="FAILED_PRECONDITION"):
    """The process at the address has another role or index."""


class ProtocolMismatch(PsError, status="FAILED_PRECONDITION"):
    """Client and server speak different major versions."""


class TrainingFailed(PsError, status="FAILED_PRECONDITION"):
    """The cluster cannot continue."""


class TrainingInterrupted(PsError, status="FAILED_PRECONDITION"):
    """Training was stopped before its end, and a session ends that would have continued."""


class DataMismatch(PsError, status="FAILED_PRECONDITION"):
    """The cluster goes through other training data than the caller's."""


class Unauthenticated(PsError, status="UNAUTHENTICATED"):
    """The caller has no token, or none that is known."""


class PermissionDenied(PsError, status="PERMISSION_DENIED"):
    """The caller's role or cluster may not do this."""


class EpochMismatch(PsError, status="ABORTED"):
    """The cluster has rolled back to another epoch than the caller's."""


class Superseded(PsError, status="ABORTED"):
    """A newer incarnation of the caller exists."""


class Unavailable(PsError, status="UNAVAILABLE"):
    """The process cannot be reached."""


class ShuttingDown(PsError, status="UNAVAILABLE"):
    """The process is about to end."""


class DeadlineExceeded(PsError, status="DEADLINE_EXCEEDED"):
    """The caller's deadline passed; the text says what was being waited for."""


class Cancelled(PsError, status="CANCELLED"):
    """The caller went away or cancelled."""


class Unimplemented(PsError, status="UNIMPLEMENTED"):
    """The server does not know this method or option."""


class ClusterNotStarted(PsError, status="FAILED_PRECONDITION"):
    """The first rank of torchrun, mpirun or Ray Train could not start the cluster of all."""


class InternalError(PsError):
    """A defect of the server; its log has the details under the number in the text."""


# What leaves the functions that programs call.


Given = ParamSpec("Given")
Result = TypeVar("Result")


def at_boundary(error: PsError | KeyboardInterrupt) -> PsError | KeyboardInterrupt:
    """Returns the error without our frames, which say nothing to who reads the traceback; a defect of ours keeps them."""
    if isinstance(error, KeyboardInterrupt):
        error.args = error.args or ("interrupted while it waited for the cluster",)
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def is_boundary(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Has a function that programs call raise its errors `at_boundary`. Not for the functions of a step: this is a call more."""

    @wraps(function)
    def called(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except (PsError, KeyboardInterrupt) as error:
            raise at_boundary(error) from error.__cause__

    return called


# Each is a row of the one table: class, reason, status. Clients make an error of its reason again by it.
ERRORS: tuple[type[PsError], ...] = tuple(PsError.__subclasses__())

# Texts of others as they may stand in a log or a status.
_MAX_TEXT = 300


def printable(text: str) -> str:
    """Returns a caller's text in one line of bounded length, so that it can neither forge nor flood a log or a status."""
    line = "".join(character if character.isprintable() else "?" for character in text[: _MAX_TEXT + 1])
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "…"
