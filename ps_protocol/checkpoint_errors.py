"""The errors of checkpoints and the places where they are kept; `errors` has them all. Knows no grpc."""

from ps_protocol.error_base import PsError


class CheckpointNotFound(PsError):
    """There is no whole checkpoint, or none of this name."""

    reason = "CHECKPOINT_NOT_FOUND"


class CheckpointMismatch(PsError):
    """A checkpoint is not one of this model."""

    reason = "CHECKPOINT_MISMATCH"


class CheckpointStorageMissing(PsError):
    """The process was given no place for checkpoints."""

    reason = "CHECKPOINT_STORAGE_MISSING"


class StorageFull(PsError):
    """There is no room for a checkpoint; training goes on."""

    reason = "STORAGE_FULL"


class StorageFailed(PsError):
    """The place for checkpoints could not be read or written; the text has the reason that the system gave."""

    reason = "STORAGE_FAILED"


class DataLoss(PsError):
    """A file is not what was written."""

    reason = "DATA_LOSS"
