"""The seam for coordination policies: the coordinator reports events, and asks what follows. Knows worker numbers and steps.

A policy decides when a contribution counts, when there is something to apply, and when a worker may continue. It knows no leases, calls or
clocks. The caller applies its contributions, one step at a time: `contributors` as long as it `is_complete`, then `advance`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


class Grant(NamedTuple):
    """A worker that waits gets a token of `step`."""

    worker: int
    step: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a contribution; with ACCEPTED, `applied_step` is the step that it is a part of.

    `factor`: what its gradients are multiplied with.
    """

    outcome: PushOutcome
    applied_step: int | None = None
    staleness: int = 0
    factor: float = 1.0


class TokenRule(Protocol):
    """Which worker may contribute to the open step, and when one that waits continues. `is_open`: the step takes more contributions.

    `advice_to_all_waiting`: a remedy for when all live workers wait for a token; empty: that cannot be. `num_free`: tokens that any worker
    may still take to contribute to the open step once more. What has a body here is true of tokens that no worker needs.
    """

    advice_to_all_waiting: str = ""
    num_free: int = 0

    @property
    def num_old(self) -> int:
        """Tokens of steps gone by, which workers get before those of the open step; gradients computed with them are dropped."""
        return 0

    def may_contribute(self, worker: int, *, is_open: bool) -> bool:
        """Whether a worker that just joined may contribute without asking for a token."""
        return True

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker has given its share for now."""
        return False

    def holds(self, worker: int) -> bool:
        """Whether a worker has leave to contribute once more."""
        return False

    def spend(self, worker: int) -> bool:
        """A worker contributes. Returns whether it may."""
        return True

    def after_commit(self, worker: int) -> list[Grant]:
        """Returns the tokens that are due because `worker` has contributed, or tried to, and the step takes more."""
        return []

    def ask(self, worker: int, *, local_step: int, request_id: int, is_open: bool) -> int | None:
        """Returns the step of a token, or None: the worker waits."""
        return None

    def forget_wish(self, worker: int) -> None:
        """Ends a worker's wait; it keeps its tokens."""
        return

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a lost worker; returns the tokens that others get by that."""
        return []

    def open_step(self, step: int) -> list[Grant]:
        """The next step is open; returns the tokens that are due."""
        return []


class _NoTokens(TokenRule):
    """Of policies whose workers need none to contribute."""


NO_TOKENS = _NoTokens()


class Policy(Protocol):
    """Decides; the coordinator acts. `step`: the open one, which is the number of steps applied.

    What has a body here is true of a policy that makes each contribution a step, and has no worker wait for another.
    """

    spec: PolicySpec
    step: int
    num_required: int = 1
    tokens: TokenRule = NO_TOKENS

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """The contributions to the next step so far, sorted."""

    @property
    def weights(self) -> tuple[float, ...]:
        """How much each of `contributors` counts in the mean, and for one alone a factor; empty: all 1."""
        return ()

    @property
    def last_worker(self) -> int:
        """The worker that was the last to contribute to the next step."""

    @property
    def num_contributions(self) -> int:
        """Contributions that are counted and not applied."""

    @property
    def is_complete(self) -> bool:
        """Whether the next step has all its contributions, and shall be applied."""

    def require(self, num_required: int) -> None:
        """Has the open step, and those after it, need so many contributions; a step that is complete stays so.

        For policies alone whose steps need as many workers as contributions.
        """
        return

    def slowest(self) -> Sequence[int]:
        """Returns the live workers that others may have to wait for; empty: no worker waits for another."""
        return ()

    def lead(self, worker: int) -> int:
        """Returns how many contributions a live worker is ahead of those."""
        return 0

    def may_contribute(self, worker: int) -> bool:
        """Whether a worker that just joined may contribute to the open step without asking for a token."""
        return True

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker (as any incarnation) has given its share for now."""
        return False

    def may_give(self, worker: int) -> bool:
        """Whether the open step can use a contribution of the worker."""
        return not self.has_contributed(worker) or self.tokens.holds(worker)

    def join(self, worker: int, incarnation: int) -> None:
        """A worker takes part from now on, perhaps with contributions that an earlier chief has counted."""
        return

    @property
    def is_in_grace(self) -> bool:
        """Whether the open step could be applied, and waits `spec.grace_s` for further contributions."""
        return False

    def end_grace(self) -> None:
        """The open step has waited long enough, and is complete."""
        return

    def stay_complete(self) -> None:
        """The open step was complete under the policy before."""
        return

    def commit(self, push_id: PushId, *, step: int, weight: float = 1.0) -> Verdict:
        """Counts a new contribution: ACCEPTED, STALE or LATE. Raises StepAhead or Unavailable, and then has changed nothing.

        `weight`: how much it counts in the mean of its step.
        """

    def after_commit(self, worker: int) -> list[Grant]:
        """Returns the tokens that are due because `worker` has contributed, or tried to."""
        return []

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Returns the step of a token, or None: the worker waits. Raises StepAhead, and then has changed nothing."""

    def forget_wish(self, worker: int) -> None:
        """Ends a worker's wait; it keeps its tokens."""
        return

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a lost worker: its unused tokens go to others; its contributions stay counted."""
        return []

    def advance(self) -> list[Grant]:
        """The next step is applied everywhere."""

    def finish(self) -> None:
        """Training ends with the next step."""
        return

    def gives_way(self, policy: PolicySpec) -> bool:
        """Whether another policy may follow now; if not, takes no more contributions until the counted ones have been applied."""
        return True

    def counted(self) -> Sequence[ChosenPush]:
        """Returns the contributions that are counted and not applied, in order of counting: for the policy that follows."""
