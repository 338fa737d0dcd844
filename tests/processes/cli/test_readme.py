"""The first things that a reader will try work as the README, the tutorial and the page on migration say."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.processes.processes import Ended, run
from tests.support.repository import ROOT


def _example(page: str = "README.md", number: int = 0) -> str:
    examples: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return examples[number]


def _run(words: list[str], cwd: Path) -> Ended:
    return run(*words, cwd=cwd, environment={"PYTHONPATH": str(ROOT)}, timeout_s=100.0)


@pytest.mark.timeout(120)
def test_example_of_the_readme_learns_the_line_with_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_example(), encoding="utf-8")
    result = _run(["-m", "lockstep", "up", "--ps", "2", "--workers", "2", "--max-steps", "200", "--", sys.executable, "train.py"], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for worker in (0, 1):
        # NumPy 1 writes a number without its type.
        assert re.search(rf"worker {worker}: {{'w': array\(\[ 2\. , -1\. ,  0\.5\]\), 'b': (np\.float64\(4\.0\)|4\.0)}}", result.stdout)


def test_example_of_the_readme_runs_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_example().replace("connect()", "local(max_steps=200)"), encoding="utf-8")
    result = _run(["train.py"], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "array([ 2. , -1. ,  0.5])" in result.stdout


@pytest.mark.timeout(120)
def test_program_beside_the_original_trains_as_it_is_printed(tmp_path: Path) -> None:
    program = _example("docs/how-to/migrate.md", 1)
    assert "from worker_client.sync_replicas import *" in program
    assert "last_step=1000" in program
    (tmp_path / "program.py").write_text(program.replace("last_step=1000", "last_step=100"), encoding="utf-8")
    # As the program's first lines say.
    result = _run(["-m", "lockstep", "up", "--ps", "2", "--workers", "5", "--", sys.executable, "program.py"], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "training is finished at step 100:" in result.stdout + result.stderr


def test_program_of_the_tutorial_trains_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_example("docs/tutorials/first-cluster.md"), encoding="utf-8")
    result = _run(["train.py"], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "worker 0: w [ 2.  -1.   0.5] after 200 steps\n"
