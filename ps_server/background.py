"""How work beside the steps is begun: in a thread of its own, unless the owner has another way."""

import contextlib
import os
import threading
from collections.abc import Callable

# Begins to call the function some time, and returns at once.
RunInBackground = Callable[[Callable[[], None]], object]

# A little: a file gives way to steps by itself, and on a busy machine it should be whole before the next one is due.
_NICENESS = 2


def run_in_thread(work: Callable[[], None]) -> None:
    """Runs the work in a thread of its own, which does not keep the process from ending."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


def run_quietly_in_thread(work: Callable[[], None]) -> None:
    """Does the same for work that nobody waits for: the system prefers all other threads to its own, also where they read and write."""

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not every system has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    run_in_thread(run)
