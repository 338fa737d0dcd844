"""`lockstep up --tensorboard` and `lockstep tensorboard`: event files of a real cluster; training does not depend on them."""

from pathlib import Path

from tests.support.formats.event_files import events
from tests.support.processes.commands import run_up

PROGRAM = """
import time
import numpy as np
import lockstep

with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(3)}, optimizer=lockstep.sgd(0.1))
    end = time.monotonic() + 40
    while not session.is_finished and time.monotonic() < end:
        session.step({"w": np.ones(3)}, metrics={"loss": 0.5})
        time.sleep(0.01)  # the pace of training: a step takes some time, so that a second has a hundred of them
"""


def test_up_has_event_files_written_until_training_ends(tmp_path: Path) -> None:
    words = ("--chief-in-ps", "--workers", "1", "--max-steps", "300", "--tensorboard", str(tmp_path / "board"))
    code, out = run_up(*words, worker=PROGRAM, run_dir=tmp_path / "run")
    assert code == 0, out
    (path,) = (tmp_path / "board").iterdir()
    points = [event for event in events(path) if event.scalars]
    assert points and points[-1].step == 300, "the last point is the end of training"
    assert all(event.scalars["training/steps_per_second"] > 0 for event in points)
    # What workers report is read a moment after the step, and may belong to the point before.
    assert {event.scalars["metrics/loss"] for event in points if "metrics/loss" in event.scalars} == {0.5}
    assert [event.step for event in points] == sorted({event.step for event in points})


def test_training_continues_where_no_event_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("a file")
    words = ("--chief-in-ps", "--workers", "1", "--max-steps", "50", "--tensorboard", str(tmp_path / "board"))
    code, out = run_up(*words, worker=PROGRAM, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "cannot write to" in out
