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
    """One stream under way, and when a message last came or went."""

    def __init__(self, context: grpc.ServicerContext, name: str) -> None:
        self.context = context
        self.name = name
        self.moved = time.monotonic()

    def watched(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yields the messages, noting when each comes or goes."""
        for message in messages:
            self.moved = time.monotonic()
            yield message
            self.moved = time.monotonic()


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
                idle = [stream for stream in self._streams if now - stream.moved > self._limit_s]
            for stream in idle:
                log.warning("stream cut rpc=%s peer=%s idle_s=%.0f", stream.name, stream.context.peer(), now - stream.moved)
                stream.context.cancel()
