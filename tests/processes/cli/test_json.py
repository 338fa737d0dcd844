"""`--json`: every command that reports something prints one JSON value, with the same exit code as without the flag."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import lockstep, lockstep_here
from worker_client import Session


def answer(*words: object) -> tuple[int, Any]:
    ended = lockstep_here(*map(str, words), "--json")
    assert ended.stdout, f"{words}: {ended.stderr}"
    return ended.returncode, json.loads(ended.stdout)


@pytest.fixture
def training(socket_dir: Path) -> Iterator[tuple[str, Session]]:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_workers=2), stack, directory=socket_dir)
        session = cluster.session()
        session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1), timeout_s=20)
        yield cluster.chief_address, session


def test_commands_that_ask_a_chief(training: tuple[str, Session]) -> None:
    address, _ = training
    assert answer("health", "--address", address) == (0, {"status": "serving"})
    code, found = answer("policy", "--chief", address)
    assert (code, found["policy"]["name"], found["total_num_replicas"]) == (0, "sync", 2)
    code, found = answer("policy", "sync", "--replicas-to-aggregate", "1", "--chief", address)
    assert (code, found["policy"]["replicas_to_aggregate"], found["step"]) == (0, 1, 0)
    code, found = answer("set", "learning_rate=0.5", "--chief", address)
    assert (code, found["changes"], found["step"]) == (0, ["learning_rate=0.5"], 0)
    code, found = answer("why", "--chief", address)
    assert (code, found["state"]) == (0, "training")
    ended = {"step": 0, "reason": "enough", "cluster": "lockstep", "chief": address}
    assert answer("finish", "--reason", "enough", "--chief", address) == (0, ended)


def test_commands_that_read_files(tmp_path: Path) -> None:
    program = (
        "import lockstep, numpy as np\nwith lockstep.connect() as s:\n s.create_or_join({'w': np.zeros(2)}, optimizer=lockstep.sgd(0.1))\n"
    )
    program += " for _ in range(3): s.step({'w': np.ones(2)})\n s.finish()\n"
    kept, history = tmp_path / "kept", tmp_path / "history"
    up = ["up", "--checkpoint-dir", kept, "--history", history, "--run-dir", tmp_path / "run", "--", sys.executable, "-c", program]
    ended = lockstep(*map(str, up), timeout_s=50.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    code, found = answer("audit", history)
    assert (code, found["is_clean"], found["problems"], found["num_steps"]) == (0, True, [], 3)
    code, found = answer("checkpoint", "verify", "--checkpoint-dir", kept)
    assert code == 0 and found["checkpoints"] and all(one["is_whole"] for one in found["checkpoints"])
    tag = found["checkpoints"][-1]["tag"]
    code, found = answer("checkpoint", "export", tmp_path / "w.npz", "--checkpoint-dir", kept)
    assert (code, found["tag"], found["tensors"]) == (0, tag, ["w"])
    (file,) = kept.glob(f"**/{tag}/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, found = answer("checkpoint", "verify", "--checkpoint-dir", kept)
    assert code == 1 and found["checkpoints"][-1]["is_damaged"]
