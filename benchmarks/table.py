"""`python -m benchmarks.table`: the usual sizes, one after the other, as a table. Knows which sizes; `step` measures."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import human_bytes
from benchmarks.plot import CannotPlot, check_plot, plot_steps
from benchmarks.step import measure
from benchmarks.workload import Workload

# total bytes, variables, steps to measure
SIZES = ((4 << 10, 4, 200), (1 << 20, 8, 100), (4_000_000, 1000, 50), (4_000_000, 1, 50), (64 << 20, 16, 15))
_ROLES = {"grpc": ("ps", "worker", "chief"), "local": ("process",)}


def main() -> int:
    """Prints the table as Markdown, row by row; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description="Measures a step at the usual sizes with SGD.")
    parser.add_argument("--repeat", type=int, default=1, help="whole runs of each row; the median one is shown")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--unix", action="store_true", help="Unix sockets instead of TCP")
    parser.add_argument("--transport", choices=("grpc", "local"), default="grpc")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draws the medians; needs the extra `bench`")
    options = parser.parse_args()
    try:
        if options.plot:
            check_plot(options.plot)
    except CannotPlot as error:
        print(f"benchmarks.table: {error}", file=sys.stderr)
        return 2
    roles = _ROLES[options.transport]
    columns = ["size", "variables", "transport", "median ms", "p90 ms"]
    columns += [f"{role}: CPU ms/step" for role in roles] + [f"{role}: peak MiB" for role in roles]
    _print_row(columns)
    _print_row(["---"] * len(columns))
    medians = {}
    for total_bytes, num_variables, num_steps in SIZES:
        workload = Workload(
            total_bytes=total_bytes, num_variables=num_variables, num_workers=options.workers, num_ps=options.ps, num_steps=num_steps
        )
        report = measure(workload, transport=options.transport, is_tcp=not options.unix, repeat=options.repeat)
        medians[total_bytes, num_variables] = report["median_ms"]
        cpu_ms = [f"{report['cpu_s_per_step'][role] * 1e3:.2f}" for role in roles]
        peak_mib = [f"{report['peak_rss_bytes'][role] / (1 << 20):.0f}" for role in roles]
        transport = f"{report['transport']} {report.get('sockets', '')}".strip()
        times = [f"{report['median_ms']:.2f}", f"{report['p90_ms']:.2f}"]
        _print_row([human_bytes(total_bytes), str(num_variables), transport, *times, *cpu_ms, *peak_mib])
    print(f"\n4 MB in 1000 variables costs {medians[4_000_000, 1000] / medians[4_000_000, 1]:.2f} times what it costs in 1 variable.")
    if options.plot:
        sizes = [f"{human_bytes(total_bytes)}\n{num_variables} variables" for total_bytes, num_variables in medians]
        title = f"{options.workers} workers, {options.ps} parameter servers, SGD"
        plot_steps(options.plot, title=title, sizes=sizes, series={options.transport: list(medians.values())})
    return 0


def _print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
