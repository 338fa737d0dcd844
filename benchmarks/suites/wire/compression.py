"""Measures bytes, time and accuracy with each wire format. Knows the arguments and the tables."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.arguments import add_json, parse_bytes, show
from benchmarks.harness.runs import run_once
from benchmarks.harness.setting import Setting
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import human_bytes, table_lines
from benchmarks.report.machine import machine
from benchmarks.suites.wire.training import digits_accuracy, wire_bytes
from worker_client.model.wire_format import wire_format

PLAIN = "float32"
FORMATS = (
    *(PLAIN, "bfloat16", "bfloat16+feedback", "float16", "float16+feedback", "int8", "int8+no_feedback", "int4", "int4+no_feedback"),
    *("top_k:0.1", "top_k:0.1+no_feedback", "top_k:0.01", "top_k:0.01+no_feedback"),
)
# Error feedback costs the same with these as with others.
_NOT_TIMED = ("float16+feedback", "top_k:0.1+no_feedback")

DESCRIPTION = "Measures each wire format over gRPC: bytes and time of a step, and what the digits model learns in so many steps."


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    formats = options.wire or list(FORMATS)
    report: dict[str, Any] = {"machine": machine()}
    if "bytes" in options.what:
        report["bytes"] = {wire: _bytes(wire, options.sizes[0]) for wire in formats}
    if "accuracy" in options.what:
        report["accuracy"] = {wire: _accuracies(wire, options) for wire in formats}
    if "time" in options.what:
        timed = [wire for wire in formats if wire not in _NOT_TIMED or options.wire]
        report["time"] = {size: _times(timed, size, options) for size in options.sizes}
    show(report, in_words, options)
    return 0


def in_words(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    lines: list[str] = []
    if "bytes" in report:
        shares = (
            [wire, *(f"{human_bytes(round(one[way]))} ({one[way] / one['model']:.3f})" for way in ("up", "down"))]
            for wire, one in report["bytes"].items()
        )
        lines += table_lines(["wire", "pushed a step", "read a step"], shares)
    for size, formats in report.get("time", {}).items():
        columns = [f"wire, {human_bytes(int(size))}", "median ms", f"to {PLAIN}", "CPU ms a step, all", f"to {PLAIN}"]
        times = (
            [wire, f"{one['median_ms']:.1f}", f"{one['ratio']:.2f}", f"{one['cpu_ms']:.1f}", f"{one['cpu_ratio']:.2f}"]
            for wire, one in formats.items()
        )
        lines += ["", *table_lines(columns, times)]
    if "accuracy" in report:
        rows = ((wire, *(f"{of(found):.4f}" for of in (statistics.mean, min, max))) for wire, found in report["accuracy"].items())
        lines += ["", *table_lines(["wire", "test accuracy, mean", "worst", "best"], rows)]
    return "\n".join(lines)


def _bytes(wire: str, size: int) -> dict[str, float]:
    found = wire_bytes(wire_format(wire), total_bytes=size)
    return {"up": found.up, "down": found.down, "model": size}


def _accuracies(wire: str, options: argparse.Namespace) -> list[float]:
    return [digits_accuracy(wire_format(wire), seed=seed, num_steps=options.train_steps) for seed in range(1, options.seeds + 1)]


def _times(formats: Sequence[str], size: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Alternates between all formats, so that other work of the machine affects all of them; ratios are of runs in the same round."""
    workload = Workload(total_bytes=size, num_variables=16, num_workers=2, num_ps=1, num_steps=options.steps)
    runs: dict[str, list[tuple[float, float]]] = {wire: [] for wire in formats}
    for _ in range(options.turns):
        for wire in formats:
            figures = run_once(workload, setting=Setting(transport="grpc", wire=wire))
            runs[wire].append((figures.median_ms, 1e3 * figures.total_cpu_s_per_step))
            options.progress.advance(1, total=options.turns * len(formats))
    plain = runs[PLAIN]
    return {wire: _row(found, plain) for wire, found in runs.items()}


def _row(found: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]) -> dict[str, float]:
    ratios = [(one[0] / other[0], one[1] / other[1]) for one, other in zip(found, plain, strict=True)]
    return {
        "median_ms": statistics.median(ms for ms, _ in found),
        "cpu_ms": statistics.median(cpu for _, cpu in found),
        "ratio": statistics.median(ratio for ratio, _ in ratios),
        "cpu_ratio": statistics.median(ratio for _, ratio in ratios),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--wire", action="append", metavar="FORMAT", help="format to measure; may be repeated (default: all)")
    parser.add_argument("--what", nargs="+", choices=("bytes", "time", "accuracy"), default=["bytes", "time", "accuracy"])
    parser.add_argument(
        "--sizes", nargs="+", type=parse_bytes, default=[16 << 20, 64 << 20], help="bytes of the model (default 16 and 64 MiB)"
    )
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a run (default 15)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each format, by turns (default 3)")
    parser.add_argument("--train-steps", type=int, default=300, help="steps of the digits model (default 300)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each format (default 5)")
    add_json(parser)
