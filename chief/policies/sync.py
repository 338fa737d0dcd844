"""Strict synchronous steps: R contributions make one, and who waits goes on when it is applied. Knows no leases, calls or clocks."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chief.policies.base import Counted, Grant, Verdict
from ps_protocol.errors import StepAhead
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import DEFAULT_POLICY, PushOutcome
from ps_protocol.roles.shard import PushId

# Strict accounting of the tokens of the open step.
#
# A token of the open step that a worker gets because it has an older one ("base token") is a matter of state: ask again, get it again.
# With fewer workers than contributions a step has extra tokens, shared by all; those are counted here: free, held, or spent.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    request_id: int
    may_take_extra: bool


class TokenQueue:
    """Waiting workers in order of their asking, and the extra tokens. Never hands out a token of a step gone by."""

    def __init__(self, *, num_extras: int, step: int = 0) -> None:
        self.step = step
        self.num_free = num_extras
        self._num_extras = num_extras
        self._held: set[int] = set()
        self._last_extra: dict[int, int] = {}  # worker -> request id of its latest extra of this step
        self._wishes: dict[int, _Wish] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """The workers that wait, in order of their asking."""
        return tuple(self._wishes)

    def ask(self, worker: int, *, local_step: int, request_id: int, may_take_extra: bool) -> int | None:
        """Returns the step of a token, or None: the worker waits, and is named by `open_step`, `drop` or `allow_extra` when it gets one."""
        if local_step > self.step:
            raise StepAhead(f"local_step {local_step} is ahead of global_step {self.step}; read again")
        if local_step < self.step or worker in self._held or request_id <= self._last_extra.get(worker, -1):
            self._wishes.pop(worker, None)
            return self.step
        if may_take_extra and self.num_free:
            self._wishes.pop(worker, None)
            self._take_extra(worker, request_id)
            return self.step
        # A repeated wish keeps its place.
        self._wishes[worker] = _Wish(request_id=request_id, may_take_extra=may_take_extra)
        return None

    def allow_extra(self, worker: int) -> list[int]:
        """Lets a waiting worker take an extra from now on; returns the workers that get a token by it."""
        wish = self._wishes.get(worker)
        if wish is not None:
            self._wishes[worker] = _Wish(request_id=wish.request_id, may_take_extra=True)
        return self._hand_out()

    def holds_extra(self, worker: int) -> bool:
        """Whether the worker has an extra token that it has not contributed with yet."""
        return worker in self._held

    def spend_extra(self, worker: int) -> bool:
        """Uses up the worker's extra token; False if it holds none."""
        if worker not in self._held:
            return False
        self._held.remove(worker)
        return True

    def forget_wish(self, worker: int) -> None:
        """Stops waiting on behalf of a worker; an extra that it holds stays its own."""
        self._wishes.pop(worker, None)

    def drop(self, worker: int) -> list[int]:
        """Forgets a worker that is gone and takes its unspent extra back; returns the workers that get a token by it."""
        self._wishes.pop(worker, None)
        self._last_extra.pop(worker, None)
        if self.spend_extra(worker):
            self.num_free += 1
        return self._hand_out()

    def open_step(self, step: int) -> list[int]:
        """Opens the next step; returns the workers that waited for it: each has a token of it now."""
        released = list(self._wishes)
        self.step, self.num_free = step, self._num_extras
        self._held.clear()
        self._last_extra.clear()
        self._wishes.clear()
        return released

    def _take_extra(self, worker: int, request_id: int) -> None:
        self.num_free -= 1
        self._held.add(worker)
        self._last_extra[worker] = request_id

    def _hand_out(self) -> list[int]:
        if not self.num_free:
            return []
        lucky = [worker for worker, wish in self._wishes.items() if wish.may_take_extra][: self.num_free]
        for worker in lucky:
            self._take_extra(worker, self._wishes.pop(worker).request_id)
        return lucky


# Strict synchronous steps: R contributions make one, and who waits goes on when it is applied.


# That of push ids: an order by their own comparisons costs several times as much.
_ORDER = operator.attrgetter("worker", "incarnation", "sequence")


class SyncPolicy:
    """Each worker gives one contribution to a step, and one more for each extra token; T > R: the first R win, T < R: R - T extras."""

    weights: tuple[float, ...] = ()
    has_common_steps = True
    has_quorum = True
    advice_to_all_waiting = ""

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
        """Extra tokens of the open step that are not handed out."""
        return self._tokens.num_free

    @property
    def is_complete(self) -> bool:
        """Whether the open step has its R contributions."""
        return len(self._contributors) >= self.num_required

    def require(self, num_required: int) -> None:
        """Has the open step, and those after it, need so many contributions; a step that is complete stays so."""
        if not self.is_complete or num_required <= self.num_contributions:
            self.num_required = num_required

    def counts(self, *, is_applied: bool) -> bool:
        """Staged contributions count."""
        return not is_applied

    def is_ahead(self, step: int) -> bool:
        """Whether the step is after the open one."""
        return step > self.step

    def is_stale(self, step: int, *, oldest_kept: int) -> bool:
        """Whether the step is before the open one."""
        return step < self.step

    def slowest(self) -> Sequence[int]:
        """None: workers do not wait for particular workers."""
        return ()

    def lead(self, worker: int) -> int:
        """None: no worker is ahead."""
        return 0

    def finish(self) -> None:
        """The step that is complete is the last one anyway."""

    def make_way(self, policy: PolicySpec) -> None:
        """What is counted can go over."""

    def way_to(self, policy: PolicySpec) -> PolicySpec | None:
        """By way of one under which each contribution is applied as a step by itself, if servers are to apply on arrival."""
        if policy.applies_on_arrival and self.num_contributions:
            return replace(policy, use_locking=True)
        if policy.applies_on_arrival:
            self.close()
        return policy

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
