"""A way between processes that can be slow, silent, torn or shut, to be told while it is used. Knows sockets; nothing of what travels."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16
_DRIP_BYTES = 16
_LOOK_S = 0.02


@dataclass(slots=True)
class Weather:
    """What happens to the bytes of some connections; may be changed at any time. `to_server` and `to_client` False: held back, both ends
    notice nothing. `lets_in` False: new connections are closed at once. `cut_in`: so many more bytes reach the servers, then the
    connection that sends the next one is cut; `num_cuts` counts them, and `on_cut` is told whose process it was, before that can notice.
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
        """How many of `num_bytes` that a connection sends may still pass before it is cut, this once; None: it is not cut."""
        with self.lock:
            if self.cut_in is None:
                return None
            if num_bytes <= self.cut_in:
                self.cut_in -= num_bytes
                return None
            self.cut_in, left = None, self.cut_in
            self.num_cuts += 1
            return left


class Proxy:
    """Listens beside the Unix socket of a server and passes on what comes, under the weather for whoever calls.

    `weather_of` says which, by the caller's process id. `sever` ends all connections that are open, as a machine does that reboots.
    """

    def __init__(self, path: str, stack: ExitStack, *, weather_of: Callable[[int], Weather]) -> None:
        self.address = f"unix:{path}.proxy"
        self._server_path = path
        self._weather_of = weather_of
        self._open: list[tuple[Weather, socket.socket]] = []
        self._is_over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{path}.proxy")
        self._listener.listen(128)
        stack.callback(self._close)
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def sever(self, weather: Weather | None = None) -> None:
        """Ends all connections, or those under this weather."""
        for its_weather, one in [*self._open]:
            if weather is None or its_weather is weather:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed in the end
            while True:
                client, _ = self._listener.accept()
                pid = _peer(client)
                weather = self._weather_of(pid)
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    if not weather.lets_in:
                        raise ConnectionRefusedError
                    server.connect(self._server_path)
                except OSError:
                    client.close()
                    server.close()
                    continue
                self._open = [(its, one) for its, one in self._open if one.fileno() >= 0] + [(weather, client), (weather, server)]
                for source, sink, is_up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=(source, sink, weather, pid if is_up else None), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, weather: Weather, pid: int | None) -> None:
        """Passes on what comes from `source`; `pid`: the caller's, for the way to the server."""
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                self._await_passage(weather, is_up=pid is not None)
                if pid is not None and (left := weather.take_cut(len(chunk))) is not None:
                    sink.sendall(chunk[:left])
                    weather.on_cut(pid)
                    break
                if weather.delay_s:
                    self._is_over.wait(weather.delay_s)
                self._send(sink, chunk, weather)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _send(self, sink: socket.socket, chunk: bytes, weather: Weather) -> None:
        while weather.drips and chunk and not self._is_over.is_set():
            sink.sendall(chunk[:_DRIP_BYTES])
            chunk = chunk[_DRIP_BYTES:]
            self._is_over.wait(0.001)
        sink.sendall(chunk)

    def _await_passage(self, weather: Weather, *, is_up: bool) -> None:
        while not (weather.to_server if is_up else weather.to_client) and not self._is_over.wait(_LOOK_S):
            pass

    def _close(self) -> None:
        self._is_over.set()
        for _, one in [*self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self.address[5:])


def _peer(client: socket.socket) -> int:
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
