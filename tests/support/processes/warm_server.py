"""The process that `warm` forks others from: it imports what they will need, and waits. Has no thread, and calls nothing of gRPC.

`python -m tests.support.processes.warm_server SOCKET` (and room for longer command lines): each request is a length, a JSON list of the
words of a Python command (after `python`), its environment, and whether it leads a process group; and its standard streams and what else
it inherits. The answer is the new process's number. The server ends when the socket does.
"""

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from tests.support.repository import ROOT

# What most roles, commands and programs for workers import.
_IMPORTED = (
    "numpy",
    "chief.serving.server",
    "ps_server.server",
    "worker_client",
    "worker_client.session.session",
    "lockstep.cli.clusters.up",
)
_PATH = [entry for entry in sys.path if entry not in {"", str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}]


def main(number: int) -> NoReturn:
    """Serves until the socket ends; in each new process runs its command."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or the first collection of each process would copy the pages of all that
    _serve(socket.socket(fileno=number))


def _serve(requests: socket.socket) -> NoReturn:
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 4, 4)
        if not head:
            os._exit(0)
        body = bytearray()
        while len(body) < int.from_bytes(head, "big"):
            body += requests.recv(1 << 20)
        words, environment, directory, is_leader = json.loads(body)
        if _is_new(requests, is_leader=is_leader):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    os.chdir(directory)
    _become(words, environment, descriptors[:3])
    if words[:2] == ["-m", "lockstep"] and words[2:3] in (["up"], ["demo"]):
        _serve_launcher()
    _run(words, descriptors[3:])
    sys.exit()


def _is_new(requests: socket.socket, *, is_leader: bool) -> bool:
    """Returns twice: True in the new process, whose parent is the one that asked by then, and False here, when its number is sent."""
    number, tell = os.pipe()
    gate, hold = os.pipe()  # ends when the process between has ended, and with it the one that asked is the parent
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            os.close(hold)
            os.read(gate, 1)
            for end in (number, tell, gate):
                os.close(end)
            return True
        if is_leader:
            os.setpgid(child, child)
        os.write(tell, str(child).encode())
        os._exit(0)
    os.close(tell)
    os.close(gate)
    os.waitpid(between, 0)
    os.close(hold)
    requests.sendall(os.read(number, 16))
    os.close(number)
    return False


def _become(words: list[str], environment: dict[str, str], streams: Sequence[int]) -> None:
    """Gives this process what an executed one would have."""
    os.environ.clear()
    os.environ.update(environment)
    _show([sys.executable, *words], [f"{name}={value}" for name, value in environment.items()])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", -(not is_unbuffered), closefd=False), write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.orig_argv = [sys.executable, *words]


def _show(words: list[str], variables: list[str]) -> None:
    """Writes command line and environment where /proc has those that this process was executed with. Too long ones are cut."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for texts, begin, end in ((words, int(fields[45]), int(fields[46])), (variables, int(fields[47]), int(fields[48]))):
        ctypes.memmove(begin, b"".join(text.encode() + b"\0" for text in texts).ljust(end - begin, b"\0"), end - begin)


def _run(words: list[str], inherited: list[int]) -> None:
    """Runs what `python WORDS` runs."""
    words = [*words]
    if "guarded_exec.py" in " ".join(words[:3]):
        return _run_guarded(words, inherited)
    if is_safe := words[0] == "-P":
        del words[0]
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    if words[0] == "-m":
        sys.argv, sys.path = words[1:], [*([] if is_safe else [os.getcwd()]), *path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = words, [str(Path(words[0]).parent), *path]
        runpy.run_path(words[0], run_name="__main__")
    return None


class _Executes(BaseException):  # no error: nothing between may catch it
    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words


def _run_guarded(words: list[str], inherited: list[int]) -> None:
    """Runs the launcher's shim, which here continues as the Python program that it would execute."""
    from lockstep.launcher import guarded_exec

    def execute(name: str, command: list[str]) -> None:
        is_python = name == sys.executable and len(command) > 1
        if is_python and (command[1] in ("-P", "-m") or command[1].endswith(".py")):
            raise _Executes(command[1:])
        os.execv(name, command) if "/" in name else execvp(name, command)

    execvp, os.execvp = os.execvp, execute  # type: ignore[assignment]
    try:
        guarded_exec.main(inherited[0], int(words[4]), float(words[5]), words[6:])
    except _Executes as executes:
        os.execvp = execvp
        words = executes.words
    # As an interpreter begins.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = [sys.executable, *words]
    _show(sys.orig_argv, [f"{name}={value}" for name, value in os.environ.items()])
    _run(words, [])


def _serve_launcher() -> None:
    """Returns in this process, which is about to become a launcher, with a server of its own beside it for what it starts."""
    from lockstep.launcher import supervisor
    from tests.support.processes import warm

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.setpgid(0, 0)
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        _show([sys.executable, "-m", warm.SERVER], [])
        _serve(theirs)
    theirs.close()
    warm.serve_from(ours)
    supervisor.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": warm.WarmPopen})  # type: ignore[assignment, attr-defined]


if __name__ == "__main__":
    main(int(sys.argv[1]))
