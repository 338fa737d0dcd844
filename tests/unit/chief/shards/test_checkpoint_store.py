"""The checkpoints that a chief removes while the next one is being written."""

from pathlib import Path

import pytest

from chief.core.messages import FindCheckpoint
from chief.shards.checkpoint_store import CheckpointStore
from ps_protocol.checkpoint.storage import LocalStorage
from tests.support.parameter_servers.checkpoints import CLUSTER, save, write_files


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
