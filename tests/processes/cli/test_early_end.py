"""Workers that end with exit code 0 before the others and leave too few: training ends with a message, not in a silent wait."""

import textwrap
from pathlib import Path

import pytest

from tests.support.processes.commands import IDLE, TRAIN, are_gone, descendants, read_until, run_up, up

# What worker 1 does, put before and into the training of both.
LEAVES = {
    "before it joins": ("if is_first_to_go: sys.exit(0)", ""),
    "at step 10, without a goodbye": ("", "if is_first_to_go and session.local_step == 10: os._exit(0)"),
}


def leaving(how: str) -> str:
    before, within = LEAVES[how]
    head = f"import os, sys\nis_first_to_go = os.environ['LOCKSTEP_WORKER_INDEX'] == '1'\n{before}\n"
    return head + TRAIN.replace("        print(", f"        {within}\n        print(", 1)


@pytest.mark.parametrize("how", LEAVES)
def test_training_is_ended_when_a_worker_leaves_too_few_behind(tmp_path: Path, how: str) -> None:
    # The lease is long: nobody shall have to wait for its end.
    arguments = ("--workers", "2", "--lease", "300", "--max-steps", "50", "--chief-in-ps")
    code, out = run_up(*arguments, worker=leaving(how), run_dir=tmp_path / "run")
    step = 0 if how == "before it joins" else 10
    assert code == 1, out
    assert "[lockstep] worker 1 ended with exit code 0 while 1 of 2 workers still run; a step needs 2" in out
    assert f"[lockstep] training ended early at step {step}: too few workers are left" in out
    assert f"[worker 0] value {-step / 2}" in out, "the worker that waited was released, and ended by itself"
    assert "training finished" not in out


def test_a_released_worker_that_does_not_end_is_ended(tmp_path: Path) -> None:
    program = textwrap.indent(leaving("before it joins"), "    ")
    worker = f"import contextlib, lockstep\nwith contextlib.suppress(lockstep.errors.TrainingInterrupted):\n{program}\n{IDLE}"
    with up("--workers", "2", worker=worker, run_dir=tmp_path / "run") as process:
        read_until(process, "idle")
        everybody = descendants(process)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 1, out
    assert "training ended early at step 0" in out
    assert are_gone(everybody)
