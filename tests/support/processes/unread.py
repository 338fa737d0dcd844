"""Outputs without a reader: a full pipe, and a terminal that Ctrl-S has stopped. Knows descriptors; asserts nothing."""

import os
import pty
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """`descriptor` is for a process's output; it takes nothing until `resume` is called, and `read` returns what has come then."""

    descriptor: int
    reader: int
    is_terminal: bool

    def resume(self) -> None:
        """Lets a stopped terminal go on, as Ctrl-Q does; reading does that for a pipe."""
        if self.is_terminal:
            os.write(self.reader, b"\x11")

    def read(self) -> str:
        """Returns what can be read without waiting."""
        parts = []
        with suppress(OSError):  # a terminal whose other side is closed
            while select.select((self.reader,), (), (), 0.0)[0] and (data := os.read(self.reader, 1 << 16)):
                parts.append(data)
        return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")


@contextmanager
def full_pipe() -> Iterator[Unread]:
    """A pipe that is full of spaces."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b" " * 4096)
        os.set_blocking(writer, True)
        yield Unread(descriptor=writer, reader=reader, is_terminal=False)
    finally:
        os.close(writer)
        os.close(reader)


@contextmanager
def stopped_terminal() -> Iterator[Unread]:
    """A terminal on which Ctrl-S has been pressed."""
    controller, terminal = pty.openpty()
    try:
        os.write(controller, b"\x13")
        yield Unread(descriptor=terminal, reader=controller, is_terminal=True)
    finally:
        os.close(terminal)
        os.close(controller)
