"""Updates by formulas over processes: with standbys, checkpoints and a kill -9, each counts once; the audit computes them again."""

import re
from pathlib import Path

import pytest

from tests.support.processes.commands import descendants, lockstep_here, read_until, up

# The program of each worker: a count that every step adds one to, and a variable with a slot that a formula moves.
PROGRAM = """
import numpy as np
import lockstep
from lockstep import Buffer, Placement, UpdateFormula

NUM_STEPS = 120
values = {name: Buffer(np.zeros(1000)) for name in ("v", "m", "count")}
with lockstep.connect() as session:
    places = Placement(pins={"v": 0, "m": 0, "count": 1}, split_bytes=0)
    session.create_or_join({**values, "w": np.zeros(2)}, optimizer=lockstep.sgd(0.1), placement=places)
    while session.global_step < NUM_STEPS and not session.is_finished:
        step = session.local_step
        updates = {} if session.worker_index else {
            "v": UpdateFormula("m = 0.5 * m + g; v = v + m", m="m", g=np.full(1000, float(step))), "count": UpdateFormula("v + 1")
        }
        session.step({"w": np.zeros(2)}, updates=updates)
        if session.worker_index == 0 and session.global_step == 40:
            print("in the middle", flush=True)
    if session.worker_index == 0:
        found, step, v, m = session.read(), session.global_step, 0.0, 0.0
        for number in range(step):
            m = 0.5 * m + number
            v = v + m
        is_right = bool((found["v"] == v).all() and (found["m"] == m).all())
        print("step", step, "counts", set(found["count"].tolist()), "right", is_right, flush=True)
"""

pytestmark = pytest.mark.timeout(150)


def _ran(victim: str, tmp_path: Path, *more: str) -> str:
    history = tmp_path / "history"
    places = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--history", str(history))
    with up("--ps", "2", "--workers", "2", *places, *more, worker=PROGRAM, run_dir=tmp_path / "run") as process:
        read_until(process, "in the middle")
        for one in descendants(process):
            if victim and victim in one.cmdline():
                one.kill()
                break
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert re.search(r"step (1\d\d) counts \{\1\.0\} right True", out), out
    verdict = lockstep_here("audit", str(history))
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    return out


def test_formulas_count_once_on_both_servers_of_a_shard_and_are_computed_again_from_the_history(tmp_path: Path) -> None:
    _ran("", tmp_path, "--standbys")


@pytest.mark.chaos
@pytest.mark.parametrize(("victim", "more"), [("ps_server", ["--durability", "step"]), ("ps_server", ["--standbys"]), ("chief", [])])
def test_after_a_kill_9_each_formula_has_counted_once(victim: str, more: list[str], tmp_path: Path) -> None:
    _ran(victim, tmp_path, *more)
