"""Replaces itself by another program once the guardian knows of it. Knows one pipe and one parent; a program of its own, stdlib only.

Run as `python -I -S guarded_exec.py PIPE PARENT PAUSE COMMAND…` as the leader of a process group; PAUSE: seconds before COMMAND. The group
registers itself, rather than being registered by the launcher, so that the group is known to the guardian even if the launcher is killed at
any moment: the guardian's pipe stays open until this process has written its line.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
EXIT_NOT_FOUND = 127  # as in a shell


def main(pipe: int, parent: int, pause_s: float, command: list[str]) -> None:
    """Never returns."""
    if sys.platform == "linux":
        # The second layer: the kernel itself kills this process when the launcher's main thread ends, should the guardian be dead.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the launcher had ended before prctl took effect
    with suppress(BrokenPipeError):  # the guardian is dead; the kernel's death signal remains
        os.write(pipe, f"watch {os.getpid()}\n".encode())
    os.close(pipe)
    # Python ignores the first two, and a shell the third for what it starts with `&`; programs inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(pause_s)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
