"""The one way into a server: each call is let in or refused, and has a handler, as a stream has. Knows no method.

On the wire all calls are streams: one message each way is a message, the end of the caller's side, an answer, and the end. So no call needs
a thread to begin, and each ends in an error in one way: by `Peer.end`.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc

from ps_protocol.errors import Cancelled, LimitExceeded, MalformedMessage, PsError
from ps_protocol.rpc.admission import Admission
from ps_protocol.rpc.server_stream import Begin, Call, Handler, Peer, never_waiting, serve_stream
from ps_protocol.rpc.status import defect
from ps_protocol.wire import codec

# What begins the calls of each method "/service/method".
Methods = Mapping[str, Begin]


class Door(grpc.GenericRpcHandler):
    """Serves the methods of one server, for `server.add_generic_rpc_handlers((door,))`. Thread-safe, never waits.

    `admission` None: everybody is let in.
    """

    def __init__(self, methods: Methods, *, server_name: str, admission: Admission | None = None) -> None:
        self._admission, self._server_name = admission or Admission(), server_name
        self._handlers = {method: self._handler(method, begin) for method, begin in methods.items()}
        self._unknown = self._handler(None, _begin_nothing)

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Returns what serves a call, also one that will be refused."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _handler(self, method: str | None, begin: Begin) -> "grpc.RpcMethodHandler[bytes, bytes]":
        def serve(requests: Iterator[bytes], context: grpc.ServicerContext, send_response: Callable[[bytes | None], None]) -> None:
            try:
                received = self._admission.admit(method, context)
            except PsError as error:
                self._admission.refuse(error, context)
                send_response(None)
            else:
                serve_stream(begin, requests, context, send_response, received=received, server_name=self._server_name)

        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(never_waiting(serve))
        return handler


def _begin_nothing(peer: Peer, call: Call) -> Handler:
    raise AssertionError("a call of no method was let in")


# Calls that may wait: each has a thread while it is served.


# Threads are made as they are needed, and stay. More calls at once than this wait, which takes no memory for tensors.
MAX_THREADS = 4_096
# Beyond any cluster: a caller that opens calls without end is refused instead of queued.
MAX_CALLS = 8_192


class CallThreads:
    """The threads of a server's calls. Thread-safe."""

    def __init__(self, *, server_name: str, max_calls: int = MAX_CALLS) -> None:
        self._server_name, self._max_calls = server_name, max_calls
        self._pool = futures.ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="rpc")
        self._lock = threading.Lock()
        self._num_calls = 0

    def serve(self, peer: Peer, work: Callable[[], object]) -> None:
        """Has a thread work for a call, which ends if that fails. Raises LimitExceeded, or Cancelled when the server has ended."""
        with self._lock:
            if self._num_calls >= self._max_calls:
                raise LimitExceeded(f"{self._max_calls} calls are under way at this server; end some of them")
            self._num_calls += 1
        try:
            self._pool.submit(self._run, peer, work)
        except RuntimeError:
            self._leave()
            raise Cancelled("the server has ended") from None

    def close(self) -> None:
        """Waits for those that are at work."""
        self._pool.shutdown()

    def _run(self, peer: Peer, work: Callable[[], object]) -> None:
        try:
            work()
        except PsError as error:
            # Its frames may hold as much as a model, and it may be kept: by them, or by the handler.
            peer.end(error.with_traceback(None))
        except Exception:
            peer.end(defect(self._server_name))
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_calls -= 1


