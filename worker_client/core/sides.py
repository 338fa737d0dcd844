"""The two sides of a worker's core, as Protocols: the chief's, and the worker's own. Knows values; makes no call.

The core is coroutines, and whatever takes time is awaited. In a session each call blocks its thread, so that nothing suspends, and `run`
has the result at once; in a simulated cluster the same coroutines wait in simulated time.
"""

from collections.abc import Collection, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from ps_protocol.errors import InternalError, PsError
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import CommitResult, End, LeaseRangesRequest, LeaseReply, ModelReply, Participant, PushCommit, Registration
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import PushResult

Result = TypeVar("Result")


class Deadline(Protocol):
    """One wait: logs its reason at intervals, and ends at its deadline."""

    def left_s(self) -> float | None:
        """Returns the seconds to the deadline; None if there is none."""

    def slice_s(self) -> float:
        """Returns how long the next call may block, in seconds."""

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Notes that the wait continues, and why. Raises DeadlineExceeded at the deadline."""


class ChiefSide(Protocol):
    """The chief, wherever it is, and the clock by which it is waited for. Two threads may use it: the worker's, and its heartbeat's."""

    async def ask(self, request: Request[Answer], *, what: str, wait: Deadline | None = None, takes_place: bool = False) -> Answer:
        """Returns the chief's answer; asks again while the chief cannot be reached, at most until the end of `wait`.

        Waits for another thread that is taking the place again, unless the request is a part of that (`takes_place`).
        """

    async def register(self, known: Registration, held: tuple[int, ...]) -> Registration:
        """Registers the participant again, with the ranges of the training data that it holds. Raises WorkerIndexTaken."""

    async def beat(self, participant: Participant) -> End:
        """Renews the lease, in one attempt; returns whether and how training has ended."""

    async def lease(self, request: LeaseRangesRequest, wait: Deadline) -> LeaseReply:
        """Leases ranges of the training data, as `ask` does; takes the answer of a request that was begun ahead."""

    def lease_ahead(self, request: LeaseRangesRequest) -> None:
        """Announces that ranges will be leased by this request, which may begin already."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Returns the turn to take the place again, or to ask who holds the shards: one thread's at a time."""

    async def await_turn(self) -> None:
        """Waits for the thread that is taking the place again."""

    def moved(self) -> None:
        """Notes that the participant is another one now: calls to shards in the name of the former one are given up."""

    def begin_wait(self, what: str, timeout_s: float | None) -> Deadline:
        """Begins a wait with a description and a limit in seconds (None: no limit)."""

    async def pause(self, wait: Deadline, seconds: float) -> None:
        """Sleeps, at most until the deadline of a wait."""


class Rows(NamedTuple):
    """Rows of a table, and the least of the steps that shards had them from; None if no row was asked for."""

    values: Array
    step: int | None


class ModelSide(Protocol):
    """The shards of the model, and the worker's memory for it, at one place. For the worker's thread."""

    async def stage(self, content: Any, step: int, *, is_waited_for: bool) -> Any:
        """Stages a contribution, and returns it for `push`. `content` None: it has no gradient for any variable."""

    async def push(self, staged: Any, push_id: PushId, step: int, *, refused: tuple[int, ...]) -> list[PushResult]:
        """Sends all shards their parts of a contribution; returns the result of each. Raises TooManyPushes."""

    def expect(self, step: int, names: Collection[str] | None = None) -> None:
        """Announces that the variables of this step will be read, or those named."""

    async def fetch(self, step: int, *, may_view: bool, names: Collection[str] | None = None) -> None:
        """Holds the variables of a step, or those named; nothing to do if they are held. Raises StepGone, StepNotReady."""

    async def fetch_newest(self, *, is_aligned: bool) -> int | None:
        """Holds the newest variables; returns their step."""

    async def give(self, *, is_copied: bool, names: Collection[str] | None = None) -> dict[str, Array]:
        """Returns the held variables for the user, or those named; `is_copied`: as copies. Raises StepGone; then nothing is held."""

    @property
    def held_step(self) -> int | None:
        """The step of the held variables; None: they are not of one step."""

    @property
    def has_dense(self) -> bool:
        """Whether the model has dense variables."""

    async def read_rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool) -> Rows:
        """Reads rows of a table, of one step or (None) the newest. Raises StepGone."""

    async def free_gradients(self, timeout_s: float | None) -> None:
        """The worker has a token: lets the user write into gradient buffers again, once the contribution sent from them is over."""

    def protect_gradients(self) -> None:
        """The call ends without a token: keeps the user from writing into gradient buffers that are still being sent from."""

    def release(self) -> None:
        """The worker has left the place: no contribution is under way from this memory any more."""


Model_co = TypeVar("Model_co", bound=ModelSide, covariant=True)


class WorkerSide(Protocol[Model_co]):
    """The worker's own side: what it has of a model, place after place, and what its program and its log hear. For the worker's thread."""

    async def create(self, reply: ModelReply) -> None:
        """Creates the variables with their first values."""

    async def open(self, model: ModelSpec, reply: ModelReply, *, has_created: bool) -> Model_co:
        """Opens connections and memory for the model, which is agreed on."""

    def heard_of_shards(self) -> None:
        """Notes that other servers than before hold the shards."""

    async def came_back(self, former: Participant, cause: PsError) -> None:
        """Notes that the worker has come back to the model, as another participant than before, and why."""

    def counts(self, commit: PushCommit) -> None:
        """Notes a commit that is about to be sent to be counted."""

    def counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Notes the chief's outcome of a contribution."""

    def warn(self, message: str) -> None:
        """Logs a warning."""


def run(steps: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in which nothing suspends, and returns its result."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    steps.close()
    raise InternalError("a call of a session suspended instead of blocking its thread")
