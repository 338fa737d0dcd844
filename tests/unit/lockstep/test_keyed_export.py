"""Exported files of models that have a table with keys: all of its rows, each with its key as the program has it."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lockstep.checkpoint_export import export
from lockstep.checkpoint_import import import_checkpoint
from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.keys import KEYS_PART, gathered
from ps_server.serving.local import InProcessShard
from tests.contract.shard.test_checkpoints import model_of
from tests.support.parameter_servers.sharded_training import KEYS, ShardedTraining


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_table_with_keys_is_exported_with_them_from_any_number_of_servers(tmp_path: Path, num_shards: int) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    shards = [InProcessShard(index=index, storage=storage) for index in range(num_shards)]
    training = ShardedTraining(shards=shards, model=model_of("momentum"), checkpoint_dir=str(tmp_path / "checkpoints"))
    training.create()
    training.train(3)
    checkpoint = training.save("t")
    export(storage, checkpoint, tmp_path / "all.npz", has_slots=True)
    with zipfile.ZipFile(tmp_path / "all.npz") as archive:
        exported = {name: np.lib.format.read_array(archive.open(name), allow_pickle=False) for name in archive.namelist()}
    keys = exported[f"clicks@{KEYS_PART}.npy"]
    assert keys.dtype == np.uint64
    assert 0 < len(keys) == len(set(keys.tolist()))
    known, state = gathered(KEYS).view(np.uint64).tolist(), training.state()
    at = [known.index(key) for key in keys.tolist()]
    for name in ("clicks", "clicks@momentum"):
        np.testing.assert_array_equal(exported[f"{name}.npy"], np.frombuffer(state[name], np.float32).reshape(-1, 3)[at])


def test_such_a_file_is_not_imported_and_the_error_says_so(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    training = ShardedTraining(
        shards=[InProcessShard(index=0, storage=storage)], model=model_of("sgd"), checkpoint_dir=str(tmp_path / "checkpoints")
    )
    training.create()
    training.train(1)
    file = tmp_path / "all.safetensors"
    export(storage, training.save("t"), file, has_slots=True)
    with pytest.raises(InvalidSpec, match="'clicks' is a table with keys, which is not imported"):
        import_checkpoint(file, storage)


def test_a_parquet_file_has_one_table_and_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "checkpoints"))
    training = ShardedTraining(
        shards=[InProcessShard(index=0, storage=storage)], model=model_of("sgd"), checkpoint_dir=str(tmp_path / "checkpoints")
    )
    training.create()
    checkpoint, file = training.save("t"), tmp_path / "t.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.checkpoint_export.check_pyarrow", lambda: None)
        for name, has_slots in (("w", False), ("", False), ("clicks", True)):
            with pytest.raises(InvalidSpec, match="one table, without slots; choose one: "):
                export(storage, checkpoint, file, has_slots=has_slots, variable=name)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidSpec, match=r"needs the package pyarrow: pip install 'lockstep-ps\[parquet\]'"):
        export(storage, checkpoint, file, variable="clicks")
    with pytest.raises(InvalidSpec, match="no variable 'v'; it has "):
        export(storage, checkpoint, tmp_path / "t.npz", variable="v")
    assert export(storage, checkpoint, tmp_path / "t.npz", variable="clicks") == ("clicks@row keys", "clicks")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "t.npz"]
