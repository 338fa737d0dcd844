"""Kills in the middle of scheduled closures and of reductions: nothing is lost or counts twice, and a wait is explained within 2 s."""

import re
from pathlib import Path

import pytest

from tests.support.processes.commands import descendants, read_until, up

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
import os
import signal
import time
import numpy as np
import lockstep
from worker_client.strategy import CollectiveHints, ParameterServerStrategy, Variable, get_replica_context

NUMBER = 40
HINTS = CollectiveHints(timeout_seconds=60.0)

def reaches(point):
    # The point where a program's process is to end, once.
    if os.environ.get("END_AT") == f"worker {session.worker_index} {point}" and number == 10 and is_first:
        print("in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

def merged(strategy, values, done, total):
    reaches("before it reduces")
    found = strategy.extended.reduce_to("SUM", values, total, HINTS)
    reaches("between two reductions")
    count = strategy.extended.reduce_to("SUM", strategy.experimental_distribute_values_from_function(lambda _: np.float64(1)), done, HINTS)
    reaches("before it writes")
    strategy.extended.update(total, "v + g", kwargs={"g": found})
    strategy.extended.update(done, "v + n / 6", kwargs={"n": count})

def step(done, total):
    context = get_replica_context()
    values = np.full(50, 1.0 + number + context.replica_id_in_sync_group)
    context.merge_call(merged, (values, done, total))

with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    is_first = session.membership.participant.incarnation == 1
    if not is_first:
        time.sleep(3)  # a program that takes long to start
    with strategy.scope():
        done, total = Variable(0.0, name="done"), Variable(np.zeros(50), name="total")
    # A program that is started again continues where the variables are.
    while (number := int(done.read_value())) < NUMBER:
        strategy.run(step, args=(done, total))
        if number == 10 and not session.worker_index and "END_AT" not in os.environ:
            print("in the middle", flush=True)
    print("reduced to", set(total.read_value().tolist()), flush=True)
"""
# A closure of these programs takes 0.02 s.
HANGS = r"join: waiting for 2 s: .*closure \d+, 'square' on worker {worker} for [1-9] s"


def _killed(victim: str, program: str, tmp_path: Path, *more: str, **environment: str) -> str:
    """Returns what was said from the middle on, after a kill -9 of a worker or of a role; or of none."""
    arguments = ("--ps", "2", "--workers", "3", *more, "--checkpoint-dir", str(tmp_path / "checkpoints"))
    with up(*arguments, worker=program, run_dir=tmp_path / "run", **environment) as process:
        read_until(process, "in the middle")
        for one in descendants(process) if victim != "none" else ():
            index = one.environ().get("LOCKSTEP_WORKER_INDEX", "none")
            if victim in one.cmdline() or victim == f"worker {index}":
                one.kill()
                break
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("victim", ["none", "worker 1", "ps_server", "chief"])
def test_closures_are_all_run_and_each_value_counts_once(victim: str, tmp_path: Path) -> None:
    out = _killed(victim, CLOSURES, tmp_path, "--min-replicas", "1")
    assert f"sum {float(sum(number**2 for number in range(200)))}" in out
    if victim == "worker 1":
        assert "was on worker 1, which is lost; another worker runs it" in out
        assert re.search(HANGS.format(worker=1), out), out
        return
    if victim == "none":
        assert not re.search(HANGS.format(worker=r"\d"), out), out
    else:
        _is_told(victim, out)
    assert sum(int(count) for count in re.findall(r"ran (\d+)", out)) >= 200


def _is_told(victim: str, out: str) -> None:
    name = {"ps_server": r"ps \d", "chief": "chief"}.get(victim, victim)
    assert re.search(rf"{name}.* killed by SIGKILL", out), out


TOTAL = sum(6.0 * number + 21.0 for number in range(40))


@pytest.mark.parametrize("victim", ["none", "worker 0", "worker 1", "ps_server", "chief"])
def test_reductions_count_once_and_none_is_lost(victim: str, tmp_path: Path) -> None:
    out = _killed(victim, REDUCTIONS, tmp_path, "--durability", "step", "--restart-workers", "9")
    assert out.count(f"reduced to {{{TOTAL}}}") == 3, out
    if victim == "none":
        assert "nothing has come of" not in out and "missing: " not in out, out
    else:
        _is_told(victim, out)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("point", ["before it reduces", "between two reductions", "before it writes"])
def test_the_write_of_a_call_is_made_once_wherever_its_worker_was_killed(point: str, worker: int, tmp_path: Path) -> None:
    out = _killed("none", REDUCTIONS, tmp_path, "--durability", "step", "--restart-workers", "9", END_AT=f"worker {worker} {point}")
    assert out.count(f"reduced to {{{TOTAL}}}") == 3, out
    _is_told(f"worker {worker}", out)
    missing = f"nothing has come of replicas {2 * worker} to {2 * worker + 1} of worker {worker}"
    if worker == 0:
        missing = "no answer of worker 0 with replicas 0 to 1"
    # What all wait for, the launcher says once.
    words = rf"Waiting \d+ s for worker {worker}" if point == "before it writes" else rf"waiting for 2 s: .*{missing}"
    assert re.search(words, out), out