class Blocking:
    """See FinishingHandler. A call that a thread serves from its first message on: it may wait for the caller at every message.

    `serve` is given the messages, and yields the answers.
    """

    def __init__(
        self,
        peer: Peer,
        serve: Callable[[Iterator[bytes]], Generator[bytes, None, None]],
        *,
        threads: CallThreads,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._peer, self._serve, self._threads, self._on_close = peer, serve, threads, on_close
        # None: no more will come. An error: the caller has gone.
        self._messages: queue.SimpleQueue[bytes | PsError | None] = queue.SimpleQueue()
        self._is_begun = self._has_taken = False

    def take(self, message: bytes) -> None:
        """Gives the thread a message; the next one is asked for when it wants that."""
        self._peer.pause()
        self._put(message)

    def finish(self) -> None:
        """Tells the thread that no more will come."""
        self._put(None)

    def close(self) -> None:
        """Ends what the thread waits for."""
        self._messages.put(Cancelled("the caller has gone"))
        self._on_close()

    def _put(self, message: bytes | None) -> None:
        self._messages.put(message)
        if not self._is_begun:
            self._is_begun = True
            self._threads.serve(self._peer, self._run)

    def _run(self) -> None:
        # Not named while it is waited for: a message may have 16 MiB.
        answers = self._serve(iter(self._next, None))
        with contextlib.closing(answers):
            for message in answers:
                self._peer.send(message)
                if not self._peer.wait_for_room():
                    return
        self._peer.end()

    def _next(self) -> bytes | None:
        if self._has_taken:
            self._peer.resume()
        self._has_taken = True
        message = self._messages.get()
        if isinstance(message, PsError):
            raise message
        return message


# Calls of one message each way.


_NO_MESSAGE = "no message; this call takes one"


class OneAnswer:
    """See FinishingHandler. A call of one message each way.

    `ask` is given the message. It answers by `answer`, at once or later, from any thread; or it ends the call with an error. It returns
    what is done when the call is over, also without an answer; None: nothing.
    """

    def __init__(self, ask: Callable[[bytes], Callable[[], object] | None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._is_asked = self._is_over = False
        self._on_over: Callable[[], object] | None = None

    def take(self, message: bytes) -> None:
        """Asks. Raises PsError."""
        if self._is_asked:
            raise MalformedMessage("a second message; this call takes one")
        self._is_asked = True
        on_over = self._ask(message)
        with self._lock:
            self._on_over, is_over = on_over, self._is_over
        if is_over and on_over is not None:
            on_over()

    def finish(self) -> None:
        """Takes the end of the caller's messages: changes nothing if there was any. Raises MalformedMessage."""
        if not self._is_asked:
            raise MalformedMessage(_NO_MESSAGE)

    def close(self) -> None:
        """The call is answered, or the caller has gone away."""
        with self._lock:
            self._is_over, on_over = True, self._on_over
        if on_over is not None:
            on_over()


def answer(peer: Peer, message: bytes) -> None:
    """Ends a call of one message each way with its answer."""
    peer.send(message)
    peer.end()


def at_once(act: Callable[[bytes, Call], bytes]) -> Begin:
    """Returns what begins calls of one message each way that the thread of events answers by `act`, which must not wait."""
    return lambda peer, call: OneAnswer(lambda message: answer(peer, act(message, call)))


def by_thread(act: Callable[[bytes, Call], bytes], threads: CallThreads) -> Begin:
    """Returns what begins calls of one message each way that a thread answers by `act`, which may wait."""
    return lambda peer, call: OneAnswer(lambda message: threads.serve(peer, lambda: answer(peer, act(message, call))))


def only_message(messages: Iterator[bytes]) -> bytes:
    """Returns the message of a call that takes one. Raises MalformedMessage if there is none."""
    message = next(messages, None)
    if message is None:
        raise MalformedMessage(_NO_MESSAGE)
    return message


def plain(request_type: type, act: Callable[[Any, Call], object]) -> Callable[[bytes, Call], bytes]:
    """Returns what answers the message of a request: it decodes it, acts, and encodes the answer."""

    def answer_to(message: bytes, call: Call) -> bytes:
        found = act(codec.decode_request(request_type, message), call)
        data: bytes = codec.encode_answer(request_type, found).SerializeToString()
        return data

    return answer_to
