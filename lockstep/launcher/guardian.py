"""Cleans up after the launcher, however it ends. Knows process groups and one directory; a program of its own, stdlib only.

Run as `python -I -S guardian.py TOKEN`. Makes a private directory, prints its path, then reads lines from standard input until its end:
`watch GROUP` and `forget GROUP`. The end means that the launcher and every process that could still register itself have ended. The
guardian then kills all watched groups, and on Linux also every process with TOKEN in its environment (one that started a session of its
own), and removes the directory.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TOKEN_VARIABLE = "LOCKSTEP_RUN"
# `unix:` addresses may have 107 bytes; the names that a caller puts into the directory must fit in the rest.
MAX_DIRECTORY_BYTES = 80
_SWEEP_S = 2.0


def main(token: str) -> None:
    """Guards until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the launcher, whatever signal the terminal sends
    directory = _make_directory()
    try:
        with suppress(BrokenPipeError):  # the launcher has ended already, so standard input has too
            os.write(1, f"{directory}\n".encode())
        os.close(1)
        for group in _watch():
            _kill_group(group)
        _sweep(token)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory() -> str:
    """Makes a directory of mode 0700 whose path is short enough for Unix sockets."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(parent)) <= MAX_DIRECTORY_BYTES - 20 and os.access(parent, os.W_OK):
            return tempfile.mkdtemp(prefix="lockstep-", dir=parent)
    sys.exit("no writable directory with a short path: set TMPDIR to one of at most 60 bytes")


def _watch() -> set[int]:
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        word, _, number = line.decode().strip().partition(" ")
        if word == "watch":
            groups.add(int(number))
        elif word == "forget":
            groups.discard(int(number))
    return groups


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone
        os.killpg(group, signal.SIGKILL)


def _sweep(token: str) -> None:
    """Kills every process that carries the token, repeatedly until none is left: one may be starting another."""
    deadline = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline:
        carriers = list(_carriers(token))
        if not carriers:
            return
        for pid in carriers:
            with suppress(ProcessLookupError, PermissionError):  # gone
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # polls: no call waits for the end of processes that are not children


def _carriers(token: str) -> Iterator[int]:
    prefix = TOKEN_VARIABLE.encode() + b"="
    for entry in Path("/proc").glob("[0-9]*"):  # empty where there is no /proc
        with suppress(OSError):  # gone, or another user's
            for item in (entry / "environ").read_bytes().split(b"\0"):
                if item.startswith(prefix) and token.encode() in item.removeprefix(prefix).split(b":"):
                    yield int(entry.name)


if __name__ == "__main__":
    main(sys.argv[1])
