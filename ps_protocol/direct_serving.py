"""Standing streams served by events instead of threads: the server's side of what `direct_stream` is for callers. Knows no message.

grpcio's threaded server gives each bidirectional stream a thread, and each message takes two of them: one that takes the event, and the
stream's own. For answers of a few bytes the way between them is most of the cost: 109 us of CPU for a message and its answer, against 72
when the thread that takes the event also handles the message. grpcio lets a handler be called back for batches of operations, as its own
streams are (since 2018 the same); where that is not as expected, each stream has its threads, and everything else stays as it is.
"""

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ps_protocol.errors import PsError
from ps_protocol.never_waiting import never_waiting
from ps_protocol.standing_peer import Begin, FinishingHandler, Handler
from ps_protocol.status import defect, set_status
from ps_protocol.threaded_peer import ThreadedPeer

log = logging.getLogger("lockstep.rpc")

_NO_FLAGS = 0
# Answers that a caller has not taken. It asks on and does not listen: its stream is ended, since nothing else would bound this.
_MAX_UNSENT = 4_096


def standing_method_handler(begin: Begin, *, server_name: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Returns the handler of a bidirectional method of bytes; `begin` is called for each stream. For servers of `grpc.server`.

    Unary methods are the same on the wire: one message, the end of the caller's side (`finish`), one answer, and the end.
    """

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext, send_response: Callable[[bytes | None], None]) -> None:
        try:
            peer = _EventPeer(context, finish=lambda: send_response(None), server_name=server_name)
        except (ImportError, AttributeError):
            by_threads = ThreadedPeer(requests, context, server_name=server_name)
            threading.Thread(target=_serve_all, args=(by_threads, begin, send_response), name="standing-stream", daemon=True).start()
            return
        peer.start(begin)

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(never_waiting(serve))
    return handler


def _serve_all(peer: ThreadedPeer, begin: Begin, send_response: Callable[[bytes | None], None]) -> None:
    for answer in peer.serve(begin):
        send_response(answer)
    send_response(None)


def _nothing() -> None:
    """Is done in place of what has been done once."""


class _EventPeer:
    """See Peer. Its callbacks run in the thread of the server that takes events; at most one message is read and one written at once."""

    def __init__(self, context: grpc.ServicerContext, *, finish: Callable[[], None], server_name: str) -> None:
        cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
        inner: Any = context
        self._context, self._finish, self._server_name = context, finish, server_name
        self._receiving = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
        self._begin_answer, self._answer = cygrpc.SendInitialMetadataOperation((), _NO_FLAGS), cygrpc.SendMessageOperation
        self._call, self._state = inner._rpc_event.call, inner._state
        self._call.start_server_batch, self._state.initial_metadata_allowed  # noqa: B018  # AttributeError, before anything has begun
        self._lock = threading.Lock()
        self._has_left = threading.Condition(self._lock)
        self._num_waiting = 0
        self._unsent: deque[bytes] = deque()
        self._is_sending = self._is_ending = self._is_over = self._is_receiving = self._is_paused = self._is_deaf = False
        self._handler: Handler | None = None

    def start(self, begin: Begin) -> None:
        """Begins to take messages."""
        try:
            self._handler = begin(self, self._context)
        except PsError as error:
            self.end(error)
            return
        except Exception:
            self.end(defect(self._server_name))
            return
        if not self._context.add_callback(self._lost):
            self._close()
            return
        self._receive()

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def wait_for_room(self) -> bool:
        with self._lock:
            self._num_waiting += 1
            try:
                self._has_left.wait_for(lambda: self._is_over or self._is_ending or not self._unsent)
            finally:
                self._num_waiting -= 1
            return not (self._is_over or self._is_ending)

    def pause(self) -> None:
        self._is_paused = True

    def go_on(self) -> None:
        self._is_paused = False
        self._receive()

    def send(self, message: bytes) -> None:
        with self._lock:
            if self._is_over or self._is_ending:
                return
            if self._is_sending:
                self._unsent.append(message)
                is_full = len(self._unsent) > _MAX_UNSENT
            else:
                self._is_sending, is_full = True, False
                self._start_sending(message)
        if is_full:
            self._context.cancel()

    def end(self, error: PsError | None = None) -> None:
        with self._lock:
            if self._is_over or self._is_ending:
                return
            self._is_ending = True
            if self._num_waiting:
                self._has_left.notify_all()
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
            if self._num_waiting:
                self._has_left.notify_all()
        if is_done:
            self._over()
        return None, ()

    def _receive(self) -> None:
        """Asks for a message, unless one has been asked for, or none is wanted."""
        with self._lock:
            if self._is_receiving or self._is_paused or self._is_over or self._is_ending or self._is_deaf or self._call is None:
                return
            self._is_receiving = True
            self._call.start_server_batch(self._receiving, self._received)

    def _received(self, event: Any) -> tuple[None, tuple[()]]:
        message, handler = event.batch_operations[0].message(), self._handler
        self._is_receiving = False
        try:
            if message is None:
                self._is_deaf = True
                if isinstance(handler, FinishingHandler) and not self._is_over:
                    handler.finish()
                else:
                    self.end()
            elif handler is not None and not self._is_ending and not self._is_over:
                handler.take(message)
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
            self._has_left.notify_all()
        self._close()

    def _over(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._close()
        finish, self._finish = self._finish, _nothing
        finish()

    def _close(self) -> None:
        with self._lock:
            handler, self._handler = self._handler, None
            # A call that is over and still held by somebody can make gRPC's waiting for events return at once, again and again.
            self._call = None
        if handler is not None:
            try:
                handler.close()
            except Exception:
                log.exception("closing a stream failed")
