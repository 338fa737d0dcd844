"""`lockstep up --dry-run`: a program in one process for a few steps, and the mistakes that are found in it."""

import os
from pathlib import Path

import pytest

from tests.support.processes.commands import TRAIN
from tests.support.processes.processes import run

MODEL = "session.create_or_join({'w': np.zeros(4)}, optimizer=lockstep.sgd(0.5))"
BEGIN = "import numpy as np, lockstep\nwith lockstep.connect() as session:\n"


def dry_run(tmp_path: Path, program: str, *arguments: str) -> tuple[int, str]:
    path = tmp_path / "train.py"
    path.write_text(program)
    done = run("-m", "lockstep", "up", "--workers", "3", "--dry-run", *arguments, "--", "python", path, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr


def test_a_program_that_is_right_makes_its_steps_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, out = dry_run(tmp_path, TRAIN)
    assert (code, out.count("step ")) == (0, 5), out
    assert "[dry run] 5 steps in" in out and "found nothing wrong" in out
    assert dry_run(tmp_path, TRAIN, "--max-steps", "3")[1].count("step ") == 3
    assert os.listdir(tmp_path) == ["train.py"]


def test_the_one_worker_of_a_dry_run_gets_all_of_the_data_that_it_divides(tmp_path: Path) -> None:
    program = (
        f"{BEGIN}    print(list(range(4)[session.worker_index :: session.num_workers]))\n    {MODEL}\n    session.step({{'w': np.ones(4)}})"
    )
    code, out = dry_run(tmp_path, program)
    assert code == 0 and "[0, 1, 2, 3]" in out, out


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('hello')", "the program opened no session: call lockstep.connect()"),
        (f"{BEGIN}    pass", "it created no model: call session.create_or_join()"),
        (f"{BEGIN}    {MODEL}\n    session.read()", "it made no step: call session.step()"),
        (
            f"{BEGIN}    {MODEL}\n    while True: session.step({{'w': np.ones(4)}})",
            "it continued after the last step: check session.is_finished",
        ),
        (
            f"{BEGIN}    {MODEL}\n    session.step({{'w': np.full(4, np.nan)}})",
            "4 elements of the last step's gradient were NaN",
        ),
        (f"{BEGIN}    {MODEL}\n    session.step({{'w': np.ones(3)}})", "ShapeMismatch: gradient for 'w'"),
        ("import sys; sys.exit('bad luck')", "[dry run] the program ended with exit code 1: see above\nbad luck"),
    ],
)
def test_a_dry_run_reports_the_mistake_of_a_program(tmp_path: Path, program: str, words: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(program)
    told = {"LOCKSTEP_CHIEF": "local", "LOCKSTEP_WORKER_INDEX": "0", "LOCKSTEP_NUM_WORKERS": "3", "LOCKSTEP_MAX_STEPS": "5"}
    done = run("-m", "lockstep.dry_run", path, environment=told)
    out = done.stdout + done.stderr
    assert done.returncode == 1 and words in out, out
    assert "worker_client/" not in out and "runpy" not in out and "dry_run.py" not in out, "only the program's own lines"


def test_a_command_that_runs_no_python_program_is_refused(tmp_path: Path) -> None:
    done = run("-m", "lockstep", "up", "--dry-run", "--", "true", cwd=tmp_path)
    assert (done.returncode, "--dry-run: want a Python program" in done.stderr) == (2, True)


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__main__.py").write_text(TRAIN)
    done = run("-m", "lockstep", "up", "--dry-run", "--", "python", "-m", "training", "2", cwd=tmp_path)
    assert "[dry run] 2 steps in" in done.stdout, done.stdout + done.stderr
