"""Standing streams served by events instead of threads: the server's side of what `direct_stream` is for callers. Knows no message.

grpcio's threaded server gives each bidirectional stream a thread, and each message takes two of them: one that takes the event, and the
stream's own. For answers of a few bytes the way between them is most of the cost: 109 us of CPU for a message and its answer, against 72
when the thread that takes the event also handles the message. grpcio lets a handler be called back for batches of operations, as its own
streams are (since 2018 the same); where that is not as expected, each stream has its threads, and everything else stays as it is.
"""

import importlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from ps_protocol.errors import InternalError, PsError
from ps_protocol.status import defect, set_status

log = logging.getLogger(__name__)

_NO_FLAGS = 0
# Answers that a caller has not taken. It asks on and does not listen: its stream is ended, since nothing else would bound this.
_MAX_UNSENT = 4_096


class Peer(Protocol):
    """The other end of one stream. Thread-safe; no method waits."""

    def send(self, message: bytes) -> None:
        """Sends a message after those before it. Does nothing once the stream is over."""

    def end(self, error: PsError | None = None) -> None:
        """Ends the stream, with the error's status if there is one, once what was given to `send` has left. Idempotent."""


class Handler(Protocol):
    """What is done with one stream. `take` is called for one message after the other, never for two at once."""

    def take(self, message: bytes) -> None:
        """Handles a message. Must not wait: the server's other streams stand still meanwhile. A PsError ends the stream with its status."""

    def close(self) -> None:
        """The stream is over, for whatever reason. Called once; messages may still be under way to the peer only if it ended well."""


Begin = Callable[[Peer, grpc.ServicerContext], Handler]


def standing_method_handler(begin: Begin, *, server_name: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Returns the handler of a bidirectional method of bytes; `begin` is called for each stream. For servers of `grpc.server`."""

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext, send_response: Callable[[bytes | None], None]) -> None:
        try:
            peer = _EventPeer(context, finish=lambda: send_response(None), server_name=server_name)
        except (ImportError, AttributeError):
            for answer in _ThreadedPeer(requests, context, server_name=server_name).serve(begin):
                send_response(answer)
            send_response(None)
            return
        peer.start(begin)

    # grpcio then calls it with a function to answer by, and keeps the call open until that is given None.
    serve.experimental_non_blocking = True  # type: ignore[attr-defined]
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(serve)  # type: ignore[arg-type]  # one argument more
    return handler


class _EventPeer:
    """See Peer. All its callbacks run in the thread of the server that takes events; at most one message is read and one written at once."""

    def __init__(self, context: grpc.ServicerContext, *, finish: Callable[[], None], server_name: str) -> None:
        cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
        inner: Any = context
        self._context, self._finish, self._server_name = context, finish, server_name
        self._receiving = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
        self._begin_answer, self._answer = cygrpc.SendInitialMetadataOperation((), _NO_FLAGS), cygrpc.SendMessageOperation
        self._call, self._state = inner._rpc_event.call, inner._state
        self._call.start_server_batch, self._state.initial_metadata_allowed  # noqa: B018  # AttributeError, before anything has begun
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._is_sending = self._is_ending = self._is_over = False
        self._handler: Handler | None = None

    def start(self, begin: Begin) -> None:
        """Begins to take messages."""
        self._handler = begin(self, self._context)
        if not self._context.add_callback(self._lost):
            self._close()
            return
        self._receive()

    def send(self, message: bytes) -> None:
        with self._lock:
            if self._is_over or self._is_ending:
                return
            if self._is_sending:
                self._unsent.append(message)
                is_deaf = len(self._unsent) > _MAX_UNSENT
            else:
                self._is_sending, is_deaf = True, False
                self._start_sending(message)
        if is_deaf:
            self._context.cancel()

    def end(self, error: PsError | None = None) -> None:
        with self._lock:
            if self._is_over or self._is_ending:
                return
            self._is_ending = True
            if error is not None:
                set_status(self._context, error)
            is_done = not self._is_sending
        if is_done:
            self._over()

    def _start_sending(self, message: bytes) -> None:
        operations: tuple[Any, ...] = (self._answer(message, _NO_FLAGS),)
        if self._state.initial_metadata_allowed:
            self._state.initial_metadata_allowed = False
            operations = (self._begin_answer, *operations)
        self._call.start_server_batch(operations, self._sent)

    def _sent(self, event: Any) -> tuple[None, tuple[()]]:
        is_done = False
        with self._lock:
            if not event.success:
                self._unsent.clear()
            if self._unsent and not self._is_over:
                self._start_sending(self._unsent.popleft())
            else:
                self._is_sending, is_done = False, self._is_ending
        if is_done:
            self._over()
        return None, ()

    def _receive(self) -> None:
        self._call.start_server_batch(self._receiving, self._received)

    def _received(self, event: Any) -> tuple[None, tuple[()]]:
        message = event.batch_operations[0].message()
        try:
            if message is None or self._is_over:
                self.end()
            elif self._handler is not None and not self._is_ending:
                self._handler.take(message)
                self._receive()
        except PsError as error:
            self.end(error)
        except Exception:
            # What escapes from here would end the server's only thread for events.
            self.end(defect(self._server_name))
        return None, ()

    def _lost(self) -> None:
        """The call has ended, by us or by the peer."""
        with self._lock:
            self._is_over = True
            self._unsent.clear()
        self._close()

    def _over(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._close()
        self._finish()

    def _close(self) -> None:
        with self._lock:
            handler, self._handler = self._handler, None
        if handler is not None:
            try:
                handler.close()
            except Exception:
                log.exception("closing a stream failed")


class _ThreadedPeer:
    """See Peer. By grpcio's public interface: one thread answers, another one reads."""

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext, *, server_name: str) -> None:
        self._requests, self._context, self._server_name = requests, context, server_name
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_ending = False

    def serve(self, begin: Begin) -> Iterator[bytes]:
        """Yields what is to be sent, until the stream ends."""
        handler = begin(self, self._context)
        self._context.add_callback(self.end)
        threading.Thread(target=self._read, args=(handler,), name="standing-stream", daemon=True).start()
        try:
            yield from iter(self._answers.get, None)
        finally:
            handler.close()

    def send(self, message: bytes) -> None:
        if not self._is_ending:
            self._answers.put(message)

    def end(self, error: PsError | None = None) -> None:
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
            if error is not None:
                set_status(self._context, error)
        self._answers.put(None)

    def _read(self, handler: Handler) -> None:
        try:
            for message in self._requests:
                if self._is_ending:
                    return
                handler.take(message)
            self.end()
        except PsError as error:
            self.end(error)
        except grpc.RpcError:
            self.end()
        except Exception:
            self.end(defect(self._server_name) if self._context.is_active() else InternalError("the caller has gone"))
