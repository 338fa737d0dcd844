"""Killed in the middle of scheduled closures and of reductions: nothing is lost or counts twice, and the wait has words within 2 s."""

import re
from pathlib import Path

import pytest

from tests.support.commands import descendants, read_until, up

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

CLOSURES = """
import time
import numpy as np
import lockstep
from worker_client.strategy import ClusterCoordinator, serve

def square(x):
    time.sleep(0.02)  # work that takes long enough for a kill in the middle
    return x * x

with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(2)}, optimizer=lockstep.sgd(0.1))
    if session.worker_index:
        print("ran", serve(session, {"square": square}), flush=True)
    else:
        with ClusterCoordinator(session) as coordinator:
            values = [coordinator.schedule("square", (float(number),)) for number in range(200)]
            values[50].fetch()
            print("in the middle", flush=True)
            coordinator.join(100)
            print("sum", sum(coordinator.fetch(values)), flush=True)
"""
REDUCTIONS = """
import numpy as np
import lockstep
from worker_client.strategy import CollectiveHints, ParameterServerStrategy

with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    session.create_or_join({"w": np.zeros(2)}, optimizer=lockstep.sgd(0.1))
    for number in range(150):
        value = strategy.experimental_distribute_values_from_function(lambda c: np.full(50, 1.0 + number + c.replica_id_in_sync_group))
        total = strategy.extended.reduce_to("SUM", value, strategy.extended.parameter_devices[0], CollectiveHints(60.0))
        assert total.tolist() == [6.0 * number + 21.0] * 50, (number, total)
        if number == 40 and not session.worker_index:
            print("in the middle", flush=True)
    print("reduced", flush=True)
"""


def _killed(victim: str, program: str, tmp_path: Path) -> str:
    """Returns what was said from the middle on, after a kill -9 of a worker or of a role."""
    arguments = ("--ps", "2", "--workers", "3", "--min-replicas", "1", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    with up(*arguments, worker=program, run_dir=tmp_path / "run") as process:
        read_until(process, "in the middle")
        for one in descendants(process):
            if victim in one.cmdline() or (victim == "worker" and one.environ().get("LOCKSTEP_WORKER_INDEX") == "1"):
                one.kill()
                break
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
def test_closures_are_all_run_and_each_value_counts_once(victim: str, tmp_path: Path) -> None:
    out = _killed(victim, CLOSURES, tmp_path)
    assert f"sum {float(sum(number**2 for number in range(200)))}" in out
    assert re.search(r"join: waiting for 2 s: \d+ closures queued", out), out
    if victim == "worker":
        assert "was on worker 1, which is gone; another one runs it" in out
    else:
        assert sum(int(count) for count in re.findall(r"ran (\d+)", out)) >= 200


@pytest.mark.parametrize("victim", ["ps_server", "chief"])
def test_reductions_go_on_and_are_right(victim: str, tmp_path: Path) -> None:
    assert _killed(victim, REDUCTIONS, tmp_path).count("reduced") == 3
