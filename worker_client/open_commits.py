"""The contributions that a chief has been told of and that are in no applied step yet. Knows commits and steps; no chief and no thread."""

from collections.abc import Iterable

from ps_protocol.chief import CommitResult, Participant, PushCommit, PushOutcome


class OpenCommits:
    """What another chief would have to be told again, of this participant. A few at most. Written by one thread; any may take a copy."""

    def __init__(self, owner: Participant) -> None:
        self.owner = owner
        self._commits: dict[int, PushCommit] = {}
        self._applied_steps: dict[int, int] = {}
        self._leased: dict[int, None] = {}

    def lease(self, ranges: Iterable[int]) -> None:
        """These ranges of the training data are the participant's, until a contribution that was made from them is answered."""
        self._leased.update(dict.fromkeys(ranges))

    @property
    def held(self) -> tuple[int, ...]:
        """The ranges that it has, also those of a contribution that is not answered."""
        return tuple(self._leased)

    def sent(self, commit: PushCommit) -> None:
        """It may have been counted from now on."""
        self._commits[commit.push_id.sequence] = commit

    def answered(self, commit: PushCommit, result: CommitResult, *, global_step: int) -> None:
        """Takes note of what became of it, while `global_step` is open."""
        outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE else result.outcome
        sequence = commit.push_id.sequence
        for identity in commit.ranges:
            self._leased.pop(identity, None)
        if outcome is not PushOutcome.ACCEPTED or result.applied_step is None:
            self._commits.pop(sequence, None)
        else:
            self._applied_steps[sequence] = result.applied_step
        self.advance(global_step)

    def advance(self, global_step: int) -> None:
        """Takes note that a step is open: what was part of an earlier one is applied."""
        if not self._commits:
            return
        for sequence in [sequence for sequence, step in self._applied_steps.items() if step < global_step]:
            self._commits.pop(sequence, None)
            del self._applied_steps[sequence]

    def is_accepted(self, commit: PushCommit) -> bool:
        """Whether the chief has said that it counts, and it is not known to be applied."""
        return commit.push_id.sequence in self._applied_steps

    def unanswered(self) -> PushCommit | None:
        """The latest that the chief has not said anything of: it may not have heard of it."""
        return next((commit for sequence, commit in reversed(self._commits.items()) if sequence not in self._applied_steps), None)

    def all(self) -> tuple[PushCommit, ...]:
        """Returns them, oldest first."""
        return tuple(self._commits.values())

    def begin(self, owner: Participant) -> None:
        """The epoch or the incarnation that they belong to is over; those to come are of this participant."""
        self._commits.clear()
        self._applied_steps.clear()
        self._leased.clear()
        self.owner = owner
