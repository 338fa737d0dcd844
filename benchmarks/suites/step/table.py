"""Measures the usual sizes over every transport, as a table, a plot and JSON. Knows the sizes; `step` measures."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.arguments import add_files, check_files
from benchmarks.harness.setting import POLICIES, SIZES, WIRES, Setting, size_title, steps_for, workload_of
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import as_row, by_role, head_rows
from benchmarks.report.machine import machine
from benchmarks.report.plot import plot_panels
from benchmarks.suites.step.step import measure
from lockstep.launcher.supervisor import LaunchFailed

# The choices of --transports; the plot has a bar for each.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "sockets": {"transport": "sockets"},
    "grpc": {"transport": "grpc"},
    "grpc-unix": {"transport": "grpc", "is_unix": True},
    "local": {"transport": "local"},
}
COLUMNS = (
    *("size", "variables", "ps", "policy", "transport", "median ms", "p90 ms"),
    *("CPU ms/step: all", "… each", "peak MiB: each", "memory of all, MiB"),
)
# (Most bytes, steps): about a second each.
_STEPS = ((1 << 16, 300), (1 << 21, 150), (1 << 23, 60), (1 << 25, 40), (1 << 26, 20))
_FEWEST_STEPS = 8
_MIB = 1 << 20

DESCRIPTION = (
    "Measures a step at the usual sizes over every transport, with 1 and 2 parameter servers, sync and async, with SGD."
    " All of it takes ten minutes; less with fewer --sizes, --transports, --ps or --policies."
)


def run(options: argparse.Namespace) -> int:
    """Prints the table as Markdown, row by row; returns the exit code."""
    cases = cases_of(options)
    check_files(options)
    report: dict[str, Any] = {"kind": "table", **machine(), "repeat": options.repeat, "rows": []}
    print(f"{report['date']}, {report['cpus']} CPUs, load average {report['load']}, {len(cases)} rows, repeat {options.repeat}\n")
    print(head_rows(COLUMNS), flush=True)
    for row in _measured(cases, repeat=options.repeat):
        report["rows"].append(row)
        print(as_row(cells(row)), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # after each: what is measured is kept
    if options.plot:
        plot_panels(options.plot, title=f"{options.workers} workers, SGD; {report['date']}, {report['cpus']} CPUs", panels=panels(report))
    print(f"\nkept in {' and '.join(str(path) for path in (options.json, options.plot) if path)}")
    return 0


def cells(row: dict[str, Any]) -> list[str]:
    """Returns the row of the table that COLUMNS heads."""
    size, variables = size_title_of(row).split(" / ")
    head = [size, variables, str(row["num_ps"]), row["policy"], row["name"]]
    times = [f"{row['median_ms']:.2f}", f"{row['p90_ms']:.2f}", f"{row['total_cpu_s_per_step'] * 1e3:.2f}"]
    cpu = by_role({role: value * 1e3 for role, value in row["cpu_s_per_step"].items()}, "{:.2f}")
    peak = by_role({role: value / _MIB for role, value in row["peak_rss_bytes"].items()}, "{:.0f}")
    return [*head, *times, cpu, peak, f"{row['total_pss_bytes'] / _MIB:.0f}"]


def panels(report: dict[str, Any]) -> dict[str, tuple[list[str], dict[str, list[float | None]]]]:
    """Returns what is drawn: for each number of servers and policy the sizes, and the medians of each transport (None: not measured)."""
    drawn: dict[str, tuple[list[str], dict[str, list[float | None]]]] = {}
    for title in dict.fromkeys(_panel(row) for row in report["rows"]):
        rows = [row for row in report["rows"] if _panel(row) == title]
        sizes, names = dict.fromkeys(map(size_title_of, rows)), dict.fromkeys(row["name"] for row in rows)
        medians = {(size_title_of(row), row["name"]): float(row["median_ms"]) for row in rows}
        drawn[title] = list(sizes), {name: [medians.get((size, name)) for size in sizes] for name in names}
    return drawn


def size_title_of(row: dict[str, Any]) -> str:
    """The title of a row's size."""
    sizes = ("total_bytes", "num_variables", "num_workers", "num_ps", "num_steps")
    return size_title(Workload(**{name: row[name] for name in sizes}))


def _panel(row: dict[str, Any]) -> str:
    return f"{row['num_ps']} parameter server{'s' if row['num_ps'] > 1 else ''}, {row['policy']}"


def cases_of(options: argparse.Namespace) -> list[tuple[str, Workload, Setting]]:
    """Returns every combination, in the order of the table. Raises WrongArguments for what is no size."""
    cases = []
    for num_ps in options.ps:
        for policy in options.policies:
            for size in options.sizes:
                bare = workload_of(size, num_steps=1)
                steps = options.steps or steps_for(bare.total_bytes, _STEPS, fewest=_FEWEST_STEPS)
                workload = workload_of(size, num_steps=steps, num_ps=num_ps, num_workers=options.workers)
                for name in options.transports:
                    is_local = name == "local"
                    asked: dict[str, Any] = {**TRANSPORTS[name], "policy": policy}
                    asked |= {} if is_local else {"chief_in_ps": options.chief_in_ps}
                    asked |= {"wire": options.wire} if asked["transport"] in ("sockets", "grpc") else {}
                    cases.append((name, workload, Setting(**asked)))
    return cases


def _measured(cases: Sequence[tuple[str, Workload, Setting]], *, repeat: int) -> Iterator[dict[str, Any]]:
    for name, workload, setting in cases:
        report = _measured_apart(workload, setting, repeat) if setting.is_local else measure(workload, setting=setting, repeat=repeat)
        yield {"name": name, **report}


def _measured_apart(workload: Workload, setting: Setting, repeat: int) -> dict[str, Any]:
    """Measures a `local` setting in a process of its own: in this one, the memory of all rows would add up. Raises LaunchFailed."""
    sizes = {"bytes": workload.total_bytes, "variables": workload.num_variables, "workers": workload.num_workers, "ps": workload.num_ps}
    flags = {**sizes, "steps": workload.num_steps, "transport": "local", "policy": setting.policy, "repeat": repeat}
    command = [sys.executable, "-m", "benchmarks", "run", "step", "--json", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LaunchFailed(f"{' '.join(command[1:])} ended with exit code {done.returncode}; its output is above")
    return dict(json.loads(done.stdout))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="BYTES/VARIABLES", help=f"default: {' '.join(SIZES)}")
    parser.add_argument(
        "--transports", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS), help="transports to measure (default: all)"
    )
    parser.add_argument("--ps", nargs="+", type=int, default=[1, 2], help="numbers of parameter servers (default 1 2)")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="policies to measure (default: both)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps to measure in each run, after 3 that are not; 300 to 8 by size")
    parser.add_argument("--repeat", type=int, default=1, help="whole runs of each row; the median one is shown (default 1)")
    parser.add_argument("--wire", choices=WIRES, default="float32", help="how numbers travel, over sockets or gRPC (default float32)")
    parser.add_argument("--chief-in-ps", action="store_true", help="the chief in the process of ps 0")
    add_files(parser, "bench.json")
