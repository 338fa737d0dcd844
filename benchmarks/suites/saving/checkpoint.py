"""Measures how saving slows down the steps of one parameter server. Knows the server's core; no process, no network."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, parse_bytes, show
from benchmarks.harness.one_server import OneServer, PlainCopy
from benchmarks.report.figures import human_bytes
from ps_server.config import default_apply_threads

_NUM_VARIABLES = 16
_NUM_QUIET = 15

DESCRIPTION = "Measures applies, alone and while a checkpoint is written, by turns, and how long steps wait for the copy."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    if options.bytes < 64 * _NUM_VARIABLES or options.saves < 2:
        raise WrongArguments("want at least 1024 bytes and two saves")
    report = measure(options.bytes, optimizer=options.optimizer, num_saves=options.saves, num_threads=options.threads, where=options.dir)
    show(report, in_words, options)
    return 0


def measure(nbytes: int, *, optimizer: str, num_saves: int, num_threads: int, where: Path | None = None) -> dict[str, Any]:
    """Applies steps alternately with and without a checkpoint being written; times are medians, in milliseconds.

    `stall_ms`: how long steps wait for a save; `copy_ms`: a plain copy of the same number of bytes just before; `excess_ms`: how much the
    longest apply around a save exceeds the median, including the wait for the save if it is the first apply. The first save, whose memory
    is new, has a figure of its own. `where` None: a temporary directory.
    """
    with tempfile.TemporaryDirectory(dir=where) as directory:
        saved = Path(directory) / "checkpoints"
        server = OneServer(nbytes, num_variables=_NUM_VARIABLES, optimizer=optimizer, num_threads=num_threads, directory=saved)
        try:
            first_stall_s, _ = server.begin_save()
            server.await_save()
            quiet: list[float] = []
            beside: list[float] = []
            stalls, copies, longest, alone, written = [], [], [], [], []
            copy = PlainCopy(server.saved_bytes)
            for _ in range(num_saves):
                quiet += [server.step() for _ in range(_NUM_QUIET)]
                copies.append(copy.seconds())
                stall_s, started = server.begin_save()
                stalls.append(stall_s)
                steps = [server.step()]
                while not server.is_saved():
                    steps.append(server.step())
                written.append(time.perf_counter() - started)
                beside += steps
                longest.append(max(stall_s + steps[0], *steps))
                server.step()
                _, started = server.begin_save()
                server.await_save()
                alone.append(time.perf_counter() - started)
        finally:
            server.stop()
    apply_s, beside_s = statistics.median(quiet), statistics.median(beside)
    return {
        "bytes": nbytes,
        "optimizer": optimizer,
        "threads": num_threads,
        "saves": num_saves,
        "saved_bytes": server.saved_bytes,
        "apply_ms": _ms(apply_s),
        "beside_ms": _ms(beside_s),
        "ratio": round(beside_s / apply_s, 2),
        "beside_p90_ms": _ms(statistics.quantiles(beside, n=10)[-1]),
        "first_stall_ms": _ms(first_stall_s),
        "stall_ms": _ms(statistics.median(stalls)),
        "copy_ms": _ms(statistics.median(copies)),
        "excess_ms": _ms(statistics.median(longest) - apply_s),
        "write_ms": _ms(statistics.median(written)),
        "write_alone_ms": _ms(statistics.median(alone)),
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the report as text."""
    first, copy, excess = (f"{report[name]:.1f}" for name in ("first_stall_ms", "copy_ms", "excess_ms"))
    title = f"{human_bytes(report['bytes'])} of float32, {report['optimizer']}, {report['threads']} threads, {report['saves']} saves"
    return "\n".join(
        [
            f"{title} of {human_bytes(report['saved_bytes'])}; medians in ms",
            f"  apply            {report['apply_ms']:8.1f}",
            f"  … while writing  {report['beside_ms']:8.1f}   x {report['ratio']:.2f}, p90 {report['beside_p90_ms']:.1f}",
            f"  stall            {report['stall_ms']:8.1f}   a plain copy {copy}; the first {first}",
            f"  … and the longest apply beside it take {excess} more than the median",
            f"  writing          {report['write_ms']:8.1f}   {report['write_alone_ms']:.1f} with nothing else to do",
        ]
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--bytes", type=parse_bytes, default=64 << 20, help="bytes of all variables (default 64 MiB)")
    parser.add_argument(
        "--optimizer", choices=("sgd", "momentum", "adam"), default="adam", help="optimizer of the variables (default adam)"
    )
    parser.add_argument(
        "--threads", type=at_least_one, default=default_apply_threads(), help="threads of an apply (default: one a processor)"
    )
    parser.add_argument("--saves", type=int, default=5, help="number of checkpoints to save (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where the checkpoints are put (default: the temporary directory)")
    add_json(parser)
