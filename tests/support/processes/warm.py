"""Starts of Python processes that cost a tenth of the time: forks of one process that has imported everything. Knows no role.

To import NumPy, gRPC and the packages takes 0.3 s of a processor for each process, which was half of what tests of processes took. Here
each process that runs tests has one that imports them once (`warm_server`), and what it starts is a fork of that one, which runs its
module as `python -m` does. It is a real process and a child of the tests: it gets signals, can be stopped, killed and waited for. It
differs in its command line, in `/proc/PID/environ`, and in that it shares memory with the others: tests that look at those execute theirs.
"""

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

_PR_SET_CHILD_SUBREAPER = 36
# What an interpreter or a library reads before the first line of a program runs.
_READ_EARLY = ("PYTHON", "COVERAGE_", "LD_", "MALLOC_", "GRPC_", "OMP_", "OPENBLAS_", "MKL_")
_ANY = subprocess.Popen[Any]


class WarmPopen(_ANY):
    """As `subprocess.Popen`; a command `python -m MODULE WORDS` in the project's root becomes a fork of the warm server."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        # The order of CPython 3.11 to 3.14; whatever a fork would do otherwise is executed.
        _, preexec, _, pass_fds, cwd, env, _, _, _, *pipes = others[:15]
        environment = dict(os.environ if env is None else env)
        can_be_forked = not preexec and not pass_fds and str(cwd or os.getcwd()) == str(ROOT)
        if not can_be_forked or list(args[:2]) != [sys.executable, "-m"] or not _SERVER.fits(environment):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", sys.executable, args, cwd, env)
        streams = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _SERVER.fork(args[2:], environment, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_warm(
    command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, cwd: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end, without input."""
    pipe = subprocess.PIPE
    with WarmPopen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def warm_server_pid() -> int:
    """Returns the number of the process that this one has its processes forked by, which stays until it ends; 0 if there is none yet."""
    return _SERVER.pid


class _Server:
    """The warm server of this process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: socket.socket | None = None
        self._environment: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Zero if it does not run."""
        return self._process.pid if self._process is not None else 0

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment would have found the libraries as the server did."""
        if sys.platform != "linux" or any(name.startswith("COVERAGE_") for name in environment):
            return False
        return _read_early(environment) == (self._environment or _read_early(os.environ))

    def fork(self, words: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> int:
        """Returns the number of a new child of this process."""
        with self._lock:
            ours = self._ours or self._start()
            request = json.dumps([list(words), dict(environment)]).encode()
            prctl = ctypes.CDLL(None).prctl
            # The server's child is handed over to this process when the one between them ends; nobody else's orphans are to be.
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(ours, [len(request).to_bytes(4, "big") + request], [*streams])
                answer = ours.recv(16)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            assert answer, "the warm server has ended"
            return int(answer)

    def _start(self) -> socket.socket:
        self._environment = _read_early(os.environ)
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.processes.warm_server", str(theirs.fileno())]
        # It stays when the test is over that needed it first.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        atexit.register(self._stop)
        return self._ours

    def _stop(self) -> None:
        if self._ours is not None and self._process is not None:
            self._ours.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    # The root is where a process looks first in any case.
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and (name, value) != ("PYTHONPATH", str(ROOT))
    }


_SERVER = _Server()
