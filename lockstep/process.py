"""One child process: its output, its log, its end. Knows pipes and process groups; not who else runs."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep.output import LineSplitter

NUM_LAST_LINES = 20
_READ_BYTES = 1 << 16
_MAX_DRAIN_READS = 64

ShowLine = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start, and under which name; `environment` is laid over this process's own, None removes a variable."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str | None]


class Process:
    """A child that leads a process group. `returncode` is None until its end has been seen, and negative if a signal ended it.

    `keeps_log`: what is in the log already stays there.
    """

    def __init__(
        self, popen: "subprocess.Popen[bytes]", *, name: str, log_path: Path, show_line: ShowLine, keeps_log: bool = False
    ) -> None:
        assert popen.stdout is not None
        self.name = name
        self.pid = popen.pid
        self.log_path = log_path
        self.started_at = time.monotonic()
        self.returncode: int | None = None
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.pipe: IO[bytes] = popen.stdout
        self._popen = popen
        self._show_line = show_line
        self._splitter = LineSplitter()
        self._log: IO[bytes] | None = log_path.open("ab" if keeps_log else "wb", buffering=0)
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def is_running(self) -> bool:
        """Whether it has not been seen to end."""
        return self.returncode is None

    def has_exited(self) -> bool:
        """Whether it has ended; it stays a zombie, so that nobody else can get its number, until `reap`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the process and all that it started in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Takes the exit status of a process that has exited, after the rest of its output."""
        for _ in range(_MAX_DRAIN_READS):  # a grandchild in a session of its own may hold the pipe, and write for ever
            if self.pipe.closed or not self.pass_on():
                break
        self.returncode = self._popen.wait()
        self._close()

    def pass_on(self) -> bool:
        """Shows and logs what output there is; False if there was none. Closes the pipe at its end."""
        data = self.pipe.read(_READ_BYTES)
        if data:
            self._write_log(data)
            self._show(self._splitter.feed(data))
        elif data is not None:
            self.pipe.close()
        return bool(data)

    def tail(self, num_lines: int = NUM_LAST_LINES) -> str:
        """Returns its last lines, indented, for a message."""
        return "\n".join(f"    {line}" for line in list(self.last_lines)[-num_lines:])

    def _close(self) -> None:
        self._show(self._splitter.finish())
        self.pipe.close()
        if self._log is not None:
            self._log.close()

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.last_lines.append(line)
            self._show_line(self.name, line)

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # a full disk must not end the training
            self._log.close()
            self._log = None
            self._show_line(self.name, f"(its log {self.log_path} ends here: {error.strerror})")


def describe_end(returncode: int) -> str:
    """Says how a process ended: `exit code 3`, `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def shell_code(returncode: int) -> int:
    """Returns what a shell would report: 128 + the number for a signal."""
    return returncode if returncode >= 0 else 128 - returncode
