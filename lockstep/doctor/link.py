"""Measures latency and bandwidth between two hosts: a small server, and the caller that measures. Knows TCP; no gRPC, no role, no secret.

Serves one caller at a time, for 30 s at most. The server sends zeros, and drops the bytes that it receives. The commands are lines:
`clock`, `ping`, `down N`, `up N`.
"""

import socket
import statistics
import time
from collections.abc import Callable
from typing import BinaryIO, cast

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.identity import Address

HELLO = b"lockstep-doctor 1\n"
MAX_BYTES = 1 << 30
_CHUNK = bytes(1 << 20)
_CALLER_S, _SILENCE_S = 30.0, 5.0
_LINE_BYTES = 64
_NUM_PINGS = 50
_FIRST_BYTES, _WANTED_S = 1 << 20, 0.7


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A link as its caller sees it. Times in seconds, rates in bytes a second. `clock_ahead_s`: how far the other host's clock is ahead."""

    round_trip_s: float
    slow_round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    clock_ahead_s: float


class NoDoctor(Exception):
    """The server at an address is not `lockstep doctor --serve`."""


def serve(address: Address, *, on_ready: Callable[[str], None], on_caller: Callable[[str], None]) -> None:
    """Serves callers, one after the other, until it is interrupted. Raises OSError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, address.port), family=family, backlog=4) as listening:
        on_ready(str(Address(host=address.host, port=listening.getsockname()[1])))
        while True:
            connection, (host, *_) = listening.accept()
            with connection:
                try:
                    served = _serve_one(connection)
                except (OSError, ValueError) as error:
                    on_caller(f"{host}: {error}")
                else:
                    on_caller(f"{host}: measured" if served else f"{host}: another program called")


def _serve_one(connection: socket.socket) -> bool:
    end = time.monotonic() + _CALLER_S
    connection.settimeout(_SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = cast("BinaryIO", connection.makefile("rwb", buffering=0))
    if stream.readline(_LINE_BYTES) != HELLO:
        return False
    connection.sendall(HELLO)
    while time.monotonic() < end and (line := stream.readline(_LINE_BYTES)):
        word, _, number = line.decode("ascii").strip().partition(" ")
        size = int(number or 0)
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"asked for {size} bytes")
        if word == "clock":
            connection.sendall(f"{time.time():.6f}\n".encode())
        elif word == "ping":
            connection.sendall(b"\n")
        elif word == "down":
            _send(connection, size, end=end)
        elif word == "up":
            _receive(connection, size, end=end)
            connection.sendall(b"\n")
        else:
            raise ValueError(f"asked for {word[:20]!r}")
    return True


def measure(address: Address, *, timeout_s: float) -> Measured:
    """Measures for about two seconds. Raises NoDoctor, OSError."""
    with socket.create_connection((address.host, address.port), timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = cast("BinaryIO", connection.makefile("rb"))
        try:
            connection.sendall(HELLO)
            answer = stream.readline(_LINE_BYTES)
        except OSError:
            answer = b""
        if answer != HELLO:
            raise NoDoctor
        connection.settimeout(_CALLER_S)
        times = [_timed(lambda: _ask(connection, stream, b"ping\n")) for _ in range(_NUM_PINGS)]
        ahead = _clock_ahead(connection, stream)
        return Measured(
            round_trip_s=statistics.median(times),
            slow_round_trip_s=sorted(times)[-_NUM_PINGS // 20],
            up_bytes_per_s=_rate(lambda size: _up(connection, stream, size)),
            down_bytes_per_s=_rate(lambda size: _down(connection, stream, size)),
            clock_ahead_s=ahead,
        )


def _clock_ahead(connection: socket.socket, stream: BinaryIO) -> float:
    """Returns how far the other clock is ahead, in seconds, by the question with the shortest round trip, whose time is known best."""
    found = []
    for _ in range(8):
        before = time.time()
        theirs = float(_ask(connection, stream, b"clock\n"))
        after = time.time()
        found.append((after - before, theirs - (before + after) / 2))
    return min(found)[1]


def _rate(move: Callable[[int], None]) -> float:
    size, taken_s = _FIRST_BYTES, _timed(lambda: move(_FIRST_BYTES))
    while taken_s < _WANTED_S / 2 and size < MAX_BYTES // 4:
        size = min(MAX_BYTES // 4, max(size * 2, int(size * _WANTED_S / max(taken_s, 1e-6))))
        taken_s = _timed(lambda: move(size))  # noqa: B023  (called at once)
    return size / max(taken_s, 1e-9)


def _up(connection: socket.socket, stream: BinaryIO, size: int) -> None:
    connection.sendall(f"up {size}\n".encode())
    _send(connection, size, end=time.monotonic() + _CALLER_S)
    _line(stream)


def _down(connection: socket.socket, stream: BinaryIO, size: int) -> None:
    connection.sendall(f"down {size}\n".encode())
    while size:
        data = stream.read(min(size, len(_CHUNK)))
        if not data:
            raise ConnectionError("the other end has closed the connection")
        size -= len(data)


def _ask(connection: socket.socket, stream: BinaryIO, line: bytes) -> bytes:
    connection.sendall(line)
    return _line(stream)


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ConnectionError("the other end has closed the connection")
    return line.strip()


def _send(connection: socket.socket, size: int, *, end: float) -> None:
    while size and time.monotonic() < end:
        connection.sendall(memoryview(_CHUNK)[: min(size, len(_CHUNK))])
        size -= min(size, len(_CHUNK))


def _receive(connection: socket.socket, size: int, *, end: float) -> None:
    while size and time.monotonic() < end:
        data = connection.recv(min(size, len(_CHUNK)))
        if not data:
            raise ConnectionError("the caller has closed the connection")
        size -= len(data)


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
