"""A job of a real Slurm saves when its time is up, is queued again, and continues from there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.slurm import Slurm
from tests.engines.ssh import LOCKSTEP
from tests.support.processes.commands import TRAIN
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("engine", ["slurm"], indirect=True)]


def test_each_worker_of_a_node_has_a_gpu_of_its_own(engine: Slurm, tmp_path: Path) -> None:
    program = 'import os; print("GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)'
    words = f"lockstep up --engine slurm -- python -c '{program}'".replace("lockstep", LOCKSTEP, 1)
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec {words}\n")
    limits = ("--wait", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", f"--output={tmp_path / 'out'}", f"--chdir={tmp_path}")
    engine.command("sbatch", *limits, str(tmp_path / "job.sh"))
    assert sorted(re.findall(r"\] GPU (.*)", (tmp_path / "out").read_text())) == ["0", "0", "1", "1"], (tmp_path / "out").read_text()


def test_what_a_job_lacks_is_said_in_a_sentence(engine: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)

    def run(name: str, flags: str) -> str:
        line = f"{LOCKSTEP} up --engine slurm {flags} -- python train.py"
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\nwhile [ ! -e {tmp_path / name} ]; do sleep 0.1; done\nexec {line}\n")
        out = tmp_path / f"{name}.out"
        limits = ("--parsable", "--nodes=2", "--no-kill", f"--output={out}", f"--chdir={tmp_path}")
        job = engine.command("sbatch", *limits, str(tmp_path / "job.sh")).strip()
        wait_until(lambda: "RUNNING" in engine.command("squeue", "-h", "-j", job, "-o", "%T"), what="the job runs", timeout_s=30)
        if name == "node":
            engine.lose("worker 1")
        (tmp_path / name).touch()
        wait_until(lambda: out.exists() and "lockstep up: " in out.read_text(), what="it says what is missing", timeout_s=60)
        said = out.read_text()
        assert "Traceback" not in said, said
        return said.partition("lockstep up: ")[2]

    said = run("program", "--host-python /nowhere/python")
    assert re.match(r"host h1 does not run Lockstep's agent: srun ended with exit code 127(: .*)?; try it: srun", said), said
    said = run("node", "")
    assert re.match(r"host h2 does not run Lockstep's agent: srun ended with exit code \d+(: .*)?; try it: srun .* --nodelist=h2", said), (
        said
    )


def test_a_module_that_a_node_lacks_is_named_with_the_node(engine: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, lockstep\nif os.uname().nodename == 'h2':\n    import nosuchmodule\n" + TRAIN)
    words = f"{LOCKSTEP} up --engine slurm --max-steps 20 -- {sys.executable} train.py"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec {words}\n")
    engine.command("sbatch", "--wait", "--nodes=2", f"--output={tmp_path / 'out'}", f"--chdir={tmp_path}", str(tmp_path / "job.sh"))
    said = (tmp_path / "out").read_text()
    assert re.search(r"worker 1 \(pid \d+\) failed on h2: exit code 1: ModuleNotFoundError: No module named 'nosuchmodule'", said), said
    assert "training was interrupted at step 0: worker 1 failed first" in said, said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--partition=nowhere", "invalid partition specified: nowhere"),
        ("--nodes=3 --exclusive --immediate=1", "Requested nodes are busy"),
    ],
)
def test_what_slurm_cannot_give_it_says_within_seconds(engine: Slurm, tmp_path: Path, flags: str, words: str) -> None:
    if "immediate" in flags:
        engine.command("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 60")
        wait_until(lambda: "RUNNING" in engine.command("squeue", "-h", "-o", "%T"), what="all nodes are taken", timeout_s=30)
    command = ["srun", *flags.split(), LOCKSTEP, "up", "--engine", "slurm", "--", "python", "train.py"]
    ended = subprocess.run(command, env=engine.environment, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode and words in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_a_job_at_its_time_limit_saves_though_nothing_has_warned_it(engine: Slurm) -> None:
    run = engine.run("--max-steps", "5000", limits=("--time=1", "--signal=B:CONT@1"))  # a signal that changes nothing, in place of ours
    run.await_step(1)
    assert wait_until(lambda: engine.state == "TIMEOUT", what="its time is up", timeout_s=120)
    saved = re.findall(r"\[lockstep\] saved: step-(\d+)", run.out)
    assert saved and "ended by SIGTERM: all processes have been ended" in run.out and "DUE TO TIME LIMIT" in run.out, run.out


def test_a_job_whose_time_is_up_continues_in_the_next_one(engine: Slurm) -> None:
    run = engine.run(limits=("--time=10", "--signal=B:USR1@90"))
    run.await_step(1)
    engine.limit_time()  # only now: its signal may come before the launcher is there
    engine.begin_anew()
    saved = re.findall(r"\[lockstep\] saved: (step-\d+)", run.out)
    assert saved and f"job {engine.job} goes into the queue again" in run.out, run.out
    run.assert_trained()
    assert f"restored tag={saved[0]}" in run.out
