"""The files that a demo leaves: metrics.csv while it runs, then model.npz and summary.json. Knows their form; measures nothing."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.demo_progress import Progress
from lockstep.supervision import LaunchFailed, make_directory
from ps_protocol.tensors import Array

_NAMES = ("metrics.csv", "model.npz", "summary.json")


class DemoFiles:
    """One directory. Files of a former demo are replaced; anything else in it is left alone."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"
        for path in (directory, self.logs):
            make_directory(path, flag="--output")
        try:
            for path in (*(directory / name for name in _NAMES), *self.logs.glob("*.log")):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise LaunchFailed(f"cannot write to {directory}: {error.strerror}; choose another --output", exit_code=2) from error

    def add_metrics(self, progress: Progress) -> None:
        """Adds a row to metrics.csv."""
        path = self.directory / "metrics.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            counts = {f"worker_{worker.index}_accepted": worker.num_accepted for worker in progress.workers}
            if is_new:
                writer.writerow(["step", "elapsed_s", "loss", "test_accuracy", "steps_per_s", "stale", "late", *counts])
            row = [progress.step, f"{progress.elapsed_s:.3f}", f"{progress.loss:.6f}", f"{progress.test_accuracy:.6f}"]
            writer.writerow([*row, f"{progress.steps_per_s:.2f}", progress.num_stale, progress.num_late, *counts.values()])

    def write_model(self, variables: Mapping[str, Array]) -> None:
        """Writes the variables; `numpy.load` gives them back by name."""
        arrays: dict[str, Any] = dict(variables)
        np.savez(self.directory / "model.npz", **arrays)

    def write_summary(
        self, progress: Progress, *, setting: Mapping[str, object], seconds: float, ended_on_the_way: Mapping[str, str]
    ) -> None:
        """Writes what a program may want to know of the run; `setting` is what was asked for."""
        summary = {
            "steps": progress.step,
            **setting,
            "seconds": round(seconds, 3),
            "test_accuracy": progress.test_accuracy,
            "loss": progress.loss,
            "stale": progress.num_stale,
            "late": progress.num_late,
            "max_staleness": progress.max_staleness,
            "accepted_by_worker": {str(worker.index): worker.num_accepted for worker in progress.workers},
            "workers_that_failed": dict(ended_on_the_way),
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def written(self) -> Sequence[Path]:
        """Returns the files that are there."""
        return [path for path in (*(self.directory / name for name in _NAMES), *sorted(self.logs.glob("*.log"))) if path.exists()]
