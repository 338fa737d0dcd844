"""The standing stream of one worker: calls as they come, answers as they are ready. Knows messages and the runner; decides nothing.

A call needs no task while it waits: the runner hands its answer over, and one writer at a time sends what there is.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from chief import events as ev
from chief.runner import Runner
from chief.worker_calls import CALLS
from ps_protocol.call_errors import encode_call_error
from ps_protocol.codec import decode_message
from ps_protocol.errors import MalformedMessage
from ps_protocol.v1 import chief_service_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]

# Answers that a peer has not taken; with more, nothing is read from it until it has.
_MAX_UNSENT = 256


class Conversation:
    """Serves one stream, in the runner's event loop."""

    def __init__(self, runner: Runner, context: Context) -> None:
        self._runner = runner
        self._context = context
        self._under_way: dict[int, int] = {}  # the caller's number of a call -> the runner's
        self._unsent: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._is_over = False

    async def serve(self) -> None:
        """Returns when the peer has ended its side, or at `end`; what has no answer then gets none. Raises MalformedMessage."""
        self._serving = asyncio.current_task()
        read = self._context.read
        try:
            while (data := await read()) is not grpc.aio.EOF:
                self._take(data)
                if len(self._unsent) > _MAX_UNSENT and self._writing is not None:
                    await asyncio.wait([self._writing])
        except asyncio.CancelledError:
            if not self._is_over:
                raise
        finally:
            self._is_over = True
            for number in self._under_way.values():
                self._runner.cancel(number)
            self._under_way.clear()
            if self._writing is not None:
                await self._writing

    def end(self) -> None:
        """Makes `serve` return, once what is answered has been sent."""
        if not self._is_over and self._serving is not None:
            self._is_over = True
            self._serving.cancel()

    def _take(self, data: bytes) -> None:
        message = decode_message(pb.ConverseRequest, data)
        number, kind = message.call, message.WhichOneof("request")
        if number in self._under_way:
            raise MalformedMessage(f"call {number} is under way; give each call a number of its own")
        if kind not in CALLS:
            error = MalformedMessage(f"call {number}: it asks for nothing that this chief knows; use the calls of their own")
            self._send(pb.ConverseResponse(call=number, error=encode_call_error(error)))
            return
        make_event, encode = CALLS[kind]
        self._under_way[number] = -1
        call = self._runner.begin(partial(make_event, getattr(message, kind)), partial(self._answer, number, kind, encode))
        if number in self._under_way:
            self._under_way[number] = call

    def _answer(self, number: int, kind: str, encode: Callable[[Any], Any], answer: ev.Reply | ev.Refuse) -> None:
        del self._under_way[number]
        if self._is_over:
            return
        if isinstance(answer, ev.Reply):
            self._send(pb.ConverseResponse(call=number, **{kind: encode(answer.value)}))
        else:
            self._send(pb.ConverseResponse(call=number, error=encode_call_error(answer.error)))

    def _send(self, message: pb.ConverseResponse) -> None:
        self._unsent.append(message.SerializeToString())
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        write = self._context.write
        try:
            while self._unsent:
                await write(self._unsent.popleft())
        except Exception:
            self._unsent.clear()  # the peer has gone, which ends `serve`, too
        finally:
            self._writing = None
