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

# Of three workers the second dies in the middle of its work, without a word.
DIES = """
import os, signal
import numpy as np
import lockstep
from worker_client.strategy import CollectiveHints, ParameterServerStrategy
with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    for number in range(3):
        value = strategy.experimental_distribute_values_from_function(lambda c: np.float64(c.replica_id_in_sync_group))
        if number == 2 and session.worker_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total = strategy.extended.reduce_to("SUM", value, value, CollectiveHints(timeout_seconds=3.0))
            print("reduced to", float(np.asarray(total)), flush=True)
        except lockstep.PsError as error:
            print("failed:", error, flush=True)
"""

pytestmark = pytest.mark.timeout(120)


def _results(out: str) -> list[tuple[Any, ...]]:
    found = re.findall(r"(\d+ replicas): mean loss ([\d.]+), accuracy ([\d.]+)", out)
    return [(replicas, float(loss), float(accuracy)) for replicas, loss, accuracy in found]


def test_six_replicas_in_three_processes_learn_what_two_in_one_process_do(tmp_path: Path) -> None:
    alone = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    ((replicas, loss, accuracy),) = _results(alone.stdout)
    assert (replicas, accuracy >= 0.95) == ("2 replicas", True)
    status, out = run_up("--ps", "1", "--workers", "3", worker=EXAMPLE.read_text(encoding="utf-8"), run_dir=tmp_path / "run")
    assert status == 0, out
    # The same batches, cut otherwise: only the order of the sums differs.
    assert _results(out) == [("6 replicas", pytest.approx(loss, abs=2e-4), pytest.approx(accuracy, abs=0.003))] * 3, out


def test_a_worker_that_is_killed_before_a_reduction_is_named_by_the_others(tmp_path: Path) -> None:
    _, out = run_up("--ps", "1", "--workers", "3", "--min-replicas", "2", worker=DIES, run_dir=tmp_path / "run")
    assert len(re.findall(r"\[worker \d\] reduced to 15.0", out)) == 6, out
    assert len(re.findall(r"failed: .*missing after 3 s: replicas 2 to 3 of worker 1", out)) == 2, out
    assert "waiting for 2 s" in out
