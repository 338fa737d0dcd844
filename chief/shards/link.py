"""The ways to one parameter server, over gRPC or in this process. A call is one attempt; the caller repeats it."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from ps_protocol.errors import MalformedMessage, PsError, Unavailable
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.request import RPCS, Answer, Request
from ps_protocol.roles.shard import ApplyRequest, ShutdownRequest
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, checked_reply, handshake_request, understanding
from ps_protocol.rpc.commands import Commands
from ps_protocol.rpc.shard import SERVICE
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec

log = logging.getLogger("lockstep.chief")

# Short: the caller that insists asks again, reports what is wrong, and waits as long as a step may take.
_TIMEOUT_S = 1.0

Report = Callable[[bool], None]
# What the calling thread shall do itself, when it holds no lock: the way to another thread would take longer.
OwnWork = Callable[[], None]
Result = TypeVar("Result")


class ShardLink(Protocol):
    """One parameter server, as a chief uses it. Every call may raise Unavailable or DeadlineExceeded."""

    @property
    def address(self) -> str:
        """Where it is."""

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity. Raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""

    async def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks, and returns the answer."""

    async def close(self) -> None:
        """Closes the connection; the server continues."""


@runtime_checkable
class DirectLink(Protocol):
    """A link by which any thread may have steps applied, too."""

    def begin(self, request: ApplyRequest, report: Report) -> OwnWork | None:
        """Has a step applied, and never waits; `report` is called once, by any thread: False if the step is not known to be applied."""


class GrpcShardLink:
    """Implements ShardLink and DirectLink: any event loop may ask. What is asked with every step travels on one stream.

    The thread that begins a step sends it: no thread has to wake another on the way to the shard.
    """

    def __init__(self, address: str, *, index: int, cluster: str, access: Access = DEFAULT_ACCESS) -> None:
        self.address, self._index, self._cluster = address, index, cluster
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)
        self._commands = Commands(self._connection)

    def begin(self, request: ApplyRequest, report: Report) -> None:
        """Sends a step."""

        def ended(found: pb.CommandResponse | PsError) -> None:
            if isinstance(found, PsError):
                log.debug("the fast way did not apply step=%d cause=%s", request.step, found.message)
            report(not isinstance(found, PsError))

        self._commands.begin(request, ended, timeout_s=_TIMEOUT_S)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity."""
        with checked_reply(self._connection) as check:
            request = handshake_request(role=Role.PARAMETER_SERVER, index=self._index, cluster=self._cluster)
            return check(await self.call(request, timeout_s=timeout_s))

    async def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks, and returns the answer. Raises Unavailable if it is none: so it is asked again, and training waits, with words."""
        field = RPCS[type(request)].field
        try:
            if not field:
                answer: Answer = await _outcome(partial(self._connection.begin, request, timeout_s=timeout_s))
            else:
                found = await _outcome(partial(self._command, request, timeout_s=timeout_s))
                with understanding(self._connection.target):
                    answer = codec.decode_answer(request, getattr(found, field))
        except MalformedMessage as error:
            raise Unavailable(error.message) from None
        if isinstance(request, ShutdownRequest):
            self._commands.close()
        return answer

    async def close(self) -> None:
        """Closes the connection; the server continues."""
        self._commands.close()
        self._connection.close()

    def _command(
        self, request: Request[Any], report: Callable[[pb.CommandResponse | PsError], None], *, timeout_s: float
    ) -> Callable[[], object]:
        return partial(self._commands.give_up, self._commands.begin(request, report, timeout_s=timeout_s))


async def _outcome(begin: Callable[[Callable[[Result | PsError], None]], Callable[[], object]]) -> Result:
    """Begins a call and returns its result, which any thread may report; raises its error. A cancelled task gives the call up."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Result] = loop.create_future()

    def take(outcome: Result | PsError) -> None:
        if found.done():
            return
        if isinstance(outcome, PsError):
            found.set_exception(outcome)
        else:
            found.set_result(outcome)

    def report(outcome: Result | PsError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller waits
            loop.call_soon_threadsafe(take, outcome)

    give_up = begin(report)
    try:
        return await found
    finally:
        give_up()


# A failure here is repeated and explained by the caller that insists: applying a step twice is applying it once.


class DirectLinks:
    """The direct links of all shards. Thread-safe; nothing here waits."""

    def __init__(self, links: Sequence[DirectLink]) -> None:
        self._links = tuple(links)

    def apply(self, requests: Sequence[ApplyRequest], report: Report) -> list[OwnWork]:
        """Has each shard apply its request. `report` is called once: True when all have, or False from the first that fails."""
        ended = report if len(requests) == 1 else _Step(len(requests), report).ended
        begun = [link.begin(request, ended) for link, request in zip(self._links, requests, strict=True)]
        return [work for work in begun if work is not None]


class _Step:
    """One step at all shards."""

    def __init__(self, num_links: int, report: Report) -> None:
        self._lock = threading.Lock()
        self._num_left = num_links
        self._report = report

    def ended(self, is_applied: bool) -> None:
        """A link has ended."""
        with self._lock:
            if self._num_left == 0:
                return  # another one has failed
            self._num_left = self._num_left - 1 if is_applied else 0
            is_over = self._num_left == 0
        if is_over:
            self._report(is_applied)
