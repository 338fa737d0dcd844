"""A job of a real Slurm trains on three nodes by the documented script, through the loss of each, its time limit and `scancel`."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.demo import Demo
from tests.engines.slurm import Slurm, slurm, why_no_slurm
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

if why := why_no_slurm():
    pytest.skip(f"no Slurm here: {why}", allow_module_level=True)
pytestmark = pytest.mark.timeout(400)
SCRIPT = re.search(r"^```\n(#!/bin/bash\n#SBATCH.*?)^```", (ROOT / "docs/how-to/running.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "slurm").mkdir()
    with slurm(3, tmp_path / "slurm") as made:
        yield made


class Job(Demo):
    """The documented script, with the demo as its program."""

    def __init__(self, nodes: Slurm, directory: Path, *flags: str, pace: str = "0.05", limits: tuple[str, ...] = ("--time=10",)) -> None:
        assert SCRIPT is not None
        words = f"{Path(sys.executable).parent / 'lockstep'} demo --pace {pace} --lease 3 --checkpoint-steps 50 {' '.join(flags)}"
        text = SCRIPT[1].replace("lockstep up", words).replace("/shared/job", str(directory / "kept")).replace("-- python train.py", "")
        assert "#SBATCH --no-kill" in text and "train.py" not in text
        (directory / "job.sh").write_text(text)
        super().__init__(directory / "out")
        self._nodes = nodes
        self.number = nodes.submit(directory / "job.sh", self.path, f"--chdir={directory}", *limits)

    def await_end(self) -> None:
        self._nodes.await_end(self.number, timeout_s=150)

    def run_on(self) -> None:
        """Has Slurm begin a job at once that is queued again: it would wait for two minutes."""
        wait_until(lambda: self._nodes.state_of(self.number) == "PENDING", what="it is queued again", timeout_s=120)
        self._nodes.run("scontrol", "update", f"jobid={self.number}", "StartTime=now")


def test_a_job_trains_the_digits_on_all_nodes_and_leaves_nothing_there(nodes: Slurm, tmp_path: Path) -> None:
    job = Job(nodes, tmp_path, pace="0.01")
    job.await_end()
    job.assert_trained()
    assert {name for _, name in re.findall(r"worker (\d) joined on (\w+)", job.out)} == {"h1", "h2", "h3"}
    assert nodes.state_of(job.number) == "COMPLETED"


@pytest.mark.parametrize(("node", "what"), [("h3", "worker 2"), ("h2", "ps 1")])
def test_a_job_that_loses_a_node_goes_on_within_ten_seconds_of_slurms_notice(nodes: Slurm, tmp_path: Path, node: str, what: str) -> None:
    job = Job(nodes, tmp_path, "--max-steps", "1000")
    job.await_step(60)
    nodes.net.kill(node)
    wait_until(lambda: nodes.is_down(node), what="Slurm notices it", timeout_s=60)
    noticed_at, step = time.monotonic(), job.step
    needed = "" if node == "h3" else f"{what} is started again"  # there is a worker in reserve
    wait_until(lambda: needed in job.out and job.step > step, what="it goes on", timeout_s=10)
    print(f"went on {time.monotonic() - noticed_at:.1f} s after the notice")
    job.await_end()
    job.assert_trained()


def test_a_job_that_loses_the_node_of_its_script_is_queued_again_and_continues(nodes: Slurm, tmp_path: Path) -> None:
    job = Job(nodes, tmp_path)
    job.await_step(60)
    nodes.net.kill("h1")
    job.run_on()
    wait_until(lambda: nodes.is_down("h1"), what="Slurm notices it", timeout_s=60)
    nodes.revive("h1")
    job.await_end()
    job.assert_trained()
    assert re.search(r"ps 0 restored tag=step-0000000[5-9]", job.out), job.out


def test_a_job_whose_time_is_up_continues_in_the_next_one(nodes: Slurm, tmp_path: Path) -> None:
    job = Job(nodes, tmp_path, limits=("--time=1", "--signal=B:USR1@45"))
    job.await_step(1)
    job.run_on()
    saved = re.findall(r"\[lockstep\] saved: (step-\d+)", job.out)
    assert saved and f"job {job.number} goes into the queue again" in job.out, job.out
    nodes.run("scontrol", "update", f"jobid={job.number}", "TimeLimit=10")
    job.await_end()
    job.assert_trained()
    assert f"restored tag={saved[0]}" in job.out


def test_a_cancelled_job_saves_its_last_step(nodes: Slurm, tmp_path: Path) -> None:
    job = Job(nodes, tmp_path, "--checkpoint-interval", "1000")
    job.await_step(30)
    nodes.run("scancel", job.number)
    job.await_end()
    steps = [int(one.name.split("-")[1]) for one in (tmp_path / "kept").glob("step-*[0-9]")]
    assert max(steps) >= 30 and max(steps) % 50, (steps, job.out)
