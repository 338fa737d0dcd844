"""Forks of the warm server are what an executed command would be: its group, session, signals, open files, exit code and last words."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.warm import WarmPopen, warm_server_pid

PROGRAM = """
import atexit, json, os, resource, signal, sys
atexit.register(lambda: print("ended", __name__, file=sys.stderr))
signals = [signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP, signal.SIGCHLD]
print(json.dumps({
    "argv": sys.argv, "open": sorted(os.listdir("/proc/self/fd")), "parent": os.getppid(),
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()], "umask": os.umask(0),
    "signals": [str(signal.getsignal(one)) for one in signals], "mask": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "session": os.getsid(0) == os.getsid(os.getppid()), "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
}), flush=True)
ends = {"raises": lambda: 1 / 0, "says": lambda: sys.exit("why"), "returns": lambda: None, "leaves": lambda: sys.exit(7),
        "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT), "killed": lambda: os.kill(os.getpid(), signal.SIGTERM)}
ends[sys.argv[1]]()
"""


@pytest.mark.parametrize("end", ["raises", "says", "returns", "leaves", "interrupted", "killed"])
def test_a_fork_is_as_an_executed_process_and_ends_as_it(end: str, tmp_path: Path) -> None:
    assert how(WarmPopen, end, tmp_path) == how(subprocess.Popen, end, tmp_path)
    with Path(f"/proc/{warm_server_pid()}/status").open() as status:
        assert "Threads:\t1\n" in status  # what has threads must not fork


@pytest.mark.parametrize("options", [{"start_new_session": True}, {"process_group": 0}, {"umask": 0o77}])
def test_what_a_fork_would_not_do_is_executed(options: dict[str, Any], tmp_path: Path) -> None:
    assert how(WarmPopen, "returns", tmp_path, **options) == how(subprocess.Popen, "returns", tmp_path, **options)


def how(start: Any, end: str, directory: Path, **options: Any) -> tuple[Any, ...]:
    (directory / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "program", end]
    pipe = subprocess.PIPE
    with start(command, cwd=directory, env={**os.environ}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **options) as process:
        out, err = process.communicate(timeout=30)
    assert json.loads(out)["parent"] == os.getpid()
    return json.loads(out), process.returncode, err.splitlines()[-2:]
