"""The HTTP port of a role: one thread, bounded connections, permissions. Knows routes and tokens; nothing of the answers.

Every connection has one request and one answer, and a deadline. So a silent or slow client costs a descriptor for some seconds, and when
there are too many connections, the oldest is cut.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial

from ps_protocol.errors import InternalError, InvalidSpec, PermissionDenied, PsError
from ps_protocol.http.messages import (
    MAX_HEAD_BYTES,
    BadRequest,
    Request,
    Response,
    Route,
    check_host,
    encode,
    error_response,
    parse_head,
)
from ps_protocol.process.listening import check_bind_address, num_descriptors, why_not
from ps_protocol.roles.identity import parse_address
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.certificates import certified_roles
from ps_protocol.security.options import OPEN, Security
from ps_protocol.security.permissions import check_allowed
from ps_protocol.security.tokens import TokenTable

log = logging.getLogger("lockstep.http")

# A request comes at once, and an answer is read at once.
_REQUEST_S, _ANSWER_S, _LINGER_S = 5.0, 10.0, 1.0
_MAX_CONNECTIONS = 256
# Connections may take a part of the descriptors that is small beside what training needs.
_MOST_OF_DESCRIPTORS = 1 / 32
# Connections that are taken a second, and at once: a flood costs this process no more than that.
_TAKEN_A_SECOND, _TAKEN_AT_ONCE = 100.0, 100
_BACKLOG, _AGAIN_S = 128, 0.05
_LOOK_AT_FILES_S = 1.0
_EVERYWHERE, _LOCAL = ("0.0.0.0", "::", ""), ("localhost", "127.0.0.1", "::1", "0:0:0:0:0:0:0:1")


class HttpServer:
    """Serves routes from `start` to `stop`, in a thread of its own. Thread-safe.

    `address`: "host:port", port 0 for any that is free. Whether an address that other machines reach may be used, who has which role,
    and TLS are as for gRPC, by `security`.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        address: str,
        cluster: str,
        security: Security = OPEN,
        allow_insecure_network: bool = False,
    ) -> None:
        check_bind_address(address, is_insecure_network_allowed=allow_insecure_network, is_closed=security.is_closed)
        self._wanted = parse_address(address, is_bind=True)
        if self._wanted.is_unix:
            raise InvalidSpec(f"address {address}: a browser reaches no Unix socket; want host:port")
        self._routes = {route.path: route for route in routes}
        self._gate = _Gate(security, cluster=cluster)
        self._tls = _Tls(security) if security.tls_cert is not None else None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        # Of the thread alone.
        self._connections: dict[asyncio.Task[None], None] = {}
        self._budget, self._looked_at = float(_TAKEN_AT_ONCE), time.monotonic()
        self._again: asyncio.TimerHandle | None = None
        self._most = max(4, min(_MAX_CONNECTIONS, int(num_descriptors() * _MOST_OF_DESCRIPTORS)))

    @property
    def url(self) -> str:
        """The URL of the server, for a browser; empty before `start`."""
        if self._socket is None:
            return ""
        host, port = self._wanted.host, self._socket.getsockname()[1]
        if host in _EVERYWHERE:
            host = self._tls.host() if self._tls else socket.gethostname()
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"

    def start(self) -> None:
        """Begins to serve. Raises InvalidSpec if it cannot listen there."""
        try:
            self._socket = _listen(self._wanted.host, self._wanted.port)
        except OSError as error:
            raise InvalidSpec(f"cannot listen at {self._wanted}: {why_not(error)}") from None
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(self._loop, self._socket, self._ending), name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cuts what is under way, and closes the port. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None and self._ending is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
            thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, listening: socket.socket, ending: asyncio.Event) -> None:
        with contextlib.closing(loop), listening:
            loop.run_until_complete(self._serve(listening, ending))

    async def _serve(self, listening: socket.socket, ending: asyncio.Event) -> None:
        self._listen_to(listening)
        await ending.wait()
        asyncio.get_running_loop().remove_reader(listening)
        if self._again is not None:
            self._again.cancel()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _listen_to(self, listening: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listening, self._take, listening)

    def _take(self, listening: socket.socket) -> None:
        """Takes the next connection; not sooner than the budget allows."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._budget, self._looked_at = min(_TAKEN_AT_ONCE, self._budget + (now - self._looked_at) * _TAKEN_A_SECOND), now
        try:
            if self._budget < 1.0:
                raise BlockingIOError
            connection, _ = listening.accept()
        except OSError:
            # It is too early, descriptors have run out, or the caller has gone already.
            loop.remove_reader(listening)
            self._again = loop.call_later(_AGAIN_S, self._listen_to, listening)
            return
        self._budget -= 1.0
        task = loop.create_task(self._converse(connection))
        self._connections[task] = None
        task.add_done_callback(partial(self._forget, connection))
        if len(self._connections) > self._most:
            # The oldest: an honest caller sends its request at once.
            next(one for one in self._connections if not one.cancelling()).cancel()

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # One that was cut before it was looked at has no transport that would do it.
        connection.close()
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a connection ended cause=%r", error)

    async def _converse(self, connection: socket.socket) -> None:
        """One request, one answer. Whatever the other end does, it ends by a deadline."""
        connection.setblocking(False)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        protocol, encryption = asyncio.StreamReaderProtocol(reader), self._tls.newest() if self._tls else None
        async with asyncio.timeout(_REQUEST_S):
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=encryption)
        try:
            response = await self._respond(reader, transport)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            # `drain` returns once all is sent.
            transport.set_write_buffer_limits(high=0)
            async with asyncio.timeout(_ANSWER_S):
                writer.write(encode(response))
                await writer.drain()
            async with asyncio.timeout(_LINGER_S):
                await _until_heard(reader, writer)
        finally:
            transport.abort()

    async def _respond(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> Response:
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await _receive(reader)
            route = self._route(request)
            self._gate.check(request, route, certificate=transport.get_extra_info("peercert"))
            return _answer(route, request)
        except (PsError, BadRequest) as error:
            return error_response(error)
        except TimeoutError:
            return error_response(BadRequest(408, f"the request did not come within {_REQUEST_S:g} s"))

    def _route(self, request: Request) -> Route:
        if self._tls is None:
            check_host(request, names=(self._wanted.host.lower(), socket.gethostname().lower()))
        route = self._routes.get(request.path)
        if route is None:
            raise BadRequest(404, "there is nothing at this path")
        if request.method != "GET":
            raise BadRequest(405, "this path is for GET alone")
        return route


class _Gate:
    """The roles that may request each path, by tokens and certificates, as for gRPC."""

    def __init__(self, security: Security, *, cluster: str) -> None:
        self._tokens = TokenTable(security.token_file) if security.token_file is not None else None
        self._verifies, self._cluster = security.verify_clients, cluster

    def check(self, request: Request, route: Route, *, certificate: object) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        if not route.rpc:
            return
        if self._verifies:
            uris = _uris_in(certificate)
            roles = certified_roles({"peer_uri": uris}, cluster=self._cluster)
            _check_any(route.rpc, roles)
        if self._tokens is not None:
            check_allowed(route.rpc, self._tokens.role_of(request.headers.get("authorization")))


def _check_any(rpc: str, roles: Collection[CallerRole]) -> None:
    """Raises PermissionDenied unless one of the roles may call it."""
    refusal: PermissionDenied | None = None
    for role in roles:
        try:
            return check_allowed(rpc, role, proof="certificate")
        except PermissionDenied as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _uris_in(certificate: object) -> list[bytes]:
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return [str(name).encode() for kind, name in names if kind == "URI"]


class _Tls:
    """The server's certificate, read again when its files change: for new connections. For one thread."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._context = self._read()
        self._stamps, self._next_look = self._look(), 0.0

    def newest(self) -> ssl.SSLContext:
        """Returns what the next connection is encrypted with."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_AT_FILES_S
            stamps = self._look()
            if stamps != self._stamps:
                try:
                    self._context, self._stamps = self._read(), stamps
                except InvalidSpec as error:
                    log.warning("changed certificates cannot be used, those read before stay cause=%s", error.message)
        return self._context

    def host(self) -> str:
        """Returns a name of this machine that callers accept: its own if the certificate has it, else the certificate's first."""
        own = socket.gethostname()
        names = [name for name in self._names() if "*" not in name and name not in _LOCAL]
        return own if own in names or not names else names[0]

    def _names(self) -> list[str]:
        """Returns the hosts of the certificate, as a caller that trusts it reads them: none if it has expired."""
        caller, there, back = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO(), ssl.MemoryBIO()
        caller.check_hostname = False
        caller.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        try:
            caller.load_verify_locations(str(self._security.tls_cert))
            asks = caller.wrap_bio(back, there)
            for end in (asks, self._context.wrap_bio(there, back, server_side=True), asks):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except OSError:
            return []
        names: Sequence[tuple[str, str]] = (asks.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
        return [name for kind, name in names if kind in ("DNS", "IP Address")]

    def _read(self) -> ssl.SSLContext:
        security = self._security
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # With a password OpenSSL does not wait at the terminal for that of a key that has one.
            context.load_cert_chain(str(security.tls_cert), str(security.tls_key), password="")
            if security.verify_clients:
                context.load_verify_locations(str(security.tls_ca))
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise InvalidSpec(f"cannot use {security.tls_cert} with {security.tls_key}: {error}") from None
        return context

    def _look(self) -> list[tuple[int, int]]:
        found = []
        for path in (self._security.tls_cert, self._security.tls_key, self._security.tls_ca):
            with contextlib.suppress(OSError):
                if path is not None:
                    about = os.stat(path)
                    found.append((about.st_ino, about.st_mtime_ns))
        return found


async def _until_heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Lets the caller close: what it still sends would otherwise have the system take the answer back from it."""
    if writer.can_write_eof():
        writer.write_eof()
    while await reader.read(MAX_HEAD_BYTES):
        pass


async def _receive(reader: asyncio.StreamReader) -> Request:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(431, f"the head of a request has {MAX_HEAD_BYTES} bytes at most") from None
    except asyncio.IncompleteReadError:
        raise BadRequest(400, "the request ends in its head") from None
    return parse_head(head)


def _answer(route: Route, request: Request) -> Response:
    try:
        return route.answer(request)
    except (PsError, BadRequest):
        raise
    except Exception:
        log.exception("cannot answer path=%s", route.path)
        raise InternalError("internal error (see the log of this process)") from None


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # localhost may have two addresses; browsers and programs try both.
    family, kind, protocol, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
