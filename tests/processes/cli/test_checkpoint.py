"""Checkpoints that are requested from outside: a running cluster saves one, and its values are those that the workers read."""

import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from lockstep.__main__ import main
from ps_protocol.checkpoint.catalog import find_checkpoint, verify_checkpoint
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.checkpoint.tensor_file import decode_header, decode_length
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.processes.commands import run_up
from tests.support.processes.warm import WarmPopen
from tests.support.waiting import wait_until
from worker_client import EmbeddingTable, IndexedSlices


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[ProcessCluster]:
    with ExitStack() as stack:
        # No checkpoints but those that are asked for.
        yield ProcessCluster(Plan(num_ps=2, num_workers=1, durability="none"), stack, directory=socket_dir).start()


def test_checkpoint_on_demand_is_refused_without_a_model_and_has_the_values_of_its_step_with_one(
    cluster: ProcessCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_DIR", str(cluster.checkpoints))
    place, session = LocalStorage(cluster.checkpoints), cluster.session()
    assert main(["checkpoint", "save", "--chief", cluster.chief_address]) == 1
    assert "the variables have no values yet" in capsys.readouterr().err
    session.create_or_join({"w": np.zeros((4, 3))}, optimizer=worker_client.sgd(1.0), split_bytes=16)
    for step in (2, 5):
        while session.local_step < step:
            session.step({"w": np.ones((4, 3))})
        assert main(["checkpoint", "save", "--chief", cluster.chief_address]) == 0
        assert capsys.readouterr().out.endswith(f"saved step-{step:09}, step {step}\n")
        found = find_checkpoint(place).checkpoint
        assert (found.step, found.num_shards, found.fence.epoch) == (step, 2, 1)
        verify_checkpoint(place, found)
        assert main(["checkpoint", "export", str(tmp_path / "model.npz")]) == 0
        with zipfile.ZipFile(tmp_path / "model.npz") as archive, archive.open("w.npy") as member:
            values = np.lib.format.read_array(member, allow_pickle=False)
        assert np.all(values == -step), "each step takes 1 away"
    assert [stored.is_whole for stored in place.stored()] == [True, True]


TRAINING = """
import numpy as np
import lockstep

with lockstep.connect() as session:
    session.create_or_join(
        {"w": np.ones((7, 3)), "v": lockstep.Variable(np.zeros(5, np.float32), optimizer=lockstep.momentum(0.1, 0.9)),
         "rows": lockstep.EmbeddingTable((11, 2)), "mean": lockstep.Buffer(np.zeros(2), "mean")},
        optimizer=lockstep.adam(lockstep.polynomial_decay(0.1, 20)), averages=lockstep.moving_average(0.9), split_bytes=64,
    )
    while not session.is_finished:
        random = np.random.default_rng(session.local_step)
        session.user_state["seen"] = session.user_state.get("seen", 0) + random.integers(9)
        rows = lockstep.IndexedSlices(random.integers(11, size=3), random.normal(size=(3, 2)).astype(np.float32))
        gradients = {"w": random.normal(size=(7, 3)), "v": random.normal(size=5).astype(np.float32), "rows": rows}
        session.step(gradients, updates={"mean": random.normal(size=2)}, metrics={"loss": random.normal()})
"""


def train(place: Path, *, until: int, run_dir: Path) -> LocalStorage:
    words = ("--ps", "2", "--workers", "1", "--max-steps", str(until), "--checkpoint-dir", str(place))
    code, out = run_up(*words, worker=TRAINING, run_dir=run_dir)
    assert code == 0, out
    return LocalStorage(place)


def test_a_training_continues_with_the_same_bits_after_export_and_import(tmp_path: Path) -> None:
    place = train(tmp_path / "ckpt", until=4, run_dir=tmp_path / "first")
    file, other = tmp_path / "all.safetensors", tmp_path / "other"
    assert main(["checkpoint", "export", str(file), "--slots", "--checkpoint-dir", place.place]) == 0
    assert main(["checkpoint", "import", str(file), "--checkpoint-dir", str(other)]) == 0
    train(tmp_path / "ckpt", until=9, run_dir=tmp_path / "second")
    train(other, until=9, run_dir=tmp_path / "third")
    checkpoints = [find_checkpoint(one).checkpoint for one in (place, LocalStorage(other))]
    assert [one.step for one in checkpoints] == [9, 9]
    assert [one.sha256 for one in checkpoints[0].files] == [one.sha256 for one in checkpoints[1].files]
    assert checkpoints[0].record.attached == checkpoints[1].record.attached != NO_STEP_ATTACHMENTS


def test_each_steps_changed_rows_are_handed_on_once_by_a_follower_that_is_killed_and_comes_back(socket_dir: Path, tmp_path: Path) -> None:
    plan = Plan(num_ps=2, num_workers=1, durability="step", chief_flags=("--full-every", "100"))
    out = tmp_path / "out"
    with ExitStack() as stack:
        cluster = ProcessCluster(plan, stack, directory=socket_dir).start()
        words = ["-m", "lockstep", "checkpoint", "changes", str(out), "--follow", "--checkpoint-dir", str(cluster.checkpoints)]

        def follow() -> "subprocess.Popen[bytes]":
            process = WarmPopen([sys.executable, *words])
            stack.callback(process.kill)
            return process

        def await_step(step: int) -> None:
            wait_until(lambda: (out / f"step-{step:09}.safetensors").exists(), what=f"step {step} is handed on", timeout_s=60)

        session = cluster.session()
        session.create_or_join({"users": EmbeddingTable(3, keys="int64")}, optimizer=worker_client.sgd(1.0))
        follower = follow()
        await_step(0)
        for step in range(1, 9):
            session.step({"users": IndexedSlices(np.array([step, 100]), np.ones((2, 3), np.float32))})
            if step == 4:
                await_step(3)
                follower.kill()
                follower.wait()
        follower = follow()
        wait_until(lambda: (out / "LAST").read_text() == "step-000000008", what="step 8 is handed on", timeout_s=60)
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(timeout=30) == 128 + signal.SIGTERM
    # What a killed process was about to write begins with a dot.
    assert sorted(path.name for path in out.glob("[!.]*")) == ["LAST", *(f"step-{step:09}.safetensors" for step in range(9))]
    rows: dict[int, float] = {}
    for step in range(1, 9):
        content = (out / f"step-{step:09}.safetensors").read_bytes()
        header = decode_header(
            content[8 : 8 + decode_length(content[:8], file_bytes=len(content), where="f")], file_bytes=len(content), where="f"
        )
        assert header.metadata.get("since", "") == (f"step-{step - 1:09}" if step > 1 else ""), "in the first step, all rows are new"
        found = {
            one.name: np.frombuffer(content[header.num_bytes + one.start : header.num_bytes + one.stop], one.dtype)
            for one in header.tensors
        }
        assert sorted(found["users@row keys"].tolist()) == [step, 100]
        rows |= zip(found["users@row keys"].tolist(), found["users"].reshape(-1, 3)[:, 0].tolist(), strict=True)
    assert rows == {100: -8.0, **dict.fromkeys(range(1, 9), -1.0)}
