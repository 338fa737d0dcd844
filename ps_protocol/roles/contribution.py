"""A contribution: its name, and what is attached to it besides tensors. Knows no shard, no chief and no message.

What is attached passes through every hop (commit, record, command, checkpoint) as one value, which no hop looks into. A thing that is to
travel with contributions is a field here and in the message; the chief's `attachments` checks it and decides what of it a step has. Ranges
of the training data are not attached: they are the chief's, which leases them and takes them back.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from itertools import groupby
from typing import NamedTuple

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import StepHyperparameter


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


# Of one step: a learning rate and a few others for each of some hundred groups of variables.
MAX_STEP_HYPERPARAMETERS = 1_024
# Of one worker. It travels with each contribution that changes it, and with the step that the contribution becomes a part of.
MAX_USER_STATE_BYTES = 64 << 10
# Of all workers, applied and about to be: a chief's record has them, and that has 12 MiB at most.
MAX_USER_STATES_BYTES = 4 << 20


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Attachments:
    """The parts of one contribution besides its tensors.

    `hyperparameters`: what the step that it becomes a part of shall use, unless a contribution of a lower push id to it has some too.
    `user_state`: state of its worker's program from it on, a JSON object; empty: it has not changed.
    """

    hyperparameters: tuple[StepHyperparameter, ...] = ()
    user_state: str = ""


NO_ATTACHMENTS = Attachments()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class GivenNumbers:
    """The hyper-parameters that contributions give for their step, the same for each of `push_ids`."""

    push_ids: tuple[PushId, ...]
    hyperparameters: tuple[StepHyperparameter, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class UserState:
    """The state of the worker with this index: a JSON object."""

    worker: int
    json: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepAttachments:
    """The attachments of the contributions of a step; in a record and in a checkpoint, the part of them that lasts.

    `numbers`: hyper-parameters of the step, in the order of its contributors; they do not last. `user_states`: in a command, those that
    change with the step, and those that changed earlier and that no record has; else those of all workers as of the step.
    """

    numbers: tuple[GivenNumbers, ...] = ()
    user_states: tuple[UserState, ...] = ()

    def hyperparameters(self, *, without: Collection[PushId]) -> tuple[StepHyperparameter, ...]:
        """Returns those of the lowest contribution that has any and is not among these."""
        for given in self.numbers:
            if not without or not {*given.push_ids} <= {*without}:
                return given.hyperparameters
        return ()


NO_STEP_ATTACHMENTS = StepAttachments()


def joined(contributions: Iterable[tuple[PushId, Attachments]], *, earlier: Mapping[int, str]) -> StepAttachments:
    """Returns what a step has of these contributions, and of states that changed earlier, by worker."""
    ordered = sorted(contributions, key=lambda one: one[0])
    runs = groupby(((push_id, given.hyperparameters) for push_id, given in ordered if given.hyperparameters), key=lambda one: one[1])
    states = {**earlier, **{push_id.worker: given.user_state for push_id, given in ordered if given.user_state}}
    return StepAttachments(
        numbers=tuple(GivenNumbers(push_ids=tuple(one[0] for one in run), hyperparameters=same) for same, run in runs),
        user_states=user_states(states),
    )


def user_states(jsons: Mapping[int, str]) -> tuple[UserState, ...]:
    """Returns states by worker as they travel."""
    return tuple(UserState(worker=worker, json=jsons[worker]) for worker in sorted(jsons))


def check_step_hyperparameters(given: Sized) -> None:
    """Raises LimitExceeded if there are too many for one step."""
    if len(given) > MAX_STEP_HYPERPARAMETERS:
        raise LimitExceeded(f"hyperparameters: {len(given)} for one step, {MAX_STEP_HYPERPARAMETERS} at most")


def check_user_states(jsons: Sequence[str]) -> None:
    """As `check_user_state`, for each; raises LimitExceeded if all together are too large, too."""
    for json in jsons:
        check_user_state(json)
    total = sum(map(len, jsons))
    if total > MAX_USER_STATES_BYTES:
        raise LimitExceeded(f"user_state: {total} bytes of all workers together, {MAX_USER_STATES_BYTES} at most; keep less in each")


def check_user_state(json: str) -> None:
    """Raises LimitExceeded if one worker's state is too large, InvalidSpec unless each of its characters is a byte."""
    if not json.isascii():
        raise InvalidSpec("user_state: it has characters that are not ASCII; write them as JSON's escapes")
    if len(json) > MAX_USER_STATE_BYTES:
        raise LimitExceeded(f"user_state: {len(json)} bytes, {MAX_USER_STATE_BYTES} at most; keep what is larger in variables or in files")
