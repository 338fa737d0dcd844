"""Starts processes, passes their output on and ends them, all of them, whatever happens. Knows nothing of what they do.

Every process leads a process group. A guardian (`guardian.py`) kills all groups when this process is gone, however it ended. One thread,
one loop: `poll` must be called again and again, from the main thread.
"""

import errno
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from lockstep.guardian import TOKEN_VARIABLE
from lockstep.process import Process, ProcessSpec, ShowLine

# Ctrl-C must end everything in two seconds: this long after SIGTERM comes SIGKILL.
STOP_GRACE_S = 1.2
_GUARDIAN_S = 5.0
_HERE = Path(__file__).parent
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchFailed(Exception):
    """A process that is needed could not be started, or ended too early; the text is for the user."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Exception):
    """The user, or the system, asked this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"ended by {number.name}")
        self.exit_code = 128 + number


class Supervisor:
    """Owns processes within a `with` block, in the main thread; leaving the block ends them and removes `directory`.

    `directory` is private (mode 0700), with a path short enough for Unix sockets.
    """

    def __init__(self, *, log_directory: Path, show_line: ShowLine) -> None:
        self.directory = Path()
        self.token = secrets.token_hex(8)
        self.processes: list[Process] = []
        self._log_directory = log_directory
        self._show_line = show_line
        self._stack = ExitStack()
        self._interrupts: list[signal.Signals] = []
        self._is_stopping = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
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
        """Starts a process; its output is shown line by line, and kept in the log directory: after that of one of the same name."""
        environment = {**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1", TOKEN_VARIABLE: self._carried_token()}
        shim = [sys.executable, "-I", "-S", str(_HERE / "guarded_exec.py"), str(self._guardian_pipe.fileno()), str(os.getpid())]
        popen = subprocess.Popen(
            [*shim, *spec.command],
            env={key: value for key, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self._guardian_pipe.fileno(),),
            process_group=0,
            bufsize=0,
        )
        log_path = self._log_directory / f"{spec.name.replace(' ', '-')}.log"
        earlier = [process for process in self.processes if process.name == spec.name and not process.is_running]
        process = Process(popen, name=spec.name, log_path=log_path, show_line=self._show, keeps_log=bool(earlier))
        self.processes = [*(one for one in self.processes if one not in earlier), process]
        self._selector.register(process.pipe, selectors.EVENT_READ, process)
        return process

    def poll(self, *, timeout_s: float) -> list[Process]:
        """Passes output on and returns the processes that have ended, waiting at most `timeout_s` for anything to happen.

        Raises Interrupted after SIGINT, SIGTERM or SIGHUP, or when output can't be written any more.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._read_signals()
            else:
                key.data.pass_on()
                if key.data.pipe.closed:
                    self._selector.unregister(key.fileobj)
        ended = [process for process in self.processes if process.is_running and process.has_exited()]
        for process in ended:
            self._reap(process)
        if self._interrupts and not self._is_stopping:
            raise Interrupted(self._interrupts[0])
        return ended

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends all processes: SIGTERM, after `grace_s` (or a second Ctrl-C) SIGKILL."""
        self._is_stopping = True
        self._signal_all(signal.SIGTERM)
        self._await_end(lambda: not self._has_running(), grace_s=grace_s)
        self._signal_all(signal.SIGKILL)
        while self._has_running():  # SIGKILL cannot be refused
            self.poll(timeout_s=0.1)

    def end_in_order(self, first: Process, *, awaited: Sequence[Process], grace_s: float) -> None:
        """SIGTERM to `first` alone, then waits until all `awaited` have ended by themselves, or for `grace_s`, or a further Ctrl-C."""
        self._is_stopping = True
        if first.is_running:
            first.signal_group(signal.SIGTERM)
        self._await_end(lambda: not any(one.is_running for one in awaited), grace_s=grace_s)

    def _reap(self, process: Process) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(process.pipe)
        process.signal_group(signal.SIGKILL)  # what it left behind
        with suppress(BrokenPipeError):  # the guardian is dead; the kernel's death signal is left
            self._guardian_pipe.write(f"forget {process.pid}\n".encode())  # while the number cannot be another's yet
        process.reap()

    def _await_end(self, has_ended: Callable[[], bool], *, grace_s: float) -> None:
        deadline, num_interrupts = time.monotonic() + grace_s, len(self._interrupts)
        while not has_ended() and len(self._interrupts) == num_interrupts and (left_s := deadline - time.monotonic()) > 0:
            self.poll(timeout_s=left_s)

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
        except OSError:  # `lockstep up … | head`: nobody reads any more
            self._show_line = _show_nothing
            self._interrupts.append(signal.SIGPIPE)

    def _start_guardian(self, stack: ExitStack) -> None:
        command = [sys.executable, "-I", "-S", str(_HERE / "guardian.py"), self.token]
        # Without the token of an outer launcher, which would kill it before it has cleaned up.
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        pipe = subprocess.PIPE
        guardian = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd="/", start_new_session=True, bufsize=0)
        assert guardian.stdin is not None and guardian.stdout is not None
        self._guardian_pipe = guardian.stdin
        stack.callback(guardian.wait, _GUARDIAN_S)
        stack.callback(guardian.stdin.close)  # the sign to clean up
        with guardian.stdout as answer:
            self.directory = Path(os.fsdecode(answer.readline().rstrip(b"\n")))
        if not self.directory.is_absolute():
            raise LaunchFailed("the guardian process, which cleans up after a crash, did not start; its words are above")

    def _catch_signals(self, stack: ExitStack) -> None:
        reader, writer = socket.socketpair()
        self._wakeup = stack.enter_context(reader)
        stack.enter_context(writer)
        reader.setblocking(False)
        writer.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        for number in (*_ENDING, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                stack.callback(signal.signal, number, signal.signal(number, _do_nothing))

    def _read_signals(self) -> None:
        with suppress(BlockingIOError):
            self._interrupts += [signal.Signals(number) for number in self._wakeup.recv(4096) if number in _ENDING]


def make_directory(path: Path, *, flag: str) -> None:
    """Makes a directory with its parents, unless it is there; LaunchFailed if it cannot be written to. `flag` is what chose it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise LaunchFailed(f"cannot write to {path}: {error.strerror}; choose another {flag}", exit_code=2) from error


def _show_nothing(name: str, line: str) -> None:
    """Stands in for an output that is gone."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Stands in for the default action; the number comes through the wakeup socket."""
