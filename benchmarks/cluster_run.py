"""Runs a workload with each role in its own process, and looks at the servers' CPU and memory from outside. Knows processes; no step."""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import RunFigures
from benchmarks.worker import RELEASE_VARIABLE
from benchmarks.workload import WorkerFigures, Workload
from lockstep.cluster import ClusterSpec, LocalCluster, last_lines
from lockstep.process import Process
from lockstep.supervision import LaunchFailed, Supervisor

_POLL_S = 0.2


class _Watcher:
    """Listens to the workers' lines; looks at the servers at the moment that the first worker is warm."""

    def __init__(self) -> None:
        self.servers: list[Process] = []
        self.servers_cpu_s: dict[str, float] = {}
        self.figures: dict[str, WorkerFigures] = {}

    def hear(self, name: str, line: str) -> None:
        event = _event(line)
        if event is None:
            if name.startswith("worker") or "ERROR" in line or "WARNING" in line:
                print(f"{name}: {line}", file=sys.stderr)
        elif event["event"] == "warm" and not self.servers_cpu_s:
            self.servers_cpu_s = {server.name: _cpu_s(server) for server in self.servers}
        elif event["event"] == "done":
            self.figures[name] = WorkerFigures(**event["figures"])


def run_cluster(workload: Workload, *, is_tcp: bool, timeout_s: float) -> RunFigures:
    """Starts the cluster, runs the workload once, ends the cluster. Raises LaunchFailed with the words of whatever failed."""
    watcher = _Watcher()
    spec = ClusterSpec(num_ps=workload.num_ps, num_workers=workload.num_workers, is_tcp=is_tcp)
    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=watcher.hear) as supervisor:
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles()
        watcher.servers = cluster.roles
        release = supervisor.directory / "release"
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(dataclasses.asdict(workload))]
        cluster.start_workers(command, environment={RELEASE_VARIABLE: str(release)})
        _await_figures(watcher, supervisor, num_workers=workload.num_workers, timeout_s=timeout_s)
        figures = _figures(watcher, workload)
        release.touch()
        _await_end(supervisor)
    return figures


def _await_figures(watcher: _Watcher, supervisor: Supervisor, *, num_workers: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while len(watcher.figures) < num_workers:
        for process in supervisor.poll(timeout_s=_POLL_S):
            raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
        if time.monotonic() > deadline:
            raise LaunchFailed(f"{num_workers - len(watcher.figures)} of {num_workers} workers were not done within {timeout_s:g} s")


def _await_end(supervisor: Supervisor, *, timeout_s: float = 20.0) -> None:
    """The cluster ends by itself once its workers have left; whatever has not after a while is ended by the supervisor."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_running for process in supervisor.processes) and time.monotonic() < deadline:
        supervisor.poll(timeout_s=_POLL_S)


def _figures(watcher: _Watcher, workload: Workload) -> RunFigures:
    workers = [watcher.figures[name] for name in sorted(watcher.figures)]
    cpu_s: dict[str, list[float]] = {"worker": [worker.cpu_s for worker in workers]}
    rss: dict[str, list[int]] = {"worker": [worker.peak_rss_bytes for worker in workers]}
    for server in watcher.servers:
        role = server.name.partition(" ")[0]
        cpu_s.setdefault(role, []).append(_cpu_s(server) - watcher.servers_cpu_s[server.name])
        rss.setdefault(role, []).append(peak_rss_bytes(server))
    return RunFigures(
        step_s=workers[0].step_s,
        cpu_s_per_step={role: sum(values) / len(values) / workload.num_steps for role, values in cpu_s.items()},
        peak_rss_bytes={role: max(values) for role, values in rss.items()},
        num_accepted=sum(worker.num_accepted for worker in workers),
    )


def _event(line: str) -> dict[str, Any] | None:
    return dict(json.loads(line)) if line.startswith('{"event"') else None


def _cpu_s(process: Process) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def peak_rss_bytes(process: Process) -> int:
    """Returns the most memory that the process ever had resident."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():  # no /proc: what it has now is the best there is
        return int(psutil.Process(process.pid).memory_info().rss)
    lines = (line.split() for line in status.read_text(encoding="utf-8").splitlines())
    return next(int(fields[1]) * 1024 for fields in lines if fields[0] == "VmHWM:")
