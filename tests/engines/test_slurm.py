"""A job of a real Slurm saves when its time is up, is queued again, and continues from there."""

import re
from pathlib import Path

import pytest

from tests.engines.slurm import Slurm
from tests.engines.ssh import LOCKSTEP

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("engine", ["slurm"], indirect=True)]


def test_each_worker_of_a_node_has_a_gpu_of_its_own(engine: Slurm, tmp_path: Path) -> None:
    program = 'import os; print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)'
    words = f"lockstep up --engine slurm -- python -c '{program}'".replace("lockstep", LOCKSTEP, 1)
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec {words}\n")
    limits = ("--wait", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", f"--output={tmp_path / 'out'}", f"--chdir={tmp_path}")
    engine.command("sbatch", *limits, str(tmp_path / "job.sh"))
    assert sorted(re.findall(r"\] GPU (.*)", (tmp_path / "out").read_text())) == ["0", "0", "1", "1"], (tmp_path / "out").read_text()


def test_a_job_whose_time_is_up_continues_in_the_next_one(engine: Slurm) -> None:
    run = engine.run(limits=("--time=1", "--signal=B:USR1@45"))
    run.await_step(1)
    engine.begin_anew()
    saved = re.findall(r"\[lockstep\] saved: (step-\d+)", run.out)
    assert saved and f"job {engine.job} goes into the queue again" in run.out, run.out
    engine.command("scontrol", "update", f"jobid={engine.job}", "TimeLimit=10")
    run.assert_trained()
    assert f"restored tag={saved[0]}" in run.out
