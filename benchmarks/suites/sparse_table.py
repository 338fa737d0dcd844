"""Training a few rows of a large table, in time, bytes and memory. Knows processes and the report."""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness.watching import peak_rss_bytes
from benchmarks.harness.worker import RELEASE_VARIABLE
from benchmarks.report.figures import human_bytes
from benchmarks.suites.table_worker import OPTIMIZERS, TableReport, TableWork
from lockstep.launcher.cluster import ClusterSpec, LocalCluster, last_lines
from lockstep.launcher.supervisor import LaunchFailed, Process, Supervisor

_POLL_S = 0.02
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    """What was measured; times are worker 0's, bytes a step those of all workers, memory that of all parameter servers together."""

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
        """What the table and its slots take in themselves."""
        return self.work.num_rows * 4 * self.work.row_length * OPTIMIZERS[self.work.optimizer][1]


class _Watcher:
    """Listens to the workers; looks at the loopback device when all are warm and when all are done."""

    def __init__(self, num_workers: int) -> None:
        self.reports: dict[str, TableReport] = {}
        self.traffic_bytes = 0
        self._num_workers = num_workers
        self._warm: set[str] = set()

    def hear(self, name: str, line: str) -> None:
        if line.startswith('{"event": "warm"'):
            self._warm.add(name)
            if len(self._warm) == self._num_workers:
                self.traffic_bytes = -_loopback_bytes()
        elif line.startswith('{"event": "done"'):
            self.reports[name] = TableReport(**json.loads(line)["report"])
            if self.is_done:
                self.traffic_bytes += _loopback_bytes()
        elif name.startswith("worker") or "ERROR" in line:
            print(f"{name}: {line}", file=sys.stderr)

    @property
    def is_done(self) -> bool:
        """Whether every worker has reported."""
        return len(self.reports) == self._num_workers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark for each optimizer and prints its figures; returns the exit code."""
    options = _parser().parse_args(arguments)
    for optimizer in options.optimizer or ["adam", "adagrad"]:
        work = TableWork(
            num_rows=options.rows,
            row_length=options.row_length,
            rows_per_push=options.rows_per_push,
            num_steps=options.steps,
            optimizer=optimizer,
        )
        try:
            figures = measure(work, num_workers=options.workers, num_ps=options.ps)
        except LaunchFailed as error:
            print(f"benchmarks.suites.sparse_table: {error}", file=sys.stderr)
            return 1
        print(json.dumps(dataclasses.asdict(figures)) if options.json else in_words(figures), flush=True)
    return 0


def measure(work: TableWork, *, num_workers: int, num_ps: int) -> TableFigures:
    """Runs the work with processes for all roles, over loopback TCP. Raises LaunchFailed in the words of whatever failed."""
    watcher = _Watcher(num_workers)
    spec = ClusterSpec(num_ps=num_ps, num_workers=num_workers, is_tcp=True)
    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=watcher.hear) as supervisor:
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles()
        servers = cluster.roles[:-1]
        empty_bytes = sum(_rss_bytes(server) for server in servers)
        release = supervisor.directory / "release"
        command = [sys.executable, "-m", "benchmarks.suites.table_worker", json.dumps(dataclasses.asdict(work))]
        cluster.start_workers(command, environment={RELEASE_VARIABLE: str(release)})
        for _ in _polls(supervisor):
            if watcher.is_done:
                break
        ps_bytes, peak_bytes, proportional_bytes = (
            sum(look(server) for server in servers) for look in (_rss_bytes, peak_rss_bytes, _proportional_bytes)
        )
        release.touch()
    reports = [watcher.reports[name] for name in sorted(watcher.reports)]
    return TableFigures(
        work=work,
        num_workers=num_workers,
        num_ps=num_ps,
        create_s=max(report.create_s for report in reports),
        step_ms=float(np.median(reports[0].step_s)) * 1e3,
        step_p90_ms=float(np.quantile(reports[0].step_s, 0.9)) * 1e3,
        read_ms=float(np.median(reports[0].read_s)) * 1e3,
        rows_per_s=sum(report.rows_pushed for report in reports) / max(sum(report.step_s) for report in reports),
        bytes_per_step=watcher.traffic_bytes // work.num_steps,
        # A row travels twice, and its index, of 8 bytes, with each.
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


def _polls(supervisor: Supervisor) -> Iterator[None]:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        for process in supervisor.poll(timeout_s=_POLL_S):
            raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
        yield
    raise LaunchFailed(f"not done within {_TIMEOUT_S:g} s")


def _loopback_bytes() -> int:
    """Bytes that this machine has sent to itself; whatever else does so counts too (`unshare -n` gives a device of one's own)."""
    return next(int(count.bytes_sent) for name, count in psutil.net_io_counters(pernic=True).items() if name.startswith("lo"))


def _rss_bytes(process: Process) -> int:
    return int(psutil.Process(process.pid).memory_info().rss)


def _proportional_bytes(process: Process) -> int:
    """Resident memory, of which that shared with other processes counts in parts; where the system does not know, all of it."""
    full = psutil.Process(process.pid).memory_full_info()
    return int(getattr(full, "pss", full.rss))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.sparse_table",
        description="Measures training on a large table: in every step each worker reads some random rows and pushes their gradients.",
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table (default 10 million)")
    parser.add_argument("--row-length", type=int, default=16, help="float32 numbers in a row (default 16)")
    parser.add_argument("--rows-per-push", type=int, default=1000, help="rows that a worker draws for a push (default 1000)")
    parser.add_argument("--workers", type=int, default=2, help="workers; a step takes a contribution of each (default 2)")
    parser.add_argument("--ps", type=int, default=2, help="parameter servers (default 2)")
    parser.add_argument("--steps", type=int, default=200, help="steps to measure, after 5 that are not (default 200)")
    parser.add_argument(
        "--optimizer", action="append", choices=sorted(OPTIMIZERS), help="may be repeated (default: adam, lazy, and adagrad)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on one line for each optimizer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
