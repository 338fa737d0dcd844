"""A role's process ends when a thread of it gets no memory, and shows other errors of threads as ever."""

import signal
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

_BEGIN = """
import os, resource, threading, time
from ps_protocol.process.exhaustion import ending_without_memory

def fail(error):
    raise error

class Dying:
    def __del__(self):
        raise self.error

def let_die(error):
    dying = Dying()
    dying.error = error

def get_nothing():
    "No thread gets memory any more. The stack of one that has ended is used again, so the next one begins, and cannot make its first call."
    first = threading.Thread(target=len, args=((),))
    first.start()
    first.join()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), resource.RLIM_INFINITY))
    while True:
        threading.Thread(target=time.sleep, args=(100,)).start()

with ending_without_memory():
    {act}
    print("continues", flush=True)
"""
# What a thread had in its hands when it failed is free once the error has been shown.
_LETS_GO = """
    import gc, weakref
    class Held: pass
    def hold(told):
        held = Held()
        told.append(weakref.ref(held))
        raise ValueError("for a reason")
    told = []
    one = threading.Thread(target=hold, args=(told,)); one.start(); one.join(); del one
    until = time.monotonic() + 10
    while told[0]() is not None and time.monotonic() < until:
        gc.collect()
    assert told[0]() is None
"""
_IN_A_THREAD = "one = threading.Thread(target=fail, args=({}('for a reason'),)); one.start(); one.join(); time.sleep({})"


def run(act: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", _BEGIN.format(act=act)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("act", [_IN_A_THREAD.format("MemoryError", 20), "let_die(MemoryError()); time.sleep(20)"])
def test_a_memory_error_that_nobody_catches_ends_the_process(act: str) -> None:
    ended = run(act)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert "a thread got no memory: this process ends" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the address space of a process is limited on Linux")
def test_a_thread_that_cannot_begin_for_want_of_memory_ends_the_process() -> None:
    """It would be waited for without end."""
    ended = run("get_nothing()")
    assert ended.returncode in (-signal.SIGKILL, 1), "or the system starts no thread at all, which is an ordinary error"
    assert "a thread got no memory" in ended.stderr or "can't start new thread" in ended.stderr


@pytest.mark.parametrize("act", [_IN_A_THREAD.format("ValueError", 0), "let_die(ValueError('for a reason'))", _LETS_GO.strip()])
def test_errors_other_than_memory_errors_are_shown_and_the_process_continues(act: str) -> None:
    ended = run(act)
    assert (ended.returncode, ended.stdout) == (0, "continues\n")
    assert "ValueError: for a reason" in ended.stderr
