"""Checkpoints that are asked for from outside: a running cluster saves one, and its values are those that the workers read."""

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from lockstep.__main__ import main
from ps_protocol.checkpoint.catalog import find_checkpoint, verify_checkpoint
from ps_protocol.checkpoint.storage import LocalStorage
from tests.support.clusters import Shape
from tests.support.real_cluster import RealCluster


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    monkeypatch.setenv("LOCKSTEP_DURABILITY", "none")  # none but those that are asked for
    return LocalStorage(tmp_path / "ckpt")


@pytest.fixture
def cluster(place: LocalStorage, socket_dir: Path) -> Iterator[RealCluster]:
    with ExitStack() as stack:
        yield RealCluster(Shape(num_ps=2, replicas_to_aggregate=1, total_num_replicas=1), stack, directory=socket_dir)


def test_checkpoint_on_demand_has_the_values_of_its_step(cluster: RealCluster, place: LocalStorage, tmp_path: Path) -> None:
    cluster.all_do("join", model="large")
    for step in (2, 5):
        cluster.all_do("push_ones", times=step - len(place.stored()) * 2)
        assert cluster.lockstep("checkpoint") == f"saved step-{step:09}, step {step}\n"
        found = find_checkpoint(place).checkpoint
        assert (found.step, found.num_shards, found.fence.epoch) == (step, 2, 1)
        verify_checkpoint(place, found)
        assert main(["checkpoint", "export", str(tmp_path / "model.npz")]) == 0
        with zipfile.ZipFile(tmp_path / "model.npz") as archive, archive.open("w.npy") as member:
            values = np.lib.format.read_array(member, allow_pickle=False)
        assert np.all(values == -step), "each step takes 1 away"
    assert [stored.is_whole for stored in place.stored()] == [True, True]


def test_checkpoint_before_there_is_a_model_is_refused_in_words(cluster: RealCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "--chief", cluster.chief_address]) == 1
    assert "the variables have no values yet" in capsys.readouterr().err
