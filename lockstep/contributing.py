"""Contributions of framework adapters: repeats them after a rollback, and checks for leftover gradients. Knows sessions; no framework."""

from collections.abc import Callable
from typing import Any

from ps_protocol.roles.chief import PushOutcome
from worker_client.core.outcomes import Push
from worker_client.session.session import Session


def until_counted(session: Session, give: Callable[[], Push], *, has_same_values: Callable[[], bool]) -> Push:
    """Calls `give`, and calls it again if the contribution was rolled back and the variables are those that it was computed from.

    A framework's loop cannot compute a batch again, so the batch would be lost although its gradients are correct. A contribution made from
    ranges of data (`session.batches()`) is not repeated: the ranges have gone back to the chief, and the worker that leases them next
    computes them again.
    """
    step = session.local_step
    push = give()
    while (
        push.outcome is PushOutcome.ROLLED_BACK
        and session.local_step == step
        and not session.is_finished
        and not session.leases_data
        and has_same_values()
    ):
        push = give()
    return push


class AddedGradients:
    """Detects gradients that were added to after they were contributed, as happens in PyTorch if zero_grad() is forgotten."""

    FORGOTTEN = "the gradients of the last step are part of this one's: call {} before backward()"

    def __init__(self) -> None:
        self._last: tuple[Any, int] | None = None

    def are_in(self, gradient: Any) -> bool:
        """Whether this is the last contribution's first gradient, changed by exactly one operation since: the sum."""
        known, version = self._last, getattr(gradient, "_version", None)
        self._last = None if version is None else (gradient, version)
        return known is not None and known[0] is gradient and version == known[1] + 1
