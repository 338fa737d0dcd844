"""Measures the throughput of a link with a limited rate, by data sockets and by gRPC. Knows the report; `shaped_link` makes the link."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.arguments import add_json, parse_bytes, show
from benchmarks.report.figures import human_bytes, table_lines
from benchmarks.report.machine import machine
from lockstep.launcher.supervisor import LaunchFailed

# In user, network and mount namespaces of its own, which disappear when it ends.
_APART = ("unshare", "-rnm", sys.executable, "-m", "benchmarks.suites.wire.shaped_link")
_TIMEOUT_S = 600.0

DESCRIPTION = "Measures what gets over links of 100 Mbit/s and 1 Gbit/s, between two network namespaces where the system permits those."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures, or why it cannot be run; returns the exit code, which is 0 then."""
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return 0
    show(measure(options.mbit, nbytes=options.bytes), in_words, options)
    return 0


def why_not() -> str:
    """Returns why no link can be made here; empty if one can."""
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} on this machine (packages util-linux and iproute2)"
    tried = subprocess.run([*_APART, "--mbit", "100", "--only-try"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return f"this system permits no link of one's own: {tried.stderr.strip().splitlines()[-1]}" if tried.returncode else ""


def measure(rates: Sequence[int], *, nbytes: int) -> dict[str, Any]:
    """Returns the report. Raises LaunchFailed."""
    rows = []
    for mbit in rates:
        command = [*_APART, "--mbit", str(mbit), "--bytes", str(nbytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise LaunchFailed(f"a link of {mbit} Mbit/s: {done.stderr.strip().splitlines()[-1]}")
        rows += [row_of(json.loads(line), mbit=mbit) for line in done.stdout.splitlines()]
    return {"rows": rows, "machine": machine()}


def row_of(figures: dict[str, Any], *, mbit: int) -> dict[str, Any]:
    """Returns a run with its share of the link's rate, each way; None: not measured."""
    shares = {
        f"{way}_share": None if figures[f"{way}_s"] is None else round(figures["bytes"] * 8e-6 / figures[f"{way}_s"] / mbit, 3)
        for way in ("up", "down", "first_up")
    }
    return {"mbit": mbit, **figures, **shares}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader, as a table in Markdown."""
    columns = ("link", "by", "bytes", "gradients up", "of the link", "the first time", "variables down", "of the link")
    rows = (
        [
            f"{row['mbit']} Mbit/s",
            f"{row['transport']}, {row['encoding']}",
            human_bytes(row["bytes"]),
            *_words(row["up_s"], row["up_share"]),
            _words(row["first_up_s"], row["first_up_share"])[1],
            *_words(row["down_s"], row["down_share"]),
        ]
        for row in report["rows"]
    )
    return "\n".join(table_lines(columns, rows))


def _words(seconds: float | None, share: float | None) -> tuple[str, str]:
    return ("–", "–") if seconds is None or share is None else (f"{seconds:.3f} s", f"{share:.1%}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1_000], help="rates of the link (default 100 and 1000)")
    parser.add_argument("--bytes", type=parse_bytes, default=64 << 20, help="bytes of the model, float32 (default 64 MiB)")
    add_json(parser)
