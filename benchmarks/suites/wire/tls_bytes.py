"""Measures the cost of encrypted bytes one way: gRPC with TLS beside Python's TLS sockets. Knows the report; `tls_ends` has both ends."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import add_json, at_least_one, show
from benchmarks.report.figures import human_bytes, table_lines
from benchmarks.report.machine import machine
from benchmarks.suites.wire.tls_ends import TIMEOUT_S, Sent, Way, send
from lockstep import certs
from lockstep.launcher.supervisor import LaunchFailed

_KIB = 1 << 10
WAYS = (
    Way(title="gRPC with TLS", is_grpc=True),
    Way(title="TLS sockets, writes of 16 KiB", write_bytes=16 * _KIB),
    Way(title="TLS sockets, writes of 1 MiB"),
    Way(title="TLS sockets, 2 connections", num_connections=2),
    Way(title="TLS sockets, 4 connections", num_connections=4),
    Way(title="plain socket", is_encrypted=False),
)

DESCRIPTION = "Measures what encrypted bytes cost from one process to another, by gRPC and by sockets of Python's ssl module, by turns."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    show(measure(options.bytes, repeat=options.repeat), in_words, options)
    return 0


def measure(sizes: Sequence[int], *, repeat: int) -> dict[str, Any]:
    """Returns the report: for each size and way the medians of all runs. Raises LaunchFailed."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        certs.create(Path(directory), cluster="bench", with_all=True)
        for size in sizes:
            runs: dict[str, list[Sent]] = {way.title: [] for way in WAYS}
            for _ in range(repeat):
                for way in WAYS:
                    runs[way.title].append(_run_once(way, size, files=Path(directory)))
            rows += [_row(size, title, of) for title, of in runs.items()]
    return {"repeat": repeat, "rows": rows, "machine": machine()}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader, as a table in Markdown."""
    columns = ("bytes", "by", "time", "CPU of both")
    rows = ([human_bytes(row["bytes"]), row["way"], f"{row['ms']:.1f} ms", f"{row['cpu_ms']:.1f} ms"] for row in report["rows"])
    return "\n".join([f"one way over loopback; medians of {report['repeat']} runs by turns", "", *table_lines(columns, rows)])


def _run_once(way: Way, num_bytes: int, *, files: Path) -> Sent:
    command = [sys.executable, "-m", "benchmarks.suites.wire.tls_ends", str(files), way.as_json(), str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            line = receiver.stdout.readline()
            if not line:
                raise LaunchFailed(f"{way.title}: the receiver ended before it listened, exit code {receiver.wait(TIMEOUT_S)}")
            sent = send(way, num_bytes, port=json.loads(line)["port"], files=files)
            return sent.with_receiver(json.loads(receiver.stdout.readline())["cpu_s"])
        finally:
            receiver.kill()


def _row(size: int, title: str, runs: Sequence[Sent]) -> dict[str, Any]:
    return {
        "bytes": size,
        "way": title,
        "ms": round(statistics.median(run.seconds for run in runs) * 1e3, 2),
        "cpu_ms": round(statistics.median(run.cpu_s for run in runs) * 1e3, 2),
        "all_ms": [round(run.seconds * 1e3, 2) for run in runs],
        "all_cpu_ms": [round(run.cpu_s * 1e3, 2) for run in runs],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--bytes", type=at_least_one, nargs="+", default=[1 << 20, 64 << 20], help="bytes to transfer (default 1 and 64 MiB)"
    )
    parser.add_argument("--repeat", type=at_least_one, default=5, help="runs of each way (default 5)")
    add_json(parser)
