"""Calls of one message each way, served without a thread that waits. Knows messages and the runner; decides nothing."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from chief import events as ev
from chief.runner import Runner
from ps_protocol.codec import decode_message
from ps_protocol.errors import MalformedMessage
from ps_protocol.standing_peer import Handler, Peer
from ps_protocol.status import defect


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC that is one event: its request, how to make the event of that and the call's number, and how to write the answer."""

    request: type[Message]
    event: Callable[[Any, int], ev.Event]
    answer: Callable[[Any], Message]


class SingleCall:
    """Serves one call. Implements the Handler of `direct_serving`; the answer comes from any thread."""

    def __init__(self, runner: Runner, peer: Peer, method: Method, *, on_close: Callable[[Handler], None]) -> None:
        self._runner, self._peer, self._method, self._on_close = runner, peer, method, on_close
        self._lock = threading.Lock()
        self._number: int | None = None
        self._is_begun = self._is_over = False

    def take(self, data: bytes) -> None:
        """Begins the call. Raises MalformedMessage."""
        if self._is_begun:
            raise MalformedMessage("a second message; this call takes one")
        self._is_begun = True
        message = decode_message(self._method.request, data)
        number = self._runner.begin(partial(self._method.event, message), self._answer)
        with self._lock:
            self._number, is_over = number, self._is_over
        if is_over:
            self._runner.cancel(number)

    def finish(self) -> None:
        """The caller has said all: nothing changes, if it has said anything. Raises MalformedMessage."""
        if not self._is_begun:
            raise MalformedMessage("no message; this call takes one")

    def close(self) -> None:
        """The call is answered, or the caller has gone away."""
        self._on_close(self)
        with self._lock:
            self._is_over, number = True, self._number
        if number is not None:
            self._runner.cancel(number)

    def _answer(self, answer: ev.Reply | ev.Refuse) -> None:
        if isinstance(answer, ev.Refuse):
            self._peer.end(answer.error)
            return
        try:
            data = self._method.answer(answer.value).SerializeToString()
        except Exception:
            self._peer.end(defect("the chief"))
            return
        self._peer.send(data)
        self._peer.end()


class ImmediateCall:
    """Serves one call whose answer is ready at once. Implements the Handler of `direct_serving`."""

    def __init__(self, peer: Peer, answer: Callable[[bytes], Message], *, on_close: Callable[[Handler], None]) -> None:
        self._peer, self._compute, self._on_close = peer, answer, on_close

    def take(self, data: bytes) -> None:
        """Answers. Raises PsError."""
        self._peer.send(self._compute(data).SerializeToString())
        self._peer.end()

    def close(self) -> None:
        """The call is over."""
        self._on_close(self)
