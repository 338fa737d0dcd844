"""Admits or refuses calls before a method sees them, and ends calls whose token is no longer valid. Knows gRPC's handlers; no message."""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import grpc

from ps_protocol.errors import LimitExceeded, MalformedMessage, PermissionDenied, PsError
from ps_protocol.process.logs import SeldomWarning
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.server_stream import CountedMessages, Handler, Peer, Received, never_waiting, stream_handler
from ps_protocol.rpc.status import answering, ending_with, set_status
from ps_protocol.rpc.strangers import StrangerGuard
from ps_protocol.security import tokens as credentials
from ps_protocol.security.certificates import certified_roles
from ps_protocol.security.options import Security
from ps_protocol.security.permissions import check_allowed, is_long_lived, is_open
from ps_protocol.security.tokens import TokenTable, authorization_in

# Calls of observers and operators: only so many at once, so that they do not keep workers from training.


# Of each of these roles at one server. A call may hold a thread, and a message of up to 16 MiB.
MAX_GUEST_CALLS = 256
_GUESTS = frozenset({CallerRole.OBSERVER, CallerRole.ADMIN, CallerRole.PS})


def are_guests(roles: AbstractSet[CallerRole]) -> bool:
    """Whether a caller with these roles takes no part in training."""
    return bool(roles) and roles <= _GUESTS


class GuestCalls:
    """Counts the calls under way of each such role. Thread-safe."""

    def __init__(self) -> None:
        self._limit = MAX_GUEST_CALLS
        self._lock = threading.Lock()
        self._num: Counter[CallerRole] = Counter()

    def enter(self, role: CallerRole, context: grpc.ServicerContext) -> None:
        """Counts a call until it ends. Raises LimitExceeded."""
        with self._lock:
            if self._num[role] >= self._limit:
                raise LimitExceeded(f"{self._limit} calls with the role {role.value} are under way at this server; end some of them")
            self._num[role] += 1
        if not context.add_callback(lambda: self._leave(role)):
            self._leave(role)

    def _leave(self, role: CallerRole) -> None:
        with self._lock:
            self._num[role] -= 1


# Calls that last, and the tokens they began with: a call ends when its token is no longer good.


log = logging.getLogger("lockstep.rpc")

_Seen = tuple[int, CallerRole]  # the table's version, and the role that the caller's token had by it


class LongLivedCalls:
    """The long-lived calls under way. Thread-safe; its own thread checks their tokens while there are such calls, until `close`."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, _Seen] = {}
        self._is_watched = False
        self._closed = threading.Event()

    def watch(self, context: grpc.ServicerContext) -> CallerRole:
        """Returns whose token the call has, and has it cancelled when the token is not of that role any more. Raises Unauthenticated."""
        version = self._tokens.version
        role = self._tokens.role_of(authorization_in(context.invocation_metadata()))
        with self._lock:
            self._calls[context] = version, role
            begins, self._is_watched = not self._is_watched, True
        if not context.add_callback(lambda: self._forget(context)):
            self._forget(context)
        if begins:
            threading.Thread(target=self._look, name="long-lived-calls", daemon=True).start()
        return role

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._calls.pop(context, None)

    def _look(self) -> None:
        while not self._closed.wait(credentials.LOOK_INTERVAL_S):
            self._tokens.renew()
            with self._lock:
                if not self._calls:
                    self._is_watched = False
                    return
                outdated = [(context, role) for context, (version, role) in self._calls.items() if version != self._tokens.version]
            for context, role in outdated:
                self._check(context, role)

    def _check(self, context: grpc.ServicerContext, role: CallerRole) -> None:
        version = self._tokens.version
        if self._tokens.is_token_of(role, authorization_in(context.invocation_metadata())):
            with self._lock:
                if context in self._calls:
                    self._calls[context] = version, role
            return
        log.warning("ended a long-lived call, since its token was removed role=%s peer=%s", role.value, context.peer())
        self._forget(context)
        # The caller opens the stream again, and is then refused for its token.
        context.cancel()


# Calls that need no token: served without a thread, and only so many at once.


# Of strangers, all together: what they may have a server remember, up to a message of 16 MiB each. One more ends the oldest, so that they
# refuse no one: a health check arrives with its request, and is answered in a moment.
MAX_OPEN_CALLS = 8


class OpenCalls:
    """The calls under way that need no admission. Thread-safe."""

    def __init__(self, *, limit: int = MAX_OPEN_CALLS, on_call: Callable[[grpc.ServicerContext], None] = lambda context: None) -> None:
        self._limit, self._on_call = limit, on_call
        self._lock = threading.Lock()
        self._calls: dict[Handler, Peer] = {}

    def handler_of(self, method: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Returns what serves a method of one message each way in place of its own handler, which must not wait."""
        return stream_handler(lambda peer, context: self._begin(method, peer, context), server_name="this server")

    def _begin(self, method: Any, peer: Peer, context: grpc.ServicerContext) -> Handler:
        self._on_call(context)
        call = _OpenCall(method, peer, context, on_close=self._closed)
        with self._lock:
            self._calls[call] = peer
            oldest = self._calls.pop(next(iter(self._calls))) if len(self._calls) > self._limit else None
        if oldest is not None:
            oldest.end(LimitExceeded(f"over {self._limit} calls without a token are under way; call again"))
        return call

    def _closed(self, call: Handler) -> None:
        with self._lock:
            self._calls.pop(call, None)


