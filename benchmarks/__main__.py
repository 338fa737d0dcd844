"""`python -m benchmarks list | run NAME … | compare BEFORE.json AFTER.json`. Knows the suites by name, and reports their errors."""

import argparse
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.compare import compare, read_report

if TYPE_CHECKING:
    from lockstep.cli.progress import Progress

# How often a suite's progress is shown again.
_PULSE_S = 0.5

# The module of each suite in this package, and what it measures.
SUITES = {
    "step": ("suites.step.step", "a step's time, CPU and memory for one size and transport"),
    "table": ("suites.step.table", "the same at six sizes over every transport, as a table, JSON and a plot"),
    "profile": ("suites.step.profile", "where each millisecond of a step goes"),
    "apply": ("suites.server.apply", "an optimizer's apply beside a plain copy of as many bytes"),
    "memory": ("suites.server.memory", "a parameter server's memory, and that it does not grow"),
    "deltas": ("suites.saving.deltas", "a delta beside a full checkpoint of a table of ten million rows"),
    "durability": ("suites.saving.durability", "a step's time with each --durability, and what a save costs the steps beside it"),
    "compression": ("suites.wire.compression", "what each wire format saves, costs and spoils"),
    "policies": ("suites.coordination.policies", "sync, ssp and async on the same work, one worker slow"),
    "straggler": ("suites.coordination.straggler", "late workers, with and without backup workers, beside what `lockstep plan` predicts"),
    "outer": ("suites.coordination.outer", "gradients of each step, beside outer steps of several inner ones: loss, bytes, time"),
    "asynchronous": (
        "suites.coordination.asynchronous",
        "outer steps as they come, by Nesterov momentum, delayed or not: a toy on a simulated clock",
    ),
    "goodput": ("suites.coordination.goodput", "failing chips: which share of their time counts, by how they are coordinated"),
    "sparse_table": ("suites.server.sparse_table", "a few rows of a table of ten million"),
    "dynamic_table": ("suites.server.dynamic_table", "a table with keys beside one of a fixed size with the same rows"),
    "clicks": ("suites.server.clicks", "a model of clicks whose keys are admitted the third time, and evicted: AUC and rows"),
    "scale_workers": ("suites.scale.workers", "1,000 workers that wait for one chief"),
    "scale_servers": ("suites.scale.servers", "64 parameter servers: start, step, status, end"),
    "fresh": ("suites.fresh.fresh", "those who follow the weights: bytes a step, delay, and what that costs the others"),
    "peers": ("suites.step.peers", "the same work on TensorFlow, gloo and MXNet, by turns"),
    "torch": ("suites.step.torch_models", "PyTorch models over lockstep.torch, beside DistributedDataParallel over gloo, by turns"),
    "page": ("report.page", "puts measured figures into benchmarks/figures.md"),
}
_USAGE = "usage: python -m benchmarks list | run NAME [arguments] | compare BEFORE.json AFTER.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    match [*(sys.argv[1:] if arguments is None else arguments)]:
        case ["list"]:
            print("\n".join(f"{name:16} {words}" for name, (_, words) in SUITES.items()))
            return 0
        case ["run", name, *rest] if name in SUITES:
            return run(name, rest)
        case ["run", name, *_]:
            print(f"benchmarks: no suite {name!r}, want one of {', '.join(SUITES)}", file=sys.stderr)
        case ["compare", before, after]:
            return _compare(Path(before), Path(after))
        case ["--help" | "-h"]:
            print(f"{_USAGE}\n\n`run NAME --help` says what a suite takes.")
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
    return 2


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a suite and returns the exit code; an error is one line that says why the suite could not run."""
    if importlib.util.find_spec("psutil") is None:
        print(f"benchmarks {name}: needs psutil, a development tool: pip install --editable . --group dev", file=sys.stderr)
        return 2
    # Imported here, so that `list` answers at once.
    from benchmarks.harness.arguments import WrongArguments
    from benchmarks.harness.setting import WrongTransport
    from lockstep.launcher.supervisor import Interrupted, LaunchFailed

    module = importlib.import_module(f"benchmarks.{SUITES[name][0]}")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks run {name}", description=module.DESCRIPTION)
    module.add_arguments(parser)
    try:
        options = parser.parse_args(arguments)
        try:
            # Some suites take minutes; those that know their number of runs report the progress.
            with pulsing(f"benchmarks {name}") as options.progress:
                return int(module.run(options))
        except WrongArguments as error:
            parser.error(str(error))
    except SystemExit as ended:
        return int(ended.code or 0)
    except (LaunchFailed, Interrupted, WrongTransport) as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))


@contextmanager
def pulsing(what: str) -> "Iterator[Progress]":
    """Shows the progress of some work within the block, also while a single part of it takes long."""
    from lockstep.cli.progress import shown

    is_over = threading.Event()
    with shown(what) as progress:

        def pulse() -> None:
            while not is_over.wait(_PULSE_S):
                progress.advance(0, total=progress.total)

        thread = threading.Thread(target=pulse, name="progress", daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            is_over.set()
            thread.join()


def _compare(before: Path, after: Path) -> int:
    try:
        rows = compare(read_report(before), read_report(after))
    except (OSError, ValueError) as error:
        print(f"benchmarks compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
