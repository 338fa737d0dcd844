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
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import NoReturn

from lockstep.launcher import guarded_exec
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
    _show([sys.executable, *words], environment)
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


def _show(words: list[str], environment: Mapping[str, str]) -> None:
    """Writes command line and environment where /proc has those that this process was executed with. Too long ones are cut."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    variables = [f"{name}={value}" for name, value in environment.items()]
    for texts, begin, end in ((words, int(fields[45]), int(fields[46])), (variables, int(fields[47]), int(fields[48]))):
        ctypes.memmove(begin, b"".join(text.encode() + b"\0" for text in texts).ljust(end - begin, b"\0"), end - begin)


class _Executes(BaseException):  # no error: nothing between may catch it
    """The program would replace itself by `python WORDS`."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words


def _run(words: list[str], inherited: list[int]) -> None:
    """Runs what `python WORDS` runs, and what that replaces itself by."""
    execve = os.execve

    def execute(path: str, command: list[str], environment: Mapping[str, str]) -> None:
        if path != sys.executable or not "".join(command[1:2]).endswith(("-P", "-m", ".py")):
            execve(path, command, environment)
        os.environ.clear()
        os.environ.update(environment)
        raise _Executes(command[1:])

    # Of what a launcher, or a command that becomes a role, calls.
    os.execve = execute  # type: ignore[assignment]
    os.execvp = lambda name, words: execute(which(name) or name, words, dict(os.environ))  # type: ignore[assignment,return-value,arg-type]
    while True:
        try:
            _run_once(words, inherited)
            return
        except _Executes as executes:
            words = executes.words
        # As an interpreter begins.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.orig_argv = [sys.executable, *words]
        _show(sys.orig_argv, os.environ)


def _run_once(words: list[str], inherited: list[int]) -> None:
    if words[2:3] == [guarded_exec.__file__]:
        guarded_exec.main(inherited[0], int(words[4]), float(words[5]), words[6:])
    is_safe = words[0] == "-P"
    module, *rest = words[is_safe:]
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    if module == "-m":
        sys.argv, sys.path = rest, [*([] if is_safe else [os.getcwd()]), *path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = [module, *rest], [str(Path(module).parent), *path]
        runpy.run_path(module, run_name="__main__")


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
        _show([sys.executable, "-m", warm.SERVER], {})
        _serve(theirs)
    theirs.close()
    warm.serve_from(ours)
    supervisor.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": warm.WarmPopen})  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    main(int(sys.argv[1]))
