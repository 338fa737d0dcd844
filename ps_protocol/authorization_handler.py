"""Lets calls in or not, before any method sees them: for every service of a server at once. Knows grpc's handlers; no message."""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from ps_protocol.authorization import CallerRole, check_allowed, is_open, is_standing
from ps_protocol.credentials import TokenTable, authorization_in
from ps_protocol.errors import PermissionDenied, PsError
from ps_protocol.guest_calls import GuestCalls, are_guests
from ps_protocol.never_waiting import never_waiting
from ps_protocol.open_calls import OpenCalls
from ps_protocol.security_options import Security
from ps_protocol.standing_calls import StandingCalls
from ps_protocol.status import answering, ending_with, set_status
from ps_protocol.tls import certified_roles

log = logging.getLogger("lockstep.rpc")

_NOTE_INTERVAL_S = 10.0
# Quoted, since grpcio's own class takes no type arguments.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class AuthorizationInterceptor(grpc.ServerInterceptor):
    """Refuses calls without a token or certificate of a role that may make them. Thread-safe, never waits.

    `tokens` None: tokens are not asked for. `checks_certificates`: the port asks callers for certificates; then these count too, and a
    caller needs both.
    """

    def __init__(self, *, cluster: str, tokens: TokenTable | None, checks_certificates: bool) -> None:
        self._cluster, self._tokens, self._checks_certificates = cluster, tokens, checks_certificates
        self._standing = StandingCalls(tokens) if tokens is not None else None
        self._open = OpenCalls()
        self._guests = GuestCalls()
        self._guarded: dict[tuple[str, int, CallerRole | None], Handler] = {}
        self._refusals: dict[str, Handler] = {}
        self._lock = threading.Lock()
        self._num_refused, self._next_note = 0, 0.0

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
        # Only now: nobody from outside shall learn which methods there are.
        handler = continuation(details)
        if handler is None:
            return None
        if role is not None:
            try:
                check_allowed(method, role)
            except PsError as error:
                return self._refusal(error)
        is_guest = role is not None and are_guests({role})
        if is_guest or self._checks_certificates or (self._standing is not None and is_standing(method)):
            guest = role if is_guest else None
            return self._kept(method, handler, lambda: self._checked(method, handler, guest), guest=guest)
        return handler

    def may_act_as(self, role: CallerRole, context: grpc.ServicerContext) -> bool:
        """Whether the caller, which was let in, has this role by all that was asked for. Raises Unauthenticated, PermissionDenied."""
        if self._tokens is not None and self._role(context.invocation_metadata()) is not role:
            return False
        return not self._checks_certificates or role in self._certified(context)

    def _role(self, metadata: Any) -> CallerRole | None:
        if self._tokens is None:
            return None
        return self._tokens.role_of(authorization_in(metadata))

    def _refusal(self, error: PsError) -> Handler:
        """Returns what refuses a call. There are few texts, each is made once: who is refused may call thousands of times in a second."""
        message = error.message
        if message not in self._refusals:
            end = ending_with(error)

            def refuse(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
                end(context)
                self._note(message, context)
                send_response(None)

            # Without waiting for the request: whoever is not let in holds no thread.
            self._refusals[message] = grpc.stream_stream_rpc_method_handler(never_waiting(refuse))
        return self._refusals[message]

    def _note(self, message: str, context: grpc.ServicerContext) -> None:
        """Has the log say who was refused; seldom, so that nobody fills it, and by another thread: writing it may wait for its reader."""
        with self._lock:
            self._num_refused += 1
            is_due = time.monotonic() >= self._next_note
            if is_due:
                self._next_note = math.inf  # until it is written
        if is_due:
            threading.Thread(target=self._write_note, args=(message, context.peer()), name="refusals", daemon=True).start()

    def _write_note(self, message: str, peer: str) -> None:
        log.warning("refused a call: %s peer=%s refused_so_far=%d", message, peer, self._num_refused)
        self._next_note = time.monotonic() + _NOTE_INTERVAL_S

    def _kept(self, method: str, handler: Handler, make: Callable[[], Handler], *, guest: CallerRole | None = None) -> Handler:
        """What serves the method instead of its own handler: made once."""
        key = (method, id(handler), guest)
        if key not in self._guarded:
            self._guarded[key] = make()
        return self._guarded[key]

    def _checked(self, method: str, handler: Handler, guest: CallerRole | None) -> Handler:
        """The handler behind checks that need the call's context; `guest`: the role by the caller's token, if it takes no part."""
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
        named: Any = handler  # a named tuple, which its type does not say
        checked: Handler = named._replace(**{kind: _guarded(getattr(handler, kind), functools.partial(self._check, method, guest))})
        return checked

    def _check(self, method: str, guest: CallerRole | None, context: grpc.ServicerContext) -> None:
        if self._checks_certificates:
            roles = self._check_certificate(method, context)
            guest = guest or (min(roles, key=lambda role: role.value) if are_guests(roles) else None)
        if guest is not None:
            self._guests.enter(guest, context)
        if self._standing is not None and is_standing(method):
            # Once more: the tokens may have changed since the call was let in.
            check_allowed(method, self._standing.watch(context))

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


def interceptors(security: Security, *, cluster: str, address: str) -> "list[AuthorizationInterceptor]":
    """Returns what guards a server at `address`: nothing if neither tokens nor certificates were asked for. Raises InvalidSpec."""
    checks_certificates = security.verify_clients and not address.startswith("unix:")
    if security.token_file is None and not checks_certificates:
        return []
    tokens = TokenTable(security.token_file) if security.token_file is not None else None
    return [AuthorizationInterceptor(cluster=cluster, tokens=tokens, checks_certificates=checks_certificates)]


def _guarded(serve: Callable[..., Any], check: Callable[[grpc.ServicerContext], None]) -> Callable[..., Any]:
    @functools.wraps(serve)
    def guarded(request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        if not rest:
            with answering(context):
                check(context)
            return serve(request, context)
        # A handler that answers by calling back, for which ending the call by an exception means nothing.
        try:
            check(context)
        except PsError as error:
            set_status(context, error)
            rest[0](None)
            return None
        return serve(request, context, *rest)

    return guarded
