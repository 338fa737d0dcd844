"""Text for a stream that may have no reader: a bounded queue, and the thread that writes. Knows bytes; no log, no process."""

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

# The most bytes that may wait for a reader. A pipe holds 64 KiB more.
_MAX_BYTES = 1 << 20
# A pipe takes this much at once: lines of several processes that share one are not mixed.
_CHUNK_BYTES = 4096
# The end waits for a reader that takes nothing for this long.
_TIMEOUT_S = 5.0
# After a user's request to end: how long it waits in total, and the most that it still writes.
_HURRY_S = 0.2
_LAST_BYTES = 1 << 14


class BoundedOutput:
    """Writes text to a stream without ever making the caller wait for a reader. Thread-safe.

    Up to `max_bytes` wait to be read. Then the oldest are dropped, so that the last words stay, and a line that begins with `prefix` says
    how many they were. It writes below the stream's own buffer, whose lock a blocked thread would hold until the process ends.
    `timeout_s`: how long the end waits for a reader that takes nothing.
    """

    def __init__(self, stream: TextIO | None, *, max_bytes: int = _MAX_BYTES, timeout_s: float = _TIMEOUT_S, prefix: str = "") -> None:
        self._is_terminal = stream is not None and stream.isatty()
        self._write_all = _writer_of(stream)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._prefix = prefix
        # Reentrant, as are all its holders: a signal handler may log while its thread is in here.
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._num_written = 0
        self._is_writing = self._is_closed = self._is_hurried = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be written."""
        return self._is_writing or bool(self._waiting)

    def write(self, text: str) -> int:
        """Queues text, whole lines of it; does nothing once closed.

        Raises OSError if an earlier text could not be written, and with EAGAIN if there is no thread to be had that writes: this text then
        waits for the next one.
        """
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._error is not None:
                raise OSError(self._error.errno, self._error.strerror)  # the class follows from the number
            if data and not self._is_closed:
                self._waiting.append(data)
                self._num_bytes += len(data)
                self._drop_beyond(self._max_bytes)
                if self._thread is None:
                    self._begin_to_write()
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread writes without it."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._is_terminal

    def hurry(self) -> None:
        """Has `close` wait for 0.2 s at most, and write the last lines only."""
        self._is_hurried = True

    def close(self) -> None:
        """Waits until all is written, or there has been no reader for a while. Idempotent."""
        with self._changed:
            self._is_closed = True
            if self._thread is None:  # nobody writes what may be left
                return
            if self._is_hurried:
                self._drop_beyond(_LAST_BYTES)
            self._changed.notify_all()
            if self._is_hurried:
                self._changed.wait_for(lambda: not self.is_behind, _HURRY_S)
                return
            while self.is_behind and self._is_read():
                pass

    def _begin_to_write(self) -> None:
        thread = threading.Thread(target=self._run, name="output", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None
        self._thread = thread

    def _is_read(self) -> bool:
        seen = self._num_written
        return self._changed.wait_for(lambda: self._num_written != seen or not self.is_behind, self._timeout_s)

    def _drop_beyond(self, num_bytes: int) -> None:
        """Drops the oldest texts, but never the last one."""
        while self._num_bytes > num_bytes and len(self._waiting) > 1:
            data = self._waiting.popleft()
            self._num_bytes -= len(data)
            self._num_dropped += max(1, data.count(b"\n"))

    def _run(self) -> None:
        while data := self._take():
            try:
                self._write_all(data)
            except OSError as error:
                self._give_up(error)
                return
            with self._changed:
                self._num_written += 1
                self._is_writing = False
                self._changed.notify_all()

    def _take(self) -> bytes:
        """Waits for text and returns what one write takes of it; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            parts = []
            if self._num_dropped:
                words = f"… {self._num_dropped} line{'s' * (self._num_dropped != 1)} dropped: nobody read the output"
                parts.append(f"{self._prefix}{words}\n".encode())
                self._num_dropped = 0
            size = sum(map(len, parts))
            while self._waiting and (not size or size + len(self._waiting[0]) <= _CHUNK_BYTES):
                parts.append(self._waiting.popleft())
                size += len(parts[-1])
                self._num_bytes -= len(parts[-1])
            self._is_writing = bool(parts)
            return b"".join(parts)

    def _give_up(self, error: OSError) -> None:
        with self._changed:
            self._error = error
            self._waiting.clear()
            self._num_bytes = 0
            self._is_writing = False
            self._changed.notify_all()


def write_last(stream: TextIO | None, text: str) -> None:
    """Writes the last words of a program, and waits for a reader for a limited time."""
    with BoundedOutput(stream) as output:
        try:
            output.write(text)
        except OSError as error:
            if error.errno != errno.EAGAIN or stream is None:
                raise
            _write_at_once(stream, text)


def _write_at_once(stream: TextIO, text: str) -> None:
    """Writes what a pipe takes at once, without a thread; nothing if nobody reads."""
    if select.select((), (stream,), (), _TIMEOUT_S)[1]:
        os.write(stream.fileno(), text.encode("utf-8", "backslashreplace")[:_CHUNK_BYTES])


def _writer_of(stream: TextIO | None) -> Callable[[bytes], object]:
    """Returns a function that writes bytes to a stream, and waits until it can."""
    if stream is None:  # the process was started without one
        return len
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory, which has no buffer below
        memory = stream
        return lambda data: memory.write(data.decode())

    def write(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
            except BlockingIOError:  # another process that has the same terminal made it so
                select.select((), (descriptor,), ())

    return write
