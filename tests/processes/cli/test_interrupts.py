"""Ctrl-C under `lockstep up`: what programs see of it, and how long each may take. And trainings that end before a worker comes."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.processes.commands import TRAIN, are_gone, descendants, read_until, run_up, up

# Trains, and says what it hears of the end, inside of the session.
TOLD = TRAIN.replace('    print(f"value', "    print('END', session.end_reason, session.global_step, flush=True)\n    print(f\"value")
# Computes for ever in the middle of its training, as a step that takes minutes.
BUSY = """
import time, numpy as np, worker_client
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
    try:
        print("busy", flush=True)
        while True:
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", session.end_reason, flush=True)
        raise
    finally:
        print("finally", flush=True)
"""


WITHOUT_BLOCK = """
import numpy as np, worker_client
session = worker_client.connect()
session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
while not session.is_finished:
    session.step({"w": np.ones(4)})
    print("step", session.global_step, flush=True)
print("after the loop")
"""
AND_SAY_THE_CODE = "import subprocess, sys\nprint('code', subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode, flush=True)"


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_program_without_a_block_leaves_at_its_end_and_fails_only_if_its_training_was_interrupted(
    tmp_path: Path, is_interrupted: bool
) -> None:
    flags = ["--chief-in-ps", "--workers", "1", *([] if is_interrupted else ["--max-steps", "5"])]
    with up(*flags, "--", WITHOUT_BLOCK, worker=AND_SAY_THE_CODE, run_dir=tmp_path / "run") as process:
        if is_interrupted:
            read_until(process, "step 3")
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert "[worker 0] after the loop" in out and "worker 0 left" in out
    assert f"[worker 0] code {int(is_interrupted)}" in out, out
    assert ("TrainingInterrupted: training was interrupted at step" in out) is is_interrupted, out


def test_a_program_hears_that_it_was_interrupted_reads_the_last_values_and_leaves(tmp_path: Path) -> None:
    with up("--chief-in-ps", "--workers", "2", worker=TOLD, run_dir=tmp_path / "run") as process:
        read_until(process, "[worker 1] step 3")
        everybody = descendants(process)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=40)
    assert process.returncode == 130
    for index in range(2):
        step = re.search(rf"\[worker {index}\] END interrupted (\d+)", out)
        value = re.search(rf"\[worker {index}\] value (\S+)", out)
        assert step and value and float(value[1]) == -0.5 * int(step[1]), out
    assert re.search(r"TrainingInterrupted: training was interrupted at step \d+, before its end", out), "its own exit code is no 0"
    assert "SIGINT to" not in out and "SIGTERM to" not in out
    assert are_gone(everybody)


def test_a_program_that_does_not_look_gets_a_keyboard_interrupt_and_its_finally(tmp_path: Path) -> None:
    with up("--chief-in-ps", "--workers", "1", worker=BUSY, run_dir=tmp_path / "run") as process:
        read_until(process, "[worker 0] busy")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "[worker 0] KeyboardInterrupt interrupted\n[worker 0] finally\n" in out, out
    assert "worker 0 left" in out or "worker 0 failed on" in out, "the chief has heard that it left"
    assert re.search(r"\[lockstep\] SIGINT to worker 0 \(pid \d+\): still running", out) and "SIGTERM to" not in out


SHORT = """
import os, sys, threading, numpy as np, worker_client
from pathlib import Path
first = Path(sys.argv[0]).with_name("first")
if os.environ["LOCKSTEP_WORKER_INDEX"] == "1":
    while not first.exists():
        threading.Event().wait(0.01)
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
first.touch()
print("left", session.end_reason, flush=True)
"""


def test_a_worker_that_comes_after_the_others_have_left_hears_that_training_is_over(tmp_path: Path) -> None:
    code, out = run_up("--chief-in-ps", "--workers", "2", worker=SHORT, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "still trying" not in out and "[worker 1] left finished" in out, out
