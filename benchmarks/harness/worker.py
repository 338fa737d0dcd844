"""`python -m benchmarks.harness.worker MODULE ORDERS DIRECTORY`: one worker process of any benchmark. Knows files and lines; no session.

MODULE has a function `work(orders, station)`; ORDERS is JSON. The worker reports events, each a line of JSON. Two files in DIRECTORY
control it: it begins once "go" exists, and ends once "release" does. Peers' roles run this module in environments where nothing of ours is
installed, so it imports the standard library alone.
"""

import importlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Short against any step that is measured; nothing is measured while a worker waits so.
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Station:
    """What connects a worker with the process that started it."""

    directory: Path

    @property
    def is_released(self) -> bool:
        """Whether the worker may leave."""
        return (self.directory / "release").exists()

    def say(self, event: str, **facts: object) -> None:
        """Reports an event."""
        print(json.dumps({"event": event, **facts}), flush=True)

    def await_go(self) -> None:
        """Reports "up" and returns at the sign to begin, so that the time of starting processes is nobody's advantage."""
        self.say("up")
        await_file(self.directory / "go")

    def await_release(self) -> None:
        """Returns when the worker may leave: servers end with the last worker, and before that their memory is to be looked at."""
        await_file(self.directory / "release")


def main() -> None:
    """Runs the module's work."""
    module, orders, directory = sys.argv[1:]
    importlib.import_module(module).work(json.loads(orders), Station(Path(directory)))


def await_file(path: Path) -> None:
    """Returns once there is such a file."""
    while not path.exists():
        time.sleep(_LOOK_S)  # one file tells all workers at once, also those that a peer's own launcher starts, which have no pipe to us


if __name__ == "__main__":
    main()
