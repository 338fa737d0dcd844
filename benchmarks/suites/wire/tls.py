"""Measures the cost of tokens and TLS in a step, alternating with a cluster that has neither. Knows the report; no step."""

import argparse
import functools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import add_json, at_least_one, parse_bytes, show
from benchmarks.harness.runs import run_cluster
from benchmarks.harness.setting import Setting
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import RunFigures, human_bytes, table_lines
from benchmarks.report.machine import machine
from lockstep import certs

_WORDS = {"open": "neither", "tokens": "tokens", "tls": "TLS and tokens", "mtls": "TLS, tokens and callers' certificates"}
_KINDS = tuple(_WORDS)


DESCRIPTION = "Measures what tokens and TLS add to a step."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    show(measure(options.bytes, num_steps=options.steps, num_workers=options.workers, repeat=options.repeat), in_words, options)
    return 0


def measure(sizes: Sequence[int], *, num_steps: int, num_workers: int, repeat: int) -> dict[str, Any]:
    """Returns the report: for each size and kind the medians of all runs. Raises LaunchFailed."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for size in sizes:
            # Large steps take longer, so fewer are enough.
            steps = num_steps if size < 16 << 20 else max(10, num_steps // 5)
            workload = Workload(total_bytes=size, num_variables=8, num_workers=num_workers, num_ps=1, num_steps=steps, optimizer="sgd")
            runs: dict[str, list[RunFigures]] = {kind: [] for kind in _KINDS}
            for _ in range(repeat):
                for kind in _KINDS:
                    files = Path(tempfile.mkdtemp(dir=directory))
                    runs[kind].append(
                        run_cluster(
                            workload,
                            setting=Setting(transport="grpc"),
                            security=_security(kind, files),
                            # Certificates name the cluster.
                            on_name=functools.partial(_make_files, files),
                        )
                    )
            rows += [_row(size, kind, runs[kind], open_runs=runs["open"]) for kind in _KINDS]
    return {"num_workers": num_workers, "num_steps": num_steps, "repeat": repeat, "rows": rows, "machine": machine()}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader, as a table in Markdown."""
    title = f"{report['num_workers']} workers, 1 ps, gRPC over TCP on one host; medians of {report['repeat']} runs by turns"
    columns = ("model", "between the processes", "step", "×", "CPU of all a step", "×")
    rows = (
        [
            *(human_bytes(row["bytes"]), _WORDS[row["kind"]]),
            *(f"{row['step_ms']:.2f} ms", f"{row['step_ratio']:.2f}", f"{row['cpu_ms']:.2f} ms", f"{row['cpu_ratio']:.2f}"),
        ]
        for row in report["rows"]
    )
    return "\n".join([title, "", *table_lines(columns, rows)])


def _row(size: int, kind: str, runs: Sequence[RunFigures], *, open_runs: Sequence[RunFigures]) -> dict[str, Any]:
    # The ratio of each run to the open run of the same turn, so that other work of the machine affects both.
    step = statistics.median(run.median_ms / other.median_ms for run, other in zip(runs, open_runs, strict=True))
    cpu = statistics.median(run.total_cpu_s_per_step / other.total_cpu_s_per_step for run, other in zip(runs, open_runs, strict=True))
    return {
        "bytes": size,
        "kind": kind,
        "step_ms": round(statistics.median(run.median_ms for run in runs), 3),
        "cpu_ms": round(statistics.median(run.total_cpu_s_per_step for run in runs) * 1e3, 3),
        "step_ratio": round(step, 3),
        "cpu_ratio": round(cpu, 3),
    }


def _make_files(directory: Path, cluster: str) -> None:
    certs.create(directory, cluster=cluster, with_all=True)


def _security(kind: str, directory: Path) -> Mapping[str, str]:
    if kind == "open":
        return {}
    variables = {"LOCKSTEP_TOKEN_FILE": str(directory / "tokens")}
    if kind == "tokens":
        return variables
    # One certificate for all roles: callers have it too, and must show it only with "mtls".
    files = {"TLS_CA": "ca.pem", "TLS_CERT": "all.pem", "TLS_KEY": "all.key"}
    variables |= {f"LOCKSTEP_{name}": str(directory / file) for name, file in files.items()}
    return variables | ({"LOCKSTEP_VERIFY_CLIENTS": "1"} if kind == "mtls" else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--bytes", type=parse_bytes, nargs="+", default=[1 << 20, 64 << 20], help="bytes of the model (default 1 and 64 MiB)"
    )
    parser.add_argument("--workers", type=int, default=2, help="workers (default 2)")
    parser.add_argument("--steps", type=int, default=100, help="steps to measure; a fifth of them from 16 MiB on (default 100)")
    parser.add_argument("--repeat", type=at_least_one, default=3, help="runs of each kind (default 3)")
    add_json(parser)
