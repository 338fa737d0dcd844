"""The caller's side of long-lived streams: driven by the calling thread itself, opened at first use, reopened after a break.

Knows gRPC's streams and bytes; no message.
"""

import atexit
import importlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from ps_protocol.errors import Cancelled, PsError, Unavailable
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.rpc.client import WRONG_ANSWERS, CancellingOnInterrupt, Connection, not_understood, translating
from ps_protocol.rpc.status import from_ending
from ps_protocol.sockets.data_socket import DataSocket

# A bidirectional stream that the calling thread works by itself.
#
# grpcio's own streams take two threads more, one that feeds them and one that receives for the whole channel, and a message passes through
# locks written in Python between them: 0.20 ms for 4 KiB and its answer, and 0.15 ms of CPU at the client. A blocking unary call of grpcio
# does without, since it has a completion queue of its own; a stream with such a queue takes 0.13 and 0.06 ms. grpcio offers that only for
# streams downwards, so `_DirectStream` uses what lies beneath (since 2018 the same), and where that is not as expected, `_FedStream`
# serves.


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}  # a value is number and name
_NO_FLAGS = 0

Metadata = tuple[tuple[str, str], ...]


class StreamEnded(Exception):
    """The stream is over: gRPC's status, its text, and the trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata


class Stream(Protocol):
    """One stream. Any thread may `cancel`, `send` and `request`; the others are for one thread at a time."""

    def send(self, message: bytes) -> None:
        """Sends a message when those before it have left, if a thread receives meanwhile. Does not wait, and does not fail."""

    def flush(self) -> None:
        """Waits until what was sent has left. Raises StreamEnded."""

    def receive(self) -> bytes:
        """Waits for the next message and returns it. Raises StreamEnded if there is none to come."""

    def request(self, message: bytes) -> None:
        """Sends a message that one message answers; the next request leaves when that is there. Does not wait, and does not fail."""

    def answer(self) -> bytes:
        """Waits for the answer to a request and returns it. Raises StreamEnded if there is none to come."""

    def exchange(self, messages: Iterable[bytes]) -> bytes:
        """Sends messages until they end or a message comes, and returns that one. Raises StreamEnded.

        A message is asked for when the one before it has been taken up, so that one of them is in memory besides gRPC's.
        """

    def cancel(self) -> None:
        """Ends the stream. Idempotent, never waits."""

    def end(self) -> None:
        """Ends the stream and releases its resources, for the thread whose turn it is. Idempotent."""


def open_stream(channel: grpc.Channel, path: str, *, metadata: Metadata = ()) -> Stream:
    """Begins a stream of bytes to a method, "/service/method". Connects meanwhile; raises ValueError if the channel is closed."""
    try:
        return _DirectStream(channel, path, metadata)
    except (ImportError, AttributeError, TypeError):
        return _FedStream(channel, path, metadata)


class _DirectStream:
    """See Stream. A batch of operations has one event when it is done; events are taken by the thread that waits."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        # Typed as anything: it has no types.
        cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
        self._cygrpc = cygrpc
        kinds: Any = cygrpc.OperationType
        self._kinds = kinds.send_message, kinds.receive_message, kinds.receive_status_on_client
        # Guards what a thread that sends and one that receives both change.
        self._lock = threading.Lock()
        self._unsent: deque[tuple[bytes, bool]] = deque()  # messages, and which of them are requests
        self._is_sending = self._is_receiving = False
        self._message: bytes | None = None
        # How it has ended. Not the exception itself: that would hold, once raised, the frames that it came through, and with
        # them this stream.
        self._ending: tuple[grpc.StatusCode, str, Metadata] | None = None
        # The batches are of gRPC's own streams; the first sends the headers, and ends with the call.
        beginning = (cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),)
        status, headers = (cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),), (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),)
        batches = [(beginning, None), (status, None), (headers, None)]
        inner: Any = channel
        flags = cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS
        self._call = inner._channel.segregated_call(flags, path.encode(), None, None, metadata, None, batches, None)
        self._num_pending = len(batches)

    def send(self, message: bytes) -> None:
        with self._lock:
            if self._is_sending:
                self._unsent.append((message, False))
            else:
                self._start_sending_locked(message, is_request=False)

    def request(self, message: bytes) -> None:
        with self._lock:
            if self._is_sending:
                self._unsent.append((message, True))
            else:
                self._start_sending_locked(message, is_request=True)

    def flush(self) -> None:
        # What is not asked for ends the stream as soon as it has its status.
        self._start_receiving()
        while self._is_sending and self._message is None:
            self._take_event_of_open_stream()

    def receive(self) -> bytes:
        self._start_receiving()
        return self.answer()

    def answer(self) -> bytes:
        while (message := self._message) is None:
            self._take_event_of_open_stream()
        self._message = None
        return message

    def exchange(self, messages: Iterable[bytes]) -> bytes:
        self._start_receiving()
        for message in messages:
            while self._is_sending and self._message is None:
                self._take_event_of_open_stream()
            if self._message is not None:
                break
            self.send(message)
        return self.receive()

    def cancel(self) -> None:
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "ended by this process")

    def end(self) -> None:
        self.cancel()
        self._unsent.clear()
        if self._is_sending:
            # What is being written to a server that is stopped stays so until it continues, or is given up. gRPC keeps the call, and
            # descriptors of it, until its last event has been taken.
            threading.Thread(target=self._take_last_events, name=_LAST_EVENTS, daemon=True).start()
        else:
            self._take_last_events()

    def _take_last_events(self) -> None:
        while self._num_pending:
            self._take_event()

    def _start_sending_locked(self, message: bytes, *, is_request: bool) -> None:
        sending = self._cygrpc.SendMessageOperation(message, _NO_FLAGS)
        if is_request and not self._is_receiving:
            # One event for both, when the answer is there.
            self._is_sending = self._is_receiving = self._start_locked(sending, self._cygrpc.ReceiveMessageOperation(_NO_FLAGS))
        else:
            self._is_sending = self._start_locked(sending)

    def _start_receiving(self) -> None:
        if not self._is_receiving and self._message is None:
            with self._lock:
                self._is_receiving = self._start_locked(self._cygrpc.ReceiveMessageOperation(_NO_FLAGS))

    def _start_locked(self, *operations: Any) -> bool:
        """Begins a batch; False if the stream is over."""
        is_started: bool = self._call.operate(operations, None)
        self._num_pending += is_started
        return is_started

    def _take_event_of_open_stream(self) -> None:
        if self._ending is not None and not self._is_receiving:
            raise StreamEnded(*self._ending)
        self._take_event()

    def _take_event(self) -> None:
        """Waits, without the interpreter's lock, for the end of a batch."""
        event = self._call.next_event()
        with self._lock:
            self._num_pending -= 1
            for operation in event.batch_operations:
                self._note_locked(operation)
            if self._unsent and not self._is_sending:
                message, is_request = self._unsent.popleft()
                self._start_sending_locked(message, is_request=is_request)

    def _note_locked(self, operation: Any) -> None:
        sent, received, status = self._kinds
        kind = operation.type()
        if kind == received:
            self._is_receiving, self._message = False, operation.message()
        elif kind == sent:
            self._is_sending = False
        elif kind == status:
            code = _CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
            self._ending = (code, _text(operation.details()), operation.trailing_metadata() or ())


