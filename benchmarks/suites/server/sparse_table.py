"""Measures training a few rows of a large table: time, bytes and memory. Knows the report, and the worker's code."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.arguments import add_json, show
from benchmarks.harness.process_memory import pss_bytes
from benchmarks.harness.processes import Cluster, peak_rss_bytes, rss_bytes
from benchmarks.harness.worker import Station
from benchmarks.report.figures import human_bytes
from benchmarks.suites.server.dynamic_table import INITIALIZER, NAME, timed_step
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Process
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client import EmbeddingTable, adagrad, adam, connect, sgd

_TIMEOUT_S = 900.0
NUM_WARMUP_STEPS = 5
# The optimizer, and the number of arrays of the table's size that a server keeps with it, including the table.
OPTIMIZERS: dict[str, tuple[Callable[[], OptimizerSpec], int]] = {
    "adam": (lambda: adam(0.001, lazy=True), 3),
    "adagrad": (lambda: adagrad(0.01), 2),
    "sgd": (lambda: sgd(0.01), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """A float32 table, and the number of its rows in a push; `num_steps` are measured, after the warm-up."""

    num_rows: int
    row_length: int
    rows_per_push: int
    num_steps: int
    optimizer: str


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, and stays until it is released."""
    work = TableWork(**orders)
    with connect() as session:
        begin = time.perf_counter()
        table = EmbeddingTable((work.num_rows, work.row_length), initializer=INITIALIZER)
        session.create_or_join({NAME: table}, optimizer=OPTIMIZERS[work.optimizer][0]())
        create_s = time.perf_counter() - begin
        random = np.random.default_rng(session.worker_index)
        drawn = [np.unique(random.integers(work.num_rows, size=work.rows_per_push)) for _ in range(NUM_WARMUP_STEPS + work.num_steps)]
        for rows in drawn[:NUM_WARMUP_STEPS]:
            timed_step(session, rows)
        station.say("warm")
        read_s, step_s = zip(*(timed_step(session, rows) for rows in drawn[NUM_WARMUP_STEPS:]), strict=True)
        num_rows = sum(map(len, drawn[NUM_WARMUP_STEPS:]))
        station.say("done", create_s=create_s, read_s=read_s, step_s=step_s, num_rows=num_rows)
        station.await_release()


DESCRIPTION = "Measures training on a large table: in every step each worker reads some random rows and pushes their gradients."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark for each optimizer and prints its figures; returns the exit code."""
    for optimizer in options.optimizer or ["adam", "adagrad"]:
        work = TableWork(
            num_rows=options.rows,
            row_length=options.row_length,
            rows_per_push=options.rows_per_push,
            num_steps=options.steps,
            optimizer=optimizer,
        )
        show(measure(work, num_workers=options.workers, num_ps=options.ps), in_words, options)
    return 0


def measure(work: TableWork, *, num_workers: int, num_ps: int) -> dict[str, Any]:
    """Runs the work with processes for all roles, over loopback TCP. Raises LaunchFailed with the error's output.

    Times are worker 0's, bytes of a step those of all workers, and memory that of all parameter servers together.
    """
    with Cluster(ClusterSpec(ps=num_ps, workers=num_workers, tcp=True)) as cluster:
        cluster.local.start_roles()
        empty_bytes = sum(map(rss_bytes, cluster.servers))
        cluster.start_workers("benchmarks.suites.server.sparse_table", work)
        cluster.processes.await_events("warm", num_workers, timeout_s=_TIMEOUT_S)
        traffic_bytes = -_loopback_bytes()
        cluster.processes.await_events("done", num_workers, timeout_s=_TIMEOUT_S)
        traffic_bytes += _loopback_bytes()
        ps_bytes, peak_bytes, proportional_bytes = (
            sum(map(look, cluster.servers)) for look in (rss_bytes, peak_rss_bytes, _proportional_bytes)
        )
        cluster.processes.release()
    done = cluster.processes.by_process("done")
    num_rows = sum(event["num_rows"] for event in done)
    return {
        "work": asdict(work),
        "num_workers": num_workers,
        "num_ps": num_ps,
        "create_s": max(event["create_s"] for event in done),
        "step_ms": 1e3 * float(np.median(done[0]["step_s"])),
        "step_p90_ms": 1e3 * float(np.quantile(done[0]["step_s"], 0.9)),
        "read_ms": 1e3 * float(np.median(done[0]["read_s"])),
        "rows_per_s": num_rows / max(sum(event["step_s"]) for event in done),
        "bytes_per_step": traffic_bytes // work.num_steps,
        # A row is sent twice, each time with its index of 8 bytes.
        "payload_bytes_per_step": num_rows * 2 * (4 * work.row_length + 8) // work.num_steps,
        "table_and_slots_bytes": work.num_rows * 4 * work.row_length * OPTIMIZERS[work.optimizer][1],
        "ps_empty_bytes": empty_bytes,
        "ps_bytes": ps_bytes,
        "ps_peak_bytes": peak_bytes,
        "ps_proportional_bytes": proportional_bytes,
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the figures for a reader."""
    work, wanted = report["work"], report["table_and_slots_bytes"]
    names = ("bytes_per_step", "payload_bytes_per_step", "table_and_slots_bytes", "ps_empty_bytes", "ps_bytes", "ps_peak_bytes")
    sizes = {name: human_bytes(report[name]) for name in (*names, "ps_proportional_bytes")}
    return "\n".join(
        [
            f"{work['num_rows']} × {work['row_length']} float32 on {report['num_ps']} ps, {report['num_workers']} workers,"
            f" {work['rows_per_push']} random rows a push, {work['optimizer']}",
            f"  created in {report['create_s']:.1f} s",
            f"  step: median {report['step_ms']:.2f} ms, p90 {report['step_p90_ms']:.2f} ms;"
            f" of it reading rows: {report['read_ms']:.2f} ms",
            f"  {report['rows_per_s']:.0f} rows/s read, pushed and updated",
            f"  {sizes['bytes_per_step']} a step over the network, of all workers and both ways;"
            f" rows, gradients and indices are {sizes['payload_bytes_per_step']} of it",
            f"  table and slots: {sizes['table_and_slots_bytes']}; ps memory: {sizes['ps_bytes']} ({report['ps_bytes'] / wanted - 1:+.1%}),"
            f" at most {sizes['ps_peak_bytes']}, {sizes['ps_empty_bytes']} without a model;"
            f" with each shared library counted once {sizes['ps_proportional_bytes']}"
            f" ({report['ps_proportional_bytes'] / wanted - 1:+.1%})",
        ]
    )


def _loopback_bytes() -> int:
    """Returns the bytes sent over loopback, including those of other processes (`unshare -n` gives a loopback device of its own)."""
    return next(int(count.bytes_sent) for name, count in psutil.net_io_counters(pernic=True).items() if name.startswith("lo"))


def _proportional_bytes(process: Process) -> int:
    return pss_bytes(process.pid) or rss_bytes(process)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table (default 10 million)")
    parser.add_argument("--row-length", type=int, default=16, help="float32 numbers in a row (default 16)")
    parser.add_argument("--rows-per-push", type=int, default=1000, help="rows that a worker draws for a push (default 1000)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--ps", type=int, default=2, help="parameter servers (default 2)")
    parser.add_argument("--steps", type=int, default=200, help="steps to measure, after 5 that are not (default 200)")
    parser.add_argument(
        "--optimizer",
        action="append",
        choices=sorted(OPTIMIZERS),
        help="optimizer to measure; may be repeated (default: adam, lazy, and adagrad)",
    )
    add_json(parser)
