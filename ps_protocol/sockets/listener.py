"""The listener for data sockets: admits only connections that the server has invited. Knows sockets and nonces; no gRPC, no message."""

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage, Unavailable, Unimplemented
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.listening import num_descriptors, why_not
from ps_protocol.roles.identity import MAX_UNIX_PATH_BYTES, Address
from ps_protocol.roles.shard import Invitation
from ps_protocol.sockets.data_socket import NONCE_BYTES, SUFFIX, WELCOME, DataSocket

log = logging.getLogger("lockstep.server")

# An invited caller connects at once, and uses the connection at once.
_INVITED_S = 10.0
_MAX_INVITED = 4_096
# A connection says its nonce with its first bytes; until then it is a stranger's.
_STRANGER_S = 2.0
_MAX_STRANGERS = 256
# Connections taken a second while an invited caller is awaited, which may stand behind strangers in the system's queue. At other times none
# is taken: strangers wait there, and cost this process nothing. No stranger can end that: only authorised calls invite.
_MAX_TAKEN_A_SECOND = 2_000
# A pause once so many have been taken.
_REST_S = 0.01
# Both together may take a part of the descriptors that is small beside what gRPC takes and what checkpoints and shared memory need.
_MOST_OF_DESCRIPTORS = 1 / 16
_BACKLOG = 256
_ALL_ADDRESSES = ("", "0.0.0.0", "::")


@light_dataclass(slots=True)
class _Stranger:
    """A connection that has not sent its nonce yet."""

    connection: socket.socket
    since: float
    said: bytes = b""


