"""How work that nobody waits for is begun: in a thread of its own, unless the owner has another way. Knows threads; no shard."""

import threading
from collections.abc import Callable

# Begins to call the function some time, and returns at once.
RunInBackground = Callable[[Callable[[], None]], object]


def run_in_thread(work: Callable[[], None]) -> None:
    """Runs the work in a thread of its own, which does not keep the process from ending."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()
