"""The standing stream to one parameter server, for asyncio: commands one after the other, each with its answer. Repeats nothing."""

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from ps_protocol.access import Metadata
from ps_protocol.call_errors import decode_call_error
from ps_protocol.codec import decode_message
from ps_protocol.errors import Cancelled, DeadlineExceeded, PsError, Unavailable
from ps_protocol.grpc_failures import from_status
from ps_protocol.status import rebuild
from ps_protocol.v1 import parameter_service_pb2 as pb


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

    async def command(self, request: pb.CommandShardRequest, *, timeout_s: float, awaited: str) -> pb.CommandShardResponse:
        """Returns the answer. Raises the error that it is, Unimplemented, DeadlineExceeded, or Unavailable if the stream breaks."""
        async with self._turn:
            request.call = next(self._numbers)
            if self._call is None or self._call.done():
                self._call = self._open(metadata=self._metadata())
            is_whole = False
            self._deadline.begin(timeout_s, on_expiry=self._call.cancel)
            try:
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

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _exchange(self, request: pb.CommandShardRequest) -> pb.CommandShardResponse:
        try:
            await self._call.write(request.SerializeToString())
        except asyncio.InvalidStateError:
            raise Unavailable(f"cannot reach {self._target}: it has ended the stream of commands") from None
        data = await self._call.read()
        if data is grpc.aio.EOF:
            raise Unavailable(f"cannot reach {self._target}: it has ended the stream of commands; did it end?")
        answer = decode_message(pb.CommandShardResponse, data)
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
