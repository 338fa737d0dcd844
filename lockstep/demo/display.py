"""Shows a running demo, and writes its files. Knows status and processes; changes neither."""

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.demo.observer import DemoStatus
from lockstep.launcher.supervisor import LaunchFailed, Process, make_directory
from ps_protocol.model.variables import Array
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.output import BoundedOutput

# The display of a running demo: a live table on a terminal, plain lines elsewhere.


_PLAIN_PERIOD_S = 1.0


class Display(Protocol):
    """Shows a demo to its user."""

    def say(self, text: str) -> None:
        """Shows a message that is not overwritten."""

    def show(self, status: DemoStatus | None, processes: Sequence[Process]) -> None:
        """Shows the present status; may be called as often as one likes."""


@contextmanager
def open_display(output: BoundedOutput, *, num_steps: int, is_plain: bool) -> Iterator[Display]:
    """Opens the display for the output: plain if requested, without a terminal, or without rich."""
    if is_plain or not output.isatty():
        yield PlainDisplay(output, num_steps=num_steps)
        return
    try:
        from lockstep.demo.live import LiveDisplay
    except ImportError:
        output.write("(for a live table: pip install 'lockstep-ps[demo]')\n")
        yield PlainDisplay(output, num_steps=num_steps)
        return
    with LiveDisplay(output, num_steps=num_steps) as display:
        yield display


class PlainDisplay:
    """Prints one line per second."""

    def __init__(self, output: BoundedOutput, *, num_steps: int) -> None:
        self._output = output
        self._num_steps = num_steps
        self._shown_at = 0.0
        self._shown: DemoStatus | None = None
        self._has_said_pids = False

    def say(self, text: str) -> None:
        """Prints the words."""
        self._output.write(f"{text}\n")

    def show(self, status: DemoStatus | None, processes: Sequence[Process]) -> None:
        """Prints a line if the last one is a second old and the status has changed."""
        if not self._has_said_pids and len(processes) > 1:
            self._has_said_pids = True
            self.say("processes: " + ", ".join(f"{process.name} pid {process.pid}" for process in processes))
        is_last = status is not None and status.step >= self._num_steps
        if status is None or status is self._shown or (time.monotonic() < self._shown_at + _PLAIN_PERIOD_S and not is_last):
            return
        self._shown, self._shown_at = status, time.monotonic()
        self.say(status_line(status, num_steps=self._num_steps))


def status_line(status: DemoStatus, *, num_steps: int) -> str:
    """Returns a status as one line."""
    accepted = " ".join(f"{worker.index}:{worker.num_accepted}" for worker in status.workers)
    line = (
        f"step {status.step:>4}/{num_steps}  loss {status.loss:.4f}  test accuracy {status.test_accuracy:.3f}"
        f"  {status.steps_per_s:5.1f} steps/s  contributions {accepted}  stale {status.num_stale}  late {status.num_late}"
    )
    if status.max_staleness:
        line += f"  staleness up to {status.max_staleness}"
    return f"{line}  waiting: {status.waiting_for}" if status.waiting_for else line


# The files of a demo: metrics.csv while it runs, then model.npz and summary.json.


_NAMES = ("metrics.csv", "model.npz", "summary.json")


class DemoFiles:
    """A demo's files in one directory. Replaces the files of an earlier demo, and touches no others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        for path in (directory, self.logs):
            make_directory(path, flag="--output")
        try:
            for path in (*(directory / name for name in _NAMES), *self.logs.glob("*.log")):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise LaunchFailed(
                f"cannot write to {directory}: {error.strerror}; choose another --output", exit_code=ExitCode.USAGE
            ) from error

    def add_metrics(self, status: DemoStatus) -> None:
        """Adds a row to metrics.csv."""
        path = self.directory / "metrics.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            counts = {f"worker_{worker.index}_accepted": worker.num_accepted for worker in status.workers}
            if is_new:
                writer.writerow(["step", "elapsed_s", "loss", "test_accuracy", "steps_per_s", "stale", "late", *counts])
            row = [status.step, f"{status.elapsed_s:.3f}", f"{status.loss:.6f}", f"{status.test_accuracy:.6f}"]
            writer.writerow([*row, f"{status.steps_per_s:.2f}", status.num_stale, status.num_late, *counts.values()])

    def write_model(self, variables: Mapping[str, Array]) -> None:
        """Writes the variables; `numpy.load` returns them by name."""
        arrays: dict[str, Any] = dict(variables)
        np.savez(self.directory / "model.npz", **arrays)

    def write_summary(
        self, status: DemoStatus, *, setting: Mapping[str, object], seconds: float, ended_on_the_way: Mapping[str, str]
    ) -> None:
        """Writes the figures of the run as JSON; `setting`: the demo's arguments."""
        summary = {
            "steps": status.step,
            **setting,
            "seconds": round(seconds, 3),
            "test_accuracy": status.test_accuracy,
            "loss": status.loss,
            "stale": status.num_stale,
            "late": status.num_late,
            "max_staleness": status.max_staleness,
            "accepted_by_worker": {str(worker.index): worker.num_accepted for worker in status.workers},
            "workers_that_failed": dict(ended_on_the_way),
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def written(self) -> Sequence[Path]:
        """Returns the files that exist."""
        return [path for path in (*(self.directory / name for name in _NAMES), *sorted(self.logs.glob("*.log"))) if path.exists()]
