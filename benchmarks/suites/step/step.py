"""Measures one step. Knows the arguments and the report; `harness.runs` makes the run."""

import argparse
import dataclasses
from typing import Any

from benchmarks.harness.arguments import add_json, parse_bytes, show
from benchmarks.harness.runs import run_once
from benchmarks.harness.setting import POLICIES, SECURITIES, TRANSPORTS, WIRES, Setting
from benchmarks.harness.workload import OPTIMIZERS, Workload
from benchmarks.report.figures import human_bytes, summary
from benchmarks.report.machine import machine
from ps_protocol.process.options import DURABILITIES

DESCRIPTION = "Measures one step: every worker reads every byte, and pushes a gradient (0.001 * value) of every byte."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    setting = Setting(
        transport=options.transport,
        is_unix=options.unix,
        wire=options.wire,
        policy=options.policy,
        chief_in_ps=options.chief_in_ps,
        durability=options.durability,
        checkpoint_steps=options.checkpoint_steps,
        security=options.security,
    )
    workload = Workload(
        total_bytes=options.bytes,
        num_variables=options.variables,
        num_workers=options.workers,
        num_ps=options.ps,
        num_steps=options.steps,
        optimizer=options.optimizer,
    )
    show(measure(workload, setting=setting, repeat=max(1, options.repeat)), in_words, options)
    return 0


def measure(workload: Workload, *, setting: Setting, repeat: int = 1) -> dict[str, Any]:
    """Runs the workload `repeat` times and returns the report: the workload, where it ran, and the figures.

    `transport_used`: the transports that the sessions used, each once. Raises LaunchFailed; WrongTransport if they are not the requested
    one.
    """
    runs = [run_once(workload, setting=setting) for _ in range(repeat)]
    used = sorted({transport for run in runs for transport in run.transports})
    return {**setting.record(), "transport_used": used, **dataclasses.asdict(workload), **summary(runs), "machine": machine()}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    sockets = f" over {report['sockets']}" if "sockets" in report else ""
    kept = f", durability {report['durability']}" if "durability" in report else ""
    lines = [
        f"{human_bytes(report['total_bytes'])} in {report['num_variables']} variables, {report['num_workers']} workers,"
        f" {report['num_ps']} ps, {report['optimizer']}, {report['policy']}, {report['num_steps']} steps",
        f"  {report['transport']}{sockets}, {report['wire']}{kept}; the sessions used {', '.join(report['transport_used'])}",
        f"  median {report['median_ms']:.2f} ms   p90 {report['p90_ms']:.2f} ms   (medians of all runs: {report['medians_ms']})",
    ]
    for role, cpu_s in report["cpu_s_per_step"].items():
        memory = f"peak {human_bytes(report['peak_rss_bytes'][role])}, {human_bytes(report['pss_bytes'][role])} with shared pages in parts"
        lines.append(f"  {role:8} {cpu_s * 1e3:8.2f} ms CPU a step   {memory}")
    cpu_ms, memory = report["total_cpu_s_per_step"] * 1e3, human_bytes(report["total_pss_bytes"])
    lines.append(f"  all      {cpu_ms:8.2f} ms CPU a step   {memory} after the last step")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 20, help="bytes of all variables together, float32 (default 1 MiB)")
    parser.add_argument("--variables", type=int, default=8, help="variables that they are split over evenly (default 8)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--ps", type=int, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=int, default=50, help="steps to measure, after 3 that are not (default 50)")
    parser.add_argument(
        "--transport",
        choices=list(TRANSPORTS),
        default="auto",
        help="a process for each role, with what the SDK chooses (auto, the default) or with this; local: one process",
    )
    parser.add_argument("--unix", action="store_true", help="Unix sockets instead of TCP; with shared memory for what still travels")
    parser.add_argument("--wire", choices=WIRES, default="float32", help="how numbers travel, over sockets or gRPC (default float32)")
    parser.add_argument("--policy", choices=list(POLICIES), default="sync", help="async: every contribution is a step of its own")
    parser.add_argument("--chief-in-ps", action="store_true", help="the chief in the process of ps 0")
    parser.add_argument("--durability", choices=["", *DURABILITIES], default="", help="with checkpoints in a temporary directory")
    parser.add_argument("--checkpoint-steps", type=int, default=None, help="… of every so many steps (default: one a minute)")
    parser.add_argument(
        "--security", choices=SECURITIES, default="tokens", help="tokens (the default), none, TLS too, or callers' certificates too"
    )
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--repeat", type=int, default=1, help="whole runs; the one with the median of the medians is reported")
    add_json(parser)
