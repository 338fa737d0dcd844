"""Starts processes, passes on their output, and ends all of them in every case. Must not know what they do.

Every process leads a process group. A guardian (`guardian.py`) kills all groups when this process has ended, however it ended. There is one
thread and one loop: call `poll` repeatedly, from the main thread.
"""

import errno
import fcntl
import math
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Protocol, Self

from lockstep.launcher.guardian import TOKEN_VARIABLE
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.exit_codes import ExitCode, of_signal

# The output of several processes, each line with the name of its process.


# Cyan, green, magenta, yellow, blue and their bright forms: red is reserved for failures.
_COLOURS = (36, 32, 35, 33, 34, 96, 92, 95, 93, 94)
_RED = 31
_MAX_LINE_BYTES = 1 << 16
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # after a \r at the end, a \n may still follow


class LineSplitter:
    """Splits a stream of bytes into lines of text, also at carriage returns, so that a progress bar is shown while it moves."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields the lines that `data` completes, without line ends."""
        if self._rest.endswith(b"\r"):
            del self._rest[-1]
            data = b"\r" + data
        first, *lines = _LINE_END.split(data)  # not what came before: an endless line may come byte by byte
        self._rest += first
        for line in lines:
            yield self._taken()
            self._rest += line
        if len(self._rest) > _MAX_LINE_BYTES:  # limits the memory for an endless line
            yield self._taken()

    def finish(self) -> Iterator[str]:
        """Yields the text after the last line end."""
        if rest := self._taken():
            yield rest.removesuffix("\r")

    def _taken(self) -> str:
        line, self._rest = self._rest, bytearray()
        return line.decode(errors="replace")


class LineStream(Protocol):
    """The supervisor's output. A write returns at once, even if the output is not read: a blocked terminal must not stop the supervisor."""

    def write(self, text: str, /) -> object:
        """Takes a line."""

    def isatty(self) -> bool:
        """Whether the output is a terminal."""


class PrefixedOutput:
    """Writes lines as `[worker 1] text`, in one colour per process if the stream is a terminal."""

    def __init__(self, stream: LineStream) -> None:
        self._stream = stream
        self._has_colours = self._stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._colours: dict[str, int] = {}

    def line(self, name: str, text: str) -> None:
        """Writes one line of a process."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._write(name, text, colour)

    def note(self, text: str) -> None:
        """Writes a message of the launcher."""
        for line in text.splitlines():
            self._write("lockstep", line, 1)

    def failure(self, text: str) -> None:
        """Writes a message of the launcher about a failure."""
        for line in text.splitlines():
            self._write("lockstep", line, _RED)

    def _write(self, name: str, text: str, colour: int) -> None:
        prefix = f"\x1b[{colour}m[{name}]\x1b[0m" if self._has_colours else f"[{name}]"
        self._stream.write(f"{prefix} {text}\n")


# One child process: its output, its log, its end.


NUM_LAST_LINES = 20
# What one turn of the loop reads of all processes together, but a little of each: reading never keeps it busy, even if every byte is a
# line of its own.
_TURN_BYTES = 1 << 13
_LEAST_BYTES = 1 << 9
# A line that was printed earlier does not say why the process ended.
_LAST_WORDS_S = 10.0
_MAX_LAST_WORDS = 1000

ShowLine = Callable[[str, str], None]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start, and its name. `environment` is added to this process's own; None removes a variable.

    `pause_s`: the process exists at once, and becomes the command after so many seconds. `host`: another one that it stands for one on.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str | None]
    pause_s: float = 0.0
    host: str = ""


class Process:
    """A child that leads a process group. `returncode` is None until its end has been noticed, and negative if a signal ended it.

    `log`: its log at `log_path`, which it closes; None: it has none.
    """

    def __init__(
        self, popen: "subprocess.Popen[bytes]", *, name: str, host: str, log_path: Path, log: IO[bytes] | None, show_line: ShowLine
    ) -> None:
        assert popen.stdout is not None
        self.name = name
        self.host = host
        self.pid = popen.pid
        self.log_path = log_path
        self.started_at = time.monotonic()
        self.returncode: int | None = None
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._last_shown_at = self._ended_at = self.started_at
        self.pipe: IO[bytes] = popen.stdout
        self._popen = popen
        self._show_line = show_line
        self._splitter = LineSplitter()
        self._log = log
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def is_running(self) -> bool:
        """Whether its end has not been noticed yet."""
        return self.returncode is None

    def has_exited(self) -> bool:
        """Whether the process has ended; it stays a zombie until `reap`, so that its pid is not reused."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the process and to all processes in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Reads the rest of the output of a process that has exited, and then its exit status."""
        # Not until the end of the pipe: a grandchild in a session of its own may keep it open and write for ever.
        if not self.pipe.closed and (num_bytes := _num_waiting(self.pipe)):
            self.pass_on(num_bytes)
        self.returncode, self._ended_at = self._popen.wait(), time.monotonic()
        self._close()

    def pass_on(self, num_bytes: int) -> None:
        """Shows and logs the available output, at most so much of it. Closes the pipe at its end."""
        data = self.pipe.read(num_bytes)
        if data:
            self._write_log(data)
            self._show(self._splitter.feed(data))
        elif data is not None:
            self.pipe.close()

    @property
    def tail(self) -> str:
        """Its last lines, for a message."""
        lines = "\n".join(f"    {line}" for line in self.last_lines)
        return f"Its last lines:\n{lines}" if lines else "It printed nothing."

    @property
    def end_text(self) -> str:
        """How it ended, with its last line if that may say why: `exit code 1: ValueError: no such file`."""
        end = describe_end(self.returncode or 0)
        is_new = self._ended_at < self._last_shown_at + _LAST_WORDS_S
        return f"{end}: {self.last_words}" if self.last_words and is_new and (self.returncode or 0) > 0 else end

    @property
    def last_words(self) -> str:
        """Its last line that is not empty; the launcher's own lines may contain it, whatever control characters it had."""
        words = next((line.strip() for line in reversed(self.last_lines) if line.strip()), "")[:_MAX_LAST_WORDS]
        return "".join(one if one.isprintable() else "?" for one in words)

    def _close(self) -> None:
        self._show(self._splitter.finish())
        self.pipe.close()
        if self._log is not None:
            self._log.close()

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.last_lines.append(line)
            self._last_shown_at = time.monotonic()
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


