"""A worker's requests to its runner: values that its generators yield, and that the runner answers. Knows values; makes no call.

A generator is run by `run`, or by a loop of one's own: an answer is sent to it, an error thrown into it.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from ps_protocol.errors import PsError
from ps_protocol.model.data import DataSpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import ModelReply, Participant, PushCommit
from ps_protocol.roles.contribution import PushId

Result = TypeVar("Result")
# Yields requests and gets their answers; returns the result.
Asking = Generator[Any, Any, Result]


class Deadline(Protocol):
    """One wait: it logs its reason at intervals, and gives up at its deadline."""

    def left_s(self) -> float | None:
        """Returns the seconds to the deadline; None if there is none."""

    def explain(self, waiting_for: str) -> None:
        """Notes that the wait continues, and why. Raises DeadlineExceeded at the deadline."""


# -- of the chief


class Register(NamedTuple):
    """Take this participant in again, with the ranges of the training data that it has; answered with a Registration."""

    former: Participant
    held: tuple[int, ...]


class Agree(NamedTuple):
    """Present the model; answered with a ModelReply. Without `wait` at once; `may_create`: the answer may be INITIALIZE."""

    participant: Participant
    model: ModelSpec
    wait: Any
    may_create: bool


class Complete(NamedTuple):
    """Tell that the first values stand. Raises NotInitializer."""

    participant: Participant
    attempt: int


class Count(NamedTuple):
    """Have a contribution counted, or (`is_question`) ask for its outcome; answered with a CommitResult."""

    participant: Participant
    commit: PushCommit
    is_question: bool = False


class AwaitToken(NamedTuple):
    """Count `commit`, if there is one, and wait for a token; answered with a TokenReply."""

    participant: Participant
    local_step: int
    request_id: int
    commit: PushCommit | None
    wait: Any


class Lease(NamedTuple):
    """Lease ranges of the training data; answered with a LeaseReply. `held`: those that the worker has.

    `is_brief`: the caller has to look soon whether others wait for it.
    """

    participant: Participant
    spec: DataSpec
    request_id: int
    held: tuple[int, ...]
    wait: Any
    is_brief: bool


class LeaseAhead(NamedTuple):
    """The worker is going to request the `Lease` with this number: the runner may begin it already."""

    participant: Participant
    spec: DataSpec
    request_id: int
    held: tuple[int, ...]


class Beat(NamedTuple):
    """Renew the lease; answered with whether training is finished."""

    participant: Participant


class Status(NamedTuple):
    """Report the cluster; answered with a ClusterStatus."""


# -- of the place


class Renew(NamedTuple):
    """Take the place again with `Place.take_again`, unless that has been done since this generation."""

    generation: int
    cause: PsError


class AwaitRenewal(NamedTuple):
    """Wait for the thread that is taking the place again."""


# -- of the shards, and of the worker's memory


class Create(NamedTuple):
    """Create the variables with their first values."""

    reply: ModelReply


class Open(NamedTuple):
    """The model stands: have connections and memory for it."""

    model: ModelSpec
    reply: ModelReply
    has_created: bool


class Arrived(NamedTuple):
    """The worker has its place in the training. `former`: the state that ended, for this reason; None: it had no place before."""

    former: Participant | None
    cause: PsError | None


class Stage(NamedTuple):
    """Make a contribution ready; answered with something for `PushParts`. `content` None: it has no gradient for any variable."""

    content: Any
    step: int
    is_waited_for: bool


class PushParts(NamedTuple):
    """Give all shards their parts of a contribution; answered with a PushResult of each."""

    staged: Any
    push_id: PushId
    step: int
    refused: tuple[int, ...]


class Expect(NamedTuple):
    """The variables of this step will be read."""

    step: int


class HearShards(NamedTuple):
    """Ask which servers hold the shards, unless the answer for this version is known."""

    version: int


class StateUnreadable(NamedTuple):
    """The state of the program that the cluster has of this worker is none: the worker goes on with an empty one, and says so."""

    cause: PsError


class FreeGradients(NamedTuple):
    """There is a token: the user may write again into memory that was sent from, once that is over."""

    timeout_s: float | None


class ProtectGradients(NamedTuple):
    """The user gets word before there is a token: he must not write into memory that is being sent from."""


class Fetch(NamedTuple):
    """Hold the variables of a step; nothing to do if they are held. Raises StepGone, StepNotReady."""

    step: int
    may_view: bool


class FetchNewest(NamedTuple):
    """Hold the newest variables; answered with their step."""

    is_aligned: bool


class Give(NamedTuple):
    """Give the held variables to the user; `is_copied`: in arrays of his own. Raises StepGone; then nothing is held."""

    is_copied: bool


class Held(NamedTuple):
    """Answered with the step of the variables that are held, None if it is not one step, and whether the model has dense ones."""


class ReadRows(NamedTuple):
    """Read rows of a table, of a step, or (None) the newest; answered with `Rows`. Raises StepGone."""

    name: str
    indices: Any
    step: int | None
    is_aligned: bool


class Do(NamedTuple):
    """Do this at the place that the worker has in the training."""

    act: Callable[[Any], Any]


# -- of the worker itself


class Pause(NamedTuple):
    """Let time pass, at most to the deadline of a wait."""

    wait: Any
    seconds: float


class Skipping(NamedTuple):
    """So many ranges of the training data count as done, and no contribution was made from them."""

    spec: DataSpec
    num_ranges: int


def run(steps: Asking[Result], acts: Mapping[type, Callable[[Any], Any]]) -> Result:
    """Runs a generator, answers each of its requests by the act for its type, and returns its result."""
    try:
        request = next(steps)
        while True:
            try:
                answer = acts[type(request)](request)
            except BaseException as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        request = None  # it may have an error that came through this frame: they would hold each other
        result: Result = end.value
        return result
