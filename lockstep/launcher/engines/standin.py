"""Stands for a worker that something else has started: tells what workers must know, and ends when the process does that it watches.

A program of its own, of the standard library only, as `lockstep up` runs workers: with the variables by which they find the cluster.
"""

import json
import os
import select
import signal
from pathlib import Path

TOLD_VARIABLE, WATCHED_VARIABLE = "LOCKSTEP_STANDIN_TELLS", "LOCKSTEP_STANDIN_WATCHES"
_TOLD = ("LOCKSTEP_CHIEF", "LOCKSTEP_CLUSTER")


def main() -> None:
    """Ends with the process that it watches, or when it is interrupted, without words."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ["LOCKSTEP_WORKER_INDEX"] == "0":
        _tell(Path(os.environ[TOLD_VARIABLE]))
    try:
        watched = os.pidfd_open(int(os.environ[WATCHED_VARIABLE]))
    except ProcessLookupError:
        return
    select.select([watched], [], [])


def _tell(path: Path) -> None:
    lines = Path(os.environ["LOCKSTEP_TOKEN_FILE"]).read_text().splitlines()
    token = next(line.split()[1] for line in lines if line.split()[:1] == ["worker"])
    told: dict[str, object] = {"variables": {**{name: os.environ[name] for name in _TOLD}, "LOCKSTEP_TOKEN": token}}
    if authorities := os.environ.get("LOCKSTEP_TLS_CA"):
        told["ca"] = Path(authorities).read_text()
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(told))
    draft.replace(path)


if __name__ == "__main__":
    main()
