"""What every peer's worker does: take its orders, start with the others, measure its steps, report. Knows only the standard library.

It runs in the peers' environments, where nothing of ours is installed; what it imports knows only the standard library too.
The lines that it prints are those of `benchmarks.harness.worker`.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.process_memory import peak_rss_bytes, pss_bytes
from benchmarks.harness.waiting import await_file


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """One process's orders: `kind` is "worker" or the name of a server; `go` is a path that appears when all workers are up."""

    kind: str
    index: int
    num_workers: int
    num_servers: int
    num_elements: int
    num_variables: int
    num_warmup_steps: int
    num_steps: int
    ports: list[int]
    directory: str

    @property
    def go(self) -> Path:
        """Appears when all workers are up."""
        return Path(self.directory) / "go"


def read_work() -> RoleWork:
    """Returns what the first argument says, which is JSON."""
    return RoleWork(**json.loads(sys.argv[1]))


def measure(work: RoleWork, step: Callable[[], object]) -> None:
    """Runs the steps and reports them. Does not return: it goes on stepping, so that nobody waits for it, until the process is ended."""
    say({"event": "up"})
    await_file(work.go)
    for _ in range(work.num_warmup_steps):
        step()
    say({"event": "warm"})
    step_s, cpu_s = [], _cpu_s()
    for _ in range(work.num_steps):
        begin = time.perf_counter()
        step()
        step_s.append(time.perf_counter() - begin)
    cpu_s = _cpu_s() - cpu_s
    memory = {"peak_rss_bytes": peak_rss_bytes(), "pss_bytes": pss_bytes()}
    say({"event": "done", "figures": {"step_s": step_s, "cpu_s": cpu_s, "num_accepted": work.num_steps, **memory}})
    while True:
        step()


def say(event: dict[str, object]) -> None:
    """Prints a line for whoever started this process."""
    print(json.dumps(event), flush=True)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
