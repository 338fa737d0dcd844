"""Waiting on conditions, so that no test sleeps for a guessed time. Knows nothing of the system."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, timeout_s: float = 10.0, what: str = "", required: bool = True) -> bool:
    """Returns True as soon as `condition()` is true. After `timeout_s` fails with `what`, or returns False if not `required`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not condition():
        if time.monotonic() > deadline:
            assert not required, f"not so within {timeout_s:g} s: {what or 'the condition'}"
            return False
        threading.Event().wait(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return True
