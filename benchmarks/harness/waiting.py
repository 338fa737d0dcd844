"""How worker processes of benchmarks wait for a sign: a file that appears. Knows paths; nothing of what is measured."""

import time
from pathlib import Path

# Short against any step that is measured; nothing is measured while a worker waits so.
_LOOK_S = 0.005


def await_file(path: Path) -> None:
    """Returns once there is such a file."""
    while not path.exists():
        time.sleep(_LOOK_S)
