"""Measures the same bytes in many variables and in few. Knows both clusters and the figures.

Both clusters run at the same time, and the same two workers make steps on them by turns. So a busy moment of the machine affects both, and
their ratio is more reliable than either time.
"""

import argparse
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json, parse_bytes, show
from benchmarks.harness.processes import Cluster, cpu_s, peak_rss_bytes
from benchmarks.report.figures import as_row, head_rows, human_bytes
from benchmarks.suites.scale.turns import ScaleWork
from lockstep.launcher.spec import ClusterSpec

_TIMEOUT_S = 300.0

DESCRIPTION = "Measures the same bytes in many variables and in few: what a variable costs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--bytes", type=parse_bytes, default=40_000_000, help="bytes of all variables, float32 (default 40000000)")
    parser.add_argument("--variables", type=int, default=10_000, help="number of variables in the model with many (default 10000)")
    parser.add_argument("--few", type=int, default=10, help="number of variables in the model with few (default 10)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (default 10)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default 10)")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "momentum", "adagrad", "adam"))
    parser.add_argument(
        "--transport",
        choices=("auto", "shared_memory", "sockets", "grpc"),
        default="auto",
        help="transport of gradients and variables (default: auto)",
    )
    parser.add_argument("--unix", action="store_true", help="Unix sockets instead of TCP")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the figures; returns the exit code."""
    show(measure(options), in_words, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts both clusters and their workers, and returns the figures of both, with the ratio of their medians turn by turn."""
    counts = (options.few, options.variables)
    spec = ClusterSpec(ps=options.ps, workers=options.workers, tcp=not options.unix)
    with ExitStack() as stack:
        clusters = [stack.enter_context(Cluster(spec, security={})) for _ in counts]
        for cluster in clusters:
            cluster.local.start_roles()
        last = clusters[-1]  # the workers are among its processes
        for worker in range(options.workers):
            work = ScaleWork(
                worker=worker,
                chiefs=[cluster.local.chief_address for cluster in clusters],
                num_variables=counts,
                total_bytes=options.bytes,
                num_rounds=options.rounds,
                num_steps=options.steps,
                optimizer=options.optimizer,
            )
            command = last.processes.worker_command("benchmarks.suites.scale.turns", work)
            last.processes.start(f"worker {worker}", command, environment={"LOCKSTEP_TRANSPORT": options.transport})
        last.processes.await_events("warm", options.workers, timeout_s=_TIMEOUT_S)
        before = [_cpu_s(cluster) for cluster in clusters]
        done = last.processes.await_events("done", options.workers, timeout_s=_TIMEOUT_S)
        used = [_cpu_s(cluster, since=since) for cluster, since in zip(clusters, before, strict=True)]
        rows = [
            _row(cluster, target, counts[target], last.processes.events, used[target], options) for target, cluster in enumerate(clusters)
        ]
        last.processes.release()
        for cluster in clusters:
            cluster.processes.await_end()
    first = next(event for event in done if event["worker"] == 0)
    return {
        "bytes": options.bytes,
        "workers": options.workers,
        "ps": options.ps,
        "optimizer": options.optimizer,
        "transport": last.processes.events["joined"][0]["transport"] or [f"grpc over {'unix' if options.unix else 'tcp'}"],
        "ratio": rows[1]["median_ms"] / rows[0]["median_ms"],
        "ratios_of_turns": _ratios(first["turns"]),
        "peak_rss_worker_bytes": max(event["peak_rss_bytes"] for event in done),
        "rows": rows,
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    ratios = report["ratios_of_turns"]
    columns = ("variables", "median step", "90 %", "read()", "CPU a step: worker", "ps", "chief", "create_or_join", "status", "--placement")
    lines = [
        f"{human_bytes(report['bytes'])}, {report['workers']} workers, {report['ps']} ps, {report['optimizer']},"
        f" {', '.join(sorted(set(report['transport'])))}",
        head_rows([*columns, "ps peak", "chief peak"]),
    ]
    for row in report["rows"]:
        cells = [str(row["variables"]), *(f"{row[name]:.2f} ms" for name in ("median_ms", "p90_ms", "read_ms"))]
        cells += [f"{row['cpu_ms_a_step'][role]:.2f} ms" for role in ("worker", "ps", "chief")]
        cells += [f"{row[name]:.2f} s" for name in ("join_s", "status_s", "placement_s")]
        cells += [f"{row['peak_rss_bytes'][role] / (1 << 20):.0f} MiB" for role in ("ps", "chief")]
        lines.append(as_row(cells))
    lines.append(
        f"many / few: {report['ratio']:.3f} (of turns: median {np.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f});"
        f" a worker has {report['peak_rss_worker_bytes'] / (1 << 20):.0f} MiB at most, for both"
    )
    return "\n".join(lines)


def _row(
    cluster: Cluster, target: int, count: int, events: dict[str, list[dict[str, Any]]], used: dict[str, float], options: Any
) -> dict[str, Any]:
    turns = [turn for event in events["done"] for turn in event["turns"] if turn["target"] == target]
    own = [turn for event in events["done"] if event["worker"] == 0 for turn in event["turns"] if turn["target"] == target]
    step_ms = 1e3 * np.concatenate([turn["step_s"] for turn in own])
    num_steps = len(step_ms)
    worker_cpu_s = sum(turn["cpu_s"] for turn in turns) / options.workers
    cpu = {"worker": worker_cpu_s, **used}
    return {
        "variables": count,
        "median_ms": float(np.median(step_ms)),
        "p90_ms": float(np.quantile(step_ms, 0.9)),
        "read_ms": 1e3 * float(np.median(np.concatenate([turn["read_s"] for turn in own]))),
        "cpu_ms_a_step": {role: 1e3 * seconds / num_steps for role, seconds in cpu.items()},
        "join_s": max(event["join_s"] for event in events["joined"] if event["target"] == target),
        "status_s": cluster.time_status(),
        "placement_s": cluster.time_status("--placement"),
        "peak_rss_bytes": {
            "ps": max(peak_rss_bytes(role) for role in cluster.local.roles[:-1]),
            "chief": peak_rss_bytes(cluster.local.chief),
        },
    }


def _cpu_s(cluster: Cluster, *, since: dict[str, float] | None = None) -> dict[str, float]:
    """Returns the CPU seconds of the chief, and the mean over all parameter servers."""
    *servers, chief = cluster.local.roles
    now = {"ps": sum(map(cpu_s, servers)) / len(servers), "chief": cpu_s(chief)}
    return now if since is None else {role: now[role] - since[role] for role in now}


def _ratios(turns: list[dict[str, Any]]) -> list[float]:
    """Returns, for each pair of consecutive turns, the median step with many variables divided by that with few."""
    medians = [(turn["target"], float(np.median(turn["step_s"]))) for turn in turns]
    return [many / few for (_, few), (_, many) in zip(medians[::2], medians[1::2], strict=True)]
