"""The ways to one parameter server, over gRPC or a long-lived stream: one attempt a call, and repeating is the caller's."""

import asyncio
import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import grpc
import grpc.aio
from google.protobuf.message import Message

from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ProtocolMismatch,
    PsError,
    Unavailable,
    Unimplemented,
    WrongCluster,
    WrongRole,
)
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, HandshakeRequest, Role, check_versions, name_of
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
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access, Metadata
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.client_stream import Stream, StreamEnded, open_stream
from ps_protocol.rpc.status import from_status, rebuild
from ps_protocol.v1 import handshake_service_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message

log = logging.getLogger("lockstep.chief")

SERVICE: str = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name
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
        """Ends what is under way. Idempotent, never waits."""


@runtime_checkable
class DirectLink(Protocol):
    """A link that has such a way, too."""

    def open_caller(self) -> ShardCaller:
        """Returns the way; whoever opens it closes it."""


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
    """Implements ShardCaller over a long-lived stream of its own.

    Who begins a step sends it, and a thread of this caller's takes the answers: no thread has to wake another on the way to the shard.
    """

    def __init__(self, address: str, *, name: str, access: Access = DEFAULT_ACCESS) -> None:
        self._connection = Connection(address, name=name, service=SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stream: Stream | None = None
        self._unsent: list[bytes] = []  # what is to be sent once there is a stream
        self._under_way: dict[int, tuple[Report, int]] = {}  # by number of the command: whom to tell, and its deadline
        self._is_cut = self._is_closed = False
        threading.Thread(target=self._run, name=f"steps of {name}", daemon=True).start()

    def begin(self, request: ApplyRequest, report: Report) -> None:
        """Sends a step."""
        number = next(self._numbers)
        data = pb.CommandRequest(call=number, apply=codec.encode(request)).SerializeToString()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._under_way[number] = report, self._deadlines.begin(self, timeout_s=_TIMEOUT_S)
                if self._stream is not None:
                    self._stream.send(data)
                else:
                    self._unsent.append(data)
                    self._changed.notify()
        if is_closed:
            report(False)

    def expire(self) -> None:
        """A step takes too long: breaks what is under way."""
        self._is_cut = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Breaks the steps under way."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
        self.expire()
        self._deadlines.close()
        self._connection.close()

    def _run(self) -> None:
        while self._await_first():
            try:
                self._serve()
            except StreamEnded as end:
                log.debug("the fast way to %s has ended cause=%s", self._connection.target, end)
            except Exception as error:
                if not self._is_closed:
                    log.warning("the fast way to %s failed; ordinary calls are used instead cause=%r", self._connection.target, error)
            self._give_up()

    def _await_first(self) -> bool:
        """Waits for a step; False: there will be none."""
        with self._lock:
            self._changed.wait_for(lambda: self._unsent or self._is_closed)
            return not self._is_closed

    def _serve(self) -> None:
        """Opens a stream, and takes answers until it ends, which it does in an error."""
        connection = self._connection
        stream = open_stream(connection.channel, connection.path("Command"), metadata=connection.metadata())
        with self._lock:
            self._stream, unsent = stream, [*self._unsent]
            self._unsent.clear()
            for data in unsent:
                stream.send(data)
        if self._is_cut:
            stream.cancel()
        while True:
            answer = decode_message(pb.CommandResponse, stream.receive())
            with self._lock:
                report, deadline = self._under_way.pop(answer.call)
            self._deadlines.end(deadline)
            is_applied = not answer.HasField("error")
            if not is_applied:
                log.debug("the fast way did not apply a step cause=%s", decode_call_error(answer.error).message)
            report(is_applied)

    def _give_up(self) -> None:
        """What is under way is not known to be applied; the next step opens another stream."""
        with self._lock:
            stream, self._stream, self._is_cut = self._stream, None, False
            given_up = [*self._under_way.values()]
            self._under_way.clear()
            self._unsent.clear()
        for report, deadline in given_up:
            self._deadlines.end(deadline)
            report(False)
        if stream is not None:
            stream.end()


class _StreamEnded(Unavailable):
    """The server has ended the stream without an answer."""


class ShardStream:
    """Opens a stream with the first command, and another one when it has broken. For one event loop."""

    def __init__(self, channel: grpc.aio.Channel, *, path: str, target: str, metadata: Callable[[], Metadata] = lambda: ()) -> None:
        self._open: Callable[..., Any] = channel.stream_stream(path)
        self._target = target
        self._metadata = metadata
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._call: Any = None  # gRPC's type for it asks for the types of its messages, which are bytes
        self._deadline = Deadline()

    async def command(self, request: pb.CommandRequest, *, timeout_s: float, awaited: str) -> pb.CommandResponse:
        """Returns the answer. Raises the error that it is, Unimplemented, DeadlineExceeded, or Unavailable if the stream breaks."""
        async with self._turn:
            request.call = next(self._numbers)
            has_served = self._call is not None and not self._call.done()
            if not has_served:
                self._call = self._open(metadata=self._metadata())
            is_whole = False
            self._deadline.begin(timeout_s, on_expiry=self._cancel)
            try:
                try:
                    answer = await self._exchange(request)
                except _StreamEnded:
                    if not has_served:
                        raise
                    # The server had too many streams at rest, and ended this one in order after its last answer.
                    self._call = self._open(metadata=self._metadata())
                    answer = await self._exchange(request)
                is_whole = True
            except grpc.aio.AioRpcError as error:
                raise self._failure(error) from None
            except asyncio.CancelledError:
                if not self._deadline.has_expired:
                    raise
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise from_status(code, "", target=self._target, awaited=awaited, timeout_s=timeout_s) from None
            finally:
                self._deadline.end()
                if not is_whole:
                    self._drop()
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        return answer

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        self._deadline.close()
        self._drop()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _drop(self) -> None:
        self._cancel()
        self._call = None

    async def _exchange(self, request: pb.CommandRequest) -> pb.CommandResponse:
        try:
            await self._call.write(request.SerializeToString())
        except asyncio.InvalidStateError:
            raise _StreamEnded(f"cannot reach {self._target}: it has ended the stream of commands") from None
        data = await self._call.read()
        if data is grpc.aio.EOF:
            raise _StreamEnded(f"cannot reach {self._target}: it has ended the stream of commands; did it end?")
        answer = decode_message(pb.CommandResponse, data)
        if answer.call != request.call:
            raise Unavailable(f"{self._target}: it answers command {answer.call}, not {request.call}; the stream is begun anew")
        return answer

    def _failure(self, error: grpc.aio.AioRpcError) -> PsError:
        failure = rebuild(error, target=self._target)
        if isinstance(failure, (Cancelled, DeadlineExceeded)):
            return Unavailable(f"cannot reach {self._target}: the stream of commands was cut; did it end?")
        return failure


class Deadline:
    """The deadline of one thing at a time, begun far more often than it passes: so the timer stays, and looks when it fires."""

    def __init__(self) -> None:
        self.has_expired = False
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._on_expiry: Callable[[], object] | None = None

    def begin(self, timeout_s: float, *, on_expiry: Callable[[], object]) -> None:
        """From now on `on_expiry` is called when the time is up, unless `end` comes first."""
        loop = asyncio.get_running_loop()
        self.has_expired, self._due, self._on_expiry = False, loop.time() + timeout_s, on_expiry
        if self._timer is None or self._timer.when() > self._due:
            self.close()
            self._timer = loop.call_at(self._due, self._look)

    def end(self) -> None:
        """What it was for is over."""
        self._due = math.inf

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._due > loop.time():
            if self._due < math.inf:
                self._timer = loop.call_at(self._due, self._look)
        elif self._on_expiry is not None:
            self.has_expired = True
            self._on_expiry()


_HANDSHAKE: str = handshake_service_pb2.DESCRIPTOR.services_by_name["HandshakeService"].full_name

Response = TypeVar("Response", bound=Message)
_ENDED_EARLY = "Internal error from Core"


class ShardLink(Protocol):
    """One parameter server, as a chief uses it. Every call may raise Unavailable or DeadlineExceeded."""

    @property
    def address(self) -> str:
        """Where it is."""

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there. Raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        """Returns step, memory and counters. The chief that has the shard says who it is, as a sign of life; others leave that 0."""

    async def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = (), timeout_s: float) -> Adoption:
        """Puts the shard under a chief, who listens at `chief_address`. `session_keys`: see Shard."""

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them; asked again, waits for the end, `max_wait_s` at most."""

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces what is there by a checkpoint's values; asked again, waits for the end, `max_wait_s` at most."""

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        """Ends the server."""

    async def close(self) -> None:
        """Closes the connection; the server goes on."""


