"""Ends a role's process when a thread of it gets no memory, and says so of its own. Knows the interpreter's hooks; no role and no log.

A thread that ends so leaves others waiting for it: the interpreter itself waits without end for a thread that could not begin. The process
would neither work nor end, so nothing would start it again. It ends as the system's own killer would end it.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

_LAST_WORDS = b"a thread got no memory: this process ends, and may be started again; give it more memory (RLIMIT_AS, memory.max)\n"
_NO_THREAD = "can't start new thread"  # CPython's words


def words_of(error: BaseException) -> str:
    """Says what the system has refused, and what to do; empty: the error is of another kind."""
    if isinstance(error, RuntimeError | OSError) and _NO_THREAD in str(error):
        return (
            "the system starts no further thread for this process: allow it more memory (ulimit -v, memory.max), or more threads and"
            " processes (ulimit -u, pids.max)"
        )
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "the system gives this process no more memory: allow it more (ulimit -v, memory.max)"
    return ""


def end_if_exhausted(error: BaseException, say: Callable[[str], object]) -> None:
    """Ends the process with exit code 1, after `say` has been given the reason, if the system has refused it memory or a thread."""
    if lacking := words_of(error):
        say(lacking)
        os._exit(1)  # some threads may wait for those that could not begin


@contextmanager
def ending_without_memory() -> Iterator[None]:
    """Ends the process, within this block, at a MemoryError that ends a thread or cannot be reported. Other errors are shown as usual."""
    failures: SimpleQueue[Any] = SimpleQueue()
    show, show_of_thread = sys.unraisablehook, threading.excepthook

    def look() -> None:
        while show_next():
            pass  # and nothing holds the error, and so the objects of its frames, until the next one

    def show_next() -> bool:
        failed = failures.get()
        if failed is None:
            return False
        if failed.exc_type is MemoryError:
            _end()
        (show_of_thread if isinstance(failed, threading.ExceptHookArgs) else show)(failed)
        return True

    # Begun now, it has the memory that a frame of Python takes. The thread that fails has not: it can call only what is written in C.
    looking = threading.Thread(target=look, name="memory", daemon=True)
    looking.start()
    sys.unraisablehook = threading.excepthook = failures.put
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = show, show_of_thread
        failures.put(None)
        looking.join()


def _end() -> None:
    with suppress(OSError):
        os.set_blocking(2, False)  # a full pipe must not keep it
        os.write(2, _LAST_WORDS)
    os.kill(os.getpid(), signal.SIGKILL)
