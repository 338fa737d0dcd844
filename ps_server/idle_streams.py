"""Ends streams in which nothing has moved for too long, since each holds a thread or memory.

A standing stream rests between two of its calls, for as long as it likes; so there may only be so many of them.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import grpc

from ps_protocol.errors import LimitExceeded

log = logging.getLogger("lockstep.server")

IDLE_LIMIT_S = 30.0
# Leaves threads for all other calls; who gets no standing stream does without.
MAX_STANDING = 3_072

Message = TypeVar("Message")


class Stream:
    """One stream under way, and since when it has waited for its peer; None while the server itself is at work.

    `is_resting` is for standing streams: set by who serves it while it may wait for its peer as long as it likes.
    """

    def __init__(self, context: grpc.ServicerContext, name: str, *, is_standing: bool) -> None:
        self.context = context
        self.name = name
        self.is_standing = is_standing
        self.is_resting = is_standing
        self.is_to_end = False
        self.waiting_since: float | None = None

    def rest(self) -> None:
        """Notes that a standing stream has done what its peer asked for."""
        self.is_resting = True
        if self.is_to_end:
            self.context.cancel()

    def begin_waiting(self) -> None:
        """Notes that its peer is to send, in the middle of what it has begun; until `waiting_since` is None again."""
        self.waiting_since = time.monotonic()

    def incoming(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yields what the peer sends."""
        while True:
            if self.is_resting and self.is_to_end:
                self.context.cancel()
            self.waiting_since = None if self.is_resting else time.monotonic()
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

    def __init__(self, *, limit_s: float = IDLE_LIMIT_S, max_standing: int = MAX_STANDING) -> None:
        self._limit_s = limit_s
        self._max_standing = max_standing
        self._num_standing = 0
        self._takes_standing = True
        self._streams: set[Stream] = set()
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

    def watching(self, context: grpc.ServicerContext, *, name: str) -> contextlib.AbstractContextManager[Stream]:
        """Watches one stream for as long as the block lasts."""
        return self._watching(Stream(context, name, is_standing=False))

    @contextlib.contextmanager
    def standing(self, context: grpc.ServicerContext, *, name: str) -> Iterator[Stream]:
        """Watches one standing stream for as long as the block lasts; it begins at rest. Raises LimitExceeded if there are too many."""
        stream = self.begin_standing(context, name=name)
        try:
            yield stream
        finally:
            self.end_of(stream)

    def begin_standing(self, context: grpc.ServicerContext, *, name: str) -> Stream:
        """As `standing`, for a stream that no block serves: until `end_of`."""
        stream = Stream(context, name, is_standing=True)
        with self._lock:
            if self._num_standing >= self._max_standing or not self._takes_standing:
                raise LimitExceeded(f"{name}: {self._num_standing} standing streams, {self._max_standing} at most; do without one")
            self._num_standing += 1
            self._streams.add(stream)
        return stream

    def end_of(self, stream: Stream) -> None:
        """The end of what `begin_standing` began. Call it once."""
        with self._lock:
            self._num_standing -= 1
            self._streams.discard(stream)

    def end_standing(self) -> None:
        """Cancels the standing streams when they rest, and takes no more: for a server that is about to end."""
        with self._lock:
            self._takes_standing = False
            standing = [stream for stream in self._streams if stream.is_standing]
        for stream in standing:
            # In this order: whoever comes to rest meanwhile looks.
            stream.is_to_end = True
            if stream.is_resting:
                stream.context.cancel()

    @contextlib.contextmanager
    def _watching(self, stream: Stream) -> Iterator[Stream]:
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
