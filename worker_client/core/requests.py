"""A worker's requests to its runner: values that its generators yield, and that the runner answers. Knows values; makes no call.

`run` runs a generator, or a loop of the runner's own: it sends each answer into the generator, or throws an error into it.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from ps_protocol.errors import PsError
from ps_protocol.model.data import DataSpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import ModelReply, Participant, PushCommit
from ps_protocol.roles.contribution import PushId

Result = TypeVar("Result")
# A generator that yields requests, receives their answers, and returns a result.
Asking = Generator[Any, Any, Result]


class Deadline(Protocol):
    """One wait: logs its reason at intervals, and ends at its deadline."""

    def left_s(self) -> float | None:
        """Returns the seconds to the deadline; None if there is none."""

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Notes that the wait continues, and why. Raises DeadlineExceeded at the deadline."""


# -- of the chief


class Register(NamedTuple):
    """Register this participant again, with the ranges of the training data that it holds; answered with a Registration."""

    former: Participant
    held: tuple[int, ...]


class Agree(NamedTuple):
    """Present the model; answered with a ModelReply, at once if `wait` is None. `may_create`: the answer may be INITIALIZE."""

    participant: Participant
    model: ModelSpec
    wait: Any
    may_create: bool


class Complete(NamedTuple):
    """Report that the first values have been written. Raises NotInitializer."""

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
    """Lease ranges of the training data; answered with a LeaseReply. `held`: the ranges that the worker holds.

    `is_brief`: the caller must soon check whether other workers wait for it.
    """

    participant: Participant
    spec: DataSpec
    request_id: int
    held: tuple[int, ...]
    wait: Any
    is_brief: bool


class LeaseAhead(NamedTuple):
    """Announce the `Lease` with this number: the runner may already begin it."""

    participant: Participant
    spec: DataSpec
    request_id: int
    held: tuple[int, ...]


class Beat(NamedTuple):
    """Renew the lease; answered with an `End`: whether and how training has ended."""

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
    """Open connections and memory for the model, which is agreed on."""

    model: ModelSpec
    reply: ModelReply
    has_created: bool


class Arrived(NamedTuple):
    """Note that the worker takes part in training.

    `former`: the participant that it was before, with the `cause` of the change; None: this is the first time.
    """

    former: Participant | None
    cause: PsError | None


class Stage(NamedTuple):
    """Stage a contribution; answered with a value for `PushParts`. `content` None: it has no gradient for any variable."""

    content: Any
    step: int
    is_waited_for: bool


class PushParts(NamedTuple):
    """Send all shards their parts of a contribution; answered with a PushResult for each."""

    staged: Any
    push_id: PushId
    step: int
    refused: tuple[int, ...]


class Expect(NamedTuple):
    """Announce that the variables of this step will be read."""

    step: int


class HearShards(NamedTuple):
    """Learn which servers hold the shards, unless this version is known."""

    version: int


class StateUnreadable(NamedTuple):
    """Log that the user state which the cluster has for this worker cannot be read: the worker continues with an empty one."""

    cause: PsError


class FreeGradients(NamedTuple):
    """The worker has a token: let the user write into gradient buffers again, once the contribution sent from them is over."""

    timeout_s: float | None


class ProtectGradients(NamedTuple):
    """The call ends without a token: keep the user from writing into gradient buffers that are still being sent from."""


class Fetch(NamedTuple):
    """Hold the variables of a step; nothing to do if they are held. Raises StepGone, StepNotReady."""

    step: int
    may_view: bool


class FetchNewest(NamedTuple):
    """Hold the newest variables; answered with their step."""

    is_aligned: bool


class Give(NamedTuple):
    """Give the held variables to the user; `is_copied`: as copies. Raises StepGone; then nothing is held."""

    is_copied: bool


class Held(NamedTuple):
    """Answered with the step of the held variables (None: they are not of one step), and whether the model has dense variables."""


class ReadRows(NamedTuple):
    """Read rows of a table, of one step or (None) the newest; answered with `Rows`. Raises StepGone."""

    name: str
    indices: Any
    step: int | None
    is_aligned: bool


class Do(NamedTuple):
    """Call `act` with the runner's object for the worker's present place; answered with its result."""

    act: Callable[[Any], Any]


# -- of the worker itself


class Pause(NamedTuple):
    """Sleep, at most until the deadline of a wait."""

    wait: Any
    seconds: float


class Skipping(NamedTuple):
    """Log that this many ranges of the training data count as done although no contribution was made from them."""

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
        request = None  # it may hold an error whose traceback has this frame: a reference cycle
        result: Result = end.value
        return result
