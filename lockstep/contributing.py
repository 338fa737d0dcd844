"""Has adapters give a contribution again where the cluster came back to its very step. Knows sessions; no framework."""

from collections.abc import Callable
from typing import Any

from ps_protocol.roles.chief import PushOutcome
from worker_client.core.outcomes import Push
from worker_client.session.session import Session


def step_until_counted(session: Session, gradients: Any, *, has_same_values: Callable[[], bool], **options: Any) -> Push:
    """Does `session.step()`, again if a rollback took the contribution and the variables are those that it was computed from.

    A loop of a framework cannot compute a batch again, so the batch would be lost, although its gradients are right. With ranges of data
    (`session.batches()`) it is not repeated: they have gone back to the chief, and are computed again by the worker that gets them.
    """
    step = session.local_step
    push = session.step(gradients, **options)
    while (
        push.outcome is PushOutcome.ROLLED_BACK
        and session.local_step == step
        and not session.is_finished
        and not session.leases_data
        and has_same_values()
    ):
        push = session.step(gradients, **options)
    return push
