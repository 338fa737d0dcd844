"""Asynchronous training without a lock: servers apply on arrival, and this only counts what workers report. Knows no leases or clocks."""

from collections.abc import Sequence

from chief.policies.base import Counted, Grant, Verdict
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


class UnlockedPolicy:
    """No worker waits and nothing is refused; the step is the number of contributions reported."""

    num_required = 1
    num_free_tokens = 0
    num_old_tokens = 0
    has_common_steps = False
    advice_to_all_waiting = ""
    num_contributions = 0
    is_complete = False
    contributors: tuple[PushId, ...] = ()
    weights: tuple[float, ...] = ()
    last_worker = 0

    def __init__(self, *, spec: PolicySpec, step: int = 0) -> None:
        self.spec = spec
        self._step = step

    @property
    def step(self) -> int:
        """The open step: the number of contributions reported."""
        return self._step

    def require(self, num_required: int) -> None:
        """Never called: each contribution is a step."""

    def slowest(self) -> Sequence[int]:
        """None: no worker waits for another."""
        return ()

    def lead(self, worker: int) -> int:
        """None: no worker is ahead."""
        return 0

    def may_contribute(self, worker: int) -> bool:
        """Always."""
        return True

    def has_contributed(self, worker: int) -> bool:
        """Never: shares are not counted."""
        return False

    def holds_token(self, worker: int) -> bool:
        """Never: tokens are not counted."""
        return False

    def join(self, worker: int) -> None:
        """Changes nothing: no worker waits for another."""

    def commit(self, push_id: PushId, *, step: int) -> Verdict:
        """Counts a contribution that the servers have applied, as the step that is open now."""
        applied_step = self._step
        self._step += 1
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=applied_step, staleness=max(0, applied_step - step))

    def after_commit(self, worker: int) -> list[Grant]:
        """None: no worker waits for a token."""
        return []

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step."""
        return self._step

    def forget_wish(self, worker: int) -> None:
        """Changes nothing: no worker waits for a token."""

    def drop(self, worker: int) -> list[Grant]:
        """None: no worker waits for a token."""
        return []

    def advance(self) -> list[Grant]:
        """Never called: nothing is left to apply."""
        return []

    def finish(self) -> None:
        """Nothing waits to be applied."""

    def gives_way(self, policy: PolicySpec) -> bool:
        """Always: nothing waits that the next policy would have to take over."""
        return True

    def counted(self) -> Sequence[Counted]:
        """Returns nothing: all is applied."""
        return ()
