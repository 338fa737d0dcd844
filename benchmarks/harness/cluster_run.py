"""Runs a workload with each role in its own process. Knows how a cluster is started and ended; no step, and nobody's figures."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness.setting import Setting
from benchmarks.harness.watching import POLL_S, Watcher
from benchmarks.harness.worker import GO_VARIABLE, KEEP_STEPPING, RELEASE_VARIABLE
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import RunFigures
from lockstep.launcher.cluster import ClusterSpec, LocalCluster
from lockstep.launcher.spec import Recovery
from lockstep.launcher.supervisor import Supervisor

_START_TIMEOUT_S = 120.0


def run_cluster(
    workload: Workload,
    *,
    setting: Setting,
    timeout_s: float,
    security: Mapping[str, str] | None = None,
    on_name: Callable[[str], object] = lambda name: None,
) -> RunFigures:
    """Starts the cluster, runs the workload once, ends the cluster. `security`: see LocalCluster; the files may be made by `on_name`.

    Raises LaunchFailed with the words of whatever failed, and WrongTransport if the sessions did not use what the setting asks for.
    """
    watcher = Watcher()
    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=watcher.hear) as supervisor:
        spec = cluster_spec(workload, setting, checkpoint_dir=str(Path(logs) / "checkpoints"))
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr), security=security)
        on_name(cluster.name)
        cluster.start_roles()
        watcher.servers = cluster.roles
        start_workers(cluster, workload, setting=setting, directory=supervisor.directory)
        watcher.await_up(supervisor, num_workers=workload.num_workers, timeout_s=_START_TIMEOUT_S)
        (supervisor.directory / "go").touch()
        watcher.await_figures(supervisor, num_workers=workload.num_workers, timeout_s=timeout_s)
        figures = watcher.run_figures(num_steps=workload.num_steps)
        (supervisor.directory / "release").touch()
        await_end(supervisor)
    setting.check(figures.transports)
    return figures


def cluster_spec(workload: Workload, setting: Setting, *, checkpoint_dir: str = "") -> ClusterSpec:
    """Returns what to start for a workload; `checkpoint_dir` is for settings with checkpoints."""
    recovery = Recovery()
    if setting.durability:
        recovery = Recovery(checkpoint_dir=checkpoint_dir, durability=setting.durability, interval_steps=setting.checkpoint_steps)
    return ClusterSpec(
        recovery=recovery,
        num_ps=workload.num_ps,
        num_workers=workload.num_workers,
        is_tcp=not setting.is_unix,
        policy=setting.policy_spec,
        chief_in_ps=setting.chief_in_ps,
    )


def start_workers(
    cluster: LocalCluster,
    workload: Workload,
    *,
    setting: Setting,
    directory: Path,
    program: str = "benchmarks.harness.worker",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Starts the workload's workers; they begin when "go" is in the directory, and leave when "release" is."""
    command = [sys.executable, "-m", program, json.dumps(dataclasses.asdict(workload))]
    if setting.policy != "sync":
        command.append(KEEP_STEPPING)
    paths = {GO_VARIABLE: str(directory / "go"), RELEASE_VARIABLE: str(directory / "release")}
    cluster.start_workers(command, environment={**setting.environment, **paths, **(environment or {})})


def await_end(supervisor: Supervisor, *, timeout_s: float = 20.0) -> None:
    """The cluster ends by itself once its workers have left; whatever has not after a while is ended by the supervisor."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_running for process in supervisor.processes) and time.monotonic() < deadline:
        supervisor.poll(timeout_s=POLL_S)
