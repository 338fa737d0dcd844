"""Passes the bytes of TCP connections on to a server, and counts each direction. Knows sockets; nothing of what travels."""

import socket
import threading
from contextlib import suppress
from types import TracebackType

_CHUNK_BYTES = 1 << 18


class ByteRelay:
    """Listens on a free port of this machine for the server at `host:port`. `num_up` and `num_down` count what came from each side."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_up = self.num_down = 0

    def __enter__(self) -> "ByteRelay":
        threading.Thread(target=self._accept, name="byte-relay", daemon=True).start()
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed in the end
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                # Each counter has one writer for each connection, and there is one connection.
                if is_up:
                    self.num_up += len(chunk)
                else:
                    self.num_down += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
