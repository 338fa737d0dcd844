"""The example of a strategy, over the processes of a cluster and alone: it learns, and both ways give the same."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_up
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "strategy_digits.py"

pytestmark = pytest.mark.timeout(120)


def _results(out: str) -> list[tuple[Any, ...]]:
    found = re.findall(r"(\d+ replicas): mean loss ([\d.]+), accuracy ([\d.]+)", out)
    return [(replicas, float(loss), float(accuracy)) for replicas, loss, accuracy in found]


def test_six_replicas_in_three_processes_learn_what_two_in_one_process_do(tmp_path: Path) -> None:
    alone = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    ((replicas, loss, accuracy),) = _results(alone.stdout)
    assert (replicas, accuracy >= 0.95) == ("2 replicas", True)
    status, out = run_up("--ps", "2", "--workers", "3", worker=EXAMPLE.read_text(encoding="utf-8"), run_dir=tmp_path / "run")
    assert status == 0, out
    # The same batches, cut otherwise: only the order of the sums differs.
    assert _results(out) == [("6 replicas", pytest.approx(loss, abs=2e-4), pytest.approx(accuracy, abs=0.003))] * 3, out
