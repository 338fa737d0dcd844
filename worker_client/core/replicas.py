"""What a worker makes of what the processes say that hold one shard, of which some may be lost. Pure: knows no call and no chief."""

from collections.abc import Sequence

from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    EpochMismatch,
    NotInitialized,
    PsError,
    ShuttingDown,
    StepAhead,
    StepNotReady,
    Unavailable,
)
from ps_protocol.roles.shard import PushReply, PushResult

# What may only mean that the process is not counted on any more: then the chief names others. It says who they are when it is asked.
DOUBTFUL = (Unavailable, NotInitialized, StepNotReady, StepAhead, EpochMismatch, Cancelled, DeadlineExceeded, ShuttingDown)
# What becomes otherwise if it is waited for. One that was restarted knows no values and no epoch: the chief names another soon, or begins
# another epoch. One at an earlier step is about to make the next, which another one has made and a worker has read there; or it was left
# behind, and the chief has not noticed that yet.
_PASSING = (NotInitialized, EpochMismatch, StepAhead)

# What became of a contribution: it counts if it lies at all of them.
_WORST_FIRST = (PushResult.STALE, PushResult.STAGED, PushResult.APPLIED, PushResult.DUPLICATE)


def is_urgent(error: PsError) -> bool:
    """Whether the chief is asked at once: a process that knows nothing has been restarted."""
    return isinstance(error, (NotInitialized, EpochMismatch))


def lasting(error: PsError) -> PsError:
    """Returns what a call ends with that has ended so while the chief names the same processes: what passes may be tried again."""
    return Unavailable(error.message, facts=error.facts) if isinstance(error, _PASSING) else error


def in_one(replies: Sequence[PushReply]) -> PushReply:
    """Returns what became of a contribution that was given to several processes."""
    return min(replies, key=lambda reply: _WORST_FIRST.index(reply.result))