# The name of threads that take the last events of streams, and how long the end of the process waits for them: a server that is stopped
# keeps them longer, but then they wait in gRPC, without a lock.
_LAST_EVENTS = "lockstep-ended-stream"
_LAST_EVENTS_S = 2.0


@atexit.register
def _await_last_events() -> None:
    """Waits for the last events before the interpreter ends: a daemon thread that it ends in the middle of one keeps a lock of its channel,
    and the interpreter waits for that lock without end when it deletes the channel.
    """
    end = time.monotonic() + _LAST_EVENTS_S
    for thread in threading.enumerate():
        if thread.name == _LAST_EVENTS:
            thread.join(max(0.0, end - time.monotonic()))


class _FedStream:
    """See Stream. By grpcio's public interface: a thread of its own takes what is to be sent."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._outgoing: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        open_call: Any = channel.stream_stream(path)
        self._call = open_call(self._feed(), metadata=metadata)

    def send(self, message: bytes) -> None:
        self._outgoing.put(iter((message,)))

    def flush(self) -> None:
        """A thread of gRPC sends."""

    def receive(self) -> bytes:
        try:
            message: bytes = next(self._call)
        except StopIteration:
            raise StreamEnded(grpc.StatusCode.OK, "", ()) from None
        except grpc.RpcError:
            metadata = self._call.trailing_metadata() or ()
            raise StreamEnded(self._call.code(), self._call.details() or "", metadata) from None
        return message

    def request(self, message: bytes) -> None:
        self.send(message)

    def answer(self) -> bytes:
        return self.receive()

    def exchange(self, messages: Iterable[bytes]) -> bytes:
        is_answered = threading.Event()
        self._outgoing.put(itertools.takewhile(lambda _: not is_answered.is_set(), messages))
        try:
            return self.receive()
        finally:
            is_answered.set()

    def cancel(self) -> None:
        self._call.cancel()

    def end(self) -> None:
        self.cancel()
        self._outgoing.put(None)

    def _feed(self) -> Iterator[bytes]:
        for messages in iter(self._outgoing.get, None):
            yield from messages


def _text(details: bytes | str | None) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else details or ""


# Long-lived streams to a method of a server: opened when first used, and again after they have broken.


Result = TypeVar("Result")


class LongLivedStream:
    """A stream that outlives its uses, of which there is one at a time. Any thread may `cancel` and `expire`; see `Streams`."""

    def __init__(self, connection: Connection, method: str, *, deadlines: CallDeadlines) -> None:
        self._connection = connection
        self._method = method
        self._deadlines = deadlines
        self._stream: Stream | None = None
        self._is_cut = self._has_expired = self._is_closed = False
        # What a use has asked for and not received, for the next use. None once the stream is broken off.
        self.asked: object = None
        # What carries the stream's payloads, if anything does; it ends with the stream.
        self.data_socket: DataSocket | None = None

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

    @property
    def may_be_kept(self) -> bool:
        """Whether another use may follow."""
        return self._stream is not None and not self._is_cut

    def use(self, act: Callable[["LongLivedStream"], Result], *, timeout_s: float, awaited: str) -> Result:
        """See `Streams.use`."""
        number, is_done = self._deadlines.begin(self, timeout_s=timeout_s), False
        try:
            result = act(self)
            is_done = True
            return result
        except WRONG_ANSWERS as wrong:
            raise not_understood(self._connection.target, wrong) from None
        except StreamEnded as end:
            error = self._error(end, awaited=awaited, timeout_s=timeout_s)
            try:
                raise error from None
            finally:
                del error  # which holds this frame now
        finally:
            self._deadlines.end(number)
            if not is_done or self._is_cut:
                self.break_off()

    def break_off(self) -> None:
        """Ends the stream, for the one whose use it is; `stream` is another one then."""
        stream, self._stream = self._stream, None
        self.asked = None
        self.let_go_of_socket()
        if stream is not None:
            stream.end()

    def carry_payloads(self, data_socket: DataSocket) -> None:
        """Has a data socket carry the stream's payloads from now on."""
        self.data_socket = data_socket
        if self._is_cut:
            data_socket.close()

    def let_go_of_socket(self) -> None:
        """Closes the data socket, if there is one; the stream continues without."""
        data_socket, self.data_socket = self.data_socket, None
        if data_socket is not None:
            data_socket.close()

    def cancel(self) -> None:
        """Breaks the use under way, from any thread."""
        self._is_cut = True
        stream, data_socket = self._stream, self.data_socket
        if data_socket is not None:
            data_socket.close()
        if stream is not None:
            stream.cancel()

    def expire(self) -> None:
        """Breaks the use under way, since its time is up."""
        self._has_expired = True
        self.cancel()

    def close(self) -> None:
        """Ends the use under way with Cancelled."""
        self._is_closed = True
        self.cancel()

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


