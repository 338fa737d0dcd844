"""The example of a trainer with two generators learns from their samples, which carry the step of the weights that made them."""

import re
from pathlib import Path

import pytest

from tests.support.processes.commands import up
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "generate_while_it_trains.py"


@pytest.mark.timeout(200)
def test_two_generators_follow_a_trainer_that_learns_from_their_samples(tmp_path: Path) -> None:
    with up("--chief-in-ps", "--workers", "1", worker=EXAMPLE.read_text(encoding="utf-8"), run_dir=tmp_path / "run") as process:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    found = re.findall(r"step \d+: reward ([\d.]+), samples ([\d.]+) steps old", said)
    rewards, ages = [float(reward) for reward, _ in found], [float(age) for _, age in found]
    assert len(found) == 6, said
    assert rewards[-1] > 0.9 > rewards[0], "a lever in ten is right at first"
    assert all(age < 10 for age in ages), "of the newest weights, less what waits to be trained on"
