"""One worker process of a benchmark: joins by its environment, says in JSON lines how far it is, and stays until it is told to go."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.workload import Workload, run_worker
from worker_client import connect

RELEASE_VARIABLE = "BENCHMARK_RELEASE"


def main() -> None:
    """Runs the workload given as JSON in the first argument."""
    workload = Workload(**json.loads(sys.argv[1]))
    with connect() as session:
        _say({"event": "up"})
        figures = run_worker(session, workload, on_warm=lambda: _say({"event": "warm"}))
        _say({"event": "done", "figures": dataclasses.asdict(figures)})
        # The servers end when the last worker has left; before that their memory is to be looked at.
        release = Path(os.environ[RELEASE_VARIABLE])
        while not release.exists():
            time.sleep(0.01)


def _say(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
