"""A job of a real Slurm saves when its time is up, is queued again, and continues from there."""

import re

import pytest

from tests.engines.slurm import Slurm

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("engine", ["slurm"], indirect=True)]


def test_a_job_whose_time_is_up_continues_in_the_next_one(engine: Slurm) -> None:
    run = engine.run(limits=("--time=1", "--signal=B:USR1@45"))
    run.await_step(1)
    engine.begin_anew()
    saved = re.findall(r"\[lockstep\] saved: (step-\d+)", run.out)
    assert saved and f"job {engine.job} goes into the queue again" in run.out, run.out
    engine.command("scontrol", "update", f"jobid={engine.job}", "TimeLimit=10")
    run.assert_trained()
    assert f"restored tag={saved[0]}" in run.out
