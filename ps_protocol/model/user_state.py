"""State of a worker's own program, as it travels and as a checkpoint has it: JSON text, by worker. Knows sizes; not what is in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.errors import LimitExceeded

# Of one worker. It travels with each contribution that changes it, and with the step that the contribution becomes a part of.
MAX_USER_STATE_BYTES = 64 << 10
# Of all workers, applied and about to be: a chief's record has them, and that has 12 MiB at most.
MAX_USER_STATES_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UserState:
    """The state of the worker with this index: a JSON object."""

    worker: int
    json: str


def check_user_states(states: Sequence[UserState]) -> None:
    """Raises LimitExceeded if one worker's state is too large, or all together are."""
    for one in states:
        check_user_state(one.json)
    total = sum(len(one.json) for one in states)
    if total > MAX_USER_STATES_BYTES:
        raise LimitExceeded(f"user_state: {total} bytes of all workers together, {MAX_USER_STATES_BYTES} at most; keep less in each")


def check_user_state(json: str) -> None:
    """Raises LimitExceeded if one worker's state is too large."""
    if len(json) > MAX_USER_STATE_BYTES:
        raise LimitExceeded(f"user_state: {len(json)} bytes, {MAX_USER_STATE_BYTES} at most; keep what is larger in variables or in files")
