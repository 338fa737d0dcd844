"""`python -m benchmarks.step`: the cost of one synchronous step. Knows the arguments and the report; the run itself is elsewhere."""

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import human_bytes, summary
from benchmarks.workload import OPTIMIZERS, Workload

_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        workload = Workload(
            total_bytes=options.bytes,
            num_variables=options.variables,
            num_workers=options.workers,
            num_ps=options.ps,
            num_steps=options.steps,
            optimizer=options.optimizer,
        )
    except ValueError as error:
        print(f"benchmarks.step: {error}", file=sys.stderr)
        return 2
    report = measure(workload, transport=options.transport, is_tcp=not options.unix, repeat=max(1, options.repeat))
    print(json.dumps(report) if options.json else in_words(report))
    return 0


def measure(workload: Workload, *, transport: str, is_tcp: bool = True, repeat: int = 1) -> dict[str, Any]:
    """Runs the workload `repeat` times and returns the report: the workload, where it ran, and the figures."""
    # Imported here, so that --help and a wrong argument answer at once.
    if transport == "local":
        from benchmarks.local_run import run_local

        runs = [run_local(workload) for _ in range(repeat)]
    else:
        from benchmarks.cluster_run import run_cluster

        runs = [run_cluster(workload, is_tcp=is_tcp, timeout_s=_TIMEOUT_S) for _ in range(repeat)]
    sockets = {} if transport == "local" else {"sockets": "tcp" if is_tcp else "unix"}
    return {"transport": transport, **sockets, **dataclasses.asdict(workload), **summary(runs), "machine": _machine()}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    sockets = f" over {report['sockets']}" if "sockets" in report else ""
    lines = [
        f"{human_bytes(report['total_bytes'])} in {report['num_variables']} variables, {report['num_workers']} workers,"
        f" {report['num_ps']} ps, {report['optimizer']}, {report['transport']}{sockets}, {report['num_steps']} steps",
        f"  median {report['median_ms']:.2f} ms   p90 {report['p90_ms']:.2f} ms   (medians of all runs: {report['medians_ms']})",
    ]
    for role, cpu_s in report["cpu_s_per_step"].items():
        lines.append(f"  {role:8} {cpu_s * 1e3:8.2f} ms CPU a step   peak {human_bytes(report['peak_rss_bytes'][role])}")
    return "\n".join(lines)


def _machine() -> dict[str, object]:
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        **{package: version(package) for package in ("grpcio", "protobuf", "numpy")},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description="Measures one synchronous step: every worker reads every byte, and pushes a gradient (0.001 * value) of every byte.",
    )
    parser.add_argument("--bytes", type=int, default=1 << 20, help="bytes of all variables together, float32 (default 1 MiB)")
    parser.add_argument("--variables", type=int, default=8, help="variables that they are split over evenly (default 8)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=int, default=50, help="steps to measure, after 3 that are not (default 50)")
    parser.add_argument("--transport", choices=("grpc", "local"), default="grpc", help="a process for each role, or all in this one")
    sockets = parser.add_mutually_exclusive_group()
    sockets.add_argument("--tcp", action="store_true", help="with grpc: TCP over loopback (the default)")
    sockets.add_argument("--unix", action="store_true", help="with grpc: Unix sockets")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--repeat", type=int, default=1, help="whole runs; the one with the median of the medians is reported")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
