"""A contribution: its name, and what it brings besides tensors. Knows what is in none of it, and no shard and no chief."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.model.value import step_value

# Of one worker. It travels with each contribution that changes it, and with the step that the contribution becomes a part of.
MAX_USER_STATE_BYTES = 64 << 10
# Of all workers, applied and about to be: a chief's record has them, and that has 12 MiB at most.
MAX_USER_STATES_BYTES = 4 << 20


# A tuple: each step makes, hashes, compares and sorts some.
class PushId(NamedTuple):
    """Names one contribution for ever; sorts by worker, then incarnation, then sequence: the order of every sum."""

    worker: int
    incarnation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.incarnation}/{self.sequence}"


# In one error: its facts have 2 KiB in all, and one that does not fit is left out whole. A caller that asks again hears of the others.
_MAX_NAMED_BYTES = 1_800


def named_contributions(push_ids: Sequence[PushId]) -> dict[str, str]:
    """Returns the facts of an error about these contributions, or the first of them."""
    words, room = [], _MAX_NAMED_BYTES
    for word in map(str, push_ids):
        room -= len(word) + 1
        if room < 0:
            break
        words.append(word)
    return {"worker": str(push_ids[0].worker), "contributions": " ".join(words)}


def contributions_named(facts: Mapping[str, str]) -> tuple[PushId, ...]:
    """Returns what `named_contributions` has named; nothing if these are not its facts."""
    found = []
    for word in facts.get("contributions", "").split():
        numbers = word.split("/")
        if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
            return ()
        found.append(PushId(worker=int(numbers[0]), incarnation=int(numbers[1]), sequence=int(numbers[2])))
    return tuple(found)


@step_value(frozen=True, slots=True, kw_only=True)
class GivenNumbers:
    """What contributions have their step use of hyper-parameters, each of `push_ids` the same."""

    push_ids: tuple[PushId, ...]
    hyperparameters: tuple[StepHyperparameter, ...]


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
