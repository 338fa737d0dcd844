"""The ways to one parameter server, over gRPC or in this process. A call is one attempt; the caller repeats it."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from google.protobuf.message import Message

from ps_protocol.errors import MalformedMessage, PsError, Unavailable
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.shard import (
    ONLY_REPLICA,
    Adoption,
    ApplyReply,
    ApplyRequest,
    ReplicaState,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardStatus,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import HANDSHAKE, Connection, checked_reply, handshake_request, not_understood
from ps_protocol.rpc.commands import Commands
from ps_protocol.rpc.shard import SERVICE
from ps_protocol.v1 import handshake_service_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec

log = logging.getLogger("lockstep.chief")

# Short: the caller that insists asks again, reports what is wrong, and waits as long as a step may take.
_TIMEOUT_S = 1.0

Report = Callable[[bool], None]
Work = Callable[[], None]


class ShardCaller(Protocol):
    """Has steps applied by one shard. Thread-safe."""

    def begin(self, request: ApplyRequest, report: Report) -> Work | None:
        """Has a step applied, and never waits; `report` is called once, by any thread: False if the step is not known to be applied.

        Returns what the calling thread shall do itself, when it holds no lock, where the way to another thread would take longer.
        """

    def close(self) -> None:
        """Ends calls under way. Idempotent, never waits."""


@runtime_checkable
class DirectLink(Protocol):
    """A link that has such a way, too."""

    def open_caller(self) -> ShardCaller:
        """Returns the way; the caller closes it."""


class BlockingCaller:
    """Implements ShardCaller by a call that blocks until the step is applied, and raises PsError: in a thread of its own.

    `is_quick` says whether the call would now return in a moment, without waiting: then any thread may make it.
    """

    def __init__(self, apply_step: Callable[[ApplyRequest], object], *, is_quick: Callable[[], bool], name: str) -> None:
        self._apply_step, self._is_quick = apply_step, is_quick
        self._steps: queue.SimpleQueue[tuple[ApplyRequest, Report] | None] = queue.SimpleQueue()
        # A thread that hangs at a shard must not keep the process from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, request: ApplyRequest, report: Report) -> Work | None:
        """Has a step applied: by the calling thread, if that takes no time."""
        if self._is_quick():
            return partial(self._apply, request, report)
        self._steps.put((request, report))
        return None

    def close(self) -> None:
        """Ends the thread, as soon as the shard lets it."""
        self._steps.put(None)

    def _run(self) -> None:
        for request, report in iter(self._steps.get, None):
            self._apply(request, report)

    def _apply(self, request: ApplyRequest, report: Report) -> None:
        is_applied = False
        try:
            self._apply_step(request)
            is_applied = True
        except PsError as error:
            log.debug("the fast way did not apply step=%d cause=%s", request.step, error.message)
        except Exception:
            log.exception("the fast way failed step=%d", request.step)
        report(is_applied)


class GrpcShardCaller:
    """Implements ShardCaller over the stream of commands: no thread has to wake another on the way to the shard."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def begin(self, request: ApplyRequest, report: Report) -> None:
        """Sends a step."""

        def ended(found: pb.CommandResponse | PsError) -> None:
            if isinstance(found, PsError):
                log.debug("the fast way did not apply step=%d cause=%s", request.step, found.message)
            report(not isinstance(found, PsError))

        self._commands.begin(ended, timeout_s=_TIMEOUT_S, awaited="a step", apply=request)

    def close(self) -> None:
        """Does nothing: calls under way end with the link's stream."""


Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")
Value = TypeVar("Value")


class ShardLink(Protocol):
    """One parameter server, as a chief uses it. Every call may raise Unavailable or DeadlineExceeded."""

    @property
    def address(self) -> str:
        """Where it is."""

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity. Raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        """Returns step, memory and counters. The chief that has the shard says who it is, as a sign of life; others leave that 0."""

    async def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = (), timeout_s: float) -> Adoption:
        """Puts the shard under a chief, which listens at `chief_address`. `session_keys`: see Shard."""

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them; asked again, waits for the end, `max_wait_s` at most."""

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces the shard's values by a checkpoint's; a repeated call waits for the end, `max_wait_s` at most."""

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        """Ends the server."""

    async def close(self) -> None:
        """Closes the connection; the server continues."""


# What chiefs count up from 1, and count on.
_MAX_COUNT = 1 << 62


