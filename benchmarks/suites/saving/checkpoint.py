"""What saving costs the steps of one parameter server. Knows the server's core; no process, no wire."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.figures import human_bytes
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.shard import ApplyRequest, PushHeader, PushId, SaveProgress, SaveRequest, SaveState, ShardSpec
from ps_server.config import default_apply_threads
from ps_server.shard.shard import Shard
from ps_server.threads import ApplyThreads

_NUM_CONTRIBUTIONS = 2
_NUM_VARIABLES = 16
_NUM_QUIET = 15
_LONGEST_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.bytes < 64 * _NUM_VARIABLES or options.saves < 2 or options.threads < 1:
        parser.error("want at least 1024 bytes, two saves and one thread")
    report = measure(options.bytes, optimizer=options.optimizer, num_saves=options.saves, num_threads=options.threads, where=options.dir)
    print(json.dumps(report) if options.json else in_words(report))
    return 0


def measure(nbytes: int, *, optimizer: str, num_saves: int, num_threads: int, where: Path | None = None) -> dict[str, Any]:
    """Applies step after step, by turns with nothing else to do and while a checkpoint is written; times are medians, in milliseconds.

    `stall_ms`: how long steps wait for a save; `copy_ms`: a plain copy of as many bytes just before; `excess_ms`: how much longer than the
    median the longest apply around a save is, with the wait for the save if it is the first. The first save, whose memory is new, has a
    figure of its own. `where` None: a temporary directory.
    """
    with tempfile.TemporaryDirectory(dir=where) as directory:
        server = _Server(nbytes, optimizer=optimizer, num_threads=num_threads, directory=Path(directory))
        try:
            first_stall_s, _ = server.begin_save()
            server.await_save()
            quiet: list[float] = []
            beside: list[float] = []
            stalls, copies, longest, alone, written = [], [], [], [], []
            copy = _PlainCopy(server.saved_bytes)
            for _ in range(num_saves):
                quiet += [server.step() for _ in range(_NUM_QUIET)]
                copies.append(copy.seconds())
                stall_s, started = server.begin_save()
                stalls.append(stall_s)
                steps = [server.step()]
                while not server.is_saved():
                    steps.append(server.step())
                written.append(time.perf_counter() - started)
                beside += steps
                longest.append(max(stall_s + steps[0], *steps))
                server.step()
                _, started = server.begin_save()
                server.await_save()
                alone.append(time.perf_counter() - started)
        finally:
            server.threads.stop()
    apply_s, beside_s = statistics.median(quiet), statistics.median(beside)
    return {
        "bytes": nbytes,
        "optimizer": optimizer,
        "threads": num_threads,
        "saves": num_saves,
        "saved_bytes": server.saved_bytes,
        "apply_ms": _ms(apply_s),
        "beside_ms": _ms(beside_s),
        "ratio": round(beside_s / apply_s, 2),
        "beside_p90_ms": _ms(statistics.quantiles(beside, n=10)[-1]),
        "first_stall_ms": _ms(first_stall_s),
        "stall_ms": _ms(statistics.median(stalls)),
        "copy_ms": _ms(statistics.median(copies)),
        "excess_ms": _ms(statistics.median(longest) - apply_s),
        "write_ms": _ms(statistics.median(written)),
        "write_alone_ms": _ms(statistics.median(alone)),
    }


class _PlainCopy:
    """What a save's copy is held against: as many bytes, in one thread, into memory that is there."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def seconds(self) -> float:
        """Returns how long one takes."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started


class _Server:
    """The core of a parameter server with a model of float32 variables, and what a chief and workers would ask of it."""

    def __init__(self, nbytes: int, *, optimizer: str, num_threads: int, directory: Path) -> None:
        variables = [
            VariableSpec(name=f"v{index:02}", data_type=DataType.FLOAT32, shape=(nbytes // 4 // _NUM_VARIABLES,))
            for index in range(_NUM_VARIABLES)
        ]
        self._layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])
        self.threads = ApplyThreads(num_threads)
        self._store = Shard(index=0, process_incarnation=1, apply_threads=self.threads, storage=LocalStorage(directory / "checkpoints"))
        self._store.adopt(epoch=1, chief_incarnation=1)
        chosen = OptimizerSpec(name=optimizer, learning_rate=constant(0.001))
        with self._store.open_creation(ShardSpec(epoch=1, shard=0, layout=self._layout, optimizer=chosen)) as creation:
            creation.write(0, bytes(self._layout.nbytes))
            creation.finish()
        self._gradient = bytes(self._layout.nbytes)
        self._step = 0
        self._request: SaveRequest | None = None
        self.saved_bytes = 0

    def step(self) -> float:
        """Stages contributions and applies them; returns how long the apply took."""
        push_ids = tuple(PushId(worker=worker, incarnation=1, sequence=self._step + 1) for worker in range(_NUM_CONTRIBUTIONS))
        for push_id in push_ids:
            with self._store.open_push(PushHeader(epoch=1, push_id=push_id, step=self._step, layout_hash=self._layout.hash)) as push:
                push.write(0, self._gradient)
                push.finish()
        request = ApplyRequest(epoch=1, chief_incarnation=1, step=self._step, contributors=push_ids)
        started = time.perf_counter()
        self._store.apply_step(request)
        self._step += 1
        return time.perf_counter() - started

    def begin_save(self) -> tuple[float, float]:
        """Has the step copied; returns how long steps had to wait for that, and since when the file is written."""
        self._request = SaveRequest(epoch=1, chief_incarnation=1, step=self._step, tag=f"step-{self._step:09}", num_shards=1)
        started = time.perf_counter()
        self._store.save(self._request)
        copied = time.perf_counter()
        return copied - started, copied

    def is_saved(self) -> bool:
        """Whether the file is there."""
        assert self._request is not None
        return self._look(self._store.save(self._request, max_wait_s=1e-6))

    def await_save(self) -> None:
        """Returns when the file is there."""
        assert self._request is not None
        while not self._look(self._store.save(self._request, max_wait_s=_LONGEST_S)):
            pass

    def _look(self, progress: SaveProgress) -> bool:
        if progress.failure is not None:
            raise progress.failure
        if progress.file is not None:
            self.saved_bytes = progress.file.num_bytes
        return progress.state is SaveState.DONE


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    first, copy, excess = (f"{report[name]:.1f}" for name in ("first_stall_ms", "copy_ms", "excess_ms"))
    title = f"{human_bytes(report['bytes'])} of float32, {report['optimizer']}, {report['threads']} threads, {report['saves']} saves"
    return "\n".join(
        [
            f"{title} of {human_bytes(report['saved_bytes'])}; medians in ms",
            f"  apply            {report['apply_ms']:8.1f}",
            f"  … while writing  {report['beside_ms']:8.1f}   x {report['ratio']:.2f}, p90 {report['beside_p90_ms']:.1f}",
            f"  stall            {report['stall_ms']:8.1f}   a plain copy {copy}; the first {first}",
            f"  … and the longest apply beside it take {excess} more than the median",
            f"  writing          {report['write_ms']:8.1f}   {report['write_alone_ms']:.1f} with nothing else to do",
        ]
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks run checkpoint",
        description="Measures applies, alone and while a checkpoint is written, by turns, and how long steps wait for the copy.",
    )
    parser.add_argument("--bytes", type=int, default=64 << 20, help="bytes of all variables (default 64 MiB)")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), default="adam", help="(default adam)")
    parser.add_argument("--threads", type=int, default=default_apply_threads(), help="of an apply (default: as many as processors)")
    parser.add_argument("--saves", type=int, default=5, help="how many are made (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where the checkpoints are put (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    return parser
