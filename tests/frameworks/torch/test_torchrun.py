"""Programs that torchrun starts find a cluster by themselves: rank 0 starts it, and it outlives the ranks that torchrun starts again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
    "--monitor-interval",
    "0.1",
]
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys, time
import numpy as np
import lockstep
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def say(text):  # in one piece: both ranks write to the same pipe
    os.write(1, f"{text}\\n".encode())

with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=lockstep.sgd(0.5))
    say(f"rank {rank} begins at {session.global_step}")
    while not session.is_finished:
        session.step({"w": np.ones(4)})
        if len(sys.argv) > 1 and (rank, attempt) == ("1", "0") and session.global_step > 20:
            os._exit(3)
    say(f"rank {rank} value {session.read()['w'][0]}")
"""


def run(directory: Path, *words: str, flags: str = "--ps 2 --max-steps 60") -> tuple[int, str]:
    (directory / "train.py").write_text(PROGRAM)
    environment = {**os.environ, "LOCKSTEP_UP": flags, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(directory / "train.py"), *words]
    ended = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=100, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_the_ranks_of_torchrun_are_the_workers_of_a_cluster_that_ends_with_them(tmp_path: Path) -> None:
    code, out = run(tmp_path)
    assert code == 0, out
    assert sorted(re.findall(r"rank (\d) value (\S+)", out)) == [("0", "-30.0"), ("1", "-30.0")], out
    assert "2 parameter servers and the chief are ready" in out


def test_ranks_that_torchrun_starts_again_take_their_places_and_the_model_stays(tmp_path: Path) -> None:
    code, out = run(tmp_path, "fail")
    assert code == 0, out
    begun = sorted((int(step), rank) for rank, step in re.findall(r"rank (\d) begins at (\d+)", out))
    assert len(begun) == 4 and begun[2][0] > 20, out
    assert out.count("value -30.0") == 2 and out.count("the chief are ready") == 1, out


def test_wrong_flags_are_an_error_of_every_rank_in_a_line(tmp_path: Path) -> None:
    code, out = run(tmp_path, flags="--pss 2")
    assert code == 1
    assert out.count("lockstep up, which rank 0 has started, ended with exit code 2; its words are above") >= 2, out
    assert "lockstep up: no such argument: --pss; did you mean '--ps'?" in out, out
    assert 'train.py", line' not in out, "a traceback of the program says nothing of the flags"
