"""Measures a cluster of very many parameter servers. Knows the report, and the worker's code.

Gradients are not computed but written once, so that only the parameter servers' part of a step is timed.
"""

import argparse
import time
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.arguments import add_json, parse_bytes, show
from benchmarks.harness.processes import Cluster, cpu_s, rss_bytes
from benchmarks.harness.worker import Station
from benchmarks.harness.workload import own_cpu_s, own_peak_rss_bytes
from benchmarks.report.figures import human_bytes
from lockstep.launcher.spec import ClusterSpec
from worker_client import Session

_TIMEOUT_S = 300.0
_NUM_WARMUP_STEPS = 5

DESCRIPTION = "Measures a cluster of many parameter servers: start, step, status, end."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--ps", type=int, default=64, help="parameter servers (default 64)")
    parser.add_argument("--bytes", type=parse_bytes, default=4 << 20, help="bytes of all variables, float32 (default 4 MiB)")
    parser.add_argument("--variables", type=int, default=256, help="number of variables (default 256)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--transport",
        choices=("auto", "shared_memory", "sockets", "grpc"),
        default="auto",
        help="transport of gradients and variables (default: auto)",
    )
    parser.add_argument("--look", type=float, default=3.0, metavar="S", help="seconds to measure idle processes (default 3)")
    parser.add_argument("--tcp", action="store_true", help="TCP instead of Unix sockets")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the figures; returns the exit code."""
    show(measure(options), in_words, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the cluster, trains on it, and returns the duration of each phase."""
    spec = ClusterSpec(ps=options.ps, workers=options.workers, tcp=options.tcp)
    with Cluster(spec, security={}) as cluster:
        started = _start(cluster)
        _start_workers(cluster, options)
        joined = cluster.processes.await_events("joined", options.workers, timeout_s=_TIMEOUT_S)
        cluster.processes.await_events("warm", options.workers, timeout_s=_TIMEOUT_S)
        cpu_before = _cpu_s(cluster)
        done = cluster.processes.await_events("done", options.workers, timeout_s=_TIMEOUT_S)
        used = {role: after - cpu_before[role] for role, after in _cpu_s(cluster).items()}
        status_s = float(np.median([cluster.time_status() for _ in range(3)]))
        idle_cpu = _idle_cpu(cluster, seconds=options.look)
        *servers, chief = cluster.local.roles
        memory = {"ps": max(map(rss_bytes, servers)), "chief": rss_bytes(chief)}
        cluster.processes.release()
        end_s = cluster.processes.await_end()
    first = next(event for event in done if event["worker"] == 0)
    step_ms = 1e3 * np.array(first["step_s"])
    return {
        "ps": options.ps,
        "workers": options.workers,
        "bytes": options.bytes,
        "variables": options.variables,
        "transport": joined[0]["transport"] or [f"grpc over {'tcp' if options.tcp else 'unix'}"],
        **started,
        "connect_s": max(event["connect_s"] for event in joined),
        "join_s": max(event["join_s"] for event in joined),
        "median_ms": float(np.median(step_ms)),
        "p90_ms": float(np.quantile(step_ms, 0.9)),
        "cpu_ms_a_step": {role: 1e3 * seconds / options.steps for role, seconds in {"worker": first["cpu_s"], **used}.items()},
        "status_s": status_s,
        "idle_cpu": idle_cpu,
        "rss_bytes": memory,
        "peak_rss_worker_bytes": max(event["peak_rss_bytes"] for event in done),
        "end_s": end_s,
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    used = ", ".join(f"{role} {value:.2f} ms" for role, value in report["cpu_ms_a_step"].items())
    idle = ", ".join(f"{role} {value:.1%}" for role, value in report["idle_cpu"].items())
    return "\n".join(
        [
            f"{report['ps']} parameter servers, {report['workers']} workers, {human_bytes(report['bytes'])} in"
            f" {report['variables']} variables, {', '.join(sorted(set(report['transport'])))}",
            f"  start {report['start_s']:.1f} s: the first server serves after {report['first_ps_s']:.1f} s, the last after"
            f" {report['last_ps_s']:.1f} s, then the chief; one server's start takes {report['start_cpu_s_of_a_ps']:.2f} s of CPU",
            f"  connect() {report['connect_s']:.2f} s, create_or_join {report['join_s']:.2f} s",
            f"  step: median {report['median_ms']:.1f} ms, 90 % {report['p90_ms']:.1f} ms; CPU: {used}",
            f"  lockstep status {report['status_s']:.2f} s; idle, of a core: {idle}; end {report['end_s']:.2f} s",
            f"  memory: a ps {report['rss_bytes']['ps'] / 1e6:.0f} MB, the chief {report['rss_bytes']['chief'] / 1e6:.0f} MB,"
            f" a worker {report['peak_rss_worker_bytes'] / 1e6:.0f} MB at most",
        ]
    )


def _start(cluster: Cluster) -> dict[str, float]:
    """Starts servers and chief; returns the seconds until they served, and the CPU seconds of one server's start."""
    begin, began_at = time.monotonic(), time.time()
    cluster.local.start_roles()
    start_s = time.monotonic() - begin
    *servers, _ = cluster.local.roles
    announced = [cluster.processes.directory / f"ps{index}.address" for index in range(len(servers))]
    serving_s = sorted(path.stat().st_mtime - began_at for path in announced)
    cpu = float(np.median([cpu_s(server) for server in servers]))
    return {"start_s": start_s, "first_ps_s": serving_s[0], "last_ps_s": serving_s[-1], "start_cpu_s_of_a_ps": cpu}


def _start_workers(cluster: Cluster, options: argparse.Namespace) -> None:
    names = {"num_variables": options.variables, "total_bytes": options.bytes, "num_steps": options.steps}
    for worker in range(options.workers):
        orders = {"worker": worker, "chief": cluster.local.chief_address, **names}
        command = cluster.processes.worker_command("benchmarks.suites.scale.servers", orders)
        cluster.processes.start(f"worker {worker}", command, environment={"LOCKSTEP_TRANSPORT": options.transport})


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, and stays until it is released."""
    num_variables, begin = orders["num_variables"], time.monotonic()
    num_elements = orders["total_bytes"] // 4 // num_variables
    with worker_client.connect(orders["chief"], worker_index=orders["worker"]) as session:
        connected = time.monotonic()
        values = {f"layer{index // 10}/weights{index % 10}": np.ones(num_elements, np.float32) for index in range(num_variables)}
        session.create_or_join(values, optimizer=worker_client.sgd(0.01))
        joined = {"connect_s": connected - begin, "join_s": time.monotonic() - connected}
        for gradient in session.gradient_buffers().values():
            gradient.fill(0.001)
        station.say("joined", **joined, transport=[str(kind) for kind in getattr(session, "transport", ())])
        _steps_s(session, _NUM_WARMUP_STEPS)
        station.say("warm")
        cpu_s = own_cpu_s()
        step_s = _steps_s(session, orders["num_steps"])
        station.say("done", worker=orders["worker"], step_s=step_s, cpu_s=own_cpu_s() - cpu_s, peak_rss_bytes=own_peak_rss_bytes())
        station.await_release()


def _steps_s(session: Session, num_steps: int) -> list[float]:
    step_s = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        session.views()
        result = session.step(session.gradient_buffers())
        step_s.append(time.perf_counter() - begin)
        if not result.is_accepted:
            raise RuntimeError(f"step {result.step}: the contribution is {result.outcome.name}, so this is no measurement")
    return step_s


def _cpu_s(cluster: Cluster) -> dict[str, float]:
    """CPU seconds so far of all servers together, and of the chief."""
    *servers, chief = cluster.local.roles
    return {"all ps": sum(map(cpu_s, servers)), "chief": cpu_s(chief)}


def _idle_cpu(cluster: Cluster, *, seconds: float) -> dict[str, float]:
    """Returns the shares of a core that all servers together, and the chief, use while no worker makes a step."""
    before, begin = _cpu_s(cluster), time.monotonic()
    cluster.processes.pass_time(seconds)
    passed_s = time.monotonic() - begin
    return {role: (after - before[role]) / passed_s for role, after in _cpu_s(cluster).items()}
