"""`python -m benchmarks.harness.worker MODULE ORDERS DIRECTORY`: one worker process of any benchmark. Knows files and lines; no session.

MODULE has a function `work(orders, station)`; ORDERS is JSON. The worker reports events, each a line of JSON. Two files in DIRECTORY
control it: it begins once "go" exists, and ends once "release" does. Peers' roles run this module in environments without Lockstep, so it
imports the standard library only.
"""

import importlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Shorter than any measured step; nothing is measured while a worker waits like this.
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Station:
    """A worker's connection to the process that started it."""

    directory: Path

    @property
    def is_released(self) -> bool:
        """Whether the worker may leave."""
        return (self.directory / "release").exists()

    def say(self, event: str, **facts: object) -> None:
        """Reports an event."""
        print(json.dumps({"event": event, **facts}), flush=True)

    def await_go(self) -> None:
        """Reports "up" and waits for the signal to begin, so that starting early is no advantage."""
        self.say("up")
        await_file(self.directory / "go")

    def await_release(self) -> None:
        """Waits until the worker may leave: servers end with the last worker, and their memory is read before that."""
        await_file(self.directory / "release")


def main() -> None:
    """Runs the work of the module in the arguments."""
    module, orders, directory = sys.argv[1:]
    importlib.import_module(module).work(json.loads(orders), Station(Path(directory)))


def await_file(path: Path) -> None:
    """Waits until the file exists."""
    while not path.exists():
        time.sleep(_LOOK_S)  # polls: one file reaches all workers, also those of a peer's own launcher, which have no pipe to it


if __name__ == "__main__":
    main()
