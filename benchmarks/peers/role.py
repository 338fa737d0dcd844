"""The common part of the peers' workers: reads orders, starts with the others, measures steps, reports. Knows only the standard library.

It runs in the peers' environments, without Lockstep, so its imports use only the standard library too. It reports events as
`benchmarks.harness.worker` does.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.process_memory import peak_rss_bytes, pss_bytes
from benchmarks.harness.worker import Station


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """One process's orders: `kind` is "worker" or the name of a server."""

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
    def station(self) -> Station:
        """The worker's connection to the benchmark."""
        return Station(Path(self.directory))


def read_work() -> RoleWork:
    """Returns the orders from the first argument, which is JSON."""
    return RoleWork(**json.loads(sys.argv[1]))


def measure(work: RoleWork, step: Callable[[], object]) -> None:
    """Runs the steps and reports them. Does not return: it continues to step until the process is ended, so that no worker waits for it."""
    work.station.await_go()
    for _ in range(work.num_warmup_steps):
        step()
    work.station.say("warm")
    step_s, cpu_s = [], _cpu_s()
    for _ in range(work.num_steps):
        begin = time.perf_counter()
        step()
        step_s.append(time.perf_counter() - begin)
    cpu_s = _cpu_s() - cpu_s
    memory = {"peak_rss_bytes": peak_rss_bytes(), "pss_bytes": pss_bytes()}
    work.station.say("done", figures={"step_s": step_s, "cpu_s": cpu_s, "num_accepted": work.num_steps, **memory})
    while True:
        step()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
