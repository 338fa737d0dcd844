"""Writes a training's scalars for TensorBoard, read by a session or an observer. Knows reports and event files; no thread, no address."""

import time
from collections.abc import Mapping
from pathlib import Path

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.event_file import EventFile
from ps_protocol.roles.chief import ClusterStatus, ParticipantKind
from worker_client.session.common import CommonCalls

_SHORTEST_S = 1e-6


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A cluster at one moment: `sums` has the sum of a metric's values times weights, and of the weights, by name."""

    at_s: float
    status: ClusterStatus
    sums: Mapping[str, tuple[float, float]]


class TensorBoardWriter:
    """Writes one event file in a directory, which is created if missing. For one thread.

    Call `record` about every second, with the same session or observer:

    writer = TensorBoardWriter("runs/1")
    ...
    writer.record(session)
    """

    def __init__(self, directory: str | Path) -> None:
        self._file = EventFile.in_directory(directory)
        self._before: Sample | None = None

    @property
    def path(self) -> Path:
        """The event file."""
        return self._file.path

    def record(self, watched: CommonCalls) -> ClusterStatus:
        """Writes the scalars since the last call if a step was made; returns the status. Raises what `status` and `read_metrics` raise."""
        status = watched.status()
        sums = {name: (report.sum, report.weight) for name, report in watched.read_metrics().items()}
        self.add(Sample(at_s=time.monotonic(), status=status, sums=sums))
        return status

    def add(self, sample: Sample) -> None:
        """Writes the scalars since the previous sample. Writes none for the first sample, and none for the first after a rollback."""
        before = self._before
        if before is not None and before.status.epoch == sample.status.epoch:
            if sample.status.global_step == before.status.global_step:
                return
            self._file.add_scalars(scalars(before, sample), step=sample.status.global_step)
        else:
            self._file.restart(step=sample.status.global_step)
        self._before = sample


def scalars(before: Sample, after: Sample) -> dict[str, float]:
    """Returns the values of the time between two samples of one epoch, by tag."""
    old, new, seconds = before.status, after.status, max(after.at_s - before.at_s, _SHORTEST_S)
    num_steps = new.global_step - old.global_step
    num_counted = (new.num_accepted - old.num_accepted, new.num_stale - old.num_stale, new.num_late - old.num_late)
    found = {
        "training/steps_per_second": num_steps / seconds,
        "training/seconds_per_step": seconds / num_steps,
        "training/contributions_per_second": sum(num_counted) / seconds,
        "training/live_workers": sum(one.state == "live" and one.kind is ParticipantKind.WORKER for one in new.participants),
        "training/max_staleness": new.max_observed_staleness,
    }
    if sum(num_counted):
        found["training/share_stale"] = num_counted[1] / sum(num_counted)
        found["training/share_late"] = num_counted[2] / sum(num_counted)
    for name, (total, weight) in after.sums.items():
        old_total, old_weight = before.sums.get(name, (0.0, 0.0))
        if weight > old_weight:
            found[f"metrics/{name}"] = (total - old_total) / (weight - old_weight)
    return found
