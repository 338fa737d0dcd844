"""One standing stream to a method of a server: opened when first used, and again after it has broken. Knows how to use it; no message."""

import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.connection import Connection, translating
from ps_protocol.direct_stream import Stream, StreamEnded, open_stream
from ps_protocol.errors import Cancelled, LimitExceeded, PsError, Unavailable, Unimplemented
from ps_protocol.interrupts import CancellingOnInterrupt
from ps_protocol.status import from_ending

Result = TypeVar("Result")


class StandingStream:
    """A stream that outlives its uses. Thread-safe: one use at a time, whoever comes meanwhile is told to do without."""

    def __init__(self, connection: Connection, method: str, *, deadlines: CallDeadlines) -> None:
        self._connection = connection
        self._method = method
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._is_served = True
        self._is_cut = self._has_expired = self._is_closed = False

    def use(self, act: Callable[["StandingStream"], Result], *, timeout_s: float, awaited: str) -> Result | None:
        """Returns what `act` does with `stream`; None if the server has no such stream, or another thread is using it.

        Whatever `act` raises breaks the stream. One that breaks by itself raises Unavailable, or the error that the server ended it with;
        the next use opens another. Raises DeadlineExceeded when `timeout_s` is up, Cancelled after `close`. Ctrl-C breaks the stream.
        """
        if not self._is_served or not self._lock.acquire(blocking=False):
            return None
        try:
            with CancellingOnInterrupt(outlives_block=True) as block:
                self._is_cut = self._has_expired = False
                block.watch(self)
                return self._use(act, timeout_s=timeout_s, awaited=awaited)
        finally:
            self._lock.release()

    @property
    def stream(self) -> Stream:
        """The stream, for the one whose use it is; opened if there is none."""
        if self._stream is None:
            with translating(self._connection.target, awaited="a stream", timeout_s=0.0):
                self._stream = open_stream(
                    self._connection.channel, self._connection.path(self._method), metadata=self._connection.metadata()
                )
            if self._is_cut:
                self._stream.cancel()
        return self._stream

    def break_off(self) -> None:
        """Ends the stream, for the one whose use it is; `stream` is another one then."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()

    def cancel(self) -> None:
        """Breaks the use under way, from any thread."""
        self._is_cut = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def expire(self) -> None:
        """Breaks the use under way, since its time is up."""
        self._has_expired = True
        self.cancel()

    def close(self) -> None:
        """Ends the stream, and the use under way with Cancelled. Idempotent."""
        self._is_closed = True
        self.cancel()
        if self._lock.acquire(blocking=False):
            try:
                self.break_off()
            finally:
                self._lock.release()

    def _use(self, act: Callable[["StandingStream"], Result], *, timeout_s: float, awaited: str) -> Result | None:
        number, is_done = self._deadlines.begin(self, timeout_s=timeout_s), False
        try:
            result = act(self)
            is_done = True
            return result
        except StreamEnded as end:
            error = self._error(end, awaited=awaited, timeout_s=timeout_s)
            if isinstance(error, (Unimplemented, LimitExceeded)):
                # An older server, or one that has no thread for another standing stream.
                self._is_served = False
                return None
            try:
                raise error from None
            finally:
                del error  # which holds this frame now
        finally:
            self._deadlines.end(number)
            if not is_done or self._is_cut:
                self.break_off()

    def _error(self, end: StreamEnded, *, awaited: str, timeout_s: float) -> PsError:
        target = self._connection.target
        if self._is_closed:
            return Cancelled(f"{target}: the connection was closed by this process")
        code = grpc.StatusCode.DEADLINE_EXCEEDED if self._has_expired else end.code
        if code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) and not self._is_cut:
            return Unavailable(f"cannot reach {target}: it ended the stream {self._method}; is it ending?")
        return from_ending(
            code, end.details, () if self._has_expired else end.metadata, target=target, awaited=awaited, timeout_s=timeout_s
        )
