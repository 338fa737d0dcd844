"""What a worker learns about its contributions. Knows outcomes and steps only."""

from dataclasses import dataclass

from ps_protocol.chief import CommitResult, PushOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What became of a contribution: its outcome, the step that it was for, and the step that was open when the chief answered.

    ACCEPTED: it is part of its step. STALE: its step had been applied before. LATE: its step takes no more from this worker, because others
    came first or it has given its share. DUPLICATE: it was counted before, and nobody knows any more as what.
    """

    outcome: PushOutcome
    step: int
    global_step: int

    @property
    def is_accepted(self) -> bool:
        """Whether the contribution is part of its step."""
        return self.outcome is PushOutcome.ACCEPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What became of a step: the outcome of its push, the step that the gradients were for, and whether training is finished."""

    outcome: PushOutcome
    step: int
    is_finished: bool

    @property
    def is_accepted(self) -> bool:
        """Whether the contribution is part of its step."""
        return self.outcome is PushOutcome.ACCEPTED


def push_of(result: CommitResult, *, step: int) -> Push:
    """Returns the outcome for the user: a commit that had to be sent twice has the outcome that it had the first time."""
    outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE and result.first_outcome is not None else result.outcome
    return Push(outcome=outcome, step=step, global_step=result.global_step)
