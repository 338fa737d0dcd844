"""Runs a workload in this one process, without a network: the floor under what processes cost. Knows the SDK's `local()`; no process."""

import threading
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.process_memory import pss_bytes
from benchmarks.harness.setting import Setting
from benchmarks.harness.workload import WorkerFigures, Workload, own_cpu_s, own_peak_rss_bytes, run_worker
from benchmarks.report.figures import RunFigures
from lockstep.in_process import InProcessCluster
from worker_client import local


def run_local(workload: Workload, *, setting: Setting) -> RunFigures:
    """Runs every worker in a thread of its own against one cluster in memory, under the setting's policy."""
    num_workers = workload.num_workers
    cluster = InProcessCluster(
        num_ps=workload.num_ps, replicas_to_aggregate=num_workers, total_num_replicas=num_workers, policy=setting.policy_spec
    )
    joined = threading.Barrier(num_workers)
    warm = threading.Barrier(num_workers, action=lambda: cpu_s.append(own_cpu_s()))
    cpu_s: list[float] = []

    def work(index: int) -> WorkerFigures:
        with local(cluster, worker_index=index) as session:
            try:
                return run_worker(session, workload, on_joined=lambda: _pass(joined), on_warm=lambda: _pass(warm))
            except BaseException:
                joined.abort()
                warm.abort()  # the others must not wait for a worker that failed
                raise

    with ThreadPoolExecutor(num_workers) as threads:
        figures = [future.result() for future in [threads.submit(work, index) for index in range(num_workers)]]
    transports = [transport for worker in figures for transport in worker.transports]
    setting.check(transports)
    return RunFigures(
        step_s=figures[0].step_s,
        cpu_s_per_step={"process": (own_cpu_s() - cpu_s[0]) / workload.num_steps},
        peak_rss_bytes={"process": own_peak_rss_bytes()},
        num_accepted=sum(worker.num_accepted for worker in figures),
        pss_bytes={"process": pss_bytes()},
        total_pss_bytes=pss_bytes(),
        transports=transports,
        num_processes={"process": 1},
    )


def _pass(barrier: threading.Barrier) -> None:
    barrier.wait()
