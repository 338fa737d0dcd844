"""A worker's calls to its chief, for asyncio. Knows messages; no worker's loop."""

import asyncio
import itertools
import time
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from ps_protocol.rpc.channel import CHANNEL_OPTIONS
from ps_protocol.v1 import chief_service_pb2 as pb

_SERVICE = "ps_protocol.v1.ChiefService"
_TIMEOUT_S = 60.0

Timed = tuple[float, pb.TokenReply]


class Calls:
    """A worker's connection to its chief, with one stream for the calls of every step. Returns tokens with their time of arrival."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._methods: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._under_way: dict[int, asyncio.Future[tuple[float, pb.ConverseResponse]]] = {}
        self._stream: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        """Registers the worker."""
        return pb.RegisterWorkerResponse.FromString(await self._call("RegisterWorker", request))

    async def dequeue(self, request: pb.DequeueTokenRequest) -> Timed:
        """Has a contribution counted, and waits for a token."""
        at, answer = await self._ask(pb.ConverseRequest(call=next(self._numbers), token=request))
        return at, answer.token

    async def heartbeat(self, request: pb.HeartbeatRequest) -> None:
        """Renews the lease."""
        await self._call("Heartbeat", request)

    async def leave(self, request: pb.DeregisterWorkerRequest) -> None:
        """Ends the lease and the connection."""
        if self._reader is not None:
            self._reader.cancel()
            self._stream.cancel()
        await self._call("DeregisterWorker", request)
        await self._channel.close()

    async def _call(self, method: str, request: Message) -> bytes:
        if method not in self._methods:
            self._methods[method] = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        answer: bytes = await self._methods[method](request.SerializeToString(), timeout=_TIMEOUT_S)
        return answer

    async def _ask(self, request: pb.ConverseRequest) -> tuple[float, pb.ConverseResponse]:
        if self._stream is None:
            self._stream = self._channel.stream_stream(f"/{_SERVICE}/Converse")()
            self._reader = asyncio.get_running_loop().create_task(self._read())
        answered = self._under_way[request.call] = asyncio.get_running_loop().create_future()
        async with self._turn:  # gRPC takes one message at a time
            await self._stream.write(request.SerializeToString())
        at, answer = await answered
        if answer.WhichOneof("response") == "error":
            raise RuntimeError(f"the chief: {answer.error.reason}: {answer.error.message}")
        return at, answer

    async def _read(self) -> None:
        try:
            # At its end, a stream returns a value that is not bytes.
            while isinstance(data := await self._stream.read(), bytes):
                at, answer = time.monotonic(), pb.ConverseResponse.FromString(data)
                self._under_way.pop(answer.call).set_result((at, answer))
            raise RuntimeError(f"the stream has ended: {await self._stream.details()}")
        except Exception as error:
            for answered in self._under_way.values():
                answered.set_exception(error)
            self._under_way.clear()
