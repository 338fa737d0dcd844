"""One worker of the large table's benchmark: reads some random rows, pushes their gradients, again and again. Knows only the SDK."""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.worker import RELEASE_VARIABLE
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client import EmbeddingTable, IndexedSlices, Session, adagrad, adam, connect, sgd, uniform_initializer

NUM_WARMUP_STEPS = 5
NAME = "table"
# The optimizer, and how many arrays of the table's size a server keeps with it, the table included.
OPTIMIZERS: dict[str, tuple[Callable[[], OptimizerSpec], int]] = {
    "adam": (lambda: adam(0.001, lazy=True), 3),
    "adagrad": (lambda: adagrad(0.01), 2),
    "sgd": (lambda: sgd(0.01), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """A float32 table, and how many of its rows a push has; `num_steps` are measured, after the warm-up."""

    num_rows: int
    row_length: int
    rows_per_push: int
    num_steps: int
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Seconds until the table was there, and of each measured step: to read rows, and all of it; rows that were pushed."""

    create_s: float
    read_s: list[float]
    step_s: list[float]
    rows_pushed: int


def main() -> None:
    """Runs the work given as JSON in the first argument, says how far it is in JSON lines, and stays until it is told to go."""
    work = TableWork(**json.loads(sys.argv[1]))
    with connect() as session:
        begin = time.perf_counter()
        table = EmbeddingTable((work.num_rows, work.row_length), initializer=uniform_initializer(-0.05, 0.05, seed=1))
        session.create_or_join({NAME: table}, optimizer=OPTIMIZERS[work.optimizer][0]())
        create_s = time.perf_counter() - begin
        random = np.random.default_rng(session.worker_index)
        for _ in range(NUM_WARMUP_STEPS):
            _step(session, work, random)
        _say({"event": "warm"})
        report = _measure(session, work, random, create_s=create_s)
        _say({"event": "done", "report": dataclasses.asdict(report)})
        # The servers end when the last worker has left; before that their memory is to be looked at.
        release = Path(os.environ[RELEASE_VARIABLE])
        while not release.exists():
            threading.Event().wait(0.01)


def _measure(session: Session, work: TableWork, random: np.random.Generator, *, create_s: float) -> TableReport:
    read_s, step_s, rows_pushed = [], [], 0
    for _ in range(work.num_steps):
        reading_s, whole_s, count = _step(session, work, random)
        read_s.append(reading_s)
        step_s.append(whole_s)
        rows_pushed += count
    return TableReport(create_s=create_s, read_s=read_s, step_s=step_s, rows_pushed=rows_pushed)


def _step(session: Session, work: TableWork, random: np.random.Generator) -> tuple[float, float, int]:
    """Returns the seconds of reading the rows and of all, and how many different rows there were."""
    indices = np.unique(random.integers(work.num_rows, size=work.rows_per_push))
    begin = time.perf_counter()
    rows = session.read_rows(NAME, indices)
    reading_s = time.perf_counter() - begin
    session.step({NAME: IndexedSlices(indices, 0.1 * rows)})
    return reading_s, time.perf_counter() - begin, len(indices)


def _say(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
