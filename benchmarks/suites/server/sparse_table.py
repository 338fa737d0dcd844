"""Measures training a few rows of a large table: time, bytes and memory. Knows the report, and the worker's code."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.arguments import add_json
from benchmarks.harness.process_memory import pss_bytes
from benchmarks.harness.processes import Cluster, peak_rss_bytes, rss_bytes
from benchmarks.harness.worker import Station
from benchmarks.report.figures import human_bytes
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Process
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client import EmbeddingTable, IndexedSlices, Session, adagrad, adam, connect, sgd, uniform_initializer

_TIMEOUT_S = 900.0
NUM_WARMUP_STEPS = 5
NAME = "table"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Seconds to create the table; of each measured step, seconds to read rows and in total; the number of pushed rows."""

    create_s: float
    read_s: list[float]
    step_s: list[float]
    rows_pushed: int


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, and stays until it is released."""
    work = TableWork(**orders)
    with connect() as session:
        begin = time.perf_counter()
        table = EmbeddingTable((work.num_rows, work.row_length), initializer=uniform_initializer(-0.05, 0.05, seed=1))
        session.create_or_join({NAME: table}, optimizer=OPTIMIZERS[work.optimizer][0]())
        create_s = time.perf_counter() - begin
        random = np.random.default_rng(session.worker_index)
        for _ in range(NUM_WARMUP_STEPS):
            _step(session, work, random)
        station.say("warm")
        report = _measure(session, work, random, create_s=create_s)
        station.say("done", report=dataclasses.asdict(report))
        station.await_release()


def _measure(session: Session, work: TableWork, random: np.random.Generator, *, create_s: float) -> TableReport:
    read_s, step_s, rows_pushed = [], [], 0
    for _ in range(work.num_steps):
        reading_s, whole_s, count = _step(session, work, random)
        read_s.append(reading_s)
        step_s.append(whole_s)
        rows_pushed += count
    return TableReport(create_s=create_s, read_s=read_s, step_s=step_s, rows_pushed=rows_pushed)


def _step(session: Session, work: TableWork, random: np.random.Generator) -> tuple[float, float, int]:
    """Returns the seconds of reading the rows and of the whole step, and the number of different rows."""
    indices = np.unique(random.integers(work.num_rows, size=work.rows_per_push))
    begin = time.perf_counter()
    rows = session.read_rows(NAME, indices)
    reading_s = time.perf_counter() - begin
    session.step({NAME: IndexedSlices(indices, 0.1 * rows)})
    return reading_s, time.perf_counter() - begin, len(indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    """The figures: worker 0's times, bytes per step of all workers, memory of all parameter servers together."""

    work: TableWork
    num_workers: int
    num_ps: int
    create_s: float
    step_ms: float
    step_p90_ms: float
    read_ms: float
    rows_per_s: float
    bytes_per_step: int
    payload_bytes_per_step: int
    ps_empty_bytes: int
    ps_bytes: int
    ps_peak_bytes: int
    ps_proportional_bytes: int

    @property
    def table_and_slots_bytes(self) -> int:
        """The bytes of the table and its slots alone."""
        return self.work.num_rows * 4 * self.work.row_length * OPTIMIZERS[self.work.optimizer][1]


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
        figures = measure(work, num_workers=options.workers, num_ps=options.ps)
        print(json.dumps(dataclasses.asdict(figures)) if options.json else in_words(figures), flush=True)
    return 0


def measure(work: TableWork, *, num_workers: int, num_ps: int) -> TableFigures:
    """Runs the work with processes for all roles, over loopback TCP. Raises LaunchFailed with the error's output."""
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
    reports = [TableReport(**event["report"]) for event in cluster.processes.by_process("done")]
    return TableFigures(
        work=work,
        num_workers=num_workers,
        num_ps=num_ps,
        create_s=max(report.create_s for report in reports),
        step_ms=float(np.median(reports[0].step_s)) * 1e3,
        step_p90_ms=float(np.quantile(reports[0].step_s, 0.9)) * 1e3,
        read_ms=float(np.median(reports[0].read_s)) * 1e3,
        rows_per_s=sum(report.rows_pushed for report in reports) / max(sum(report.step_s) for report in reports),
        bytes_per_step=traffic_bytes // work.num_steps,
        # A row is sent twice, each time with its index of 8 bytes.
        payload_bytes_per_step=sum(report.rows_pushed for report in reports) * 2 * (4 * work.row_length + 8) // work.num_steps,
        ps_empty_bytes=empty_bytes,
        ps_bytes=ps_bytes,
        ps_peak_bytes=peak_bytes,
        ps_proportional_bytes=proportional_bytes,
    )


def in_words(figures: TableFigures) -> str:
    """Returns the figures for a reader."""
    work, wanted = figures.work, figures.table_and_slots_bytes
    return "\n".join(
        [
            f"{work.num_rows} × {work.row_length} float32 on {figures.num_ps} ps, {figures.num_workers} workers,"
            f" {work.rows_per_push} random rows a push, {work.optimizer}",
            f"  created in {figures.create_s:.1f} s",
            f"  step: median {figures.step_ms:.2f} ms, p90 {figures.step_p90_ms:.2f} ms; of it reading rows: {figures.read_ms:.2f} ms",
            f"  {figures.rows_per_s:.0f} rows/s read, pushed and updated",
            f"  {human_bytes(figures.bytes_per_step)} a step over the network, of all workers and both ways;"
            f" rows, gradients and indices are {human_bytes(figures.payload_bytes_per_step)} of it",
            f"  table and slots: {human_bytes(wanted)}; ps memory: {human_bytes(figures.ps_bytes)} ({figures.ps_bytes / wanted - 1:+.1%}),"
            f" at most {human_bytes(figures.ps_peak_bytes)}, {human_bytes(figures.ps_empty_bytes)} without a model;"
            f" with each shared library counted once {human_bytes(figures.ps_proportional_bytes)}"
            f" ({figures.ps_proportional_bytes / wanted - 1:+.1%})",
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
