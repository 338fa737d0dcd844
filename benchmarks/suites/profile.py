"""`python -m benchmarks.suites.profile`: where each millisecond of a step goes, on each path. Knows processes and the table; times nothing.

Servers and worker run with clocks around their seams (`profile_seams`), which costs some microseconds a call.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.cluster_run import await_end, cluster_spec, start_workers
from benchmarks.harness.seams import read_intervals
from benchmarks.harness.setting import WIRES, Setting, WrongTransport, workload_of
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import as_row
from benchmarks.report.profile_figures import parts_of, process_rows
from benchmarks.suites.profile_role import DIRECTORY_VARIABLE
from lockstep.launcher.cluster import LocalCluster, last_lines
from lockstep.launcher.supervisor import Interrupted, LaunchFailed, Process, Supervisor

_TIMEOUT_S = 300.0


class _ProfiledCluster(LocalCluster):
    """A cluster whose parameter servers are started with clocks around their seams."""

    def _program_of(self, module: str) -> str:
        return "benchmarks.suites.profile_role" if module == "ps_server" else module


@dataclass(slots=True)
class _Watch:
    """What is heard of the workers, and seen of the servers' CPU time between the first word "warm" and the last word "seen"."""

    servers: Sequence[Process] = ()
    up: set[str] = field(default_factory=set)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, tuple[float, float]] = field(default_factory=dict)
    after: dict[str, tuple[float, float]] = field(default_factory=dict)

    def hear(self, name: str, line: str) -> None:
        """Takes one line that a process has printed."""
        event = json.loads(line) if line.startswith('{"event"') else {"event": ""}
        if event["event"] == "up":
            self.up.add(name)
        elif event["event"] == "warm" and not self.before:
            self.before = self._times()
        elif event["event"] == "seen":
            self.seen[name] = event
            self.after = self._times()
        elif not event["event"] and (name.startswith("worker") or "ERROR" in line):
            print(f"{name}: {line}", file=sys.stderr)

    def cpu_s(self) -> dict[str, tuple[float, float]]:
        """User and system seconds of each process."""
        workers = {name: (event["user_s"], event["system_s"]) for name, event in sorted(self.seen.items())}
        servers = {name: (self.after[name][0] - user, self.after[name][1] - system) for name, (user, system) in self.before.items()}
        return servers | workers

    def _times(self) -> dict[str, tuple[float, float]]:
        times = {server.name: psutil.Process(server.pid).cpu_times() for server in self.servers}
        return {name: (found.user, found.system) for name, found in times.items()}


def profile(workload: Workload, setting: Setting) -> dict[str, Any]:
    """Runs the workload once with clocks, and returns what each part took. Raises LaunchFailed, WrongTransport."""
    watch = _Watch()
    with tempfile.TemporaryDirectory() as kept, Supervisor(log_directory=Path(kept) / "logs", show_line=watch.hear) as supervisor:
        cluster = _ProfiledCluster(cluster_spec(workload, setting), supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles(environment={DIRECTORY_VARIABLE: kept})
        watch.servers = cluster.roles
        environment = {DIRECTORY_VARIABLE: kept}
        start_workers(
            cluster,
            workload,
            setting=setting,
            directory=supervisor.directory,
            program="benchmarks.suites.profile_role",
            environment=environment,
        )
        _await(watch.up, workload.num_workers, supervisor)
        (supervisor.directory / "go").touch()
        _await(watch.seen, workload.num_workers, supervisor)
        (supervisor.directory / "release").touch()
        await_end(supervisor)
        worker = read_intervals(Path(kept) / "worker-0.json")
        servers = [interval for path in sorted(Path(kept).glob("ps-*.json")) for interval in read_intervals(path)]
    setting.check([transport for event in watch.seen.values() for transport in event["transports"]])
    steps = [interval for interval in worker if interval.part == "step"]
    cpu_ms = {name: [1e3 * value / workload.num_steps for value in both] for name, both in watch.cpu_s().items()}
    step_ms = sorted(1e3 * (step.end - step.begin) for step in steps)[len(steps) // 2]
    parts = [*parts_of(worker, steps, who="worker 0"), *parts_of(servers, steps, who="ps")]
    return {**setting.record(), "title": setting.title, "step_ms": step_ms, "cpu_ms": cpu_ms, "parts": parts}


def _await(reached: Mapping[str, Any] | set[str], count: int, supervisor: Supervisor) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while len(reached) < count:
        for process in supervisor.poll(timeout_s=0.05):
            raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
        if time.monotonic() > deadline:
            raise LaunchFailed(f"not all of {count} workers came so far within {_TIMEOUT_S:g} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints two tables for each path, or JSON; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        workload = workload_of(options.size, num_steps=options.steps, num_ps=options.ps)
        settings = [Setting(transport=name, wire=options.wire if name == "grpc" else "float32") for name in options.transports]
    except ValueError as error:
        print(f"benchmarks.suites.profile: {error}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"kind": "profile", "size": options.size, "paths": []}
    try:
        for setting in settings:
            found = profile(workload, setting)
            report["paths"].append(found)
            if not options.json:
                _print(options.size, found)
    except (LaunchFailed, Interrupted, WrongTransport) as error:
        print(f"benchmarks.suites.profile: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    if options.json:
        print(json.dumps(report))
    return 0


def _print(size: str, found: dict[str, Any]) -> None:
    print(f"\n{size}, {found['title']}: a step took {found['step_ms']:.2f} ms\n")
    for row in process_rows(found):
        print(as_row(row) if row[0] else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.profile",
        description="Shows where each millisecond of a synchronous step goes: CPU of each process, and the parts of a step in their order,"
        " as seen by worker 0 and by the parameter server. 2 workers, SGD.",
    )
    parser.add_argument("--size", default="64MiB/16", metavar="BYTES/VARIABLES", help="default: 64MiB/16")
    parser.add_argument("--transports", nargs="+", choices=("shm", "grpc"), default=["shm", "grpc"], help="default: both")
    parser.add_argument("--wire", choices=WIRES, default="float32", help="how numbers travel over gRPC (default float32)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=int, default=30, help="steps to look at, after 3 that are not (default 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
