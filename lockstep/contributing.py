"""What framework adapters share: they join, contribute again after a rollback, and find likely mistakes. Knows sessions; no framework."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import lockstep
from ps_protocol.errors import InvalidSpec, ModelMismatch
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.roles.chief import PushOutcome
from worker_client.core.outcomes import Push
from worker_client.session.session import Session

OVERWRITTEN = (
    "the program has written into the {}: the servers do not take these values, and the next step replaces them. Set values before the"
    " optimizer is made, or after the last step; a cluster continues from its own checkpoints (--checkpoint-dir)"
)


def check_session(given: object) -> None:
    """Raises TypeError for anything that `session_of` does not take."""
    if not (given is None or isinstance(given, (Session, Mapping))):
        raise TypeError(f"session: got a {type(given).__name__}, want what lockstep.connect() returns, its arguments as a dict, or None")


def check_connected(given: object, call: str) -> None:
    """Raises InvalidSpec for anything that is no session, for an adapter that takes nothing else."""
    if not isinstance(given, Session):
        raise InvalidSpec(f"{call}: got a {type(given).__name__}, want a session, which lockstep.connect() or lockstep.local() returns")


def session_of(given: Session | Mapping[str, Any] | None) -> Session:
    """Returns the session that an adapter is given, or connects with these arguments."""
    return given if isinstance(given, Session) else lockstep.connect(**(given or {}))


def trains_no_more(session: Session, phase: int) -> RuntimeError | None:
    """Returns the error of an optimizer that was made in this phase of training; None: the session is in that phase still."""
    if session.phase == phase:
        return None
    return RuntimeError("another optimizer has been made on this session since, which began another phase of training: use that one")


def left_out(session: Session, names: Collection[str]) -> dict[str, None]:
    """Returns "no gradient" for each of the cluster's variables that is not among these: this phase of training does not train it."""
    return {one.name: None for one in session.model().variables if not one.is_state and one.name not in names}


def join(
    session: Session, given: Mapping[str, Any], *, optimizer: OptimizerSpec, options: Mapping[str, Any], call: str, named: str
) -> None:
    """Creates or joins the model, or begins another phase of its training.

    A mismatch is said with `named` for the framework's optimizer, and `call` for where options go.
    """
    try:
        session.create_or_join(given, optimizer=optimizer, **options)
    except ModelMismatch as error:
        words = error.message.replace("create_or_join(…", call).replace(" optimizer.", f" optimizer {named}.")
        raise ModelMismatch(words, facts=error.facts) from None


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
