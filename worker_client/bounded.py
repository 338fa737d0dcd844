"""Runs calls that may hang, for a bounded time. Knows threads and callables; nothing of what the calls do."""

import threading
import time
from collections.abc import Callable, Sequence


def run_bounded(calls: Sequence[Callable[[], object]], *, name: str, timeout_s: float) -> bool:
    """Runs all calls at the same time, each in a daemon thread, and waits for them at most `timeout_s`; returns whether all have ended.

    What has not ended goes on by itself and holds up neither the caller nor the interpreter's end. Errors are the calls' own affair.
    """
    threads = [threading.Thread(target=call, name=name, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
