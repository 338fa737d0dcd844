"""`lockstep up --tensorboard` and `lockstep tensorboard`: event files of a real cluster; training does not depend on them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.formats.event_files import events
from tests.support.repository import ROOT

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


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def up(program: Path, tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lockstep", "up", "--run-dir", tmp_path / "run", *words, "--", sys.executable, program]
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=50)


def test_up_has_event_files_written_until_training_ends(program: Path, tmp_path: Path) -> None:
    ended = up(program, tmp_path, "--max-steps", "300", "--tensorboard", str(tmp_path / "board"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = (tmp_path / "board").iterdir()
    points = [event for event in events(path) if event.scalars]
    assert points and points[-1].step == 300, "the last point is the end of training"
    assert all(event.scalars["metrics/loss"] == 0.5 and event.scalars["training/steps_per_second"] > 0 for event in points)
    assert [event.step for event in points] == sorted({event.step for event in points})


def test_training_continues_where_no_event_file_can_be_written(program: Path, tmp_path: Path) -> None:
    (tmp_path / "board").write_text("a file")
    ended = up(program, tmp_path, "--max-steps", "50", "--tensorboard", str(tmp_path / "board"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "cannot write to" in ended.stdout
