"""Ends streams in which nothing has moved for too long, since each holds one of the server's threads. Knows gRPC contexts; no tensor."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import grpc

log = logging.getLogger(__name__)

IDLE_LIMIT_S = 30.0

Message = TypeVar("Message")


class _Stream:
    """One stream under way, and since when it has waited for its peer; None while the server itself is at work."""

    def __init__(self, context: grpc.ServicerContext, name: str) -> None:
        self.context = context
        self.name = name
        self.waiting_since: float | None = None

    def incoming(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yields what the peer sends."""
        while True:
            self.waiting_since = time.monotonic()
            message = next(messages, None)
            self.waiting_since = None
            if message is None:
                return
            yield message

    def outgoing(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yields what the peer is sent; gRPC asks for the next message when the peer has made room for it."""
        for message in messages:
            self.waiting_since = time.monotonic()
            yield message
            self.waiting_since = None


class IdleStreams:
    """Watches streams from one thread of its own, between `start` and `stop`. Thread-safe.

    A stream that is cut ends as CANCELLED: gRPC's threaded server cannot give another status to a call whose thread waits.
    """

    def __init__(self, *, limit_s: float = IDLE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle-streams", daemon=True)

    @property
    def num_streams(self) -> int:
        """Streams under way."""
        return len(self._streams)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextlib.contextmanager
    def watching(self, context: grpc.ServicerContext, *, name: str) -> Iterator[_Stream]:
        """Watches one stream for as long as the block lasts."""
        stream = _Stream(context, name)
        with self._lock:
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _run(self) -> None:
        while not self._stopping.wait(self._limit_s / 4):
            now = time.monotonic()
            with self._lock:
                idle = [stream for stream in self._streams if now - (stream.waiting_since or now) > self._limit_s]
            for stream in idle:
                log.warning("stream cut rpc=%s peer=%s idle_s>%.3g", stream.name, stream.context.peer(), self._limit_s)
                stream.context.cancel()
