"""Strict synchronous steps: R contributions make one, and who waits goes on when it is applied. Knows no leases, calls or clocks."""

import operator
from collections.abc import Sequence

from chief.policy import Counted, Grant, Verdict
from chief.token_queue import TokenQueue
from ps_protocol.chief import DEFAULT_POLICY, PushOutcome
from ps_protocol.errors import StepAhead
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.shard import PushId

# That of push ids: an order by their own comparisons costs several times as much.
_ORDER = operator.attrgetter("worker", "incarnation", "sequence")


class SyncPolicy:
    """Each worker gives one contribution to a step, and one more for each extra token; T > R: the first R win, T < R: R - T extras."""

    weights: tuple[float, ...] = ()

    def __init__(
        self,
        *,
        num_required: int,
        num_extras: int = 0,
        step: int = 0,
        spec: PolicySpec = DEFAULT_POLICY,
        counted: Sequence[Counted] = (),
    ) -> None:
        self.spec = spec
        self.num_required = num_required
        self.step = step  # the open step: the number of steps applied
        self._tokens = TokenQueue(num_extras=num_extras, step=step)
        self._contributors = [entry.push_id for entry in counted]
        self._contributed = {push_id.worker for push_id in self._contributors}
        self._is_closed = False

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """What the open step is made of so far, sorted."""
        return tuple(sorted(self._contributors, key=_ORDER))

    @property
    def last_worker(self) -> int:
        """The worker that contributed last."""
        return self._contributors[-1].worker

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

    def require(self, num_required: int) -> None:
        """Has the open step, and those after it, need so many contributions; a step that is complete stays so."""
        if not self.is_complete or num_required <= self.num_contributions:
            self.num_required = num_required

    def may_contribute(self, worker: int) -> bool:
        """Whether the step takes more, and the worker has not given its own contribution yet."""
        return not self.is_complete and worker not in self._contributed

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker (as any incarnation) is part of the open step."""
        return worker in self._contributed

    def holds_token(self, worker: int) -> bool:
        """Whether a worker holds an extra token."""
        return self._tokens.holds_extra(worker)

    def join(self, worker: int) -> None:
        """Changes nothing: who contributes is known by that."""

    def commit(self, push_id: PushId, *, step: int) -> Verdict:
        """Counts a new contribution: a worker's first to the step is free, further ones cost an extra token each."""
        if step > self.step:
            raise StepAhead(f"local_step {step} is ahead of global_step {self.step}; read again")
        if step < self.step:
            return Verdict(outcome=PushOutcome.STALE, staleness=self.step - step)
        is_full = self.is_complete or self._is_closed
        if is_full or (push_id.worker in self._contributed and not self._tokens.spend_extra(push_id.worker)):
            return Verdict(outcome=PushOutcome.LATE)
        self._contributed.add(push_id.worker)
        self._contributors.append(push_id)
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=step)

    def after_commit(self, worker: int) -> list[Grant]:
        """A worker that waited before it contributed may take an extra now."""
        return [] if self.is_complete or worker not in self._contributed else self._granted(self._tokens.allow_extra(worker))

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step's token to a worker of an older step, and an extra to one that has contributed to this step."""
        may_take_extra = worker in self._contributed and not self.is_complete
        return self._tokens.ask(worker, local_step=local_step, request_id=request_id, may_take_extra=may_take_extra)

    def forget_wish(self, worker: int) -> None:
        """The worker waits no more; an extra that it holds stays its own."""
        self._tokens.forget_wish(worker)

    def drop(self, worker: int) -> list[Grant]:
        """Returns a gone worker's unspent extra to the pool. What it contributed stays counted."""
        return self._granted(self._tokens.drop(worker))

    def advance(self) -> list[Grant]:
        """Opens the next step, with new extras; all who wait have a token of it."""
        self._contributors.clear()
        self._contributed.clear()
        self.step += 1
        return self._granted(self._tokens.open_step(self.step))

    def close(self) -> None:
        """Takes no more contributions."""
        self._is_closed = True

    def counted(self) -> Sequence[Counted]:
        """Returns the contributions of the open step, in order of their coming."""
        return [Counted(push_id=push_id, step=self.step) for push_id in self._contributors]

    def _granted(self, workers: Sequence[int]) -> list[Grant]:
        return [Grant(worker, self.step) for worker in workers]