class _OpenCall:
    """Serves one call by the method's own handler. Implements `Handler` of `ps_protocol.rpc.server_stream`."""

    def __init__(self, method: Any, peer: Peer, context: grpc.ServicerContext, *, on_close: Callable[[Handler], None]) -> None:
        self._method, self._peer, self._context, self._on_close = method, peer, context, on_close

    def take(self, message: bytes) -> None:
        """Answers. Raises MalformedMessage."""
        try:
            request = self._method.request_deserializer(message)
        except Exception:
            raise MalformedMessage("the request is no message of this method") from None
        answer = self._method.unary_unary(request, self._context)
        inner: Any = self._context  # `code` is no part of its type
        if inner.code() in (None, grpc.StatusCode.OK):
            self._peer.send(self._method.response_serializer(answer))
        self._peer.end()

    def close(self) -> None:
        """The call is over."""
        self._on_close(self)


# Lets calls in or not, before any method sees them: for every service of a server at once.


# Quoted, since grpcio's own class takes no type arguments.
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class AuthorizationInterceptor(grpc.ServerInterceptor):
    """Refuses calls without a token or certificate of a role that may make them. Thread-safe, never waits.

    `strangers` is told whose calls are let in, and whose are not. `tokens` None: tokens are not asked for. `checks_certificates`: the port
    asks callers for certificates; then these count too, and a caller needs both.
    """

    def __init__(
        self, *, cluster: str, tokens: TokenTable | None, checks_certificates: bool, strangers: StrangerGuard | None = None
    ) -> None:
        self._cluster, self._tokens, self._checks_certificates, self._strangers = cluster, tokens, checks_certificates, strangers
        self._nothing = self._absence()
        self._long_lived = LongLivedCalls(tokens) if tokens is not None else None
        self._open = OpenCalls(on_call=self._charge)
        self._guests = GuestCalls()
        self._guarded: dict[tuple[str, int, CallerRole | None], MethodHandler] = {}
        self._refusals: dict[str, MethodHandler] = {}
        self._warning, self._num_refused = SeldomWarning(log), 0

    def intercept_service(self, continuation: Callable[[Any], MaybeHandler], details: Any) -> MaybeHandler:
        """Returns what handles the call: the method's own handler, or one that refuses."""
        method: str = details.method
        if is_open(method):
            handler = continuation(details)
            return None if handler is None else self._kept(method, handler, lambda: self._open.handler_of(handler))
        try:
            role = self._role(details.invocation_metadata)
        except PsError as error:
            return self._refusal(error)
        # Only now: outsiders must not learn which methods there are.
        handler = continuation(details)
        if handler is None:
            return self._nothing
        if role is not None:
            try:
                check_allowed(method, role)
            except PsError as error:
                return self._refusal(error)
        is_guest = role is not None and are_guests({role})
        if self._strangers is not None or is_guest or self._checks_certificates or (self._long_lived is not None and is_long_lived(method)):
            guest = role if is_guest else None
            if self._strangers is not None and not handler.request_streaming:
                self._strangers.expect()
            return self._kept(method, handler, lambda: self._checked(method, handler, guest), guest=guest)
        return handler

    def may_act_as(self, role: CallerRole, context: grpc.ServicerContext) -> bool:
        """Whether the admitted caller has this role by all its credentials. Raises Unauthenticated, PermissionDenied."""
        if self._tokens is not None and self._role(context.invocation_metadata()) is not role:
            return False
        return not self._checks_certificates or role in self._certified(context)

    def close(self) -> None:
        """Ends the thread that checks tokens, once the server's calls have ended."""
        if self._long_lived is not None:
            self._long_lived.close()

    def _role(self, metadata: Any) -> CallerRole | None:
        if self._tokens is None:
            return None
        return self._tokens.role_of(authorization_in(metadata))

    def _refusal(self, error: PsError) -> MethodHandler:
        """Returns the handler that refuses a call. Each text's is made once: a refused caller may call thousands of times in a second."""
        message = error.message
        if message not in self._refusals:
            end = ending_with(error)

            def refuse(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
                end(context)
                self._charge(context)
                self._num_refused += 1
                self._warning.warn("refused a call: %s peer=%s refused_so_far=%d", lambda: (message, context.peer(), self._num_refused))
                send_response(None)

            # Without waiting for the request: a refused caller holds no thread.
            self._refusals[message] = grpc.stream_stream_rpc_method_handler(never_waiting(refuse))
        return self._refusals[message]

    def _kept(
        self, method: str, handler: MethodHandler, make: Callable[[], MethodHandler], *, guest: CallerRole | None = None
    ) -> MethodHandler:
        """The handler that serves the method instead of its own: made once."""
        key = (method, id(handler), guest)
        if key not in self._guarded:
            self._guarded[key] = make()
        return self._guarded[key]

    def _checked(self, method: str, handler: MethodHandler, guest: CallerRole | None) -> MethodHandler:
        """The handler behind checks that need the call's context; `guest`: the role by the caller's token, if it takes no part."""
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
        named: Any = handler  # a named tuple, which its type does not say
        check = functools.partial(self._check, method, guest, not handler.request_streaming)
        checked: MethodHandler = named._replace(**{kind: _guarded(getattr(handler, kind), check)})
        return checked

    def _absence(self) -> MaybeHandler:
        """Returns the handler for an unknown method; None: gRPC answers it, and it is not counted."""
        if self._strangers is None:
            return None

        def refuse(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            context.set_details("Method not found!")
            self._charge(context)
            send_response(None)

        return grpc.stream_stream_rpc_method_handler(never_waiting(refuse))

    def _check(self, method: str, guest: CallerRole | None, was_expected: bool, context: grpc.ServicerContext) -> Received:
        """Lets the call in, and returns what its messages count for. Raises Unauthenticated, PermissionDenied, LimitExceeded."""
        try:
            self._check_context(method, guest, context)
        except PsError:
            self._charge(context)
            raise
        if self._strangers is None:
            return Received()
        return self._strangers.admit(context.peer(), was_expected=was_expected)

    def _check_context(self, method: str, guest: CallerRole | None, context: grpc.ServicerContext) -> None:
        if self._checks_certificates:
            roles = self._check_certificate(method, context)
            guest = guest or (min(roles, key=lambda role: role.value) if are_guests(roles) else None)
        if guest is not None:
            self._guests.enter(guest, context)
        if self._long_lived is not None and is_long_lived(method):
            # Once more: the tokens may have changed since the call was let in.
            check_allowed(method, self._long_lived.watch(context))

    def _charge(self, context: grpc.ServicerContext) -> None:
        if self._strangers is not None:
            self._strangers.charge(context.peer(), num_headers=len(context.invocation_metadata()))

    def _certified(self, context: grpc.ServicerContext) -> frozenset[CallerRole]:
        # Lists, though its type says that the values are single.
        names: Any = context.auth_context()
        return certified_roles(names, cluster=self._cluster)

    def _check_certificate(self, method: str, context: grpc.ServicerContext) -> frozenset[CallerRole]:
        """Returns the roles that the caller has by its certificate. Raises PermissionDenied unless one of them may call the method."""
        roles = self._certified(context)
        refusals: list[PermissionDenied] = []
        for role in sorted(roles, key=lambda role: role.value):
            try:
                check_allowed(method, role, proof="certificate")
                return roles
            except PermissionDenied as error:
                refusals.append(error)
        raise refusals[0]


def interceptors(security: Security, *, cluster: str, address: str, strangers: StrangerGuard) -> "list[AuthorizationInterceptor]":
    """Returns the guard of a server at `address`; none on a Unix socket without tokens. Raises InvalidSpec.

    `strangers` is told of calls on a port that strangers can reach.
    """
    if address.startswith("unix:"):
        if security.token_file is None:
            return []
        return [AuthorizationInterceptor(cluster=cluster, tokens=TokenTable(security.token_file), checks_certificates=False)]
    tokens = TokenTable(security.token_file) if security.token_file is not None else None
    return [AuthorizationInterceptor(cluster=cluster, tokens=tokens, checks_certificates=security.verify_clients, strangers=strangers)]


def _guarded(serve: Callable[..., Any], check: Callable[[grpc.ServicerContext], Received]) -> Callable[..., Any]:
    @functools.wraps(serve)
    def guarded(request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        if not rest:
            with answering(context):
                received = check(context)
            return serve(_counted(request, received), context)
        # A handler that answers by calling back, for which ending the call by an exception means nothing.
        try:
            received = check(context)
        except PsError as error:
            set_status(context, error)
            rest[0](None)
            return None
        return serve(_counted(request, received), context, *rest)

    return guarded


def _counted(request: Any, received: Received) -> Any:
    """Returns a call's message, which has been counted, or its messages, which will be."""
    if isinstance(request, Iterator):
        return CountedMessages(request, received)
    if isinstance(request, bytes):
        received.num_bytes += len(request)
    return request
