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
from worker_client.strategy import CollectiveHints, ParameterServerStrategy, Variable, get_replica_context

NUMBER = 80

def merged(strategy, values, done, total):
    found = strategy.extended.reduce_to("SUM", values, total, CollectiveHints(timeout_seconds=60.0))
    strategy.extended.update(total, "v + g", kwargs={"g": found})
    strategy.extended.update(done, "v + 1")

def step(number, done, total):
    context = get_replica_context()
    context.merge_call(merged, (np.full(50, 1.0 + number + context.replica_id_in_sync_group), done, total))

with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    with strategy.scope():
        done, total = Variable(0.0, name="done"), Variable(np.zeros(50), name="total")
    # A program that is started again goes on where the variables are.
    while (number := int(done.read_value())) < NUMBER:
        strategy.run(step, args=(number, done, total))
        if number == 25 and not session.worker_index:
            print("in the middle", flush=True)
    print("reduced to", set(total.read_value().tolist()), flush=True)
"""


def _killed(victim: str, program: str, tmp_path: Path, *more: str) -> str:
    """Returns what was said from the middle on, after a kill -9 of a worker or of a role."""
    arguments = ("--ps", "2", "--workers", "3", *more, "--checkpoint-dir", str(tmp_path / "checkpoints"))
    with up(*arguments, worker=program, run_dir=tmp_path / "run") as process:
        read_until(process, "in the middle")
        for one in descendants(process):
            index = one.environ().get("LOCKSTEP_WORKER_INDEX", "none")
            if victim in one.cmdline() or victim == f"worker {index}":
                one.kill()
                break
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("victim", ["worker 1", "ps_server", "chief"])
def test_closures_are_all_run_and_each_value_counts_once(victim: str, tmp_path: Path) -> None:
    out = _killed(victim, CLOSURES, tmp_path, "--min-replicas", "1")
    assert f"sum {float(sum(number**2 for number in range(200)))}" in out
    assert re.search(r"join: waiting for 2 s: \d+ closures queued", out), out
    if victim == "worker 1":
        assert "was on worker 1, which is gone; another one runs it" in out
    else:
        assert sum(int(count) for count in re.findall(r"ran (\d+)", out)) >= 200


@pytest.mark.parametrize("victim", ["worker 0", "worker 1", "ps_server", "chief"])
def test_reductions_count_once_and_none_is_lost(victim: str, tmp_path: Path) -> None:
    out = _killed(victim, REDUCTIONS, tmp_path, "--durability", "step", "--restart-workers", "9")
    total = sum(6.0 * number + 21.0 for number in range(80))
    assert out.count(f"reduced to {{{total}}}") == 3, out
    name = {"ps_server": r"ps \d", "chief": "chief"}.get(victim, victim)
    assert re.search(rf"{name}.* killed by SIGKILL", out), out