def _num_waiting(pipe: IO[bytes]) -> int:
    """Returns how many bytes there are to be read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def describe_end(returncode: int) -> str:
    """Returns how a process ended: `exit code 3`, `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def shell_code(returncode: int) -> int:
    """Returns what a shell would report: 128 + the number for a signal."""
    return returncode if returncode >= 0 else 128 - returncode


# After Ctrl-C the prompt must be back within two seconds, even on a machine that is ten times slower. SIGKILL follows SIGTERM after the
# first time; the supervisor waits no longer than the second, and the guardian does the rest.
STOP_GRACE_S = 0.6
_END_S = 1.0
_GUARDIAN_S = 5.0
_LOOK_S = 0.05  # how often a condition is looked at that is no event of a process
_HERE = Path(__file__).parent
# SIGUSR1: a batch system warns that the job's time is up.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class LaunchFailed(Exception):
    """A required process could not be started, or ended too early; the text is for the user."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Exception):
    """The user, or the system, asked this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended by {number.name}")
        self.exit_code = of_signal(number)


class Supervisor:
    """Owns processes within a `with` block, in the main thread; leaving the block ends them and removes `directory`.

    `directory` is private (mode 0700), with a path short enough for Unix sockets. `log_directory` None: there are no logs. `show_line`
    must not block.
    """

    def __init__(self, *, log_directory: Path | None, show_line: ShowLine) -> None:
        self.directory = Path()
        self.token = secrets.token_hex(8)
        self.processes: list[Process] = []
        self._log_directory = log_directory
        self._show_line = show_line
        self._stack = ExitStack()
        self._interrupts: list[signal.Signals] = []
        self._is_stopping = False
        # The latest time to which ending the processes may take; no limit unless a signal asked for the end.
        self._end_by = math.inf

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._log_directory is not None:
                self._log_directory.mkdir(parents=True, exist_ok=True)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._catch_signals(stack)
            self._start_guardian(stack)
            stack.callback(self.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def start(self, spec: ProcessSpec) -> Process:
        """Starts a process. Shows its output line by line, and writes it to a log; a restarted process continues the log of its name."""
        given = {name: text for name, text in {**os.environ, **spec.environment}.items() if text is not None}
        environment = {**given, **with_checkout(given), "PYTHONUNBUFFERED": "1", TOKEN_VARIABLE: self._carried_token()}
        words = self._guardian_pipe.fileno(), os.getpid(), spec.pause_s
        shim = [sys.executable, "-I", "-S", str(_HERE / "guarded_exec.py"), *map(str, words)]
        popen = subprocess.Popen(
            [*shim, *spec.command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self._guardian_pipe.fileno(),),
            process_group=0,
            bufsize=0,
        )
        earlier = [process for process in self.processes if process.name == spec.name and not process.is_running]
        log_path = (self._log_directory or Path()) / f"{spec.name.replace(' ', '-')}.log"
        log = None if self._log_directory is None else log_path.open("ab" if earlier else "wb", buffering=0)
        process = Process(popen, name=spec.name, host=spec.host, log_path=log_path, log=log, show_line=self._show)
        self.processes = [*(one for one in self.processes if one not in earlier), process]
        self._selector.register(process.pipe, selectors.EVENT_READ, process)
        return process

    def poll(self, *, timeout_s: float) -> list[Process]:
        """Passes output on and returns the processes that have ended. Waits at most `timeout_s` for an event.

        Raises Interrupted after SIGINT, SIGTERM, SIGHUP or SIGUSR1, or when output cannot be written any more.
        """
        events = self._selector.select(timeout_s)
        share_bytes = max(_LEAST_BYTES, _TURN_BYTES // max(1, len(events)))
        for key, _ in events:
            if key.data is None:
                self._read_signals()
            else:
                key.data.pass_on(share_bytes)
                if key.data.pipe.closed:
                    self._selector.unregister(key.fileobj)
        ended = [process for process in self.processes if process.is_running and process.has_exited()]
        for process in ended:
            self._reap(process)
        if self._interrupts and not self._is_stopping:
            raise Interrupted(self._interrupts[0])
        return ended

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends all processes: sends SIGTERM, and after `grace_s` (or a second Ctrl-C) SIGKILL.

        If a signal asked for the end, returns within 1 s, even if the system has not ended a killed process yet.
        """
        self._is_stopping = True
        self._end_by = time.monotonic() + _END_S if self._interrupts else math.inf
        self._signal_all(signal.SIGTERM)
        self.await_end(lambda: not self._has_running(), grace_s=grace_s)
        self._signal_all(signal.SIGKILL)
        while self._has_running() and time.monotonic() < self._end_by:  # SIGKILL cannot be refused
            self.poll(timeout_s=0.1)

    def ignore_signals(self) -> None:
        """Goes on from now on where it would have ended because of a signal; the handlers stay, so that no child ignores the signal."""
        self._selector.unregister(self._wakeup)

    def await_end(self, has_ended: Callable[[], bool], *, grace_s: float) -> bool:
        """Passes output on until `has_ended`, for `grace_s`, or until another Ctrl-C, which it does not raise; False: there was one."""
        self._is_stopping = True
        deadline, num_interrupts = time.monotonic() + grace_s, len(self._interrupts)
        while not has_ended() and len(self._interrupts) == num_interrupts and (left_s := deadline - time.monotonic()) > 0:
            self.poll(timeout_s=min(left_s, _LOOK_S))
        return len(self._interrupts) == num_interrupts

    def _reap(self, process: Process) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(process.pipe)
        process.signal_group(signal.SIGKILL)  # its remaining children
        self._tell_guardian(f"forget {process.pid}")  # while its pid cannot be reused yet
        process.reap()

    def _tell_guardian(self, words: str) -> None:
        with suppress(BrokenPipeError):  # the guardian is dead; the kernel's death signal remains
            self._guardian_pipe.write(f"{words}\n".encode())

    def _carried_token(self) -> str:
        # Appended to the token of an outer launcher, which must find its grandchildren too.
        outer = os.environ.get(TOKEN_VARIABLE)
        return f"{outer}:{self.token}" if outer else self.token

    def _has_running(self) -> bool:
        return any(process.is_running for process in self.processes)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_running:
                process.signal_group(number)

    def _show(self, name: str, line: str) -> None:
        try:
            self._show_line(name, line)
        except OSError:  # `lockstep up … | head`: the reader has ended
            self._show_line = _show_nothing
            if not self._is_stopping:  # else it ended by the same Ctrl-C: `lockstep up … | tee log`
                self._interrupts.append(signal.SIGPIPE)

    def _start_guardian(self, stack: ExitStack) -> None:
        command = [sys.executable, "-I", "-S", str(_HERE / "guardian.py"), self.token]
        # Without the token of an outer launcher, whose guardian would kill this one before it has cleaned up.
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        pipe = subprocess.PIPE
        guardian = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd="/", start_new_session=True, bufsize=0)
        assert guardian.stdin is not None and guardian.stdout is not None
        self._guardian_pipe = guardian.stdin
        stack.callback(self._await_guardian, guardian)
        stack.callback(guardian.stdin.close)  # the signal to clean up
        with guardian.stdout as answer:
            self.directory = Path(os.fsdecode(answer.readline().rstrip(b"\n")))
        if not self.directory.is_absolute():
            raise LaunchFailed("the guardian process, which cleans up after a crash, did not start; its output is above")

    def _await_guardian(self, guardian: "subprocess.Popen[bytes]") -> None:
        left_s = max(0.1, self._end_by - time.monotonic())
        try:
            guardian.wait(min(_GUARDIAN_S, left_s))
        except subprocess.TimeoutExpired:
            guardian.returncode = 0  # it keeps running in a session of its own; the destructor must not wait for it either

    def _catch_signals(self, stack: ExitStack) -> None:
        reader, writer = socket.socketpair()
        self._wakeup = stack.enter_context(reader)
        stack.enter_context(writer)
        reader.setblocking(False)
        writer.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        for number in (*_ENDING, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:  # keeps nohup in effect
                stack.callback(signal.signal, number, signal.signal(number, _do_nothing))

    def _read_signals(self) -> None:
        with suppress(BlockingIOError):
            self._interrupts += [signal.Signals(number) for number in self._wakeup.recv(4096) if number in _ENDING]


def with_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the PYTHONPATH with which child processes find the packages of a source tree that is not installed, after their own."""
    root = _HERE.resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    earlier = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join([*earlier, str(root)])}


def make_directory(path: Path, *, flag: str) -> None:
    """Makes a directory with its parents if it is missing. Raises LaunchFailed, which names `flag`, if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise LaunchFailed(f"cannot write to {path}: {error.strerror}; choose another {flag}", exit_code=ExitCode.USAGE) from error


def _show_nothing(name: str, line: str) -> None:
    """Replaces an output whose reader has ended."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Replaces the default action of a signal; its number comes through the wakeup socket."""
