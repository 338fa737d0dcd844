"""Lets calls in or not, before any method sees them: for every service of a server at once. Knows grpc's handlers; no message."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from ps_protocol.authorization import CallerRole, check_allowed, is_open
from ps_protocol.credentials import TokenTable
from ps_protocol.errors import PermissionDenied, PsError
from ps_protocol.security_options import Security
from ps_protocol.status import answering, set_status
from ps_protocol.tls import certified_roles

_KEY = "authorization"
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
        self._guarded: dict[tuple[str, int], Handler] = {}

    def intercept_service(self, continuation: Callable[[Any], MaybeHandler], details: Any) -> MaybeHandler:
        """Returns what handles the call: the method's own handler, or one that refuses."""
        method: str = details.method
        if is_open(method):
            return continuation(details)
        try:
            role = self._role(details.invocation_metadata)
        except PsError as error:
            return _refusal(error)
        # Only now: nobody from outside shall learn which methods there are.
        handler = continuation(details)
        if handler is None:
            return None
        if role is not None:
            try:
                check_allowed(method, role)
            except PsError as error:
                return _refusal(error)
        return self._with_certificate(method, handler) if self._checks_certificates else handler

    def may_act_as(self, role: CallerRole, context: grpc.ServicerContext) -> bool:
        """Whether the caller, which was let in, has this role by all that was asked for. Raises Unauthenticated, PermissionDenied."""
        if self._tokens is not None and self._role(context.invocation_metadata()) is not role:
            return False
        return not self._checks_certificates or role in self._certified(context)

    def _role(self, metadata: Any) -> CallerRole | None:
        if self._tokens is None:
            return None
        given = next((value for key, value in metadata or () if key == _KEY), None)
        return self._tokens.role_of(given)

    def _with_certificate(self, method: str, handler: Handler) -> Handler:
        """The handler behind a check of the certificate, which only the call's context knows."""
        key = (method, id(handler))
        if key not in self._guarded:
            kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
            kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
            check = functools.partial(self._check_certificate, method)
            named: Any = handler  # a named tuple, which its type does not say
            self._guarded[key] = named._replace(**{kind: _guarded(getattr(handler, kind), check)})
        return self._guarded[key]

    def _certified(self, context: grpc.ServicerContext) -> frozenset[CallerRole]:
        # Lists, though its type says that the values are single.
        names: Any = context.auth_context()
        return certified_roles(names, cluster=self._cluster)

    def _check_certificate(self, method: str, context: grpc.ServicerContext) -> None:
        roles = self._certified(context)
        refusals: list[PermissionDenied] = []
        for role in sorted(roles, key=lambda role: role.value):
            try:
                check_allowed(method, role, proof="certificate")
                return
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


def _refusal(error: PsError) -> Handler:
    def refuse(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
        set_status(context, error)
        send_response(None)

    # Without waiting for the request: whoever is not let in holds no thread.
    setattr(refuse, "experimental_non_blocking", True)  # noqa: B010  # functions have no such attribute for the type checker
    handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler


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
