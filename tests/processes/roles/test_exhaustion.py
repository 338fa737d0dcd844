"""Roles that the system allows no further thread: one line says what is lacking, and nothing of Lockstep's inside."""

import pytest

from tests.support.processes.processes import run

# Threads fail as they do where an address space or a number of processes is used up, at the same one each time.
_WITH_FEW_THREADS = """
import importlib, sys, threading
left, begin = [None] * int(sys.argv[1]), threading.Thread.start

def start(thread):
    if not left:
        raise RuntimeError("can't start new thread")
    left.pop()
    begin(thread)

threading.Thread.start = start
module = sys.argv[2]
sys.argv[1:] = sys.argv[3:]
sys.exit(importlib.import_module(module).main())
"""
_CHIEF = ("chief.__main__", "--ps", "127.0.0.1:1", "--workers", "1")
_SERVER = ("ps_server.__main__", "--index", "0")
_BOTH = ("lockstep.combined.__main__", "--index", "0", "--with-chief", "--workers", "1")
_UP = ("lockstep.__main__", "up", "--run-dir", "{run}", "--", "true")


@pytest.mark.parametrize(
    ("num_threads", "command"),
    [(0, _CHIEF), (2, _CHIEF), (5, _CHIEF), (0, _SERVER), (2, _SERVER), (4, _SERVER), (0, _BOTH), (2, _BOTH), (5, _BOTH), (0, _UP)],
)
def test_a_process_that_gets_no_thread_says_so_in_one_line(tmp_path: object, num_threads: int, command: tuple[str, ...]) -> None:
    ended = run("-c", _WITH_FEW_THREADS, num_threads, *(word.format(run=tmp_path) for word in command))
    assert ended.returncode == 1
    assert "the system starts no further thread for this process: allow it more memory" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
