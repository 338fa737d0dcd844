"""Runs a workload once, with each role in its own process or all in this one, and returns its figures. Knows clusters; prints nothing."""

import dataclasses
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import process_memory
from benchmarks.harness.processes import Cluster, Processes, cpu_s, peak_rss_bytes
from benchmarks.harness.setting import Setting
from benchmarks.harness.workload import WorkerFigures, Workload, own_cpu_s, own_peak_rss_bytes, run_worker
from benchmarks.report.figures import RunFigures
from lockstep import certs
from lockstep.in_process import InProcessCluster
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Process
from worker_client import local

WORKER = "benchmarks.harness.workload"
_START_TIMEOUT_S = 120.0
TIMEOUT_S = 600.0


def run_once(workload: Workload, *, setting: Setting) -> RunFigures:
    """Runs the workload once. Raises LaunchFailed and WrongTransport."""
    return run_local(workload, setting=setting) if setting.is_local else run_cluster(workload, setting=setting)


def run_cluster(workload: Workload, *, setting: Setting, timeout_s: float = TIMEOUT_S) -> RunFigures:
    """Starts the cluster, runs the workload once, ends the cluster.

    Raises LaunchFailed with the output of what failed, and WrongTransport if the sessions did not use the setting's transport.
    """
    with ExitStack() as stack:
        kept = stack.enter_context(tempfile.TemporaryDirectory())
        secrets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = cluster_spec(workload, setting, checkpoint_dir=kept)
        cluster = stack.enter_context(Cluster(spec, security=_security(setting.security, secrets)))
        if setting.security in ("tls", "mtls"):
            certs.create(secrets, cluster=cluster.local.name, with_all=True)  # certificates name the cluster
        cluster.local.start_roles()
        start_workers(cluster, workload, setting=setting)
        figures = measured(cluster.processes, cluster.local.roles, workload, timeout_s=timeout_s)
        cluster.processes.release()
        cluster.processes.await_end()
    setting.check(figures.transports)
    return figures


def run_local(workload: Workload, *, setting: Setting) -> RunFigures:
    """Runs every worker in a thread of its own against one cluster in memory: the lower bound of a step's cost."""
    num_workers = workload.num_workers
    cluster = InProcessCluster(
        num_ps=workload.num_ps, replicas_to_aggregate=num_workers, total_num_replicas=num_workers, policy=setting.policy_spec
    )
    joined = threading.Barrier(num_workers)
    warm = threading.Barrier(num_workers, action=lambda: cpu_s_before.append(own_cpu_s()))
    cpu_s_before: list[float] = []

    def work(index: int) -> WorkerFigures:
        with local(cluster, worker_index=index) as session:
            try:
                return run_worker(session, workload, on_joined=joined.wait, on_warm=warm.wait)
            except BaseException:
                joined.abort()
                warm.abort()  # so that the others do not wait for a failed worker
                raise

    with ThreadPoolExecutor(num_workers) as threads:
        figures = [future.result() for future in [threads.submit(work, index) for index in range(num_workers)]]
    transports = [transport for worker in figures for transport in worker.transports]
    setting.check(transports)
    return RunFigures(
        step_s=figures[0].step_s,
        cpu_s_per_step={"process": (own_cpu_s() - cpu_s_before[0]) / workload.num_steps},
        peak_rss_bytes={"process": own_peak_rss_bytes()},
        num_accepted=sum(worker.num_accepted for worker in figures),
        pss_bytes={"process": process_memory.pss_bytes()},
        total_pss_bytes=process_memory.pss_bytes(),
        transports=transports,
        num_processes={"process": 1},
    )


def cluster_spec(workload: Workload, setting: Setting, *, checkpoint_dir: str = "") -> ClusterSpec:
    """Returns the cluster's specification for a workload; `checkpoint_dir` is for settings with checkpoints."""
    durability = {"durability": setting.durability, "checkpoint_steps": setting.checkpoint_steps, "checkpoint_dir": checkpoint_dir}
    return ClusterSpec(
        ps=workload.num_ps,
        workers=workload.num_workers,
        tcp=not setting.is_unix,
        policy=setting.policy,
        chief_in_ps=setting.chief_in_ps,
        **(durability if setting.durability else {}),
    )


def _security(kind: str, files: Path) -> Mapping[str, str] | None:
    """Returns variables for LaunchedCluster, which makes tokens itself. One certificate is for all roles, shown by callers with "mtls"."""
    if kind == "tokens":
        return None
    if kind == "open":
        return {}
    names = {"TOKEN_FILE": "tokens", "TLS_CA": "ca.pem", "TLS_CERT": "all.pem", "TLS_KEY": "all.key"}
    variables = {f"LOCKSTEP_{name}": str(files / file) for name, file in names.items()}
    return variables | ({"LOCKSTEP_VERIFY_CLIENTS": "1"} if kind == "mtls" else {})


def start_workers(
    cluster: Cluster,
    workload: Workload,
    *,
    setting: Setting,
    module: str = WORKER,
    environment: Mapping[str, str | None] | None = None,
    **orders: Any,
) -> None:
    """Starts the workload's workers, which run `module` with the workload and `orders`."""
    all_orders = {"workload": dataclasses.asdict(workload), "keeps_stepping": setting.policy != "sync", **orders}
    cluster.start_workers(module, all_orders, environment={**setting.environment, **(environment or {})})


def measured(processes: Processes, servers: Sequence[Process], workload: Workload, *, timeout_s: float) -> RunFigures:
    """Lets the workers begin once all are up, waits until all have reported, and returns the figures, including the servers' memory."""
    processes.await_events("up", workload.num_workers, timeout_s=_START_TIMEOUT_S)
    processes.go()
    processes.await_events("warm", 1, timeout_s=timeout_s)
    cpu_s_before = {server.name: cpu_s(server) for server in servers}
    processes.await_events("done", workload.num_workers, timeout_s=timeout_s)
    workers = [WorkerFigures(**event["figures"]) for event in processes.by_process("done")]
    used_s: dict[str, list[float]] = {"worker": [worker.cpu_s for worker in workers]}
    rss: dict[str, list[int]] = {"worker": [worker.peak_rss_bytes for worker in workers]}
    pss: dict[str, list[int]] = {"worker": [worker.pss_bytes for worker in workers]}
    for server in servers:
        role = server.name.partition(" ")[0]
        used_s.setdefault(role, []).append(cpu_s(server) - cpu_s_before[server.name])
        rss.setdefault(role, []).append(peak_rss_bytes(server))
        pss.setdefault(role, []).append(process_memory.pss_bytes(server.pid))
    return RunFigures(
        step_s=workers[0].step_s,
        cpu_s_per_step={role: sum(values) / len(values) / workload.num_steps for role, values in used_s.items()},
        peak_rss_bytes={role: max(values) for role, values in rss.items()},
        num_accepted=sum(worker.num_accepted for worker in workers),
        pss_bytes={role: max(values) for role, values in pss.items()},
        total_pss_bytes=sum(sum(values) for values in pss.values()),
        transports=[transport for worker in workers for transport in worker.transports],
        num_processes={role: len(values) for role, values in used_s.items()},
    )
