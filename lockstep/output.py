"""What a person sees of several processes at once: each line with the name of its process. Knows lines and colours; no process."""

import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# Cyan, green, magenta, yellow, blue and their bright forms: red is left for failures.
_COLOURS = (36, 32, 35, 33, 34, 96, 92, 95, 93, 94)
_RED = 31
_MAX_LINE_BYTES = 1 << 16
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # the \n of a last \r may be still to come


class LineSplitter:
    """Cuts a stream of bytes into lines of text, at carriage returns too, so that a progress bar is seen while it moves."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields the lines that `data` completes, without their ends."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _MAX_LINE_BYTES:  # a line that never ends must not grow without limit
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            yield line.decode(errors="replace")

    def finish(self) -> Iterator[str]:
        """Yields what came after the last end of a line."""
        if self._rest:
            yield self._rest.rstrip(b"\r").decode(errors="replace")
        self._rest = b""


class PrefixedOutput:
    """Writes lines as `[worker 1] text`, in one colour a process if the stream is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._has_colours = self._stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._colours: dict[str, int] = {}

    def line(self, name: str, text: str) -> None:
        """Writes one line of a process."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._write(name, text, colour)

    def note(self, text: str) -> None:
        """Writes the launcher's own words."""
        for line in text.splitlines():
            self._write("lockstep", line, 1)

    def failure(self, text: str) -> None:
        """Writes the launcher's own words about something that went wrong."""
        for line in text.splitlines():
            self._write("lockstep", line, _RED)

    def _write(self, name: str, text: str, colour: int) -> None:
        prefix = f"\x1b[{colour}m[{name}]\x1b[0m" if self._has_colours else f"[{name}]"
        self._stream.write(f"{prefix} {text}\n")
        self._stream.flush()
