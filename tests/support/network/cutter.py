"""A TCP connection that is cut after so many bytes. Knows bytes; no messages."""

import contextlib
import select
import socket
import threading

_PIECE_BYTES = 64 << 10


class Cutter:
    """Passes connections on to `target`, and counts the bytes to it (`num_up`) and from it (`num_down`), and cuts. A context manager.

    `cut_up_at`, `cut_down_at`: how many bytes pass before the connection is cut, once; later connections pass whole. `is_silent`: what is
    cut is cut for the caller alone, and its server learns nothing.
    """

    def __init__(self, target: str, *, cut_up_at: int | None = None, cut_down_at: int | None = None, is_silent: bool = False) -> None:
        self.lead_to(target)
        self._limits = [cut_up_at, cut_down_at]
        self._is_silent = is_silent
        self._counts = [0, 0]
        self.num_cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> "Cutter":
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in (self._listener, *self._sockets):
            one.close()

    def lead_to(self, target: str) -> None:
        """Passes later connections on to another server."""
        host, _, port = target.rpartition(":")
        self._target = host, int(port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def num_up(self) -> int:
        return self._counts[0]

    @property
    def num_down(self) -> int:
        return self._counts[1]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [caller, server]
                thread = threading.Thread(target=self._pass_on, args=(caller, server), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, caller: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([caller, server], [], [])
                for source in ready:
                    way, other = (0, server) if source is caller else (1, caller)
                    data = source.recv(_PIECE_BYTES)
                    if not data:
                        raise OSError
                    other.sendall(data)
                    self._counts[way] += len(data)
                    limit = self._limits[way]
                    if limit is not None and self._counts[way] >= limit:
                        self._limits[way] = None
                        self.num_cuts += 1
                        raise OSError
        for one in (caller,) if self._is_silent else (caller, server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
