"""Starts of Python processes that cost a tenth of the time: forks of one process that has imported everything. Knows no role.

To import NumPy, gRPC and the packages takes 0.3 s of a processor for each process, which was half of what tests of processes took. Here
each process that runs tests has one that imports them once (`warm_server`), and what it starts is a fork of that one, which runs its
module as `python -m` does. It is a real process and a child of the tests: it gets signals, can be stopped, killed and waited for, and
/proc has its command line and environment. It shares memory with the others, and the order that their sets have (the seed of hashes): tests
that look at these execute theirs.

A launcher that is started so (`lockstep up`, `lockstep demo`) starts its roles, and workers that run Python, in the same way: by a server
of its own, through the real `guarded_exec`. Tests of how a launcher executes its processes use `subprocess`.
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

import psutil

from tests.support.repository import ROOT

SERVER = "tests.support.processes.warm_server"
_PR_SET_CHILD_SUBREAPER = 36
# What an interpreter or a library reads before the first line of a program runs.
_READ_EARLY = ("PYTHON", "COVERAGE_", "LD_", "MALLOC_", "GRPC_", "OMP_", "OPENBLAS_", "MKL_")
_READ_LATE = ("PYTHONUNBUFFERED", "GRPC_VERBOSITY")  # by the server, or by its forks, too
# What a fork's command line and environment may have.
_ROOM_BYTES = 64 << 10
_ANY = subprocess.Popen[Any]


class WarmPopen(_ANY):
    """As `subprocess.Popen`; a command `python -m MODULE WORDS`, or the shim of a launcher, becomes a fork of the warm server."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        # The order of CPython 3.11 to 3.14; whatever a fork would do otherwise is executed.
        executable, preexec, _, pass_fds, cwd, env, _, _, shell, *rest = others
        pipes, (_, *identity, is_new_session, group) = rest[:6], rest[6:]
        environment = dict(os.environ if env is None else env)
        is_shim = str(args[3:4]).endswith("guarded_exec.py']") and group == 0
        is_module = list(args[:2]) == [sys.executable, "-m"] and not pass_fds and group == -1
        is_special = preexec or shell or is_new_session or executable not in (None, args[0]) or identity != [None, None, None, -1]
        if is_special or not (is_shim or is_module) or not _SERVER.fits(environment):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", sys.executable, args, cwd, env)
        streams = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = [list(args[1:]), environment, str(cwd or Path.cwd()), is_shim]
        self.pid = _SERVER.fork(request, [*streams, *pass_fds])
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


def is_warm_server(process: psutil.Process) -> bool:
    """Whether it is the server of a launcher, which ends with that by itself."""
    with suppress(psutil.Error):
        return SERVER in process.cmdline()
    return False


def serve_from(ours: socket.socket) -> None:
    """Has what this process starts forked by the warm server at the other end, which shares this one's memory."""
    _SERVER.serve_from(ours)


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
        return read_early(environment) == (self._environment or read_early(os.environ))

    def serve_from(self, ours: socket.socket) -> None:
        """Uses this server."""
        self._ours, self._environment = ours, read_early(os.environ)

    def fork(self, request: list[object], descriptors: Sequence[int]) -> int:
        """Returns the number of a new child of this process."""
        with self._lock:
            ours = self._ours or self._start()
            body = json.dumps(request).encode()
            prctl = ctypes.CDLL(None).prctl
            # The server's child is handed over to this process when the one between them ends; nobody else's orphans are to be.
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(ours, [len(body).to_bytes(4, "big") + body], [*descriptors])
                answer = ours.recv(16)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            assert answer, "the warm server has ended"
            return int(answer)

    def _start(self) -> socket.socket:
        self._environment = read_early(os.environ)
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", SERVER, str(theirs.fileno()), " " * _ROOM_BYTES]
        # It stays when the test is over that needed it first.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        environment["WARM_SERVERS_ROOM"] = " " * _ROOM_BYTES
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        atexit.register(self._stop)
        return self._ours

    def _stop(self) -> None:
        if self._ours is not None and self._process is not None:
            self._ours.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment is read before a program begins: only a process with the same can be a fork."""
    found = {name: value for name, value in environment.items() if name.startswith(_READ_EARLY) and name not in _READ_LATE}
    # A process finds its packages in the root in any case.
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(ROOT))]
    return {**found, "PYTHONPATH": os.pathsep.join(path)}


_SERVER = _Server()
