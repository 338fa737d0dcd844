"""Asynchronous training without a lock: servers apply on arrival, and this only counts what workers report. Knows no leases or clocks."""

from collections.abc import Sequence

from chief.policies.base import Grant, Policy, Verdict
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


class UnlockedPolicy(Policy):
    """No worker waits and nothing is refused; the step is the number of contributions reported."""

    num_contributions = 0
    is_complete = False
    contributors: tuple[PushId, ...] = ()
    last_worker = 0

    def __init__(self, *, spec: PolicySpec, step: int = 0) -> None:
        self.spec = spec
        self.step = step

    def commit(self, push_id: PushId, *, step: int, weight: float = 1.0) -> Verdict:
        """Counts a contribution that the servers have applied, as the step that is open now."""
        applied_step = self.step
        self.step += 1
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=applied_step, staleness=max(0, applied_step - step))

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step."""
        return self.step

    def advance(self) -> list[Grant]:
        """Never called: nothing is left to apply."""
        return []

    def counted(self) -> Sequence[ChosenPush]:
        """Returns nothing: all is applied."""
        return ()
