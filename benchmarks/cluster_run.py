"""Runs a workload with each role in its own process. Knows how a cluster is started and ended; no step, and nobody's figures."""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import RunFigures
from benchmarks.watching import POLL_S, Watcher
from benchmarks.worker import RELEASE_VARIABLE
from benchmarks.workload import Workload
from lockstep.cluster import ClusterSpec, LocalCluster
from lockstep.supervision import Supervisor


def run_cluster(workload: Workload, *, is_tcp: bool, timeout_s: float) -> RunFigures:
    """Starts the cluster, runs the workload once, ends the cluster. Raises LaunchFailed with the words of whatever failed."""
    watcher = Watcher()
    spec = ClusterSpec(num_ps=workload.num_ps, num_workers=workload.num_workers, is_tcp=is_tcp)
    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=watcher.hear) as supervisor:
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles()
        watcher.servers = cluster.roles
        release = supervisor.directory / "release"
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(dataclasses.asdict(workload))]
        cluster.start_workers(command, environment={RELEASE_VARIABLE: str(release)})
        watcher.await_figures(supervisor, num_workers=workload.num_workers, timeout_s=timeout_s)
        figures = watcher.run_figures(num_steps=workload.num_steps)
        release.touch()
        _await_end(supervisor)
    return figures


def _await_end(supervisor: Supervisor, *, timeout_s: float = 20.0) -> None:
    """The cluster ends by itself once its workers have left; whatever has not after a while is ended by the supervisor."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_running for process in supervisor.processes) and time.monotonic() < deadline:
        supervisor.poll(timeout_s=POLL_S)
