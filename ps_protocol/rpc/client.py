"""A caller's connection to one server: calls end in values or typed errors, and a handshake identifies the server.

Knows how to call; the clients of each role name methods and messages.
"""

import contextlib
import importlib
import itertools
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from ps_protocol.errors import (
    Cancelled,
    FrameOutOfOrder,
    InvalidSpec,
    MalformedMessage,
    ProtocolMismatch,
    PsError,
    TruncatedStream,
    Unavailable,
    Unimplemented,
    WrongCluster,
    WrongRole,
)
from ps_protocol.roles.identity import (
    PROTOCOL_VERSION,
    HandshakeReply,
    HandshakeRequest,
    Role,
    TryCheckpointsRequest,
    check_versions,
    parse_address,
)
from ps_protocol.roles.request import RPCS, Answer, Request
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.status import rebuild
from ps_protocol.wire import codec
from ps_protocol.wire.codec import decode_message

# Ctrl-C during a streaming call.
#
# gRPC's streams wait on locks that are written in Python. A KeyboardInterrupt that Python raises just there can leave such a lock held for
# ever, and closing the channel would then hang. So, while the main thread is in a stream, Ctrl-C cancels the call, and the exception is
# raised once the call has ended. A handler of the user's own is left alone.


try:
    # What Python wraps to take and give members of enums, at five times the price; a worker's step changes the handler eight times.
    _c_signal: Any = importlib.import_module("_signal")
    _set_handler, _handler_of = _c_signal.signal, _c_signal.getsignal
except (ImportError, AttributeError):
    _set_handler, _handler_of = signal.signal, signal.getsignal
_SIGINT = int(signal.SIGINT)


class Cancellable(Protocol):
    """A call under way."""

    def cancel(self) -> object:
        """Ends it; without effect if it is over."""


class CancellingOnInterrupt:
    """A block whose Ctrl-C cancels the watched call first, and ends the block with KeyboardInterrupt. An inner block takes its place.

    `outlives_block`: the call continues after a block without Ctrl-C, for the next one.
    """

    def __init__(self, *, outlives_block: bool = False) -> None:
        self._outlives_block = outlives_block
        self._call: Cancellable | None = None
        self._is_interrupted = False
        self._is_active = False
        self._outer: Any = None

    def __enter__(self) -> "CancellingOnInterrupt":
        if threading.current_thread() is threading.main_thread():
            outer = _handler_of(_SIGINT)
            if outer is signal.default_int_handler or isinstance(getattr(outer, "__self__", None), CancellingOnInterrupt):
                self._outer = outer
                _set_handler(_SIGINT, self._interrupt)
                self._is_active = True
        return self

    def watch(self, call: Cancellable) -> None:
        """Names the call to cancel, now or when the block ends; it is cancelled at once if Ctrl-C came before."""
        self._call = call
        if self._is_interrupted:
            call.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._call is not None and not self._outlives_block:
            # Without effect once the call is over; otherwise the block failed, and the rest is not wanted.
            self._call.cancel()
        if self._is_active:
            _set_handler(_SIGINT, self._outer)
        if self._is_interrupted:
            raise KeyboardInterrupt from None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._call is not None:
            # Runs in the thread that may hold the call's lock, which that thread may take again.
            self._call.cancel()


# A channel to one server whose calls end in values or typed errors.


Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


@contextlib.contextmanager
def translating(target: str, *, awaited: str, timeout_s: float) -> Iterator[None]:
    """Turns what gRPC raises in the block into typed errors about `target`, for example "ps 0 at 127.0.0.1:5000".

    What is found wrong with its answers in the block is an error about it, too.
    """
    try:
        yield
    except grpc.RpcError as error:
        # A stream that fails is its own error: with its traceback it would hold for long whatever it was raised through.
        error.__traceback__ = None
        raise rebuild(error, target=target, awaited=awaited, timeout_s=timeout_s) from None
    except WRONG_ANSWERS as error:
        raise not_understood(target, error) from None
    except ValueError as error:
        # gRPC has no other sign for a channel that this process has closed, and two texts for it.
        if "closed" not in str(error):
            raise
        raise Cancelled(f"{target}: the connection was closed by this process") from None


# What is wrong with an answer that is not what its place in the protocol asks for.
WRONG_ANSWERS = (MalformedMessage, FrameOutOfOrder, TruncatedStream)


def not_understood(target: str, error: PsError) -> PsError:
    """Returns the error for an answer of `target` that makes no sense, as `error` says, which does not know whose answer it was."""
    error_type = type(error) if isinstance(error, WRONG_ANSWERS) else MalformedMessage
    return error_type(f"cannot understand {target}: {error.message}", facts=error.facts)


@contextlib.contextmanager
def understanding(target: str) -> Iterator[None]:
    """Names the server whose answer is decoded in the block."""
    try:
        yield
    except PsError as error:
        raise not_understood(target, error) from None


def answered(response_type: type[Response], answer: bytes | None, *, awaited: str) -> Response:
    """Returns the answer; raises MalformedMessage if it is none: gRPC gives None where a server ends a call without one."""
    if answer is None:
        raise MalformedMessage(f"it ended the call without an answer, though {awaited} was requested; is it a Lockstep server?")
    return decode_message(response_type, answer)


