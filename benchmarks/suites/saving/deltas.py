"""Measures a delta beside a full checkpoint of the same large table, by turns. Knows the server's core; no process, no network."""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json, at_least_one, show
from benchmarks.harness.one_server import FENCE, OneServer
from benchmarks.report.figures import human_bytes
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.model.keys import KeySpec, spread
from ps_protocol.model.variables import ANY, Array, DataType, Initializer, InitializerKind, VariableSpec
from ps_protocol.roles.shard import SaveRequest, SparsePart

_ROWS_A_STEP = 1 << 18
_LONGEST_S = 600.0

DESCRIPTION = (
    "Measures a delta, after some rows of a table with Adagrad have changed, beside a full checkpoint, by turns; and steps with marks."
)


class _Server:
    """A table on one parameter server, trained by one worker."""

    def __init__(self, num_rows: int, row_length: int, *, is_keyed: bool, directory: Path) -> None:
        variable = VariableSpec(
            name="rows",
            data_type=DataType.FLOAT32,
            shape=(ANY if is_keyed else num_rows, row_length),
            is_sparse=True,
            keys=KeySpec() if is_keyed else None,
            initializer=Initializer(kind=InitializerKind.UNIFORM, low=-0.05, high=0.05, seed=1),
        )
        self._row_length = row_length
        # What a worker names the rows by.
        self._names = spread(np.arange(num_rows)) if is_keyed else np.arange(num_rows)
        self._server = OneServer(variable, optimizer="adagrad", rate=0.01, storage=LocalStorage(directory))
        self.stop = self._server.stop
        for start in range(0, num_rows if is_keyed else 0, _ROWS_A_STEP):
            self.step(np.arange(start, min(start + _ROWS_A_STEP, num_rows)))

    def step(self, rows: Array) -> float:
        """Applies a gradient of these rows, and returns the seconds of the apply."""
        gradient = np.full((len(rows), self._row_length), 0.1, np.float32)
        part = SparsePart(table=0, num_rows=len(rows))
        return self._server.step(np.sort(self._names[rows]).tobytes() + gradient.tobytes(), sparse=(part,))

    def save(self, since: int) -> tuple[float, float, int, int]:
        """Saves the step; returns the seconds that steps wait, all seconds, the bytes of the file, and the step."""
        shard, step = self._server.shard, self._server.at_step
        request = SaveRequest(fence=FENCE, step=step, tag=f"step-{step:09}-{since}", since=since)
        started = time.perf_counter()
        shard.call(request)
        copied = time.perf_counter()
        while (progress := shard.call(replace(request, max_wait_s=_LONGEST_S))).file is None:
            if progress.failure is not None:
                raise progress.failure
        return copied - started, time.perf_counter() - started, progress.file.num_bytes, step


def measure(num_rows: int, row_length: int, *, share: float, is_keyed: bool, num_turns: int, where: Path | None) -> dict[str, Any]:
    """Saves a full checkpoint, changes rows, and saves a delta on it, by turns; seconds are medians, ratios those of a turn."""
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(dir=where) as directory:
        server = _Server(num_rows, row_length, is_keyed=is_keyed, directory=Path(directory))
        try:
            few = [np.sort(random.choice(num_rows, 8192, replace=False)) for _ in range(30)]
            unmarked = statistics.median(server.step(rows) for rows in few)
            turns = []
            for _ in range(num_turns):
                full = server.save(-1)
                server.step(np.sort(random.choice(num_rows, int(share * num_rows), replace=False)))
                turns.append((full, server.save(full[3])))
                for path in Path(directory).iterdir():
                    LocalStorage(directory).remove_incomplete(path.name.removesuffix(".incomplete"))
                server.step(few[0])
            marked = statistics.median(server.step(rows) for rows in few)
        finally:
            server.stop()
    stalls, seconds, sizes = [[statistics.median(turn[kind][figure] for turn in turns) for kind in (0, 1)] for figure in (0, 1, 2)]
    return {
        "kind": "keys" if is_keyed else "fixed size",
        "rows": num_rows,
        "row_length": row_length,
        "share": share,
        "full_s": round(seconds[0], 3),
        "delta_s": round(seconds[1], 3),
        "time_ratio": round(statistics.median(delta[1] / full[1] for full, delta in turns), 4),
        "full_stall_s": round(stalls[0], 3),
        "delta_stall_s": round(stalls[1], 3),
        "full_bytes": int(sizes[0]),
        "delta_bytes": int(sizes[1]),
        "size_ratio": round(sizes[1] / sizes[0], 4),
        "step_ms": round(unmarked * 1e3, 2),
        "marked_step_ms": round(marked * 1e3, 2),
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the report as text."""
    full, delta = (f"{human_bytes(report[kind + '_bytes'])} in {report[kind + '_s']:.3f} s" for kind in ("full", "delta"))
    return "\n".join(
        [
            f"{report['rows']} rows of {report['row_length']} float32 with Adagrad, {report['kind']}, {report['share']:.1%} changed",
            f"  full    {full}; steps wait {report['full_stall_s']:.3f} s",
            f"  delta   {delta}, {report['size_ratio']:.2%} and {report['time_ratio']:.2%}; steps wait {report['delta_stall_s']:.3f} s",
            f"  a step of 8192 rows {report['step_ms']:.2f} ms, while changes are noted {report['marked_step_ms']:.2f} ms",
        ]
    )


def run(options: argparse.Namespace) -> int:
    """Measures both kinds of tables, prints the figures, and returns the exit code."""
    for is_keyed in (False, True):
        report = measure(
            options.rows, options.row_length, share=options.share, is_keyed=is_keyed, num_turns=options.turns, where=options.dir
        )
        show(report, in_words, options)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--rows", type=at_least_one, default=10_000_000, help="rows of the table (default 10 million)")
    parser.add_argument("--row-length", type=at_least_one, default=16, help="float32 numbers in a row (default 16)")
    parser.add_argument("--share", type=float, default=0.01, help="which part of the rows changes between two checkpoints (default 0.01)")
    parser.add_argument("--turns", type=at_least_one, default=3, help="how often both are measured, by turns (default 3)")
    parser.add_argument("--dir", type=Path, default=None, help="where the checkpoints are put (default: the temporary directory)")
    add_json(parser)
