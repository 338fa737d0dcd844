"""Processes that tests start: the announcement of a role, and the end of a process. Knows no cluster."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.support.processes.warm import WarmPopen, run_warm
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

Process = subprocess.Popen[bytes]
Ended = subprocess.CompletedProcess[str]


def start_role(stack: ExitStack, module: str, *words: object, announce: Path, log: IO[bytes] | None = None) -> Process:
    """Starts `python -m MODULE WORDS`, which says at `announce` where it serves, and ends with `stack`. `log` gets what it says."""
    command = [sys.executable, "-m", module, "--announce", str(announce), *map(str, words)]
    process = WarmPopen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(end, process)
    return process


def talking(stack: ExitStack, *command: object, stderr: int | None = None) -> Process:
    """Starts a command that a test talks to through its standard input and output; ends with `stack`."""
    process = WarmPopen([*map(str, command)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        stack.callback(stream.close)
    stack.callback(end, process)
    return process


def run(*words: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None, timeout_s: float = 50.0) -> Ended:
    """Runs `python WORDS` to its end. `environment` is added to this process's."""
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **(environment or {})}
    return run_warm(command, cwd=cwd, environment=variables, timeout_s=timeout_s)


@contextmanager
def speaking(
    *words: object, environment: Mapping[str, str] | None = None, stdout: int | None = None, stderr: int | None = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """A process `python WORDS` whose output a test reads as text, by default standard error; killed at the end if it still runs.

    `stdout` and `stderr` are as of Popen. `environment` is added to this process's.
    """
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **(environment or {})}
    process = WarmPopen(command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Waits for the end of a speaking process; returns its exit code and what it has said."""
    _, words = process.communicate(timeout=30)
    return process.returncode, words


def announced(process: "subprocess.Popen[bytes] | subprocess.Popen[str]", path: Path, *, timeout_s: float = 30.0) -> str:
    """Returns the address that a role has announced, once it serves."""
    wait_until(lambda: path.exists() or process.poll() is not None, timeout_s=timeout_s, what=f"{path} is announced")
    assert path.exists(), f"the process ended with {process.returncode} instead of announcing {path}"
    return path.read_text(encoding="utf-8").strip()


def end(process: Process) -> None:
    """Ends a process, also one that is stopped, and waits for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: Process) -> None:
    """Ends a process with SIGKILL, and waits for it."""
    process.kill()
    process.wait(10)
