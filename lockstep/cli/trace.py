"""`lockstep trace`: looks at a running cluster for some seconds and writes a trace. Knows its arguments, time and a file; no format."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from lockstep.cli.access import CommandFailed, add_arguments, chief_of
from lockstep.timeline import Timeline
from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import Chief, ClusterStatus

# As many as a chief keeps, and how often it is asked: before they are half gone.
_NUM_ENTRIES = 256
_LONGEST_S, _SHORTEST_S = 0.5, 0.02
_MOST_S = 600.0


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trace`."""
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="address of the chief; as --chief")
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long to look (default: 5)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="file to write (default: trace.json)")
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")


def run_trace(arguments: argparse.Namespace) -> int:
    """Writes the trace and returns the exit code: 1 if no step was made meanwhile."""
    if not 0 < arguments.seconds <= _MOST_S:
        raise InvalidSpec(f"--seconds: got {arguments.seconds:g}, want more than 0 and at most {_MOST_S:g}")
    arguments.chief = arguments.address or arguments.chief
    timeline = Timeline()
    with chief_of(arguments) as chief, _opened(arguments.output) as file:
        status = _look(chief, timeline, seconds=arguments.seconds, is_quiet=arguments.json)
        json.dump(timeline.trace(cluster=status.cluster), file, separators=(",", ":"))
    if arguments.json:
        print(json.dumps({"file": str(arguments.output), "num_steps": timeline.num_steps, "num_missed": timeline.num_missed}))
    elif timeline.is_empty:
        print(f"no step ended within {arguments.seconds:g} s: {status.waiting_for or status.reason or 'look for longer'}", file=sys.stderr)
    else:
        missed = f"; {timeline.num_missed} steps were too fast to be seen" if timeline.num_missed else ""
        print(f"{timeline.num_steps} steps in {arguments.output}{missed}; open it in https://ui.perfetto.dev or chrome://tracing")
    return 1 if timeline.is_empty else 0


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}; choose another -o FILE", exit_code=2) from error


def _look(chief: Chief, timeline: Timeline, *, seconds: float, is_quiet: bool) -> ClusterStatus:
    end = time.monotonic() + seconds
    if not is_quiet:
        print(f"looking for {seconds:g} s …", flush=True)
    while True:
        asked_at = time.monotonic()
        status = chief.status(max_ledger_entries=_NUM_ENTRIES)
        # The report is of some moment in between.
        timeline.add(status, at_s=(asked_at + time.monotonic()) / 2)
        left_s = end - time.monotonic()
        if left_s <= 0:
            return status
        step_s = sum(entry.duration_s for entry in status.ledger) / len(status.ledger) if status.ledger else _LONGEST_S
        time.sleep(min(left_s, max(_SHORTEST_S, min(_LONGEST_S, step_s * _NUM_ENTRIES / 2))))