class DataListener:
    """Listens from `start` to `stop`, in a thread of its own. Thread-safe."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._most = max(4, int(num_descriptors() * _MOST_OF_DESCRIPTORS / 2))
        self._lock = threading.Lock()
        # By nonce: since when it is invited, and its connection once it has come.
        self._invited: dict[bytes, tuple[float, socket.socket | None]] = {}
        self._address: Address | None = None
        self._has_stopped = False
        self._thread: threading.Thread | None = None
        self._strangers: dict[int, _Stranger] = {}
        self._wake: socket.socket | None = None

    def start(self, address: Address, *, port: int = 0) -> None:
        """Begins to listen beside a server's `address`, at `port` (0: any that is free) of its host. Raises InvalidSpec if it cannot."""
        try:
            if address.is_unix:
                self._address = Address(path=address.path + SUFFIX)
                if len(self._address.path.encode()) > MAX_UNIX_PATH_BYTES:
                    return  # then there are none
                listening = [_listen_unix(self._address.path)]
            else:
                listening = _listen_tcp(address.host, port)
                self._address = Address(host=address.host, port=listening[0].getsockname()[1])
        except OSError as error:
            where = str(Address(path=address.path + SUFFIX) if address.is_unix else Address(host=address.host, port=port))
            raise InvalidSpec(f"cannot listen at {where} for data sockets: {why_not(error)}") from None
        for one in listening:
            one.setblocking(False)
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(listening, woken), name="data-listener", daemon=True)
        self._thread.start()

    def invite(self) -> Invitation:
        """Invites one connection, which must come and be used within 10 s. Raises Unimplemented if there are none here, LimitExceeded;
        Unavailable after `stop`.
        """
        address, now = self._address, time.monotonic()
        if self._has_stopped:
            raise Unavailable(f"{self._name} is ending and takes no more data sockets")
        if self._thread is None or address is None:
            raise Unimplemented(f"{self._name} has no data sockets: what travels is encrypted, or its Unix socket's path is too long")
        nonce = secrets.token_bytes(NONCE_BYTES)
        with self._lock:
            if len(self._invited) >= min(self._most, _MAX_INVITED):
                raise LimitExceeded(f"{self._name}: {len(self._invited)} data sockets are waited for at once; try again later")
            self._invited[nonce] = now, None
        with contextlib.suppress(OSError):  # it is awake already, or has just ended
            if self._wake is not None:
                self._wake.send(b"\0")
        return Invitation(nonce=nonce, port=address.port, path=address.path)

    def claim(self, nonce: bytes) -> DataSocket:
        """Returns the connection that has sent a nonce; it is the caller's. Raises MalformedMessage if there is none."""
        with self._lock:
            _, connection = self._invited.get(nonce, (0.0, None))
            if connection is None:
                raise MalformedMessage("payload.socket: no data socket has come with this nonce; ask for another one")
            del self._invited[nonce]
        return DataSocket(connection, nonce=nonce, peer="the caller")

    def stop(self) -> None:
        """Ends the thread, and every unclaimed connection. Idempotent."""
        self._has_stopped = True
        thread, self._thread = self._thread, None
        if thread is not None and self._wake is not None:
            self._wake.close()
            thread.join()

    def _run(self, listening: list[socket.socket], woken: socket.socket) -> None:
        with woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            budget, looked_at, is_listening = float(_MAX_TAKEN_A_SECOND), time.monotonic(), False
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._wait_s(is_listening))}
                if woken in ready and not woken.recv(_MAX_INVITED):
                    break
                now = time.monotonic()
                budget, looked_at = min(budget + (now - looked_at) * _MAX_TAKEN_A_SECOND, _MAX_TAKEN_A_SECOND), now
                for stranger in [one for one in self._strangers.values() if one.connection in ready]:
                    self._hear(stranger, selector)
                for one in listening:
                    if one in ready:
                        # Those of one turn leave room for strangers of the turn before, whose nonce may still come.
                        budget -= self._take(one, selector, now=now, most=max(1, min(int(budget), self._max_strangers // 2)))
                self._expire(selector, now=now)
                if is_listening != (budget >= 1 and self._is_awaiting()):
                    is_listening = not is_listening
                    for one in listening:
                        if is_listening:
                            selector.register(one, selectors.EVENT_READ)
                        else:
                            selector.unregister(one)
        self._end(listening)

    def _wait_s(self, is_listening: bool) -> float | None:
        """Returns the time after which something is to be done that no connection tells of."""
        if not is_listening and self._is_awaiting():
            return _REST_S
        return 1.0 if self._strangers or self._invited else None

    @property
    def _max_strangers(self) -> int:
        return min(self._most, _MAX_STRANGERS)

    def _is_awaiting(self) -> bool:
        with self._lock:
            return any(connection is None for _, connection in self._invited.values())

    def _take(self, listening: socket.socket, selector: selectors.BaseSelector, *, now: float, most: int) -> int:
        """Takes at most so many connections that wait; returns how many it tried to take."""
        for count in range(most):
            try:
                connection, _ = listening.accept()
            except OSError:  # there is none any more, or there are no descriptors
                return max(1, count)
            self._admit(connection, selector, now=now)
        return most

    def _admit(self, connection: socket.socket, selector: selectors.BaseSelector, *, now: float) -> None:
        connection.setblocking(False)
        if len(self._strangers) >= self._max_strangers:
            self._drop(next(iter(self._strangers.values())), selector)
        self._strangers[connection.fileno()] = stranger = _Stranger(connection, now)
        selector.register(connection, selectors.EVENT_READ)
        self._hear(stranger, selector)

    def _hear(self, stranger: _Stranger, selector: selectors.BaseSelector) -> None:
        """Takes what a connection says; the rest of a nonce may come later."""
        try:
            said = stranger.connection.recv(NONCE_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if said and len(stranger.said) < NONCE_BYTES:
            return
        self._forget(stranger, selector)
        with self._lock:
            invited = self._invited.get(stranger.said)
            if invited is not None and invited[1] is None:
                # Another thread may claim it as soon as it is there, and close it.
                with contextlib.suppress(OSError):  # then its use will fail
                    stranger.connection.send(WELCOME)
                self._invited[stranger.said] = time.monotonic(), stranger.connection
                return
        stranger.connection.close()

    def _drop(self, stranger: _Stranger, selector: selectors.BaseSelector) -> None:
        self._forget(stranger, selector)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger, selector: selectors.BaseSelector) -> None:
        del self._strangers[stranger.connection.fileno()]
        selector.unregister(stranger.connection)

    def _expire(self, selector: selectors.BaseSelector, *, now: float) -> None:
        for stranger in [one for one in self._strangers.values() if now - one.since > _STRANGER_S]:
            self._drop(stranger, selector)
        with self._lock:
            gone = [(nonce, connection) for nonce, (since, connection) in self._invited.items() if now - since > _INVITED_S]
            for nonce, _ in gone:
                del self._invited[nonce]
        for _, connection in gone:
            if connection is not None:
                connection.close()

    def _end(self, listening: list[socket.socket]) -> None:
        for one in listening:
            one.close()
        if self._address is not None and self._address.is_unix:
            with contextlib.suppress(OSError):
                os.unlink(self._address.path)
        with self._lock:
            connections = [connection for _, connection in self._invited.values() if connection is not None]
            self._invited.clear()
        for connection in [*connections, *(stranger.connection for stranger in self._strangers.values())]:
            connection.close()


# Of a server that has none.
NO_DATA_SOCKETS = DataListener(name="this server")


def _listen_unix(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    try:
        # The file of a killed server: it is known by now that no process listens at the server's own path.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listening.bind(path)
        listening.listen(256)
    except BaseException:
        listening.close()
        raise
    return listening


def _listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listens wherever gRPC does that was given the same host: at all its addresses, at one port. Raises OSError."""
    if host in _ALL_ADDRESSES and socket.has_dualstack_ipv6():
        return [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)]
    addresses = dict.fromkeys((family, where[0]) for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    while True:
        listening: list[socket.socket] = []
        failure: OSError | None = None
        for family, where in addresses:
            chosen = listening[0].getsockname()[1] if listening else port
            try:
                listening.append(socket.create_server((str(where), chosen), family=family, backlog=_BACKLOG))
            except OSError as error:
                # A name may have addresses that this host has not.
                failure = error if failure is None or error.errno == errno.EADDRINUSE else failure
        is_taken = failure is not None and failure.errno == errno.EADDRINUSE
        if listening and not is_taken:
            return listening
        for one in listening:
            one.close()
        if failure is not None and (port or not listening):
            raise failure
