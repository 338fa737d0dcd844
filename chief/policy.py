"""When a contribution counts, when a step has enough, when a worker may go on. Knows worker numbers and steps; no leases, calls or clocks.

The seam for coordination policies: the coordinator tells what happened and asks what follows. "sync" is the strict synchronous one.
"""

from typing import Protocol

from chief.token_queue import TokenQueue
from ps_protocol.chief import PushOutcome
from ps_protocol.errors import StepAhead
from ps_protocol.shard import PushId


class Policy(Protocol):
    """Decides; the coordinator acts. Methods that return workers name those that wait and now have a token of `step`."""

    name: str
    num_required: int

    @property
    def step(self) -> int:
        """The open step: the number of steps applied."""

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """What the open step is made of so far, sorted."""

    @property
    def num_contributions(self) -> int:
        """Contributions that the open step has."""

    @property
    def num_free_tokens(self) -> int:
        """Tokens of the open step that any worker may still take to contribute once more."""

    @property
    def is_complete(self) -> bool:
        """Whether the open step has all its contributions: it takes no more, and shall be applied."""

    def may_contribute(self, worker: int) -> bool:
        """Whether a worker that just joined may contribute to the open step without asking for a token."""

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker (as any incarnation) is part of the open step."""

    def holds_token(self, worker: int) -> bool:
        """Whether a worker has leave to contribute once more to the open step."""

    def commit(self, push_id: PushId, *, step: int) -> PushOutcome:
        """Counts a new contribution: ACCEPTED, STALE or LATE. Raises StepAhead, and then has changed nothing."""

    def after_commit(self, worker: int) -> list[int]:
        """Returns the workers that get a token because `worker` has contributed."""

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Returns the step of a token, or None: the worker waits. Raises StepAhead, and then has changed nothing."""

    def forget_wish(self, worker: int) -> None:
        """The worker waits no more; it keeps what it was given."""

    def drop(self, worker: int) -> list[int]:
        """The worker is gone; what it was given and did not use goes to others."""

    def advance(self) -> list[int]:
        """The open step is applied everywhere: opens the next."""


class SyncPolicy:
    """R contributions make a step; each worker gives one, and one more for each extra token; who waits goes on when the step is applied."""

    name = "sync"

    def __init__(self, *, num_required: int, num_extras: int = 0, step: int = 0) -> None:
        self.num_required = num_required
        self._tokens = TokenQueue(num_extras=num_extras, step=step)
        self._contributors: list[PushId] = []
        self._contributed: set[int] = set()

    @property
    def step(self) -> int:
        """The open step: the number of steps applied."""
        return self._tokens.step

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """What the open step is made of so far, sorted."""
        return tuple(sorted(self._contributors))

    @property
    def num_contributions(self) -> int:
        """Contributions that the open step has."""
        return len(self._contributors)

    @property
    def num_free_tokens(self) -> int:
        """Extra tokens of the open step that nobody holds."""
        return self._tokens.num_free

    @property
    def is_complete(self) -> bool:
        """Whether the open step has its R contributions."""
        return len(self._contributors) >= self.num_required

    def may_contribute(self, worker: int) -> bool:
        """Whether the step takes more, and the worker has not given its own contribution yet."""
        return not self.is_complete and worker not in self._contributed

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker (as any incarnation) is part of the open step."""
        return worker in self._contributed

    def holds_token(self, worker: int) -> bool:
        """Whether a worker holds an extra token."""
        return self._tokens.holds_extra(worker)

    def commit(self, push_id: PushId, *, step: int) -> PushOutcome:
        """Counts a new contribution: a worker's first to the step is free, further ones cost an extra token each."""
        if step > self.step:
            raise StepAhead(f"local_step {step} is ahead of global_step {self.step}; read again")
        if step < self.step:
            return PushOutcome.STALE
        if self.is_complete or (push_id.worker in self._contributed and not self._tokens.spend_extra(push_id.worker)):
            return PushOutcome.LATE
        self._contributed.add(push_id.worker)
        self._contributors.append(push_id)
        return PushOutcome.ACCEPTED

    def after_commit(self, worker: int) -> list[int]:
        """A worker that waited before it contributed may take an extra now."""
        return [] if self.is_complete else self._tokens.allow_extra(worker)

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step's token to a worker of an older step, and an extra to one that has contributed to this step."""
        may_take_extra = worker in self._contributed and not self.is_complete
        return self._tokens.ask(worker, local_step=local_step, request_id=request_id, may_take_extra=may_take_extra)

    def forget_wish(self, worker: int) -> None:
        """The worker waits no more; an extra that it holds stays its own."""
        self._tokens.forget_wish(worker)

    def drop(self, worker: int) -> list[int]:
        """Returns a gone worker's unspent extra to the pool. What it contributed stays counted."""
        return self._tokens.drop(worker)

    def advance(self) -> list[int]:
        """Opens the next step, with new extras; all who wait have a token of it."""
        self._contributors.clear()
        self._contributed.clear()
        return self._tokens.open_step(self.step + 1)
