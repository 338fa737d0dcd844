"""The checkpoints that a chief finds, makes whole, and removes while the next one is being written."""

from pathlib import Path
from unittest import mock

import pytest

from chief.core.messages import CommitCheckpoint, FindCheckpoint, Found
from chief.shards.checkpoint_store import CheckpointStore
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.errors import StorageFull
from tests.support.parameter_servers.checkpoints import CLUSTER, checkpoint_of, save, write_files


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def store(storage: LocalStorage) -> CheckpointStore:
    return CheckpointStore(storage, cluster=CLUSTER)


def _tags(storage: LocalStorage) -> list[tuple[str, bool]]:
    return [(stored.tag, stored.is_whole) for stored in storage.stored()]


def test_old_checkpoints_are_removed_and_those_being_written_stay(storage: LocalStorage, store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(storage, step=step)
    for step in (4, 5):
        write_files(storage, step=step)
    store.expect("step-000000005")
    store.prune(2)
    assert _tags(storage) == [("step-000000002", True), ("step-000000003", True), ("step-000000005", False)]
    store.expect("step-000000006")
    store.prune(2)
    assert _tags(storage) == [("step-000000002", True), ("step-000000003", True)], "an attempt that was given up"


def test_a_checkpoint_that_the_cluster_restores_is_kept_however_many_are_newer(storage: LocalStorage, store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        save(storage, step=step)
    found = store.find(FindCheckpoint(excluded=("step-000000002", "step-000000003")))
    assert found.checkpoint is not None and found.checkpoint.step == 1
    store.prune(1)
    assert _tags(storage) == [("step-000000001", True), ("step-000000003", True)]


def test_without_a_whole_checkpoint_what_is_there_is_skipped_with_its_fault_and_its_epoch_counts(
    storage: LocalStorage, store: CheckpointStore
) -> None:
    assert store.find(FindCheckpoint()) == Found(checkpoint=None)
    broken = save(storage, step=2, epoch=3)
    (Path(storage.place) / broken.tag / "MANIFEST.json").write_text("{}")
    for wish in (FindCheckpoint(), FindCheckpoint(only=broken.tag)):
        found = store.find(wish)
        assert (found.checkpoint, found.highest_epoch) == (None, 3)
        ((tag, fault),) = found.skipped
        assert tag == broken.tag and "not a valid manifest" in fault


def test_a_manifest_that_cannot_be_written_leaves_nothing_of_its_checkpoint(
    storage: LocalStorage, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = (checkpoint_of(write_files(storage, step=step), step=step) for step in (1, 2))
    with monkeypatch.context() as full, pytest.raises(StorageFull):
        full.setattr(LocalStorage, "commit", mock.Mock(side_effect=StorageFull("no room")))
        store.commit(CommitCheckpoint(checkpoint=lost, keep=1))
    store.commit(CommitCheckpoint(checkpoint=kept, keep=1))
    save(storage, step=3)
    store.prune(1)
    assert _tags(storage) == [(kept.tag, True), ("step-000000003", True)], "the latest that it has committed stays"
