"""Floods by a stranger without a token, as fast as possible, over several connections. Knows HTTP/2's frames; no role.

    python -m tests.support.network.floods HOST:PORT KIND --connections 4 --seconds 4 [--tls] [--let-in]

With `--let-in`, each connection first makes a call that is answered: for parameter servers without tokens.

It prints one JSON object at the end: how often it connected and was cut, and how many bytes it sent.
"""

import argparse
import itertools
import json
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# A tool of tests: it always ends by itself.
MAX_CONNECTIONS, MAX_SECONDS = 64, 120.0
_CHUNK_BYTES = 64 << 10
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM, _END_HEADERS = 1, 4


def _frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


_GREETING = _PREFACE + _frame(_SETTINGS)
_STREAM_IDS = range(1, 1 << 31, 2)


def _literal(name: bytes, value: bytes, *, is_kept: bool = False) -> bytes:
    """A header that is spelled out, by HPACK; `is_kept`: to be remembered by the receiver."""
    return (b"\x40" if is_kept else b"\x00") + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, digits = len(text) - 127, bytearray(b"\x7f")
    while rest >= 128:
        digits.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*digits, rest]) + text


def _request(path: bytes) -> bytes:
    """The headers of a call without a token."""
    # :method POST and :scheme http are entries 3 and 6 of the table that every receiver has.
    names = ((b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"\x83\x86" + b"".join(_literal(name, value) for name, value in names)


_CHECK = _request(b"/grpc.health.v1.Health/Check")
_STATUS = _request(b"/ps_protocol.v1.ParameterService/GetShardStatus")


def _again(frame: bytes) -> Iterator[bytes]:
    return itertools.repeat(frame * max(1, _CHUNK_BYTES // len(frame)))


def _on_new_streams(frames: Callable[[int], bytes], *, at_once: int = 256) -> Iterator[bytes]:
    for first in range(0, len(_STREAM_IDS), at_once):
        yield b"".join(map(frames, _STREAM_IDS[first : first + at_once]))


def _request_frame(stream: int, headers: bytes, *, flags: int = _END_HEADERS) -> bytes:
    return _frame(_HEADERS, headers, flags=flags, stream=stream)


def _remembered() -> Iterator[bytes]:
    """Headers that fill the receiver's table and are thrown out of it by the next ones."""
    values = (_literal(b"n%d" % number, b"v" * 900, is_kept=True) for number in itertools.count())
    return _on_new_streams(lambda stream: _request_frame(stream, _CHECK + b"".join(itertools.islice(values, 8))), at_once=8)


def _unfolded() -> Iterator[bytes]:
    """One large header that is remembered, and calls that name it thousands of times by one byte each."""
    yield _request_frame(1, _CHECK + _literal(b"n", b"v" * 3900, is_kept=True))
    yield from _on_new_streams(lambda stream: _request_frame(stream + 2, _CHECK + b"\xbe" * 8000), at_once=8)


def _continued() -> Iterator[bytes]:
    """Headers of one call that have no end."""
    yield _request_frame(1, _CHECK, flags=0)
    yield from _again(_frame(_CONTINUATION, _literal(b"name", b"v" * 200), stream=1))


def _data(stream: int) -> Iterator[bytes]:
    yield _request_frame(1, _CHECK)
    yield from _again(_frame(_DATA, bytes(16_384), stream=stream))


def _noise(first: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield os.urandom(_CHUNK_BYTES)


def _silence() -> Iterator[bytes]:
    while True:
        time.sleep(0.02)  # a stranger that says nothing need not take a processor
        yield b""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is sent after the connection is made, in chunks without end; `reads`: whether answers are taken off the connection."""

    chunks: Callable[[], Iterator[bytes]]
    greeting: bytes = _GREETING
    reads: bool = True


KINDS: dict[str, Kind] = {
    "priority": Kind(lambda: _again(_frame(_PRIORITY, bytes(5), stream=1))),
    "window_update": Kind(lambda: _again(_frame(_WINDOW_UPDATE, struct.pack(">I", 1)))),
    "window_update of streams": Kind(lambda: _again(_frame(_WINDOW_UPDATE, struct.pack(">I", 1), stream=1))),
    "settings": Kind(lambda: _again(_frame(_SETTINGS))),
    "settings unread": Kind(lambda: _again(_frame(_SETTINGS)), reads=False),
    "settings acknowledged": Kind(lambda: _again(_frame(_SETTINGS, flags=1))),
    "ping": Kind(lambda: _again(_frame(_PING, bytes(8)))),
    "ping answered": Kind(lambda: _again(_frame(_PING, bytes(8), flags=1))),
    "goaway": Kind(lambda: _again(_frame(_GOAWAY, bytes(8)))),
    "unknown frames": Kind(lambda: _again(_frame(0xFA, bytes(16)))),
    "rst_stream": Kind(lambda: _again(_frame(RST_STREAM, bytes(4), stream=1))),
    "hpack remembered": Kind(_remembered),
    "hpack unfolded": Kind(_unfolded),
    "hpack continued": Kind(_continued),
    "data of a call": Kind(lambda: _data(1)),
    "data of no call": Kind(lambda: _data(3)),
    "empty data": Kind(lambda: itertools.chain([_request_frame(1, _CHECK)], _again(_frame(_DATA, stream=1)))),
    "rapid reset": Kind(
        lambda: _on_new_streams(lambda stream: _request_frame(stream, _CHECK) + _frame(RST_STREAM, bytes(4), stream=stream))
    ),
    "calls": Kind(lambda: _on_new_streams(lambda stream: _request_frame(stream, _STATUS))),
    "calls unread": Kind(lambda: _on_new_streams(lambda stream: _request_frame(stream, _STATUS)), reads=False),
    "health": Kind(
        lambda: _on_new_streams(
            lambda stream: _request_frame(stream, _CHECK) + _frame(_DATA, bytes(5), flags=_END_STREAM, stream=stream), at_once=64
        )
    ),
    "garbage": Kind(lambda: _noise(b""), greeting=b""),
    "garbage after the greeting": Kind(lambda: _noise(_GREETING), greeting=b""),
    "nothing": Kind(lambda: iter(()), greeting=b""),
}
# Frames without which no call can do, and which carry nothing: also a caller that was let in may send only so many.
CONTROL_KINDS = ("priority", "window_update", "settings", "ping", "unknown frames", "rst_stream")
# As slow as it gets, which only ports that expect something at once mind.
SLOW_KINDS = {"silence": Kind(_silence, greeting=b"")}


class Flood:
    """Connections of one kind to one port, each of which is made again at once when it is cut."""

    def __init__(self, host: str, port: int, kind: Kind, *, tls: bool, until: float, is_let_in: bool = False) -> None:
        self._where, self._kind, self._until, self._is_let_in = (host, port), kind, until, is_let_in
        self._tls = _tls() if tls else None
        self._lock = threading.Lock()
        self.num_connections = self.num_cut = self.num_bytes = 0

    def run(self) -> None:
        """One connection after the other; to be called by several threads."""
        while time.monotonic() < self._until:
            self.run_once()

    def run_once(self) -> None:
        """One connection, until it is cut."""
        try:
            with self._connected() as connection:
                self._count(num_connections=1)
                self._pour(connection)
        except (OSError, ssl.SSLError):
            self._count(num_cut=1)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._where, timeout=1.0)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection)
        return connection

    def _pour(self, connection: socket.socket) -> None:
        greeting = self._kind.greeting
        if self._is_let_in:
            _make_call(connection)
            greeting = b""
        connection.setblocking(False)
        for chunk in itertools.chain([greeting], self._kind.chunks()):
            view = memoryview(chunk)
            if time.monotonic() >= self._until:
                return
            while view:
                if time.monotonic() >= self._until:
                    return
                try:
                    sent = connection.send(view)
                    self._count(num_bytes=sent)
                    view = view[sent:]
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    select.select([connection] if self._kind.reads else [], [connection], [], 0.05)
                if self._kind.reads:
                    _take(connection)
        raise ConnectionResetError  # all was sent that there is

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


def _make_call(connection: socket.socket) -> None:
    """Asks for a parameter server's status, and returns when it has been answered."""
    empty = _frame(_DATA, bytes(5), flags=_END_STREAM, stream=1)
    connection.sendall(_GREETING + _frame(_SETTINGS, flags=1) + _request_frame(1, _STATUS) + empty)
    with connection.makefile("rb") as answers:
        while True:
            header = answers.read(9)
            if len(header) < 9:
                raise ConnectionResetError
            answers.read(int.from_bytes(header[:3]))
            if header[3] == _HEADERS and header[4] & _END_STREAM:
                return


def _take(connection: socket.socket) -> None:
    try:
        if not connection.recv(1 << 16):
            raise ConnectionResetError
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        pass


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def main() -> None:
    """Floods, and prints what became of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("kind", choices=[*KINDS, *SLOW_KINDS])
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--let-in", action="store_true")
    arguments = parser.parse_args()
    host, _, port = arguments.address.rpartition(":")
    until = time.monotonic() + min(arguments.seconds, MAX_SECONDS)
    flood = Flood(host, int(port), (KINDS | SLOW_KINDS)[arguments.kind], tls=arguments.tls, until=until, is_let_in=arguments.let_in)
    threads = [threading.Thread(target=flood.run) for _ in range(min(arguments.connections, MAX_CONNECTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    json.dump({"connections": flood.num_connections, "cut": flood.num_cut, "bytes": flood.num_bytes}, sys.stdout)


if __name__ == "__main__":
    main()
