"""The standing stream of one worker: calls as they come, answers as they are ready. Knows messages and the runner; decides nothing.

A call needs no thread while it waits: the runner hands its answer over, in the thread that has it, and that sends it.
"""

import threading
from collections.abc import Callable
from functools import partial

from chief import events as ev
from chief.runner import Runner
from chief.worker_calls import CALLS, encoded_answer, encoded_error
from ps_protocol.codec import decode_message
from ps_protocol.errors import MalformedMessage
from ps_protocol.standing_peer import Handler, Peer
from ps_protocol.v1 import chief_service_pb2 as pb


class Conversation:
    """Serves one stream. Implements the Handler of `direct_serving`; answers come from any thread."""

    def __init__(self, runner: Runner, peer: Peer, *, on_close: Callable[[Handler], None]) -> None:
        self._runner, self._peer, self._on_close = runner, peer, on_close
        self._lock = threading.Lock()
        self._under_way: dict[int, int | None] = {}  # the caller's number of a call -> the runner's, once known
        self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call that a message is. Raises MalformedMessage."""
        message = decode_message(pb.ConverseRequest, data)
        number, kind = message.call, message.WhichOneof("request")
        if number in self._under_way:
            raise MalformedMessage(f"call {number} is under way; give each call a number of its own")
        if kind not in CALLS:
            error = MalformedMessage(f"call {number}: it asks for nothing that this chief knows; use the calls of their own")
            self._peer.send(encoded_error(number, error))
            return
        with self._lock:
            self._under_way[number] = None
        call = self._runner.begin(partial(CALLS[kind][0], getattr(message, kind)), partial(self._answer, number, kind))
        with self._lock:
            if number in self._under_way:
                self._under_way[number] = call
            is_over = self._is_over
        if is_over:
            self._runner.cancel(call)

    def close(self) -> None:
        """The stream is over: what has no answer gets none."""
        self._on_close(self)
        with self._lock:
            self._is_over = True
            calls = [*self._under_way.values()]
            self._under_way.clear()
        for call in calls:
            if call is not None:
                self._runner.cancel(call)

    def _answer(self, number: int, kind: str, answer: ev.Reply | ev.Refuse) -> None:
        with self._lock:
            self._under_way.pop(number, None)
            if self._is_over:
                return
        if isinstance(answer, ev.Reply):
            self._peer.send(encoded_answer(number, kind, answer.value))
        else:
            self._peer.send(encoded_error(number, answer.error))
