"""One worker process of a benchmark: joins by its environment, says in JSON lines how far it is, and stays until it is told to go.

It begins when the path in BENCHMARK_GO is there. With "keep-stepping" as second argument it goes on working once it has measured, so that
workers who need not wait for each other don't get quicker as others end.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from benchmarks.harness.waiting import await_file
from benchmarks.harness.workload import Workload, run_worker, take_step
from worker_client import connect

RELEASE_VARIABLE = "BENCHMARK_RELEASE"
GO_VARIABLE = "BENCHMARK_GO"
KEEP_STEPPING = "keep-stepping"


def main() -> None:
    """Runs the workload given as JSON in the first argument."""
    workload, keeps_stepping = Workload(**json.loads(sys.argv[1])), KEEP_STEPPING in sys.argv[2:]
    go, release = (Path(os.environ[name]) for name in (GO_VARIABLE, RELEASE_VARIABLE))
    with connect() as session:
        figures = run_worker(session, workload, on_joined=lambda: _await_go(go), on_warm=lambda: _say({"event": "warm"}))
        _say({"event": "done", "figures": dataclasses.asdict(figures)})
        # The servers end when the last worker has left; before that their memory is to be looked at.
        while keeps_stepping and not release.exists():
            take_step(session)
        await_file(release)


def _await_go(go: Path) -> None:
    _say({"event": "up"})
    await_file(go)


def _say(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
