"""`python -m ps_server` with a place for checkpoints: it comes back after kill -9, and a save under way outlives SIGTERM."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.shard import SaveRequest, Shard
from ps_protocol.shard_client import GrpcShard
from ps_protocol.tensors import DataType, VariableSpec
from tests.contract.sharded_training import CHIEF, ShardedTraining
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
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
            with contextlib.closing(GrpcShard(announced.read_text().strip(), index=index)) as shard:
                yield process, shard
        finally:
            process.kill()


def test_cluster_goes_on_from_its_checkpoint_after_a_server_was_killed(tmp_path: Path) -> None:
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
            shard.save(SaveRequest(epoch=3, chief_incarnation=CHIEF, step=1, tag="torn"))
        assert process.wait(30) == -signal.SIGKILL
    with _server(tmp_path, 0) as (_, shard):
        restored = dataclasses.replace(training, shards=[shard])
        restored.restore("whole", step=0, epoch=4)
        assert restored.state() == expected


def test_save_under_way_is_finished_before_the_server_ends(tmp_path: Path) -> None:
    with _server(tmp_path, 0, failpoints="ps.save.before_fsync=delay:0.3") as (process, shard):
        training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(tmp_path / "checkpoints"))
        training.create()
        shard.save(SaveRequest(epoch=3, chief_incarnation=CHIEF, step=0, tag="t"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    (file,) = (tmp_path / "checkpoints" / "t.incomplete").iterdir()
    assert file.name == "ps-00000-of-00001.safetensors" and file.stat().st_size > 0