class Streams:
    """The streams to one method of a server. Thread-safe: one stream is kept, and uses at the same time have others, that end with them."""

    def __init__(self, connection: Connection, method: str, *, deadlines: CallDeadlines) -> None:
        self.connection = connection
        self._method = method
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._kept: LongLivedStream | None = None
        self._in_use: set[LongLivedStream] = set()
        self._is_closed = False

    def use(self, act: Callable[[LongLivedStream], Result], *, timeout_s: float, awaited: str) -> Result:
        """Returns what `act` does with a stream; it may be called twice, if the first stream had been ended while nobody used it.

        Whatever `act` raises breaks the stream. One that breaks by itself raises Unavailable, or the error that the server ended it with;
        the next use opens another. Raises DeadlineExceeded when `timeout_s` is up, Cancelled after `close`. Ctrl-C breaks the stream.
        """
        with self._lock:
            if self._is_closed:
                raise Cancelled(f"{self.connection.target}: the connection was closed by this process")
            stream, self._kept = self._kept, None
            if stream is None:
                stream = LongLivedStream(self.connection, self._method, deadlines=self._deadlines)
            self._in_use.add(stream)
        try:
            with CancellingOnInterrupt(outlives_block=True) as block:
                block.watch(stream)
                return stream.use(act, timeout_s=timeout_s, awaited=awaited)
        finally:
            with self._lock:
                self._in_use.remove(stream)
                is_kept = self._kept is None and not self._is_closed and stream.may_be_kept
                if is_kept:
                    self._kept = stream
            if not is_kept:
                stream.break_off()

    def close(self) -> None:
        """Ends the streams, and the uses under way with Cancelled. Idempotent."""
        with self._lock:
            self._is_closed = True
            kept, self._kept, in_use = self._kept, None, [*self._in_use]
        for stream in in_use:
            stream.close()
        if kept is not None:
            kept.break_off()