class Connection:
    """One channel. Thread-safe. Connects when first used; after a loss, when used again. Makes one attempt a call.

    `access`: the caller's credentials. Raises InvalidSpec for an invalid address, certificate or token.
    """

    def __init__(self, address: str, *, name: str, service: str, access: Access = DEFAULT_ACCESS) -> None:
        self.address = address
        self.target = f"{name} at {address}"
        # What each call carries.
        self.metadata = access.metadata_for(address)
        self.access = access
        self._service = service
        self._channel = access.open_renewing(address)
        # Typed by each use: gRPC's callables are as generic as their messages. Of the channel that is the first of the two.
        self._methods: tuple[grpc.Channel, dict[tuple[str, str], Any]] = self._channel.newest(), {}

    @property
    def channel(self) -> grpc.Channel:
        """The channel for the next call; a new one once the certificates have changed."""
        return self._channel.newest()

    def path(self, method: str) -> str:
        """Returns a method's name as gRPC has it; as it is if it is that of another service."""
        return method if method.startswith("/") else f"/{self._service}/{method}"

    def handshake(self, role: Role | None, *, index: int | None, cluster: str, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity, asking once; raises WrongCluster, WrongRole or ProtocolMismatch if it is not the wanted one.

        `role` None, `index` None and an empty `cluster` accept any. Also Unavailable and DeadlineExceeded; InvalidSpec if the server speaks
        TLS and the caller does not, or the other way round.
        """
        request, address, access = handshake_request(role=role, index=index, cluster=cluster), self.address, self.access
        try:
            with checked_reply(self) as check:
                return check(self.call(request, timeout_s=timeout_s))
        except Unavailable as error:
            if not may_be_tls(error.message):
                raise
            if access.uses_tls(address) and access.security.tls_cert is None:
                raise Unavailable(f"{error.message} If it asks callers for certificates: pass --tls-cert and --tls-key") from None
            if not access.uses_tls(address) and speaks_tls(address):
                raise InvalidSpec(f"cannot talk to {self.target}: server speaks TLS; pass tls=True or --tls-ca") from None
            raise

    def try_checkpoints(self, tag: str, *, is_last: bool, timeout_s: float) -> tuple[str, tuple[str, ...]]:
        """Tries the server's place for checkpoints, as the proto says; returns the place, empty if there is none, and the trials seen."""
        found = self.call(TryCheckpointsRequest(tag=tag, is_last=is_last), timeout_s=timeout_s)
        return found.place, found.seen

    def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks by an RPC with one message each way, and returns the answer."""
        answer_type, awaited = codec.answer_message(request), request.awaited
        answer = self.unary(RPCS[type(request)].path, codec.encode(request), answer_type, timeout_s=timeout_s, awaited=awaited)
        with understanding(self.target):
            return codec.decode_answer(request, answer)

    def unary(self, method: str, request: Message, response_type: type[Response], *, timeout_s: float, awaited: str) -> Response:
        """Calls a method with one message each way."""
        # Bytes, here and below: of those that are no message, gRPC would say only that, with a traceback in the log.
        invoke: Callable[..., bytes | None] = self._callable("unary_unary", method, _serialize, None)
        with translating(self.target, awaited=awaited, timeout_s=timeout_s):
            return answered(response_type, invoke(request, timeout=timeout_s, metadata=self.metadata()), awaited=awaited)

    def begin(self, request: Request[Answer], report: Callable[[Answer | PsError], None], *, timeout_s: float) -> Callable[[], object]:
        """Begins such a call and does not wait: `report` is called once, by a thread of gRPC's. Returns what cancels the call."""
        answer_type, awaited = codec.answer_message(request), request.awaited

        def ended(call: "grpc.Future[bytes | None]") -> None:
            try:
                with translating(self.target, awaited=awaited, timeout_s=timeout_s):
                    answer = answered(answer_type, call.result(), awaited=awaited)
                with understanding(self.target):
                    found: Answer | PsError = codec.decode_answer(request, answer)
            except PsError as error:
                found = error.with_traceback(None)
            except grpc.FutureCancelledError:
                found = Cancelled(f"{self.target}: the call was cancelled while it waited for {awaited}")
            report(found)

        invoke = self._callable("unary_unary", RPCS[type(request)].path, _serialize, None)
        with translating(self.target, awaited=awaited, timeout_s=timeout_s):
            call: grpc.Future[bytes | None] = invoke.future(codec.encode(request), timeout=timeout_s, metadata=self.metadata())
        call.add_done_callback(ended)
        return call.cancel

    def stream_up(
        self, method: str, messages: Iterable[bytes], response_type: type[Response], *, timeout_s: float, awaited: str
    ) -> Response:
        """Sends framed messages, at least one, and returns the answer, which may come before all are sent."""
        rest = iter(messages)
        head = list(itertools.islice(rest, 2))
        with translating(self.target, awaited=awaited, timeout_s=timeout_s):
            if len(head) == 1:
                # On the wire a stream of one message is a unary call, and that needs no feeding thread: 4 KiB take 0.4 ms, not 0.7.
                return answered(response_type, self._send_one(method, head[0], timeout_s=timeout_s), awaited=awaited)
            feed = self._callable("stream_unary", method, None, None)
            with CancellingOnInterrupt() as block:
                call: grpc.Future[bytes | None] = feed.future(itertools.chain(head, rest), timeout=timeout_s, metadata=self.metadata())
                block.watch(call)
                return answered(response_type, call.result(), awaited=awaited)

    def _send_one(self, method: str, message: bytes, *, timeout_s: float) -> bytes | None:
        send: Callable[..., bytes | None] = self._callable("unary_unary", method, None, None)
        return send(message, timeout=timeout_s, metadata=self.metadata())

    def stream_down(
        self, method: str, request: Message, consume: Callable[[Iterator[bytes]], Result], *, timeout_s: float, awaited: str
    ) -> Result:
        """Returns what `consume` makes of the raw messages of the answer; the call is cancelled if it leaves some of them."""
        invoke = self._callable("unary_stream", method, _serialize, None)
        with translating(self.target, awaited=awaited, timeout_s=timeout_s), CancellingOnInterrupt() as block:
            call = invoke(request, timeout=timeout_s, metadata=self.metadata())
            block.watch(call)
            return consume(call)

    def stream_both(
        self, method: str, messages: Iterable[bytes], consume: Callable[[Iterator[bytes]], Result], *, timeout_s: float, awaited: str
    ) -> Result:
        """Sends framed messages, at least one, and returns what `consume` makes of the raw messages of the answer, which come meanwhile."""
        rest = iter(messages)
        head = list(itertools.islice(rest, 2))
        with translating(self.target, awaited=awaited, timeout_s=timeout_s), CancellingOnInterrupt() as block:
            if len(head) == 1:
                # As in stream_up: no feeding thread for one message.
                send: Any = self._callable("unary_stream", method, None, None)
                sent: Any = head[0]
            else:
                send, sent = self._callable("stream_stream", method, None, None), itertools.chain(head, rest)
            call = send(sent, timeout=timeout_s, metadata=self.metadata())
            block.watch(call)
            return consume(call)

    def open_stream(self, method: str, messages: Iterator[bytes]) -> Any:
        """Begins a stream of framed messages both ways that lasts until one side ends it; returns its call, which yields raw messages."""
        return self._callable("stream_stream", method, None, None)(messages, metadata=self.metadata())

    def close(self) -> None:
        """Ends calls under way with Cancelled and closes the channel. Idempotent."""
        self._channel.close()

    def _callable(self, kind: str, method: str, serializer: Any, deserializer: Any) -> Any:
        channel, (known, methods) = self._channel.newest(), self._methods
        if known is not channel:
            methods = {}
            self._methods = channel, methods
        # Two threads may both make one; either serves.
        if (kind, method) not in methods:
            methods[kind, method] = getattr(channel, kind)(
                self.path(method), request_serializer=serializer, response_deserializer=deserializer
            )
        return methods[kind, method]


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


# Whether a server speaks TLS, found out by greeting it once: a lost connection alone does not say.


_TIMEOUT_S = 0.5
# First bytes of TLS records: a handshake, an alert.
_RECORDS = (b"\x16", b"\x15")


def may_be_tls(text: str) -> bool:
    """Whether the words of a failure fit a server that waits for TLS and was greeted without."""
    return "connection was lost" in text


def speaks_tls(address: str) -> bool:
    """Greets what listens at the address, for half a second at most. False also if nothing can be found out."""
    parsed = parse_address(address)
    greeting = _greeting()
    if parsed.is_unix or not greeting:
        return False
    with contextlib.suppress(OSError), socket.create_connection((parsed.host, parsed.port), timeout=_TIMEOUT_S) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(greeting)
        return connection.recv(1) in _RECORDS
    return False


def _greeting() -> bytes:
    try:
        import ssl
    except ImportError:  # a parameter server does without
        return b""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_side=False).do_handshake()
    return outgoing.read()


# Identifies the server at an address before any other call.


def handshake_request(*, role: Role | None, index: int | None, cluster: str) -> HandshakeRequest:
    """Returns the handshake for the wanted server; None and "" accept any."""
    return HandshakeRequest(cluster=cluster, expected_role=role, expected_index=index, version=PROTOCOL_VERSION)


@contextlib.contextmanager
def checked_reply(connection: Connection) -> Iterator[Callable[[HandshakeReply], HandshakeReply]]:
    """Gives what checks an answer to that question; words its errors, and those of the call in the block, for the caller."""

    def check(reply: HandshakeReply) -> HandshakeReply:
        check_versions(client=PROTOCOL_VERSION, server=reply.version)
        return reply

    try:
        yield check
    except (WrongCluster, WrongRole, ProtocolMismatch) as error:
        # The server does not know by which address it was called.
        raise type(error)(f"{connection.address}: {error.message}", facts=error.facts) from None
    except Unimplemented:
        raise WrongRole(f"{connection.address}: a gRPC server answers there, but not one of Lockstep's; check the address") from None
