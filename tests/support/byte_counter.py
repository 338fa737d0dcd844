"""Passes the bytes of connections on to a Unix socket, and counts them. Knows sockets; nothing of what travels."""

import socket
import threading
from contextlib import ExitStack, suppress

_CHUNK_BYTES = 1 << 16


class ByteCounter:
    """Listens beside the server at `path` and passes on what comes. `num_bytes` counts both directions; it never goes down."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self.address = f"unix:{path}.counted"
        self._server_path = path
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{path}.counted")
        self._listener.listen()
        self._open.append(self._listener)
        stack.callback(self._close)
        threading.Thread(target=self._accept, name="byte-counter", daemon=True).start()

    @property
    def num_bytes(self) -> int:
        """Bytes that have passed in either direction."""
        with self._lock:
            return self._num_bytes

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed in the end
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    server.connect(self._server_path)
                except OSError:  # it does not serve yet; whoever asks will ask again
                    client.close()
                    server.close()
                    continue
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                with self._lock:
                    self._num_bytes += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
