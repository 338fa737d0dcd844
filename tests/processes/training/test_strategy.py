"""The example of a strategy, over the processes of a cluster and alone: it learns, and both ways give the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.commands import run_up
from tests.support.processes.processes import run
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "strategy_digits.py"


pytestmark = pytest.mark.timeout(120)


def _results(out: str) -> list[tuple[Any, ...]]:
    found = re.findall(r"(\d+ replicas): mean loss ([\d.]+), accuracy ([\d.]+)", out)
    return [(replicas, float(loss), float(accuracy)) for replicas, loss, accuracy in found]


def test_six_replicas_in_three_processes_learn_what_two_in_one_process_do(tmp_path: Path) -> None:
    ((replicas, _, accuracy),) = _results(run(EXAMPLE).stdout)
    assert (replicas, accuracy >= 0.95) == ("2 replicas", True)
    # What both ways give is compared after a quarter of the steps.
    program = EXAMPLE.read_text(encoding="utf-8").replace("NUM_STEPS = 120", "NUM_STEPS = 30")
    ((replicas, loss, accuracy),) = _results(run("-c", program).stdout)
    assert (replicas, 0.5 < accuracy < 0.95) == ("2 replicas", True)
    status, out = run_up("--chief-in-ps", "--workers", "3", worker=program, run_dir=tmp_path / "run")
    assert status == 0, out
    # The same batches, cut otherwise: only the order of the sums differs.
    assert _results(out) == [("6 replicas", pytest.approx(loss, abs=2e-4), pytest.approx(accuracy, abs=0.003))] * 3, out
