"""Stands here for a process on another host: passes on its output, its files, signals and its end. A program of its own, stdlib only.

Run as `python -I -S remote.py TASK`, with a JSON file that it waits for, and removes once the agent runs. `reach` is the command that runs
the agent (`agent.py`) on the host, such as ssh; the agent reads the rest as its first line of standard input. What it answers begins with a
mark, after what a login prints and signs of life from what waits for room there, and is a series of frames: a letter, a length, that many
bytes. `o` is output of the process; `j` is JSON: a file of the process to be written here, or its end. Later lines to the agent are
signals, and signs of life; so each side notices when the other is gone.
"""

import json
import os
import resource
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

MARK = b"\x1elockstep-agent\n"
# A sign of life before the mark.
WAITS = b"\0"
HEAD = struct.Struct(">cI")
# A link that is cut for 20 s may be silent for 40 s: TCP tries again after pauses that double.
BEAT_S, SILENT_S = 5.0, 45.0
# The exit code of a process whose host is gone.
EXIT_HOST_LOST = 254
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_END_S, _LOOK_S = 2.0, 0.05


class Remote:
    """The process on the other host. Ends this program where what reaches the host is not installed."""

    def __init__(self, path: Path) -> None:
        self._path, task = path, json.loads(path.read_text())
        self._host, self._directory, reach = task["host"], Path(task["private"]), task.pop("reach")
        self._program, self._attempt = reach[0], shlex.join(reach)
        self._files = frozenset(task["returns"])
        # A group of its own: the launcher signals this process's group, which must not end the connection.
        try:
            self._way = subprocess.Popen(
                reach, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, bufsize=0
            )
        except OSError as error:
            _write(f"host {self._host} cannot be reached: {self._program}: {error.strerror}; install it on this machine\n".encode())
            sys.exit(EXIT_HOST_LOST)
        assert self._way.stdin is not None and self._way.stdout is not None and self._way.stderr is not None
        self._input, self._output, self._errors = self._way.stdin, self._way.stdout, self._way.stderr
        os.set_blocking(self._errors.fileno(), False)
        self._last_error = b""
        self._received, self._has_begun = bytearray(), False
        self._end: int | None = None
        self._heard_at = time.monotonic()
        self._tell(task)

    def run(self, wakeup: socket.socket) -> int:
        """Returns how the process ended; negative: by which signal."""
        selector = selectors.DefaultSelector()
        for source in (self._output, self._errors, wakeup):
            selector.register(source, selectors.EVENT_READ)
        beat_at = time.monotonic() + BEAT_S
        while self._end is None:
            for key, _ in selector.select(max(0.0, beat_at - time.monotonic())):
                if key.fileobj is wakeup:
                    for number in wakeup.recv(64):
                        self._tell({"signal": number})
                elif key.fileobj is self._errors:
                    if not self._pass_error_on():
                        selector.unregister(self._errors)
                elif not (data := os.read(self._output.fileno(), 1 << 16)):
                    return self._lost(f"{self._program} ended with exit code {self._way.wait()}")
                else:
                    self._take(data)
            now = time.monotonic()
            if now >= beat_at:
                self._tell({})
                beat_at = now + BEAT_S
            if now > self._heard_at + SILENT_S:
                return self._lost(f"it has been silent for {SILENT_S:g} s")
        self._input.close()
        with suppress(subprocess.TimeoutExpired):
            self._way.wait(_END_S)
        return self._end

    def _tell(self, order: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # its end is noticed where it is read
            self._input.write(json.dumps(order).encode() + b"\n")

    def _pass_error_on(self) -> bool:
        """Shows what ssh, or what else reaches the host, says of itself; False: nothing is left."""
        data = self._errors.read(1 << 16) or b""
        _write(data)
        self._last_error = next((line for line in reversed(data.split(b"\n")) if line.strip()), self._last_error)
        return bool(data)

    def _take(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        self._received += data
        if not self._has_begun:
            before, mark, rest = self._received.partition(MARK)
            self._received = before.replace(WAITS, b"")
            if not mark:
                return
            self._path.unlink()
            _write(bytes(self._received))  # what a login printed
            self._received, self._has_begun = rest, True
        while len(self._received) >= HEAD.size:
            kind, length = HEAD.unpack_from(self._received)
            if len(self._received) < HEAD.size + length:
                return
            content = bytes(self._received[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            if kind == b"o":
                _write(content)
            else:
                self._note(json.loads(content))

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("file") in self._files:
            path = self._directory / said["file"]
            draft = path.with_suffix(".draft")
            draft.write_text(said["text"])
            draft.replace(path)
        elif "ended" in said:
            self._end = said["ended"]

    def _lost(self, why: str) -> int:
        with suppress(ProcessLookupError):
            os.killpg(self._way.pid, signal.SIGKILL)
        if self._has_begun:
            words = f"host {self._host} is lost: {why}"
        else:
            while self._pass_error_on():
                pass
            cause = f": {self._last_error.decode(errors='replace').strip()}" if self._last_error else ""
            words = f"host {self._host} does not run Lockstep's agent: {why}{cause}; try it: {self._attempt}"
        _write(bytes(self._received) + f"{words}\n".encode())
        return EXIT_HOST_LOST


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


def _wake(number: int, frame: FrameType | None) -> None:
    """Replaces the default action of a signal; its number comes through the wakeup socket."""


def main(path: Path) -> None:
    """Ends as the process on the other host did."""
    while not path.exists():  # polls: no call waits for a file
        time.sleep(_LOOK_S)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _PASSED_ON:
        signal.signal(number, _wake)
    end = Remote(path).run(reader)
    if end < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core that counts is on the other host
        if -end not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    sys.exit(end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