class GrpcShardLink:
    """Implements ShardLink. Belongs to the event loop that it was made in.

    What is asked with every step travels on a long-lived stream.
    """

    def __init__(self, address: str, *, index: int, cluster: str, access: Access = DEFAULT_ACCESS) -> None:
        self._access, self._metadata = access, access.metadata_for(address)
        self._address, self._index, self._cluster = address, index, cluster
        self._target = f"{name_of(Role.PARAMETER_SERVER, index)} at {address}"
        self._channel = access.open_aio_channel(address)
        self._methods: dict[str, Any] = {}
        self._stream = ShardStream(self._channel, path=f"/{SERVICE}/Command", target=self._target, metadata=self._metadata)

    @property
    def address(self) -> str:
        """Where it is."""
        return self._address

    def open_caller(self) -> GrpcShardCaller:
        """Returns the way for threads; whoever opens it closes it."""
        return GrpcShardCaller(self._address, name=name_of(Role.PARAMETER_SERVER, self._index), access=self._access)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there."""
        role = Role.PARAMETER_SERVER
        request = HandshakeRequest(cluster=self._cluster, expected_role=role, expected_index=self._index, version=PROTOCOL_VERSION)
        path, message = f"/{_HANDSHAKE}/Handshake", codec.encode(request)
        try:
            answer = await self._call(path, message, handshake_service_pb2.HandshakeResponse, timeout_s=timeout_s, awaited="the handshake")
            reply = codec.decode(HandshakeReply, answer)
            check_versions(client=PROTOCOL_VERSION, server=reply.version)
        except (WrongCluster, WrongRole, ProtocolMismatch) as error:
            # The server does not know by which address it was called.
            raise type(error)(f"{self._address}: {error.message}", facts=error.facts) from None
        except Unimplemented:
            raise WrongRole(f"{self._address}: a gRPC server answers there, but not one of Lockstep's; check the address") from None
        return reply

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        """Returns step, memory and counters."""
        request = pb.GetShardStatusRequest(fence=codec.encode(fence))
        answer = await self._unary("GetShardStatus", request, pb.GetShardStatusResponse, timeout_s=timeout_s, awaited="its status")
        return codec.decode(ShardStatus, answer)

    async def adopt(
        self,
        fence: Fence,
        *,
        chief_address: str = "",
        session_keys: tuple[bytes, ...] = (),
        timeout_s: float,
        replica: ReplicaState = ONLY_REPLICA,
    ) -> Adoption:
        """Puts the shard under a chief, who counts on it like this, if it is one of several replicas."""
        request = pb.AdoptShardRequest(
            fence=codec.encode(fence),
            chief_address=chief_address,
            session_keys=session_keys,
            replica=codec.encode(replica),
        )
        answer = await self._unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=timeout_s, awaited="its adoption")
        return codec.decode(Adoption, answer)

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""
        request = pb.KeepRecordRequest(fence=codec.encode(fence), version=version, record=record)
        await self._unary("KeepRecord", request, pb.KeepRecordResponse, timeout_s=timeout_s, awaited="a record to be kept")

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them."""
        message, awaited = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s)), f"step {request.step} to be saved"
        answer = await self._unary("SaveShard", message, pb.SaveShardResponse, timeout_s=timeout_s, awaited=awaited)
        return codec.decode(SaveProgress, answer)

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces what is there by a checkpoint's values."""
        message, awaited = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s)), f"{request.tag} to be restored"
        answer = await self._unary("RestoreShard", message, pb.RestoreShardResponse, timeout_s=timeout_s, awaited=awaited)
        return codec.decode(RestoreProgress, answer)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""
        await self._command(timeout_s, "its new settings", configure=codec.encode(settings))

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""
        answer = await self._command(timeout_s, f"the norms of step {request.step}", prepare=codec.encode(request))
        return tuple(answer.prepare.sums)

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        answer = await self._command(timeout_s, f"step {request.step} to be applied", apply=codec.encode(request))
        return codec.decode(ApplyReply, answer.apply)

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(fence=codec.encode(fence), reason=reason)
        await self._unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=timeout_s, awaited="its end")
        self._stream.close()

    async def close(self) -> None:
        """Closes the connection; the server goes on."""
        self._stream.close()
        await self._channel.close()

    async def _command(self, timeout_s: float, awaited: str, **command: Any) -> pb.CommandResponse:
        """Returns the answer on the long-lived stream, or, if the server has ended that, on one for this command alone."""
        request = pb.CommandRequest(**command)
        try:
            return await self._stream.command(request, timeout_s=timeout_s, awaited=awaited)
        except InternalError as error:
            # What grpc.aio says when a stream ends before its first write has left; a stream of one message says why.
            if _ENDED_EARLY not in error.message:
                raise
        answer = await self._unary("Command", request, pb.CommandResponse, timeout_s=timeout_s, awaited=awaited)
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        return answer

    async def _unary(self, method: str, request: Message, response: type[Response], *, timeout_s: float, awaited: str) -> Response:
        return await self._call(f"/{SERVICE}/{method}", request, response, timeout_s=timeout_s, awaited=awaited)

    async def _call(self, path: str, request: Message, response_type: type[Response], *, timeout_s: float, awaited: str) -> Response:
        if path not in self._methods:
            self._methods[path] = self._channel.unary_unary(
                path, request_serializer=type(request).SerializeToString, response_deserializer=response_type.FromString
            )
        try:
            answer: Response = await self._methods[path](request, timeout=timeout_s, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise rebuild(error, target=self._target, awaited=awaited, timeout_s=timeout_s) from None
        return answer


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
        """Ends what is under way. Idempotent."""
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
