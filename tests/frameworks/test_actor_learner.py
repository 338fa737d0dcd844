"""Actors that follow the weights, on a real environment: none of their samples is older than agreed, also where actors are killed."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("gymnasium", reason="gymnasium is not installed: `make test-frameworks` has it")

from tests.support.repository import ROOT

NUM_STEPS, NUM_ACTORS = 60, 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("flags", "most_lag"), [(["--lose-every", "15"], 2), (["--synchronous"], 0)], ids=["come and go", "synchronous"])
def test_every_sample_is_of_a_step_that_is_near(flags: list[str], most_lag: int) -> None:
    learner = [sys.executable, "examples/actor_learner.py", "--steps", str(NUM_STEPS), *flags]
    command = [sys.executable, "-m", "lockstep", "up", "--ps", "1", "--workers", "1", "--", *learner]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if '"lags"' in line]
    report = json.loads(line[line.index("{") :])
    lags = {int(lag): count for lag, count in report["lags"].items() if lag.isdecimal()}
    assert sum(lags.values()) == NUM_STEPS * NUM_ACTORS and max(lags) <= most_lag
    assert report["reward"] > 0 and report["samples_a_s"] > 0