class GrpcShardLink:
    """Implements ShardLink: any event loop may ask. What is asked with every step travels on one stream."""

    def __init__(self, address: str, *, index: int, cluster: str, access: Access = DEFAULT_ACCESS) -> None:
        self._address, self._index, self._cluster = address, index, cluster
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)
        self._commands = Commands(self._connection)

    @property
    def address(self) -> str:
        """Where it is."""
        return self._address

    def open_caller(self) -> GrpcShardCaller:
        """Returns the way for threads."""
        return GrpcShardCaller(self._commands)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity."""
        request = handshake_request(role=Role.PARAMETER_SERVER, index=self._index, cluster=self._cluster)
        reply_type = handshake_service_pb2.HandshakeResponse
        try:
            with checked_reply(self._connection) as check:
                return check(await self._unary(HANDSHAKE, request, reply_type, timeout_s=timeout_s, awaited="the handshake"))
        except MalformedMessage as error:
            raise Unavailable(error.message) from None

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        """Returns step, memory and counters."""
        request = pb.GetShardStatusRequest(fence=codec.encode(fence))
        answer = await self._unary("GetShardStatus", request, pb.GetShardStatusResponse, timeout_s=timeout_s, awaited="its status")
        status = self._decoded(ShardStatus, answer)
        fence = status.fence
        if max(fence.epoch, fence.chief_incarnation, status.settings_version) > _MAX_COUNT or bool(fence.life) != bool(fence.epoch):
            wrong = MalformedMessage(f"{fence} and version {status.settings_version} of the settings are no chief's")
            raise Unavailable(not_understood(self._connection.target, wrong).message)
        return status

    async def adopt(
        self,
        fence: Fence,
        *,
        chief_address: str = "",
        session_keys: tuple[bytes, ...] = (),
        timeout_s: float,
        replica: ReplicaState = ONLY_REPLICA,
    ) -> Adoption:
        """Puts the shard under a chief. `replica`: how the chief counts on it, if it is one of several replicas."""
        request = pb.AdoptShardRequest(
            fence=codec.encode(fence),
            chief_address=chief_address,
            session_keys=session_keys,
            replica=codec.encode(replica),
        )
        answer = await self._unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=timeout_s, awaited="its adoption")
        return self._decoded(Adoption, answer)

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""
        request = pb.KeepRecordRequest(fence=codec.encode(fence), version=version, record=record)
        await self._unary("KeepRecord", request, pb.KeepRecordResponse, timeout_s=timeout_s, awaited="a record to be kept")

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them."""
        message, awaited = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s)), f"step {request.step} to be saved"
        answer = await self._unary("SaveShard", message, pb.SaveShardResponse, timeout_s=timeout_s, awaited=awaited)
        return self._decoded(SaveProgress, answer)

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces the shard's values by a checkpoint's."""
        message, awaited = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s)), f"{request.tag} to be restored"
        answer = await self._unary("RestoreShard", message, pb.RestoreShardResponse, timeout_s=timeout_s, awaited=awaited)
        return self._decoded(RestoreProgress, answer)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""
        await self._command(timeout_s, "its new settings", configure=settings)

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""
        answer = await self._command(timeout_s, f"the norms of step {request.step}", prepare=request)
        return tuple(answer.prepare.sums)

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        answer = await self._command(timeout_s, f"step {request.step} to be applied", apply=request)
        return self._decoded(ApplyReply, answer.apply)

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(fence=codec.encode(fence), reason=reason)
        await self._unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=timeout_s, awaited="its end")
        self._commands.close()

    async def close(self) -> None:
        """Closes the connection; the server continues."""
        self._commands.close()
        self._connection.close()

    async def _command(self, timeout_s: float, awaited: str, **command: Any) -> pb.CommandResponse:
        def begin(report: Callable[[pb.CommandResponse | PsError], None]) -> Callable[[], object]:
            number = self._commands.begin(report, timeout_s=timeout_s, awaited=awaited, **command)
            return partial(self._commands.give_up, number)

        return await _outcome(begin)

    async def _unary(self, method: str, request: Message, response: type[Response], *, timeout_s: float, awaited: str) -> Response:
        begin = self._connection.begin_unary
        try:
            return await _outcome(lambda report: begin(method, request, response, report, timeout_s=timeout_s, awaited=awaited))
        except MalformedMessage as error:
            raise Unavailable(error.message) from None

    def _decoded(self, value_type: type[Value], answer: Message) -> Value:
        """Returns an answer as a value. Raises Unavailable if it is none: so it is asked again, and training waits, with words."""
        try:
            return codec.decode(value_type, answer)
        except PsError as error:
            raise Unavailable(not_understood(self._connection.target, error).message) from None


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


class ShardLanes:
    """One way to each shard. Thread-safe; nothing here waits."""

    def __init__(self, callers: Sequence[ShardCaller]) -> None:
        self._callers = tuple(callers)

    def apply(self, requests: Sequence[ApplyRequest], report: Report) -> list[Work]:
        """Has each shard apply its request. `report` is called once: True when all have, or False from the first that fails.

        Returns what the calling thread shall do itself, when it holds no lock: the way to another thread would take longer.
        """
        ended = report if len(requests) == 1 else _Round(len(requests), report).ended
        begun = [caller.begin(request, ended) for caller, request in zip(self._callers, requests, strict=True)]
        return [work for work in begun if work is not None]

    def close(self) -> None:
        """Ends calls under way. Idempotent."""
        for caller in self._callers:
            caller.close()


class _Round:
    """One step at all shards."""

    def __init__(self, num_lanes: int, report: Report) -> None:
        self._lock = threading.Lock()
        self._num_left = num_lanes
        self._report = report

    def ended(self, is_applied: bool) -> None:
        """A lane has ended."""
        with self._lock:
            if self._num_left == 0:
                return  # another one has failed
            self._num_left = self._num_left - 1 if is_applied else 0
            is_over = self._num_left == 0
        if is_over:
            self._report(is_applied)
