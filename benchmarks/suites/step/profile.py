"""Shows the time of each part of a step, on each path. Knows processes and the table; times nothing.

Servers and worker run with timed seams (`harness.seams`), which costs some microseconds per call.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import add_json
from benchmarks.harness.processes import Cluster, cpu_times_s
from benchmarks.harness.runs import cluster_spec, start_workers
from benchmarks.harness.seams import read_intervals
from benchmarks.harness.setting import WIRES, Setting, workload_of
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import as_row
from benchmarks.report.profile_figures import parts_of, process_rows
from benchmarks.suites.step.profile_role import DIRECTORY_VARIABLE

_TIMEOUT_S = 300.0


ROLE = "benchmarks.suites.step.profile_role"


def profile(workload: Workload, setting: Setting) -> dict[str, Any]:
    """Runs the workload once with timed seams, and returns the time of each part. Raises LaunchFailed, WrongTransport."""
    with tempfile.TemporaryDirectory() as kept, Cluster(cluster_spec(workload, setting), programs={"ps_server": ROLE}) as cluster:
        environment: dict[str, str | None] = {DIRECTORY_VARIABLE: kept}
        cluster.local.start_roles(environment=environment)
        start_workers(cluster, workload, setting=setting, module=ROLE, environment=environment)
        processes, roles = cluster.processes, cluster.local.roles
        processes.await_events("up", workload.num_workers, timeout_s=_TIMEOUT_S)
        processes.go()
        processes.await_events("warm", 1, timeout_s=_TIMEOUT_S)
        before = {role.name: cpu_times_s(role) for role in roles}
        processes.await_events("done", workload.num_workers, timeout_s=_TIMEOUT_S)
        after = {role.name: cpu_times_s(role) for role in roles}
        processes.release()
        processes.await_end()
        worker = read_intervals(Path(kept) / "worker-0.json")
        servers = [interval for path in sorted(Path(kept).glob("ps-*.json")) for interval in read_intervals(path)]
    done = processes.by_process("done")
    setting.check([transport for event in done for transport in event["transports"]])
    steps = [interval for interval in worker if interval.part == "step"]
    used_s = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in before}
    used_s |= {event["process"]: [event["user_s"], event["system_s"]] for event in done}
    cpu_ms = {name: [1e3 * value / workload.num_steps for value in both] for name, both in used_s.items()}
    step_ms = sorted(1e3 * (step.end - step.begin) for step in steps)[len(steps) // 2]
    parts = [*parts_of(worker, steps, who="worker 0"), *parts_of(servers, steps, who="ps")]
    return {**setting.record(), "title": setting.title, "step_ms": step_ms, "cpu_ms": cpu_ms, "parts": parts}


TRANSPORTS = ("shm", "sockets", "grpc")
DESCRIPTION = (
    "Shows where each millisecond of a synchronous step goes: CPU of each process, and the parts of a step in their order,"
    " as seen by worker 0 and by the parameter server. 2 workers, SGD."
)


def run(options: argparse.Namespace) -> int:
    """Prints two tables for each path, or JSON; returns the exit code."""
    workload = workload_of(options.size, num_steps=options.steps, num_ps=options.ps)
    settings = [Setting(transport=name, wire="float32" if name == "shm" else options.wire) for name in options.transports]
    report: dict[str, Any] = {"kind": "profile", "size": options.size, "paths": []}
    for setting in settings:
        found = profile(workload, setting)
        report["paths"].append(found)
        if not options.json:
            _print(options.size, found)
    if options.json:
        print(json.dumps(report))
    return 0


def _print(size: str, found: dict[str, Any]) -> None:
    print(f"\n{size}, {found['title']}: a step took {found['step_ms']:.2f} ms\n")
    for row in process_rows(found):
        print(as_row(row) if row[0] else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--size", default="64MiB/16", metavar="BYTES/VARIABLES", help="bytes and number of variables (default: 64MiB/16)")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="transports to profile (default: all)")
    parser.add_argument("--wire", choices=WIRES, default="float32", help="how numbers travel (default float32)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=int, default=30, help="steps to measure, after 3 that are not (default 30)")
    add_json(parser)
