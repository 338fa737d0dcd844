"""The token queue of tf.compat.v1.train.SyncReplicasOptimizer, exactly as it behaves: for conformance. Knows no leases, calls or clocks.

A token is the step's number at the time it was put in. It is needed to leave a step, not to start one. Workers take tokens in the order of
their requests, and a token is for any worker. So an old token may be handed out, and the gradients computed with it are dropped.
"""

from collections import deque

from chief.policies.base import Grant, TokenRule
from ps_protocol.model.light_dataclass import light_dataclass


@light_dataclass(slots=True)
class _Run:
    """Tokens of one step, one behind the other in the queue."""

    step: int
    count: int


class FifoTokens(TokenRule):
    """Any worker may give several contributions to a step, and needs no token for it. Each step puts `tokens_per_step` tokens in.

    A token is of no worker and, if it is old, of no use: none is leave to contribute to the open step.

    `num_tokens` are in at the start, with the number of the step that is open then.
    """

    advice_to_all_waiting = "all live workers wait for a token and the queue is empty: start one more worker, or change to strict tokens"

    def __init__(self, *, tokens_per_step: int, num_tokens: int, step: int = 0) -> None:
        self._tokens_per_step = tokens_per_step
        self._step = step
        self._tokens = deque([_Run(step, num_tokens)] if num_tokens else [])  # oldest first
        self._wishes: dict[int, int] = {}  # worker -> request id, in order of their asking
        self._granted: dict[int, tuple[int, int]] = {}  # worker -> request id and token of its latest

    @property
    def num_old(self) -> int:
        """Tokens of steps gone by, which are handed out first."""
        return sum(run.count for run in self._tokens if run.step < self._step)

    def has_contributed(self, worker: int) -> bool:
        """Whether the worker waits for a token: one that does not may contribute again."""
        return worker in self._wishes

    def ask(self, worker: int, *, local_step: int, request_id: int, is_open: bool) -> int | None:
        """Gives the oldest token, whatever the worker's step; the same one again if the request is repeated."""
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
        """Forgets a lost worker. A token that it took is lost, as in the original."""
        self._wishes.pop(worker, None)
        self._granted.pop(worker, None)
        return []

    def open_step(self, step: int) -> list[Grant]:
        """Puts the tokens of the next step in."""
        self._tokens.append(_Run(step, self._tokens_per_step))
        self._step = step
        return self._hand_out()

    def _hand_out(self) -> list[Grant]:
        grants = []
        while self._tokens and self._wishes:
            worker, run = next(iter(self._wishes)), self._tokens[0]
            self._granted[worker] = self._wishes.pop(worker), run.step
            grants.append(Grant(worker, run.step))
            run.count -= 1
            if not run.count:
                self._tokens.popleft()
        return grants
