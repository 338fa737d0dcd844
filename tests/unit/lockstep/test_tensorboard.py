"""Event files of a training: their values, their steps, and the effect of a rollback. Reads the files record by record."""

from pathlib import Path

import numpy as np

import worker_client
from lockstep.tensorboard import Sample, TensorBoardWriter, scalars
from tests.support.chief.cluster_status import cluster_status, worker_status
from tests.support.formats.event_files import events


def sample(at_s: float, step: int, *, epoch: int = 1, **changes: object) -> Sample:
    sums = {"loss": (float(changes.pop("loss", 0.0)), float(changes.pop("weight", 0.0)))}  # type: ignore[arg-type]
    return Sample(at_s=at_s, status=cluster_status(worker_status(0), global_step=step, epoch=epoch, **changes), sums=sums)


def test_values_are_those_of_the_time_between_two_samples() -> None:
    before, after = sample(10.0, 100, loss=50.0, weight=10.0, num_accepted=100), sample(12.0, 150, loss=54.0, weight=18.0, num_accepted=140)
    found = scalars(before, Sample(at_s=12.0, status=after.status, sums=after.sums))
    assert found["training/steps_per_second"] == 25.0 and found["training/seconds_per_step"] == 0.04
    assert found["training/contributions_per_second"] == 20.0 and found["training/share_stale"] == 0.0
    assert found["metrics/loss"] == 0.5
    assert found["training/live_workers"] == 1


def test_metric_that_nobody_reported_meanwhile_has_no_point() -> None:
    assert "metrics/loss" not in scalars(sample(1.0, 1, loss=3.0, weight=3.0), sample(2.0, 2, loss=3.0, weight=3.0))


def test_nothing_is_written_while_no_step_is_made_and_a_rollback_is_marked(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "runs" / "1")
    for at_s, step, epoch in ((1.0, 10, 1), (2.0, 20, 1), (3.0, 20, 1), (4.0, 15, 2), (5.0, 16, 2)):
        writer.add(sample(at_s, step, epoch=epoch))
    found = events(writer.path)
    assert [(one.step, one.is_start, bool(one.scalars)) for one in found[1:]] == [
        (10, True, False),
        (20, False, True),
        (15, True, False),
        (16, False, True),
    ]


def test_session_in_this_process_is_recorded(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    with worker_client.local() as session:
        session.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.sgd(0.1))
        writer.record(session)
        for _ in range(4):
            session.step({"w": np.ones(2)}, metrics={"loss": 0.25})
        writer.record(session)
    last = events(writer.path)[-1]
    assert last.step == 4 and last.scalars["metrics/loss"] == 0.25 and last.scalars["training/steps_per_second"] > 0
