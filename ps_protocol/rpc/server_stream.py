"""The server's side of calls and streams: gRPC's events serve quick work, threads serve slow work. Knows no message."""

import importlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Protocol, TypeVar, runtime_checkable

import grpc

from ps_protocol.errors import InternalError, PsError
from ps_protocol.rpc.status import defect, set_status

# Handlers that never wait, and are begun by the thread that takes a server's events.
#
# grpcio otherwise begins every call in a thread of the server's pool, which makes threads as calls come, and keeps them: callers who are
# not even let in could have it make thousands.


Serve = TypeVar("Serve", bound=Callable[..., None])


class _SameThread(futures.ThreadPoolExecutor):
    """Does at once what it is given, and never makes a thread."""

    def submit(self, do: Callable[..., Any], /, *arguments: Any, **named: Any) -> "futures.Future[Any]":
        done: futures.Future[Any] = futures.Future()
        try:
            done.set_result(do(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


SAME_THREAD = _SameThread(1)


def never_waiting(serve: Serve) -> Serve:
    """Returns the handler of a bidirectional method, marked: it is given a third argument, a function to answer by, and must not wait.

    The call lasts until that function is given None, whenever and by whatever thread. Given a message it waits until that has left, so
    that is for other threads.
    """
    # Functions have no such attributes for the type checker.
    for name, value in (("experimental_non_blocking", True), ("experimental_thread_pool", SAME_THREAD)):
        setattr(serve, name, value)
    return serve


# How much of what a connection sends is messages: a connection's bound needs that, and gRPC does not say it.


class Received:
    """How many bytes of calls and messages one connection has received, since `since`, and how many of its calls were let in.

    Each message adds to it, whatever thread takes it. What two threads add at the same moment may count once: budgets bear that.
    """

    __slots__ = ("num_bytes", "num_calls", "since")

    def __init__(self, *, since: float = 0.0) -> None:
        self.since, self.num_bytes, self.num_calls = since, 0, 0


# A message's own frames, and what is sent on account of its answer: window updates, and TLS around each of them.
MESSAGE_BYTES = 256


# What serves a long-lived stream and what it sees of the caller: two interfaces.


class Peer(Protocol):
    """The other end of one stream. Thread-safe; no method waits but `wait_for_room`."""

    @property
    def num_unsent(self) -> int:
        """Messages that wait behind the one that is leaving."""

    def send(self, message: bytes) -> None:
        """Sends a message after those before it. Does nothing once the stream is over."""

    def wait_for_room(self) -> bool:
        """Waits until nothing waits behind the message that is leaving; False if the stream is over. For threads of their own."""

    def pause(self) -> None:
        """Requests no further message until `resume`; for `take`. Idempotent."""

    def resume(self) -> None:
        """Asks for the next message. Idempotent."""

    def answer(self, message: bytes) -> None:
        """Sends a message and asks for the next one, as one operation; for a handler that has paused and sends nothing until then."""

    def end(self, error: PsError | None = None) -> None:
        """Ends the stream, with the error's status if there is one, once what was given to `send` has left. Idempotent."""


class Handler(Protocol):
    """The handler of one stream. `take` is called for one message after the other, never for two at once."""

    def take(self, message: bytes) -> None:
        """Handles a message. Must not wait: the server's other streams stand still meanwhile. A PsError ends the stream with its status."""

    def close(self) -> None:
        """The stream is over, for whatever reason. Called once; messages may still be under way to the peer only if it ended well."""


@runtime_checkable
class FinishingHandler(Handler, Protocol):
    """A handler that may have answers to give when no more messages come."""

    def finish(self) -> None:
        """No more messages will come; the stream lasts until `Peer.end`. Without this method it ends at once."""


class Call(Protocol):
    """What gRPC knows of one call. Thread-safe."""

    def peer(self) -> str:
        """Returns where the caller is."""

    def invocation_metadata(self) -> Any:
        """Returns what came with the call, in pairs."""

    def auth_context(self) -> Any:
        """Returns what the caller's certificate says, in lists."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has it called when the call is over; False if it is over already."""

    def cancel(self) -> Any:
        """Ends the call as CANCELLED."""


Begin = Callable[[Peer, Call], Handler]


# A long-lived stream by grpcio's public interface: two threads, one reads and one writes.


class ThreadedPeer:
    """See Peer. `serve` writes; a thread of its own reads."""

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext, received: Received, *, server_name: str) -> None:
        self._requests, self._context, self._traffic, self._server_name = requests, context, received, server_name
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._is_ending = self._is_paused = False

    def serve(self, begin: Begin) -> Iterator[bytes]:
        """Yields what is to be sent, until the stream ends."""
        try:
            handler = begin(self, self._context)
        except PsError as error:
            set_status(self._context, error)
            return
        except Exception:
            set_status(self._context, defect(self._server_name))
            return
        self._context.add_callback(self.end)
        threading.Thread(target=self._read, args=(handler,), name="stream", daemon=True).start()
        try:
            for answer in iter(self._answers.get, None):
                with self._changed:
                    self._changed.notify_all()
                yield answer
        finally:
            self.end()
            handler.close()

    @property
    def num_unsent(self) -> int:
        """See Peer."""
        return self._answers.qsize()

    def send(self, message: bytes) -> None:
        """See Peer."""
        if not self._is_ending:
            self._answers.put(message)

    def wait_for_room(self) -> bool:
        """See Peer."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending or not self._answers.qsize())
        return not self._is_ending

    def pause(self) -> None:
        """See Peer."""
        self._is_paused = True

    def resume(self) -> None:
        """See Peer."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def answer(self, message: bytes) -> None:
        """See Peer."""
        self.send(message)
        self.resume()

    def end(self, error: PsError | None = None) -> None:
        """See Peer."""
        with self._changed:
            if self._is_ending:
                return
            self._is_ending = True
            self._changed.notify_all()
            if error is not None:
                set_status(self._context, error)
        self._answers.put(None)

    def _read(self, handler: Handler) -> None:
        try:
            for message in self._requests:
                if self._is_ending:
                    return
                self._traffic.num_bytes += len(message) + MESSAGE_BYTES
                handler.take(message)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_ending or not self._is_paused)
            if isinstance(handler, FinishingHandler):
                handler.finish()
            else:
                self.end()
        except PsError as error:
            self.end(error)
        except grpc.RpcError:
            self.end()
        except Exception:
            self.end(defect(self._server_name) if self._context.is_active() else InternalError("the caller has gone"))


