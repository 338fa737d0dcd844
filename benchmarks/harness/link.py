"""A link of a given rate and delay before a server: each connection has one of its own. Knows sockets; no protocol.

It has no losses, and no window that grows slowly as on a long line.
"""

import queue
import socket
import threading
import time
from contextlib import suppress

from benchmarks.harness.relay import Conditions, Relay

# Bytes a second, and seconds one way: there and back take what the name says.
NETWORKS: dict[str, tuple[float, float] | None] = {
    "loopback": None,
    "1Gbit": (1e9 / 8, 0.0),
    "1Gbit-100ms": (1e9 / 8, 0.05),
    "100Mbit-50ms": (1e8 / 8, 0.025),
    "100Mbit-100ms": (1e8 / 8, 0.05),
}
_CHUNK_BYTES = 1 << 15
# What waits before the link, as in a router.
_AHEAD_S = 0.01


class Link(Relay):
    """A relay whose connections carry `rate` bytes a second, each of which arrives `delay_s` later."""

    def __init__(self, server: str, *, rate: float, delay_s: float) -> None:
        super().__init__(server)
        self._rate, self._delay_s = rate, delay_s

    def _pass_on(self, source: socket.socket, sink: socket.socket, conditions: Conditions, is_up: bool, pid: int) -> None:
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=_give, args=(sink, under_way), daemon=True).start()
        free, chunk = 0.0, b"."  # when the link has taken in all that came before
        while chunk:
            chunk = b""
            with suppress(OSError):
                chunk = source.recv(_CHUNK_BYTES)
            now = time.monotonic()
            free = max(free, now) + len(chunk) / self._rate
            under_way.put((free + self._delay_s, chunk))
            time.sleep(max(0.0, free - now - _AHEAD_S))  # the link is full: so its rate is made


def _give(sink: socket.socket, under_way: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    with suppress(OSError):
        while True:
            due, chunk = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))  # on its way: so the delay is made
            if not chunk:
                break
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_RDWR)
