"""`lockstep trace` and `tensorboard`: poll a running cluster and write what they see to files. Know no file format."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import worker_client
from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.results import CommandFailed
from lockstep.tensorboard import TensorBoardWriter
from lockstep.timeline import Timeline
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import Given
from ps_protocol.roles.chief import Chief, ClusterState, ClusterStatus

# The number of ledger entries that a chief keeps, and the limits of the pause between two polls of `trace`.
_NUM_ENTRIES = 256
_LONGEST_S, _SHORTEST_S = 0.5, 0.02
_MOST_S = 600.0

_TENSORBOARD_PERIOD_S = 1.0
_TENSORBOARD_TIMEOUT_S = 60.0
_BEFORE = (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trace`."""
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="address of the chief; as --chief")
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="seconds to record (default: 5)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="file to write (default: trace.json)")
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")


def run_trace(arguments: argparse.Namespace) -> int:
    """Writes the trace and returns the exit code: 1 if no step was made in that time."""
    if not 0 < arguments.seconds <= _MOST_S:
        raise InvalidSpec(f"--seconds: got {arguments.seconds:g}, want more than 0 and at most {_MOST_S:g}")
    arguments.chief = arguments.address or arguments.chief
    timeline = Timeline()
    with chief_of(arguments) as chief, _opened(arguments.output) as file:
        if not arguments.json:
            print(f"recording for {arguments.seconds:g} s …", flush=True)
        for status, at_s in statuses(chief, seconds=arguments.seconds):
            timeline.add(status, at_s=at_s)
        json.dump(timeline.trace(cluster=status.cluster), file, separators=(",", ":"))
    if arguments.json:
        print(json.dumps({"file": str(arguments.output), "num_steps": timeline.num_steps, "num_missed": timeline.num_missed}))
    elif timeline.is_empty:
        print(
            f"no step ended within {arguments.seconds:g} s: {status.waiting_for or status.reason or 'record for longer'}", file=sys.stderr
        )
    else:
        missed = f"; {timeline.num_missed} steps were too fast to be seen" if timeline.num_missed else ""
        print(f"{timeline.num_steps} steps in {arguments.output}{missed}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 1 if timeline.is_empty else 0


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}; choose another -o FILE", exit_code=ExitCode.USAGE) from error


def statuses(chief: Chief, *, seconds: float) -> Iterator[tuple[ClusterStatus, float]]:
    """Yields reports with their ledgers and the time of each, often enough that none of their steps is missed, and one at the end."""
    end = time.monotonic() + seconds
    while True:
        asked_at = time.monotonic()
        status = chief.status(max_ledger_entries=_NUM_ENTRIES)
        # The chief made the report at some moment in between.
        yield status, (asked_at + time.monotonic()) / 2
        left_s = end - time.monotonic()
        if left_s <= 0:
            return
        step_s = sum(entry.duration_s for entry in status.ledger) / len(status.ledger) if status.ledger else _LONGEST_S
        pause_s = max(_SHORTEST_S, min(_LONGEST_S, step_s * _NUM_ENTRIES / 2))
        time.sleep(min(left_s, pause_s))  # the chief answers at once, so this loop sets the pace: half of the ledger may be replaced


def add_tensorboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tensorboard`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory for the event file; created if missing")
    add_arguments(parser)


def run_tensorboard(arguments: argparse.Namespace) -> int:
    """Writes until training ends and returns the exit code."""
    with chief_of(arguments) as chief:
        address, security = chief.address, chief.access.security  # reports an absent chief at once; an observer would wait for it
    cluster = Given(vars(arguments), os.environ)[options.CALLED_CLUSTER]
    try:
        writer = TensorBoardWriter(arguments.directory)
    except OSError as error:
        raise CommandFailed(
            f"cannot write to {arguments.directory}: {error.strerror}; choose another directory", exit_code=ExitCode.USAGE
        ) from error
    print(f"writing {writer.path} until training ends; look at it with: tensorboard --logdir {arguments.directory}", flush=True)
    with worker_client.observe(address, cluster=cluster, security=security, timeout_s=_TENSORBOARD_TIMEOUT_S) as observer:
        _record(observer, writer)
    return 0


def _record(observer: worker_client.Observer, writer: TensorBoardWriter) -> None:
    """Records once a second from the creation of the model on, and once more when training has ended."""
    has_model = False
    while True:
        state = (writer.record(observer) if has_model else observer.status()).state
        if state is ClusterState.FAILED or (has_model and state is ClusterState.FINISHED):
            return
        if has_model or state in _BEFORE:
            time.sleep(_TENSORBOARD_PERIOD_S)  # the resolution of event files; the chief answers at once, so this loop sets the pace
        has_model = has_model or state not in _BEFORE
