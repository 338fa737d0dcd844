"""Measures the cost of the chief's page a step, with and without readers, alternating with a cluster without a page. Knows the report."""

import argparse
import statistics
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.harness.arguments import add_json, at_least_one, show
from benchmarks.harness.runs import run_cluster
from benchmarks.harness.setting import TRANSPORTS, Setting, size_title, workload_of
from benchmarks.report.figures import RunFigures, table_lines
from benchmarks.report.machine import machine

_WORDS = {
    "off": "no page",
    "on": "a page without readers",
    "read": "a page, and a reader every 0.8 s",
    "scraped": "a page, a reader, and a scraper as often",
}
_KINDS = tuple(_WORDS)
# The requested paths, and the period of the page's own requests.
_PATHS = {"read": ("api/cluster",), "scraped": ("api/cluster", "metrics")}
_PERIOD_S = 0.8
_ADDRESS = "127.0.0.1:0"

DESCRIPTION = "Measures what the chief's page adds to a step."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--sizes", nargs="+", default=["4KiB/4"], help="bytes and number of variables (default 4KiB/4)")
    parser.add_argument("--transport", choices=sorted(TRANSPORTS), default="shm", help="how gradients travel (default shm)")
    parser.add_argument("--workers", type=int, default=2, help="workers (default 2)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_KINDS[1:],
        default=["on", "scraped"],
        help="kinds to compare with a cluster without a page (default: on scraped)",
    )
    parser.add_argument("--steps", type=int, default=2_000, help="steps of a run (default 2,000: some looks of the page are among them)")
    parser.add_argument("--repeat", type=at_least_one, default=7, help="runs of each kind, by turns (default 7: two minutes)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    show(measure(options), in_words, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the report, with every run. Raises LaunchFailed."""
    rows = []
    kinds = tuple(kind for kind in _KINDS if kind == "off" or kind in options.only)
    for size in options.sizes:
        workload = workload_of(size, num_steps=options.steps, num_workers=options.workers)
        runs: dict[str, list[RunFigures]] = {kind: [] for kind in kinds}
        for turn in range(options.repeat):
            # The order rotates, so that other work of the machine affects all kinds alike.
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                page = "" if kind == "off" else _ADDRESS
                reader = partial(_reader, paths=_PATHS[kind]) if kind in _PATHS else None
                runs[kind].append(
                    run_cluster(workload, setting=Setting(transport=options.transport), page=page, beside=reader, security={})
                )
                options.progress.advance(1, total=len(options.sizes) * options.repeat * len(kinds))
        rows += [_row(size_title(workload), kind, runs[kind], off=runs["off"]) for kind in kinds]
    return {"num_workers": options.workers, "num_steps": options.steps, "repeat": options.repeat, "rows": rows, "machine": machine()}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader, as a table in Markdown."""
    title = f"{report['num_workers']} workers, 1 ps, one host; {report['repeat']} runs of {report['num_steps']} steps each, by turns"
    columns = ("model", "page", "median step", "× no page", "each run", "mean step", "×", "CPU of the chief a step", "×")
    lines = (
        [
            *(row["size"], _WORDS[row["kind"]], f"{row['step_ms']:.4f} ms", f"{row['step_ratio']:.3f}"),
            " ".join(f"{ratio:.3f}" for ratio in row["step_ratios"]),
            *(f"{row['mean_ms']:.4f} ms", f"{row['mean_ratio']:.3f}"),
            *(f"{row['chief_cpu_ms']:.4f} ms", f"{row['chief_cpu_ratio']:.3f}"),
        ]
        for row in report["rows"]
    )
    return "\n".join([title, "", *table_lines(columns, lines)])


def _row(size: str, kind: str, runs: Sequence[RunFigures], *, off: Sequence[RunFigures]) -> dict[str, Any]:
    pairs = list(zip(runs, off, strict=True))
    ratios = [round(one.median_ms / other.median_ms, 4) for one, other in pairs]
    return {
        "size": size,
        "kind": kind,
        "step_ms": statistics.median(one.median_ms for one in runs),
        "step_ratio": statistics.median(ratios),
        "step_ratios": ratios,
        # A request affects one step in some hundreds, which only the mean shows.
        "mean_ms": statistics.median(one.mean_ms for one in runs),
        "mean_ratio": statistics.median(one.mean_ms / other.mean_ms for one, other in pairs),
        "chief_cpu_ms": statistics.median(one.cpu_s_per_step["chief"] for one in runs) * 1e3,
        "chief_cpu_ratio": statistics.median(one.cpu_s_per_step["chief"] / other.cpu_s_per_step["chief"] for one, other in pairs),
    }


@contextmanager
def _reader(page: str, *, paths: Sequence[str]) -> Iterator[None]:
    """Requests these paths of the page periodically within the block, as a browser does."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(_PERIOD_S):
            for path in paths:
                with urllib.request.urlopen(f"{page}{path}", timeout=10) as response:
                    response.read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
