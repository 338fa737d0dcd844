"""The token queue of tf.compat.v1.train.SyncReplicasOptimizer, with all its habits: for conformance. Knows no leases, calls or clocks.

A token is the step's number at the time it was put in. It is needed to leave a step, not to start one. Workers take tokens in order of
their asking, for any worker, so an old one may be handed out, and the gradients computed with it are dropped.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from chief.policies.base import Counted, Grant, Verdict
from ps_protocol.errors import StepAhead
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.shard import PushId


class FifoPolicy:
    """R contributions of the open step make the next; any worker may give several. Each step puts `tokens_per_step` tokens in.

    `num_tokens` are in at the start, with the number of the step that is open then.
    """

    weights: tuple[float, ...] = ()
    has_common_steps = True
    has_quorum = False
    advice_to_all_waiting = "all live workers wait for a token and the queue is empty: start one more worker, or change to strict tokens"
    num_free_tokens = 0  # tokens are of no worker and, if they are old, of no use: none is leave to contribute to the open step

    def __init__(
        self,
        *,
        spec: PolicySpec,
        num_required: int,
        tokens_per_step: int,
        num_tokens: int,
        step: int = 0,
        counted: Sequence[Counted] = (),
    ) -> None:
        self.spec = spec
        self.num_required = num_required
        self._step = step
        self._tokens_per_step = tokens_per_step
        self._tokens = deque([step] * num_tokens)
        self._wishes: dict[int, int] = {}  # worker -> request id, in order of their asking
        self._granted: dict[int, tuple[int, int]] = {}  # worker -> request id and token of its latest
        self._contributors = [entry.push_id for entry in counted]
        self._is_closed = False

    @property
    def step(self) -> int:
        """The open step: the number of steps applied."""
        return self._step

    @property
    def num_tokens(self) -> int:
        """Tokens that lie in the queue, also old ones."""
        return len(self._tokens)

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """What the open step is made of so far, sorted."""
        return tuple(sorted(self._contributors))

    @property
    def last_worker(self) -> int:
        """The worker that contributed last."""
        return self._contributors[-1].worker

    @property
    def num_contributions(self) -> int:
        """Contributions that the open step has."""
        return len(self._contributors)

    @property
    def is_complete(self) -> bool:
        """Whether the open step has its R contributions."""
        return len(self._contributors) >= self.num_required

    def require(self, num_required: int) -> None:
        """Never called: the queue has a fixed number of tokens a step."""

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
        """Always: no worker needs a token to start."""
        return True

    def has_contributed(self, worker: int) -> bool:
        """Whether the worker waits for a token: one that does not may contribute again."""
        return worker in self._wishes

    def holds_token(self, worker: int) -> bool:
        """Never for sure: what a worker was given may be old."""
        return False

    def join(self, worker: int) -> None:
        """Changes nothing: no worker is expected."""

    def commit(self, push_id: PushId, *, step: int) -> Verdict:
        """Counts a contribution of the open step, from whomever, until there are R."""
        if step > self._step:
            raise StepAhead(f"local_step {step} is ahead of global_step {self._step}; read again")
        if step < self._step:
            return Verdict(outcome=PushOutcome.STALE, staleness=self._step - step)
        if self.is_complete or self._is_closed:
            return Verdict(outcome=PushOutcome.LATE)
        self._contributors.append(push_id)
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=step)

    def after_commit(self, worker: int) -> list[Grant]:
        """Nothing follows: tokens come with steps."""
        return []

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the oldest token, whatever the worker's step; the same one again if the request is repeated."""
        if local_step > self._step:
            raise StepAhead(f"local_step {local_step} is ahead of global_step {self._step}; read again")
        last_request, last_token = self._granted.get(worker, (-1, 0))
        if request_id <= last_request:
            self._wishes.pop(worker, None)
            return last_token
        # A repeated wish keeps its place.
        self._wishes[worker] = request_id
        return next((grant.step for grant in self._hand_out() if grant.worker == worker), None)

    def forget_wish(self, worker: int) -> None:
        """The worker waits no more."""
        self._wishes.pop(worker, None)

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a worker that is gone. A token that it took is lost, as in the original."""
        self._wishes.pop(worker, None)
        self._granted.pop(worker, None)
        return []

    def advance(self) -> list[Grant]:
        """Opens the next step, and puts its tokens in."""
        self._contributors.clear()
        self._step += 1
        self._tokens.extend([self._step] * self._tokens_per_step)
        return self._hand_out()

    def close(self) -> None:
        """Takes no more contributions."""
        self._is_closed = True

    def counted(self) -> Sequence[Counted]:
        """Returns the contributions of the open step, in order of their coming."""
        return [Counted(push_id=push_id, step=self._step) for push_id in self._contributors]

    def _hand_out(self) -> list[Grant]:
        grants = []
        while self._tokens and self._wishes:
            worker = next(iter(self._wishes))
            request_id, token = self._wishes.pop(worker), self._tokens.popleft()
            self._granted[worker] = request_id, token
            grants.append(Grant(worker, token))
        return grants
