"""Optimizers given as formulas, over processes: the example learns, with standbys, and the audit computes its steps again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ps_protocol.process.history import read_history
from ps_protocol.roles.history import Begun, Counted
from tests.support.processes.commands import lockstep_here, run_up
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "custom_optimizers.py"

pytestmark = pytest.mark.timeout(120)


def _accuracies(out: str) -> list[float]:
    return [float(accuracy) for accuracy in re.findall(r"accuracy ([\d.]+)", out)]


def test_lion_and_lamb_as_formulas_learn_and_each_step_is_computed_again_from_the_history(tmp_path: Path) -> None:
    history = tmp_path / "history"
    arguments = ("--ps", "1", "--workers", "2", "--standbys", "--history", str(history))
    code, out = run_up(*arguments, worker=EXAMPLE.read_text(encoding="utf-8"), run_dir=tmp_path / "run")
    assert code == 0, out
    assert len(_accuracies(out)) == 2 and min(_accuracies(out)) >= 0.95, out
    verdict = lockstep_here("audit", str(history))
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "300 steps of servers computed again" in verdict.stdout, verdict.stdout
    written = [*read_history(history)]
    assert [one.role for one in written].count("ps-0") == 2, "of a server and its standby"
    assert [type(record.event) for one in written if one.role == "chief" for record in one.records] == [Begun, *[Counted] * 150]


def test_the_example_needs_no_cluster() -> None:
    alone = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    assert len(_accuracies(alone.stdout)) == 2 and min(_accuracies(alone.stdout)) >= 0.94, alone.stdout
