"""Measures a table with keys beside one of a fixed size with the same rows, and a Python dict. Knows the report, and the worker's code."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.arguments import add_json, show
from benchmarks.harness.processes import Cluster, cpu_s, rss_bytes
from benchmarks.harness.worker import Station
from benchmarks.report.figures import human_bytes
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Process
from ps_protocol.model.keys import KeySpec, spread
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import ANY, DataType, VariableSpec
from ps_server.numbers.key_index import KeyIndex
from ps_server.numbers.memory import MemoryBudget, growing_bytes
from ps_server.numbers.row_gradients import RowGradient
from ps_server.numbers.tables import Table
from ps_server.optimizers.rule import UpdateRule
from worker_client import EmbeddingTable, IndexedSlices, Session, adagrad, connect, uniform_initializer

_TIMEOUT_S = 900.0
NAME = "table"
NUM_KEYS, EXPONENT, KEYS_PER_BATCH = 1e9, 1.05, 8192
INITIALIZER = uniform_initializer(-0.05, 0.05, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysWork:
    """Batches of keys of a row length; `num_rows`: of the table of a fixed size in which the same rows are numbered, None: by keys.

    `prefetches`: servers are told the keys of the next batch before the gradients of one are pushed.
    """

    row_length: int
    num_batches: int
    num_workers: int
    num_rows: int | None = None
    prefetches: bool = False


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
        timed_step(session, keys[0])
        station.say("warm")
        began_s = time.process_time()
        ahead = [*keys[1:], keys[0]] if work.prefetches else [None] * len(keys)
        # The first pass over the batches makes the rows.
        first, second = ([timed_step(session, one, then) for one, then in zip(keys, ahead, strict=True)] for _ in range(2))
        station.say(
            "done",
            first_s=[whole for _, whole in first],
            second_s=[whole for _, whole in second],
            read_s=[reading for reading, _ in second],
            num_rows=sum(map(len, keys)),
            cpu_s=time.process_time() - began_s,
        )
        station.await_release()


def timed_step(session: Session, keys: Any, following: Any = None) -> tuple[float, float]:
    """Reads these rows and pushes a gradient of each; returns the seconds of reading, and of all. `following`: what is read next."""
    begin = time.perf_counter()
    rows = session.read_rows(NAME, keys)
    reading_s = time.perf_counter() - begin
    if following is not None:
        session.prefetch(NAME, following)
    session.step({NAME: IndexedSlices(keys, 0.1 * rows)})
    return reading_s, time.perf_counter() - begin


DESCRIPTION = "Measures a table with keys, drawn by Zipf's law from 10^9, beside one of a fixed size with the same rows, and a dict."


def run(options: argparse.Namespace) -> int:
    """Runs all kinds by turns for each row length and number of servers, prints the figures, and returns the exit code."""
    for row_length in options.row_length or [16, 64]:
        if options.grow is not None:
            print(json.dumps(growth(options.grow, row_length)), flush=True)
            continue
        plain = KeysWork(row_length=row_length, num_batches=options.batches, num_workers=options.workers)
        num_rows = len(distinct_keys(plain))
        for _ in range(options.turns):
            if options.memory_share is not None:
                show(measure(plain, num_ps=1, num_rows=num_rows), in_words, options)
                for tier in (Tier(options.table_dir), Tier(options.table_dir, share=options.memory_share)):
                    for prefetches in (False, True):
                        work = dataclasses.replace(plain, prefetches=prefetches)
                        show(measure(work, num_ps=1, num_rows=num_rows, tier=tier), in_words, options)
                continue
            for num_ps in options.ps or [1, 2]:
                for fixed in (num_rows, None):
                    show(measure(dataclasses.replace(plain, num_rows=fixed), num_ps=num_ps, num_rows=num_rows), in_words, options)
            if not options.json:
                print(f"a Python dict of such rows in one process: {dict_rows_per_s(plain):.0f} rows/s read and updated", flush=True)
                if importlib.util.find_spec("torch") is not None:
                    print(f"torch.nn.EmbeddingBag and SparseAdam in one process: {torch_rows_per_s(plain):.0f} rows/s", flush=True)
    return 0


# What a server needs in memory for each row whatever its length, and for contributions under way.
_INDEX_BYTES, _OTHER_BYTES = 28, 48 << 20


@dataclass(frozen=True, slots=True)
class Tier:
    """Rows in files of a directory; `share` of their bytes may be in memory at once (None: all), with what else a server needs."""

    directory: str
    share: float | None = None

    def limit_bytes(self, work: KeysWork, num_rows: int) -> int:
        """Returns how much memory the server is given from its start on, page cache included."""
        return int((self.share or 0) * num_rows * 8 * work.row_length) + num_rows * _INDEX_BYTES + _OTHER_BYTES


@contextlib.contextmanager
def limited(processes: Sequence[Process], num_bytes: int) -> Iterator[None]:
    """Limits what the system has in memory for processes from now on, page cache included; needs root and cgroups."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()]
    is_v1 = any(controllers == "memory" for _, controllers, _ in entries)
    own = next(path for _, controllers, path in entries if controllers == ("memory" if is_v1 else ""))
    parent = Path("/sys/fs/cgroup", "memory" if is_v1 else "", own.lstrip("/"))
    group = parent / f"lockstep-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(num_bytes), encoding="ascii")
        for process in processes:
            (group / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
        yield
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
        group.rmdir()


def measure(work: KeysWork, *, num_ps: int, num_rows: int, tier: Tier | None = None) -> dict[str, Any]:
    """Runs the work with processes for all roles. Raises LaunchFailed with the error's output.

    Rows a second are read, pushed and applied, of all workers. Processor time is that of both passes, to which other work on the machine
    adds little.
    """
    with contextlib.ExitStack() as stack:
        if tier is not None:
            os.environ["LOCKSTEP_TABLE_DIR"] = tier.directory
            stack.callback(os.environ.pop, "LOCKSTEP_TABLE_DIR")
        cluster = stack.enter_context(Cluster(ClusterSpec(ps=num_ps, workers=work.num_workers, tcp=True)))
        cluster.local.start_roles()
        if tier is not None and tier.share is not None:
            stack.enter_context(limited(cluster.servers, tier.limit_bytes(work, num_rows)))
        empty_bytes = sum(map(rss_bytes, cluster.servers))
        cluster.start_workers("benchmarks.suites.server.dynamic_table", work)
        cluster.processes.await_events("warm", work.num_workers, timeout_s=_TIMEOUT_S)
        before_s = sum(map(cpu_s, cluster.servers))
        cluster.processes.await_events("done", work.num_workers, timeout_s=_TIMEOUT_S)
        servers_s, full_bytes = sum(map(cpu_s, cluster.servers)) - before_s, sum(map(rss_bytes, cluster.servers))
        cluster.processes.release()
    done = cluster.processes.by_process("done")
    num_pushed, seconds = sum(event["num_rows"] for event in done), done[0]["second_s"]
    return {
        "kind": _kind(work, num_rows, tier),
        "work": dataclasses.asdict(work),
        "num_ps": num_ps,
        "num_rows": num_rows,
        "first_rows_per_s": num_pushed / max(sum(event["first_s"]) for event in done),
        "rows_per_s": num_pushed / max(sum(event["second_s"]) for event in done),
        "read_ms": float(np.median(done[0]["read_s"])) * 1e3,
        "step_ms": float(np.median(seconds)) * 1e3,
        "step_p99_ms": float(np.quantile(seconds, 0.99)) * 1e3,
        "worst_ms": max(max(event["first_s"]) for event in done) * 1e3,
        "bytes_per_row": (full_bytes - empty_bytes) / num_rows,
        "servers_us_per_row": 1e6 * servers_s / (2 * num_pushed),
        "workers_us_per_row": 1e6 * sum(event["cpu_s"] for event in done) / (2 * num_pushed),
    }


def _kind(work: KeysWork, num_rows: int, tier: Tier | None) -> str:
    words = "keys" if work.num_rows is None else "fixed size"
    if tier is not None:
        memory = "" if tier.share is None else f" of a server with {human_bytes(tier.limit_bytes(work, num_rows))}, page cache included"
        words += f" in files{memory}, {'prefetched' if work.prefetches else 'without prefetch'}"
    return words


def growth(num_rows: int, row_length: int) -> dict[str, Any]:
    """Returns what steps of new keys take in this process while a table grows, in ms of this thread's processor time and on the clock.

    `index`: finding out that keys are new, and giving them their places, in an index alone: it is what grows. Of each step the least of
    three runs counts, for the machine may do something else in any of them.
    """
    shape = (ANY, row_length)
    variable = VariableSpec(name=NAME, data_type=DataType.FLOAT32, shape=shape, is_sparse=True, keys=KeySpec(), initializer=INITIALIZER)
    rule = UpdateRule(OptimizerSpec(name="adagrad", learning_rate=constant(0.01)))
    piece = VariableSlice(variable=variable, start=0, stop=variable.num_rows)
    num_steps = -(-num_rows // KEYS_PER_BATCH)
    placing = np.min([_placing(num_steps) for _ in range(3)], axis=0)
    empty_bytes = psutil.Process().memory_info().rss
    table = Table(piece, rule, budget=MemoryBudget(None, owner="benchmark"), step=0)
    rows = np.full((KEYS_PER_BATCH, row_length), 0.1, np.float32)
    times = np.empty((num_steps, 2))
    for step, taken in enumerate(times):
        rule.begin(step)
        with _clocks(taken):
            table.apply(RowGradient(indices=_new_keys(step), rows=rows))
        rule.advance()
    columns = [*times.T, *placing.T]
    spent = {
        name: {"median": 1e3 * float(np.median(one)), "p99": 1e3 * float(np.quantile(one, 0.99)), "worst": 1e3 * float(one.max())}
        for name, one in zip(("processor", "clock", "index, processor", "index, clock"), columns, strict=True)
    }
    table_bytes = psutil.Process().memory_info().rss - empty_bytes
    return {"rows": table.num_rows, "row_length": row_length, "bytes_per_row": table_bytes / table.num_rows, "ms": spent}


def _placing(num_steps: int) -> Any:
    """Returns what each step takes in an index alone."""
    index = KeyIndex(growing_bytes(8 * (num_steps + 1) * KEYS_PER_BATCH, purpose="keys").view(np.int64))
    times = np.empty((num_steps, 2))
    for step, taken in enumerate(times):
        new = _new_keys(step)
        with _clocks(taken):
            index.find(new)
            index.add(new)
    return times


def _new_keys(step: int) -> Any:
    return np.sort(spread(np.arange(step * KEYS_PER_BATCH, (step + 1) * KEYS_PER_BATCH)))


@contextlib.contextmanager
def _clocks(into: Any) -> Iterator[None]:
    begin = time.thread_time(), time.perf_counter()
    yield
    into[:] = time.thread_time() - begin[0], time.perf_counter() - begin[1]


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


def torch_rows_per_s(work: KeysWork) -> float:
    """Returns how many rows a second PyTorch reads and updates in one process, where all keys have numbers beforehand."""
    import torch

    numbered = dataclasses.replace(work, num_workers=1, num_rows=0)
    known = distinct_keys(numbered)
    bag = torch.nn.EmbeddingBag(len(known), work.row_length, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(bag.parameters())
    given = [torch.from_numpy(np.unique(rows)) for rows in batches(numbered, 0)]
    offsets = [torch.arange(len(rows)) for rows in given]
    for _ in range(2):  # the second time it has its slots
        begin = time.perf_counter()
        for rows, places in zip(given, offsets, strict=True):
            out = bag(rows, places)
            optimizer.zero_grad()
            out.backward(0.1 * out.detach())
            optimizer.step()
        seconds = time.perf_counter() - begin
    return sum(map(len, given)) / seconds


def in_words(report: dict[str, Any]) -> str:
    """Returns the figures for a reader."""
    work, has_keys = report["work"], report["kind"].startswith("keys")
    needed = 8 * has_keys + 2 * 4 * work["row_length"]
    return (
        f"{report['kind']}, {report['num_rows']} rows of {work['row_length']} float32 with Adagrad, {report['num_ps']} ps,"
        f" {work['num_workers']} workers: {report['rows_per_s']:.0f} rows/s ({report['first_rows_per_s']:.0f} while rows are made);"
        f" step median {report['step_ms']:.2f} ms, p99 {report['step_p99_ms']:.2f} ms,"
        f" worst while rows are made {report['worst_ms']:.2f} ms; of it reading {report['read_ms']:.2f} ms;"
        f" processor time of a row {report['servers_us_per_row']:.1f} µs of servers and"
        f" {report['workers_us_per_row']:.1f} µs of workers; {human_bytes(int(report['bytes_per_row']))} a row"
        f" ({report['bytes_per_row'] / needed:.2f} of {'key, ' if has_keys else ''}row and slot)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--row-length", type=int, action="append", help="float32 numbers in a row; may be repeated (default 16 and 64)")
    parser.add_argument("--ps", type=int, action="append", help="parameter servers; may be repeated (default 1 and 2)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--batches", type=int, default=200, help="batches of a worker, of 8,192 keys each (default 200)")
    parser.add_argument("--turns", type=int, default=1, help="how often all kinds are measured, by turns (default 1)")
    parser.add_argument("--grow", type=int, metavar="ROWS", help="measure the steps of a table that grows to so many rows instead")
    parser.add_argument(
        "--memory-share",
        type=float,
        metavar="SHARE",
        help="measure rows in files instead, of which a server may have this share in memory, such as 0.1; needs root and cgroups",
    )
    parser.add_argument("--table-dir", default=tempfile.gettempdir(), help="where those files are (default: the directory for such files)")
    add_json(parser)
