"""Measures a table with keys beside one of a fixed size with the same rows, and a Python dict. Knows the report, and the worker's code."""

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json
from benchmarks.harness.processes import Cluster, rss_bytes
from benchmarks.harness.worker import Station
from benchmarks.report.figures import human_bytes
from lockstep.launcher.spec import ClusterSpec
from worker_client import EmbeddingTable, IndexedSlices, Session, adagrad, connect, uniform_initializer

_TIMEOUT_S = 900.0
NAME = "table"
NUM_KEYS, EXPONENT, KEYS_PER_BATCH = 1e9, 1.05, 8192
INITIALIZER = uniform_initializer(-0.05, 0.05, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysWork:
    """Batches of keys of a row length; `num_rows`: of the table of a fixed size in which the same rows are numbered, None: by keys."""

    row_length: int
    num_batches: int
    num_workers: int
    num_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysReport:
    """Seconds of each step: of the first pass over the batches, which makes the rows, and of the second; rows of each batch."""

    first_s: list[float]
    second_s: list[float]
    read_s: list[float]
    rows: list[int]


def batches(work: KeysWork, worker: int) -> list[Any]:
    """Returns a worker's keys, drawn by Zipf's law; those of a table of a fixed size are their ranks among the keys of all workers."""
    drawn = [_zipf(np.random.default_rng([index, worker]), KEYS_PER_BATCH) for index in range(work.num_batches)]
    if work.num_rows is None:
        return drawn
    known = distinct_keys(work)
    return [np.searchsorted(known, keys) for keys in drawn]


def distinct_keys(work: KeysWork) -> Any:
    """Returns all keys of all workers."""
    keyed = dataclasses.replace(work, num_rows=None)
    return np.unique(np.concatenate([keys for worker in range(work.num_workers) for keys in batches(keyed, worker)]))


def _zipf(random: np.random.Generator, count: int) -> Any:
    """Draws from 1 to 10^9 with probabilities in proportion to a power of the number, by the inverse of the distribution's integral."""
    power = 1 - EXPONENT
    return np.floor((random.random(count) * (NUM_KEYS**power - 1) + 1) ** (1 / power)).astype(np.int64)


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, and stays until it is released."""
    work = KeysWork(**orders)
    with connect() as session:
        if work.num_rows is None:
            table = EmbeddingTable(work.row_length, keys="int64", initializer=INITIALIZER)
        else:
            table = EmbeddingTable((work.num_rows, work.row_length), initializer=INITIALIZER)
        session.create_or_join({NAME: table}, optimizer=adagrad(0.01))
        keys = [np.unique(one) for one in batches(work, session.worker_index)]
        _step(session, keys[0])
        station.say("warm")
        passes = [[_step(session, one) for one in keys] for _ in range(2)]
        report = KeysReport(
            first_s=[whole for _, whole in passes[0]],
            second_s=[whole for _, whole in passes[1]],
            read_s=[reading for reading, _ in passes[1]],
            rows=[len(one) for one in keys],
        )
        station.say("done", report=dataclasses.asdict(report))
        station.await_release()


def _step(session: Session, keys: Any) -> tuple[float, float]:
    begin = time.perf_counter()
    rows = session.read_rows(NAME, keys)
    reading_s = time.perf_counter() - begin
    session.step({NAME: IndexedSlices(keys, 0.1 * rows)})
    return reading_s, time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysFigures:
    """The figures of one kind of table. Rows a second: read, pushed and applied, of all workers."""

    kind: str
    work: KeysWork
    num_ps: int
    num_rows: int
    first_rows_per_s: float
    rows_per_s: float
    read_ms: float
    step_ms: float
    step_p99_ms: float
    worst_ms: float
    bytes_per_row: float


DESCRIPTION = "Measures a table with keys, drawn by Zipf's law from 10^9, beside one of a fixed size with the same rows, and a dict."


def run(options: argparse.Namespace) -> int:
    """Runs both tables by turns for each row length and number of servers, prints the figures, and returns the exit code."""
    for row_length in options.row_length or [16, 64]:
        plain = KeysWork(row_length=row_length, num_batches=options.batches, num_workers=options.workers)
        num_rows = len(distinct_keys(plain))
        for num_ps in options.ps or [1, 2]:
            for _ in range(options.turns):
                for fixed in (num_rows, None):
                    work = dataclasses.replace(plain, num_rows=fixed)
                    _show(measure(work, num_ps=num_ps, num_rows=num_rows), options)
        if not options.json:
            print(f"a Python dict of such rows in one process: {dict_rows_per_s(plain):.0f} rows/s read and updated", flush=True)
    return 0


def _show(figures: KeysFigures, options: argparse.Namespace) -> None:
    print(json.dumps(dataclasses.asdict(figures)) if options.json else in_words(figures), flush=True)


def measure(work: KeysWork, *, num_ps: int, num_rows: int) -> KeysFigures:
    """Runs the work with processes for all roles. Raises LaunchFailed with the error's output."""
    with Cluster(ClusterSpec(ps=num_ps, workers=work.num_workers, tcp=True)) as cluster:
        cluster.local.start_roles()
        empty_bytes = sum(map(rss_bytes, cluster.servers))
        cluster.start_workers("benchmarks.suites.server.dynamic_table", work)
        cluster.processes.await_events("done", work.num_workers, timeout_s=_TIMEOUT_S)
        full_bytes = sum(map(rss_bytes, cluster.servers))
        cluster.processes.release()
    reports = [KeysReport(**event["report"]) for event in cluster.processes.by_process("done")]
    num_pushed = sum(sum(report.rows) for report in reports)
    seconds = reports[0].second_s
    return KeysFigures(
        kind="keys" if work.num_rows is None else "fixed size",
        work=work,
        num_ps=num_ps,
        num_rows=num_rows,
        first_rows_per_s=num_pushed / max(sum(report.first_s) for report in reports),
        rows_per_s=num_pushed / max(sum(report.second_s) for report in reports),
        read_ms=float(np.median(reports[0].read_s)) * 1e3,
        step_ms=float(np.median(seconds)) * 1e3,
        step_p99_ms=float(np.quantile(seconds, 0.99)) * 1e3,
        worst_ms=max(max(report.first_s) for report in reports) * 1e3,
        bytes_per_row=(full_bytes - empty_bytes) / num_rows,
    )


def dict_rows_per_s(work: KeysWork) -> float:
    """Returns how many rows a second are read from a dict of arrays, and updated as by Adagrad."""
    rows: dict[int, Any] = {}
    count, begin = 0, time.perf_counter()
    for keys in batches(work, 0)[:20]:
        for key in np.unique(keys).tolist():
            row, slot = rows.get(key) or (np.zeros(work.row_length, np.float32), np.full(work.row_length, 0.1, np.float32))
            gradient = 0.1 * row
            slot += gradient * gradient
            row -= 0.01 * gradient / np.sqrt(slot)
            rows[key] = row, slot
            count += 1
    return count / (time.perf_counter() - begin)


def in_words(figures: KeysFigures) -> str:
    """Returns the figures for a reader."""
    needed = 8 * (figures.kind == "keys") + 2 * 4 * figures.work.row_length
    return (
        f"{figures.kind}, {figures.num_rows} rows of {figures.work.row_length} float32 with Adagrad, {figures.num_ps} ps,"
        f" {figures.work.num_workers} workers: {figures.rows_per_s:.0f} rows/s ({figures.first_rows_per_s:.0f} while rows are made);"
        f" step median {figures.step_ms:.2f} ms, p99 {figures.step_p99_ms:.2f} ms, worst while rows are made {figures.worst_ms:.2f} ms;"
        f" of it reading {figures.read_ms:.2f} ms; {human_bytes(int(figures.bytes_per_row))} a row"
        f" ({figures.bytes_per_row / needed:.2f} of {'key, ' if figures.kind == 'keys' else ''}row and slot)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--row-length", type=int, action="append", help="float32 numbers in a row; may be repeated (default 16 and 64)")
    parser.add_argument("--ps", type=int, action="append", help="parameter servers; may be repeated (default 1 and 2)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--batches", type=int, default=200, help="batches of a worker, of 8,192 keys each (default 200)")
    parser.add_argument("--turns", type=int, default=1, help="how often both tables are measured, by turns (default 1)")
    add_json(parser)
