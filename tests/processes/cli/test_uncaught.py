"""Errors that a program does not catch: Python's own traceback, one, of the program's lines, and the error's type and words."""

import runpy
import traceback
from pathlib import Path
from types import TracebackType

import pytest

from ps_protocol.errors import PsError
from tests.support.processes.processes import run

STEP = """
import numpy as np
import lockstep
with lockstep.local() as session:
    session.create_or_join({"w": np.zeros((4, 2))}, optimizer=lockstep.sgd(0.1))
    session.step({"w": np.ones((2, 4))})
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (STEP, "ShapeMismatch: gradient for 'w': shape (2, 4), variable (4, 2); nothing is broadcast; push the gradient of 'w'"),
        (STEP.replace("step(", "push("), "ShapeMismatch: gradient for 'w': shape (2, 4), variable (4, 2)"),
        (STEP.replace("(4, 2)", "(4, 2), int"), "InvalidSpec: variable 'w': its initial value is int64; want float32 or float64"),
        (STEP.replace('step({"w": np.ones((2, 4))})', 'read_rows("w")'), "InvalidSpec: variable 'w' is dense"),
        (STEP.replace('step({"w": np.ones((2, 4))})', "set_hyperparameters(learning_rate=-1.0)"), "InvalidSpec: optimizer 'sgd'"),
        ("import lockstep\nlockstep.adam(-1.0)", "InvalidSpec: optimizer 'adam': learning_rate = -1.0, want >= 0"),
        ("import lockstep\nlockstep.connect('nowhere')", "InvalidSpec: address 'nowhere': no host and port in it; want host:port"),
        ("import lockstep\nlockstep.connect('127.0.0.1:1', timeout_s=0.1)", "Unavailable: cannot reach the chief at 127.0.0.1:1"),
        ("import lockstep\nlockstep.custom_optimizer('v - lr * gg', 0.1)", "InvalidSpec: formula, line 1, column 10: unknown name 'gg'"),
    ],
)
def test_a_mistake_is_one_traceback_of_the_programs_line_and_at_most_two_of_ours(tmp_path: Path, program: str, words: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(program)
    with pytest.raises(PsError) as raised:
        runpy.run_path(str(path), run_name="__main__")
    # What Python itself would print, less the frames of this test.
    frames: TracebackType | None = raised.tb
    while frames is not None and frames.tb_frame.f_code.co_filename != str(path):
        frames = frames.tb_next
    said = "".join(traceback.format_exception(raised.type, raised.value, frames))
    lines = said.splitlines()
    assert said.count("Traceback (most recent call last):") == 1, said
    first, *ours = [line for line in lines if line.startswith("  File")]
    assert first.startswith(f'  File "{path}"') and len(ours) <= 2, said
    assert lines[-1].startswith(f"lockstep.errors.{words}"), said


def test_an_import_changes_nothing_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    names = ("sys.excepthook", "threading.excepthook", "sys.unraisablehook", "signal.getsignal(2)", "logging.root.handlers")
    looks = f"[{', '.join(names)}]"
    path.write_text(f"import logging, signal, sys, threading\nbefore = {looks}\nimport lockstep, worker_client\nassert before == {looks}\n")
    done = run(path)
    assert (done.returncode, done.stderr) == (0, "")
