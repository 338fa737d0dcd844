"""`python -m ps_server` with a place for checkpoints: it recovers after kill -9, and a save under way finishes after SIGTERM."""

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ps_protocol.errors import PsError, StorageFailed, StorageFull
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.shard import SaveRequest, SaveState, Shard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.sharded_training import CHIEF, ShardedTraining
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

MODEL = ModelSpec(
    variables=tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(50, 3)) for name in ("a", "b")),
    optimizer=OptimizerSpec(name="adam", learning_rate=constant(0.1)),
    placement=PlacementPolicy(),
)


@contextlib.contextmanager
def _server(directory: Path, index: int, *, failpoints: str = "") -> Iterator[tuple[subprocess.Popen[bytes], Shard]]:
    announced = directory / f"announced-{index}"
    announced.unlink(missing_ok=True)
    command = [sys.executable, "-m", "ps_server", "--index", str(index), "--announce", str(announced), "--enable-failpoints"]
    environment = {**os.environ, "LOCKSTEP_FAILPOINTS": failpoints}
    with subprocess.Popen([*command, "--checkpoint-dir", str(directory / "checkpoints")], cwd=ROOT, env=environment) as process:
        try:
            wait_until(lambda: announced.exists() or process.poll() is not None, timeout_s=30, what="the server has announced its address")
            with contextlib.closing(CommandedShard(announced.read_text().strip(), index=index)) as shard:
                yield process, shard
        finally:
            process.kill()


def test_cluster_continues_from_its_checkpoint_after_a_server_was_killed(tmp_path: Path) -> None:
    with _server(tmp_path, 0) as (_, survivor):
        with _server(tmp_path, 1) as (process, lost):
            training = ShardedTraining(shards=[survivor, lost], model=MODEL, checkpoint_dir=str(tmp_path / "checkpoints"))
            training.create()
            training.train(2)
            training.save("t")
            training.train(3)
            expected = training.state()
            process.kill()
            process.wait()
        with _server(tmp_path, 1) as (_, restarted):
            training.shards = [survivor, restarted]
            training.restore("t", step=2, epoch=4)
            training.train(3)
            assert training.state() == expected


def test_server_killed_while_it_writes_leaves_the_checkpoint_before_whole(tmp_path: Path) -> None:
    with _server(tmp_path, 0, failpoints="ps.save.mid_file=kill@2") as (process, shard):
        training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(tmp_path / "checkpoints"))
        training.create()
        training.save("whole")
        expected = training.state()
        training.train(1)
        with contextlib.suppress(Exception):
            shard.call(SaveRequest(fence=fence(3, CHIEF), step=1, tag="torn"))
        assert process.wait(30) == -signal.SIGKILL
    with _server(tmp_path, 0) as (_, shard):
        restored = dataclasses.replace(training, shards=[shard])
        restored.restore("whole", step=0, epoch=4)
        assert restored.state() == expected


def test_disk_that_is_full_costs_no_step_and_no_older_checkpoint_and_is_tried_again(tmp_path: Path) -> None:
    large = dataclasses.replace(MODEL, variables=(VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(1 << 18,)),))
    with _server(tmp_path, 0) as (process, shard):
        training = ShardedTraining(shards=[shard], model=large, checkpoint_dir=str(tmp_path / "checkpoints"))
        training.create()
        training.save("old")
        expected = training.state()
        # What the system then answers to a write is what it answers where a quota ends.
        limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        for _ in range(3):
            training.train(1)
            failure = _failure(training, "new")
            assert isinstance(failure, StorageFull) and "File too large" in failure.message
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        training.save("new")
        training.restore("old", step=0, epoch=4)
        assert training.state() == expected
        training.restore("new", step=3, epoch=5)


def test_disk_that_cannot_sync_makes_no_checkpoint_and_the_next_save_is_tried(tmp_path: Path) -> None:
    with _server(tmp_path, 0, failpoints="ps.save.before_fsync=error:eio@2") as (_, shard):
        training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(tmp_path / "checkpoints"))
        training.create()
        training.save("old")
        training.train(1)
        assert isinstance(_failure(training, "new"), StorageFailed)
        assert not (tmp_path / "checkpoints" / "new.incomplete" / "ps-00000-of-00001.safetensors").exists()
        training.train(1)
        training.save("new")


def _failure(training: ShardedTraining, tag: str) -> PsError | None:
    """Saves, which is to fail, and returns why it did."""
    request = SaveRequest(fence=fence(training.epoch, CHIEF), step=training.step, tag=tag)
    (shard,) = training.shards
    shard.call(request)
    progress = shard.call(replace(request, max_wait_s=20.0))
    assert progress.state is SaveState.FAILED
    return progress.failure


def test_save_under_way_is_finished_before_the_server_ends(tmp_path: Path) -> None:
    with _server(tmp_path, 0, failpoints="ps.save.before_fsync=delay:0.3") as (process, shard):
        training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(tmp_path / "checkpoints"))
        training.create()
        shard.call(SaveRequest(fence=fence(3, CHIEF), step=0, tag="t"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    (file,) = (tmp_path / "checkpoints" / "t.incomplete").iterdir()
    assert file.name == "ps-00000-of-00001.safetensors" and file.stat().st_size > 0
