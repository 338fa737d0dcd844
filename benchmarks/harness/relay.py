"""A relay between clients and a server that counts bytes, and can delay, hold back or cut them. Knows sockets; no protocol."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ps_protocol.sockets.data_socket import SUFFIX

_CHUNK_BYTES = 1 << 16
_DRIP_BYTES = 16
_LOOK_S = 0.02


@dataclass(slots=True)
class Conditions:
    """The network conditions of some connections; may be changed at any time.

    `to_server` and `to_client` False: bytes are held back, and neither end notices. `lets_in` False: new connections are closed at once.
    `cut_in`: after this many more bytes to the servers, the connection that sends the next byte is cut. `num_cuts` counts the cuts, and
    `on_cut` is called with the process id of the sender before the sender can notice.
    """

    to_server: bool = True
    to_client: bool = True
    lets_in: bool = True
    delay_s: float = 0.0
    drips: bool = False
    cut_in: int | None = None
    num_cuts: int = 0
    on_cut: Callable[[int], None] = lambda pid: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_cut(self, num_bytes: int) -> int | None:
        """Returns how many of the `num_bytes` that a connection sends may pass before it is cut; None: it is not cut. Cuts once only."""
        with self.lock:
            if self.cut_in is None:
                return None
            if num_bytes <= self.cut_in:
                self.cut_in -= num_bytes
                return None
            self.cut_in, left = None, self.cut_in
            self.num_cuts += 1
            return left


class Relay:
    """Listens in place of the server at "unix:PATH" or "HOST:PORT", and passes bytes on, within a `with` block.

    `conditions_of` returns the conditions for a caller's process id; None: no faults. The server need not serve yet: a connection that
    comes too early is refused, as the server itself would refuse it. For a Unix socket, the data socket beside it is relayed too.
    """

    def __init__(self, server: str, *, conditions_of: Callable[[int], Conditions] | None = None) -> None:
        normal = Conditions()
        self._server = server
        self._conditions_of = conditions_of or (lambda pid: normal)
        self._open: list[tuple[Conditions, socket.socket]] = []
        self._is_over = threading.Event()
        self._counting = threading.Lock()
        self._num_up = self._num_down = 0
        listener = _listener(server)
        name = listener.getsockname()
        self.address = f"unix:{name}" if _is_unix(server) else f"{name[0]}:{name[1]}"
        # Listeners, each with the address of its server.
        self._routes = [(listener, server)]
        if _is_unix(server):
            self._routes.append((_unix_listener(name + SUFFIX), server + SUFFIX))

    def __enter__(self) -> Self:
        for listener, server in self._routes:
            threading.Thread(target=self._accept, args=(listener, server), name="relay", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        for one in [*(one for _, one in self._open), *(listener for listener, _ in self._routes)]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        if _is_unix(self._server):
            path = self.address.removeprefix("unix:")
            for one_path in (path, path + SUFFIX):
                with suppress(OSError):
                    os.unlink(one_path)

    @property
    def num_up(self) -> int:
        """Bytes that came from clients; never goes down."""
        with self._counting:
            return self._num_up

    @property
    def num_down(self) -> int:
        """Bytes that came from the server; never goes down."""
        with self._counting:
            return self._num_down

    def sever(self, conditions: Conditions | None = None) -> None:
        """Ends all connections, as a rebooting machine does, or those with these conditions."""
        for its_conditions, one in [*self._open]:
            if conditions is None or its_conditions is conditions:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket, address: str) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                client, _ = listener.accept()
                pid = _peer(client) if _is_unix(address) else 0
                conditions = self._conditions_of(pid)
                try:
                    server = _connected(address) if conditions.lets_in else None
                except OSError:
                    server = None
                if server is None:
                    client.close()
                    continue
                self._open = [(its, one) for its, one in self._open if one.fileno() >= 0] + [(conditions, client), (conditions, server)]
                for source, sink, is_up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=(source, sink, conditions, is_up, pid), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, conditions: Conditions, is_up: bool, pid: int) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                self._count(len(chunk), is_up=is_up)
                self._await_passage(conditions, is_up=is_up)
                if is_up and (left := conditions.take_cut(len(chunk))) is not None:
                    sink.sendall(chunk[:left])
                    conditions.on_cut(pid)
                    break
                if conditions.delay_s:
                    self._is_over.wait(conditions.delay_s)
                self._send(sink, chunk, conditions)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, num_bytes: int, *, is_up: bool) -> None:
        with self._counting:
            if is_up:
                self._num_up += num_bytes
            else:
                self._num_down += num_bytes

    def _send(self, sink: socket.socket, chunk: bytes, conditions: Conditions) -> None:
        while conditions.drips and chunk and not self._is_over.is_set():
            sink.sendall(chunk[:_DRIP_BYTES])
            chunk = chunk[_DRIP_BYTES:]
            self._is_over.wait(0.001)
        sink.sendall(chunk)

    def _await_passage(self, conditions: Conditions, *, is_up: bool) -> None:
        while not (conditions.to_server if is_up else conditions.to_client) and not self._is_over.wait(_LOOK_S):
            pass


def _is_unix(address: str) -> bool:
    return address.startswith("unix:")


def _listener(server: str) -> socket.socket:
    """A socket beside the server's, or on a free port of this machine."""
    if not _is_unix(server):
        return socket.create_server(("127.0.0.1", 0))
    return _unix_listener(f"{server.removeprefix('unix:')}.relay")


def _unix_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener


def _connected(address: str) -> socket.socket:
    if not _is_unix(address):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)))
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(address.removeprefix("unix:"))
    except OSError:
        connected.close()
        raise
    return connected


def _peer(client: socket.socket) -> int:
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
