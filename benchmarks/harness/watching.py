"""What is seen of a running cluster from outside: its workers' reports, its servers' CPU and memory. Knows processes; starts none."""

import json
import sys
import time
from typing import Any

import psutil

from benchmarks.harness import process_memory
from benchmarks.harness.workload import WorkerFigures
from benchmarks.report.figures import RunFigures
from lockstep.launcher.cluster import last_lines
from lockstep.launcher.supervisor import LaunchFailed, Process, Supervisor

POLL_S = 0.2


class Watcher:
    """Listens to the workers' lines; looks at the servers at the moment that the first worker is warm.

    `hear` is made for a Supervisor's show_line. `is_quiet`: what workers say besides is not passed on.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.servers: list[Process] = []
        self.servers_cpu_s: dict[str, float] = {}
        self.up: set[str] = set()
        self.figures: dict[str, WorkerFigures] = {}
        self._is_quiet = is_quiet

    def hear(self, name: str, line: str) -> None:
        """Takes one line that a process has printed."""
        event = _event(line)
        if event is None:
            if not self._is_quiet and (name.startswith("worker") or "ERROR" in line or "WARNING" in line):
                print(f"{name}: {line}", file=sys.stderr)
        elif event["event"] == "up":
            self.up.add(name)
        elif event["event"] == "warm" and not self.servers_cpu_s:
            self.servers_cpu_s = {server.name: cpu_s(server) for server in self.servers}
        elif event["event"] == "done":
            self.figures[name] = WorkerFigures(**event["figures"])

    def await_up(self, supervisor: Supervisor, *, num_workers: int, timeout_s: float) -> None:
        """Returns when so many workers are up; raises LaunchFailed with the words of whatever ended before, or after `timeout_s`."""
        self._await(self.up, supervisor, num_workers=num_workers, timeout_s=timeout_s, what="up")

    def await_figures(self, supervisor: Supervisor, *, num_workers: int, timeout_s: float) -> None:
        """Returns when so many workers have reported; raises LaunchFailed likewise."""
        self._await(self.figures, supervisor, num_workers=num_workers, timeout_s=timeout_s, what="done")

    def run_figures(self, *, num_steps: int) -> RunFigures:
        """Returns the figures of the run, with the servers as they are at this moment."""
        workers = [self.figures[name] for name in sorted(self.figures)]
        used_s: dict[str, list[float]] = {"worker": [worker.cpu_s for worker in workers]}
        rss: dict[str, list[int]] = {"worker": [worker.peak_rss_bytes for worker in workers]}
        pss: dict[str, list[int]] = {"worker": [worker.pss_bytes for worker in workers]}
        for server in self.servers:
            role = server.name.partition(" ")[0]
            used_s.setdefault(role, []).append(cpu_s(server) - self.servers_cpu_s[server.name])
            rss.setdefault(role, []).append(peak_rss_bytes(server))
            pss.setdefault(role, []).append(process_memory.pss_bytes(server.pid))
        return RunFigures(
            step_s=workers[0].step_s,
            cpu_s_per_step={role: sum(values) / len(values) / num_steps for role, values in used_s.items()},
            peak_rss_bytes={role: max(values) for role, values in rss.items()},
            num_accepted=sum(worker.num_accepted for worker in workers),
            pss_bytes={role: max(values) for role, values in pss.items()},
            total_pss_bytes=sum(sum(values) for values in pss.values()),
            transports=[transport for worker in workers for transport in worker.transports],
            num_processes={role: len(values) for role, values in used_s.items()},
        )

    def _await(self, reached: set[str] | dict[str, Any], supervisor: Supervisor, *, num_workers: int, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while len(reached) < num_workers:
            for process in supervisor.poll(timeout_s=POLL_S):
                raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
            if time.monotonic() > deadline:
                raise LaunchFailed(f"{num_workers - len(reached)} of {num_workers} workers were not {what} within {timeout_s:g} s")


def cpu_s(process: Process) -> float:
    """Returns the CPU seconds of a running process so far, user and system."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def peak_rss_bytes(process: Process) -> int:
    """Returns the most memory that the process ever had resident."""
    # Without /proc what it has now is the best there is.
    return process_memory.peak_rss_bytes(process.pid) or int(psutil.Process(process.pid).memory_info().rss)


def _event(line: str) -> dict[str, Any] | None:
    return dict(json.loads(line)) if line.startswith('{"event"') else None