class StreamThread:
    """A thread of one stream, for what may take long; begun when it is first needed. It does one thing after the other.

    What fails in it ends the stream, and nothing more is done.
    """

    def __init__(self, peer: Peer, *, server_name: str) -> None:
        self._peer, self._server_name = peer, server_name
        self._work: queue.SimpleQueue[Callable[[], object] | None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything was left to it."""
        return self._work is not None

    def do(self, work: Callable[[], object]) -> None:
        """Leaves it to the thread."""
        if self._work is None:
            self._work = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._work,), name="long-lived-stream", daemon=True).start()
        self._work.put(work)

    def end(self) -> None:
        """Ends the thread after what was left to it."""
        if self._work is not None:
            self._work.put(None)

    def _run(self, work: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
        try:
            # Nothing is named here while it waits: what is done may hold as much as a model.
            while _do(work.get()):
                pass
        except PsError as error:
            self._peer.end(error)
        except Exception:
            self._peer.end(defect(self._server_name))


def _do(work: Callable[[], object] | None) -> bool:
    if work is not None:
        work()
    return work is not None


# Standing streams served by events instead of threads: the server's side of what `ps_protocol.rpc.client_stream` is for callers.
#
# grpcio's threaded server gives each bidirectional stream a thread, and each message takes two of them: one that takes the event, and the
# stream's own. For answers of a few bytes the way between them is most of the cost: 109 us of CPU for a message and its answer, against 72
# when the thread that takes the event also handles the message. Where one side asks and the other answers, an answer and the wish for the
# next message have one event, when that message comes: nothing wakes the thread to tell it that the answer has left. grpcio lets a handler
# be called back for batches of operations, as its own streams are (since 2018 the same); where that is not as expected, each stream has its
# threads, and everything else stays as it is.


log = logging.getLogger("lockstep.rpc")

_NO_FLAGS = 0
# Answers that a caller has not taken. It asks on and does not listen: its stream is ended, since nothing else would bound this.
_MAX_UNSENT = 4_096


def serve_stream(
    begin: Begin,
    requests: Iterator[bytes],
    context: grpc.ServicerContext,
    send_response: Callable[[bytes | None], None],
    *,
    received: Received,
    server_name: str,
) -> None:
    """Serves one stream by the handler that `begin` returns; what a `never_waiting` method is given goes in. Never waits.

    `received`: what its messages count for.
    """
    try:
        peer = _EventPeer(context, received, finish=lambda: send_response(None), server_name=server_name)
    except (ImportError, AttributeError):
        by_threads = ThreadedPeer(requests, context, received, server_name=server_name)
        threading.Thread(target=_serve_all, args=(by_threads, begin, send_response), name="stream", daemon=True).start()
        return
    peer.start(begin)


def _serve_all(peer: ThreadedPeer, begin: Begin, send_response: Callable[[bytes | None], None]) -> None:
    for answer in peer.serve(begin):
        send_response(answer)
    send_response(None)


def _nothing() -> None:
    """Is done in place of what has been done once."""


class _EventPeer:
    """See Peer. Its callbacks run in the thread of the server that takes events; at most one message is read and one written at once."""

    def __init__(self, context: grpc.ServicerContext, received: Received, *, finish: Callable[[], None], server_name: str) -> None:
        cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
        inner: Any = context
        self._context, self._traffic, self._finish, self._server_name = context, received, finish, server_name
        self._receiving = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
        self._begin_answer, self._answer = cygrpc.SendInitialMetadataOperation((), _NO_FLAGS), cygrpc.SendMessageOperation
        self._call, self._state = inner._rpc_event.call, inner._state
        self._call.start_server_batch, self._state.initial_metadata_allowed  # noqa: B018  # AttributeError, before anything has begun
        self._lock = threading.Lock()
        self._has_left = threading.Condition(self._lock)
        self._num_waiting = 0
        self._unsent: deque[bytes] = deque()
        # `_is_answering`: an answer is leaving whose event is that of the next message.
        self._is_sending = self._is_answering = self._is_receiving = self._is_paused = False
        self._is_ending = self._is_over = self._is_deaf = False
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

    def resume(self) -> None:
        self._is_paused = False
        self._receive()

    def send(self, message: bytes) -> None:
        with self._lock:
            if self._is_over or self._is_ending:
                return
            if self._is_sending or self._is_answering:
                self._unsent.append(message)
                is_full = len(self._unsent) > _MAX_UNSENT
            else:
                self._is_sending, is_full = True, False
                self._start_sending(message)
        if is_full:
            self._context.cancel()

    def answer(self, message: bytes) -> None:
        with self._lock:
            self._is_paused = False
            if not (self._is_sending or self._is_receiving or self._is_deaf or self._is_over or self._is_ending):
                self._is_answering = self._is_receiving = True
                self._call.start_server_batch((*self._sending(message), *self._receiving), self._received)
                return
        self.send(message)
        self._receive()

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
        self._call.start_server_batch(self._sending(message), self._sent)

    def _sending(self, message: bytes) -> tuple[Any, ...]:
        operation = self._answer(message, _NO_FLAGS)
        if self._state.initial_metadata_allowed:
            self._state.initial_metadata_allowed = False
            return self._begin_answer, operation
        return (operation,)

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
        """Requests a message, unless one is requested already, or none is needed."""
        with self._lock:
            if self._is_receiving or self._is_paused or self._is_over or self._is_ending or self._is_deaf or self._call is None:
                return
            self._is_receiving = True
            self._call.start_server_batch(self._receiving, self._received)

    def _received(self, event: Any) -> tuple[None, tuple[()]]:
        message, handler = event.batch_operations[-1].message(), self._handler
        self._is_receiving = False
        if self._is_answering:
            with self._lock:
                self._is_answering = False
                if self._unsent and not self._is_over:
                    self._is_sending = True
                    self._start_sending(self._unsent.popleft())
        try:
            if message is None:
                if isinstance(handler, FinishingHandler) and not self._is_over:
                    if self._is_sure_of_the_end():
                        handler.finish()
                else:
                    self.end()
            elif handler is not None and not self._is_ending and not self._is_over:
                self._traffic.num_bytes += len(message) + MESSAGE_BYTES
                handler.take(message)
                self._receive()
        except PsError as error:
            self.end(error)
        except Exception:
            # What escapes from here would end the server's only thread for events.
            self.end(defect(self._server_name))
        return None, ()

    def _is_sure_of_the_end(self) -> bool:
        """Whether no more messages will come because the peer has said so. A call that was cancelled has this event too, and then its own.

        So the first time the event is asked for once more: by then the call is known to be over, if it is.
        """
        with self._lock:
            is_sure, self._is_deaf = self._is_deaf, True
            if not is_sure and self._call is not None:
                self._call.start_server_batch(self._receiving, self._received)
            return is_sure

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
            # A finished call that is still referenced can make gRPC's wait for events return at once, again and again.
            self._call = None
        if handler is not None:
            try:
                handler.close()
            except Exception:
                log.exception("closing a stream failed")
