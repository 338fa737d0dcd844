"""Every place for checkpoints: a directory, and every place that fsspec reaches (here its memory and its local files)."""

import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.checkpoint.catalog import (
    KnownCheckpoints,
    find_checkpoint,
    highest_epoch,
    list_checkpoints,
    open_storage,
    prune,
    storage_of_role,
    verify_checkpoint,
)
from ps_protocol.checkpoint.fsspec_storage import RemoteStorage
from ps_protocol.checkpoint.manifest import ManifestEncoder, read_checkpoint
from ps_protocol.checkpoint.storage import MANIFEST, CheckpointStorage, LocalStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, check_file, open_file, write_file
from ps_protocol.checkpoint.trial import PlaceTrial
from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec
from ps_protocol.roles.shard import CheckpointFile
from tests.support.parameter_servers.checkpoints import CLUSTER, VARIABLES, checkpoint_of, save, values_of, write_files

_numbers = itertools.count()


@pytest.fixture(params=["directory", "memory", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStorage]:
    if request.param == "directory":
        yield LocalStorage(tmp_path / "ckpt")
        return
    url = f"memory://ckpt-{next(_numbers)}" if request.param == "memory" else f"file://{tmp_path}/ckpt"
    remote = RemoteStorage(url)
    yield remote
    for stored in remote.stored():
        remote.remove(stored.tag)
        remote.remove_incomplete(stored.tag)


def tags_of(storage: CheckpointStorage) -> list[tuple[str, bool]]:
    return [(stored.tag, stored.is_whole) for stored in storage.stored()]


def damage(storage: CheckpointStorage, tag: str, name: str, content: bytes | None) -> None:
    """Replaces a file of a whole checkpoint, as no process of ours does; None removes it."""
    if isinstance(storage, LocalStorage):
        path = Path(storage.place) / tag / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    else:
        assert isinstance(storage, RemoteStorage)
        path_there = f"{storage._root}/{tag}/{name}"
        storage._files.rm_file(path_there)
        if content is not None:
            storage._files.pipe_file(path_there, content)


def content_of(storage: CheckpointStorage, tag: str, file: CheckpointFile) -> bytearray:
    content = bytearray(file.num_bytes)
    with storage.open(tag, file.name) as reader:
        assert reader.num_bytes == file.num_bytes
        reader.read_into(memoryview(content), offset=0)
    return content


def test_place_that_does_not_exist_has_no_checkpoints(storage: CheckpointStorage) -> None:
    assert storage.stored() == ()
    assert highest_epoch(storage) == 0
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint in "):
        find_checkpoint(storage)
    for missing in (storage.manifest, storage.remove, storage.remove_incomplete):
        if missing == storage.manifest:
            with pytest.raises(CheckpointNotFound, match="no whole checkpoint 'step-1'"):
                missing("step-1")
        else:
            missing("step-1")


def test_checkpoint_is_there_only_when_it_has_been_committed(storage: CheckpointStorage) -> None:
    files = write_files(storage, step=5)
    assert tags_of(storage) == [("step-000000005", False)]
    with pytest.raises(CheckpointNotFound, match=r"no complete checkpoint .*1 incomplete: step-000000005"):
        find_checkpoint(storage, cluster=CLUSTER)
    checkpoint = checkpoint_of(files, step=5)
    storage.commit(checkpoint.tag, ManifestEncoder().encode(checkpoint, saved_at="now"), files=files)
    assert tags_of(storage) == [("step-000000005", True)]
    found = find_checkpoint(storage, cluster=CLUSTER)
    assert (found.checkpoint, found.saved_at, found.skipped) == (checkpoint, "now", ())
    assert read_checkpoint(storage, checkpoint.tag, sha256=found.manifest_sha256).checkpoint == checkpoint
    verify_checkpoint(storage, checkpoint)


def test_values_come_back_as_they_were(storage: CheckpointStorage) -> None:
    checkpoint = save(storage, step=5, num_shards=1)
    arrays = {}
    with open_file(storage, checkpoint.tag, checkpoint.files[0]) as reader:
        assert reader.metadata == {"step": "5"}
        for tensor in reader:
            arrays[tensor.name] = np.empty(tensor.shape, tensor.dtype)
            reader.read_into(arrays[tensor.name])
        assert reader.num_bytes_read == checkpoint.num_bytes
    np.testing.assert_array_equal(arrays["layer/b"], values_of(VARIABLES[1], step=5))
    np.testing.assert_array_equal(arrays["scale@@[[0:1]@velocity"], values_of(VARIABLES[3], step=5, part="velocity"))
    np.testing.assert_array_equal(arrays["wide[:,3:6]"], values_of(VARIABLES[2], step=5)[:, 3:])


def test_tensor_can_be_read_in_parts_and_skipped(storage: CheckpointStorage) -> None:
    tensors = [SavedTensor(name=name, array=np.arange(1000, dtype=np.int64) * number) for number, name in enumerate(("a", "b", "c"))]
    file = write_file(storage, "t", shard=0, num_shards=1, tensors=tensors, metadata={})
    checkpoint = checkpoint_of([file], step=1)
    storage.commit("t", ManifestEncoder().encode(checkpoint, saved_at=""), files=[file])
    parts = np.zeros(500, np.int64)
    with open_file(storage, "t", file) as reader:
        for tensor in reader:
            if tensor.name == "b":
                reader.read_into(parts[:100])
                reader.read_into(parts[100:])
            if tensor.name == "c":
                with pytest.raises(DataLoss, match="8000 left"):
                    reader.read_into(np.zeros(1001, np.int64))
    np.testing.assert_array_equal(parts, np.arange(500))


def test_a_small_file_of_the_place_is_replaced_as_a_whole_and_is_no_checkpoint(storage: CheckpointStorage) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no index\.json in "):
        storage.get("index.json")
    for content in (b"old and longer", b"new"):
        storage.put("index.json", content)
        assert storage.get("index.json") == content
    save(storage, step=5, num_shards=1)
    assert tags_of(storage) == [("step-000000005", True)]
    storage.remove("step-000000005")
    assert storage.get("index.json") == b"new"
    for name in ("../x", "a/b", ".hidden", ""):
        with pytest.raises(InvalidSpec):
            storage.put(name, b"")
        with pytest.raises(InvalidSpec):
            storage.get(name)


def test_the_files_of_a_failed_save_are_removed(storage: CheckpointStorage) -> None:
    with pytest.raises(RuntimeError, match="mid"):
        with storage.create("t", "ps-0.safetensors", num_bytes=10) as writer:
            writer.write(b"12345")
            raise RuntimeError("mid")
    assert all(not stored.files for stored in storage.stored())
    storage.remove_incomplete("t")
    assert storage.stored() == ()


def test_commit_without_all_files_changes_nothing(storage: CheckpointStorage) -> None:
    save(storage, step=4)
    files = write_files(storage, step=5)
    tag = "step-000000005"
    for wrong in (
        (*files, CheckpointFile(name="ps-2.safetensors", shard=2, num_bytes=1, sha256="0" * 64)),
        (CheckpointFile(name=files[0].name, shard=0, num_bytes=1, sha256="0" * 64), files[1]),
    ):
        with pytest.raises(CheckpointNotFound, match=r"the file of ps 2, is not there; do all roles|ps 0 wrote 1"):
            storage.commit(tag, b"{}", files=wrong)
    assert tags_of(storage) == [("step-000000004", True), (tag, False)]


def test_a_commit_of_files_that_do_not_exist_is_refused(storage: CheckpointStorage) -> None:
    with pytest.raises(CheckpointNotFound, match="do all roles have the same --checkpoint-dir"):
        storage.commit("t", b"{}", files=[CheckpointFile(name="ps-0.safetensors", shard=0, num_bytes=1, sha256="0" * 64)])


def test_checkpoint_that_is_saved_again_is_the_new_one(storage: CheckpointStorage) -> None:
    first, second = (save(storage, step=5, num_shards=num_shards) for num_shards in (2, 1))
    assert first.tag == second.tag
    assert find_checkpoint(storage).checkpoint == second
    verify_checkpoint(storage, second)
    prune(storage, cluster=CLUSTER, keep=3)
    assert tags_of(storage) == [(second.tag, True)]


def test_newest_is_the_one_of_the_highest_epoch_and_then_of_the_highest_step(storage: CheckpointStorage) -> None:
    save(storage, step=900, epoch=1)
    save(storage, step=100, epoch=3)
    save(storage, step=20, epoch=3)
    newest = find_checkpoint(storage, cluster=CLUSTER).checkpoint
    assert (newest.fence.epoch, newest.step) == (3, 100)
    assert highest_epoch(storage) == 3
    assert find_checkpoint(storage, excluded=[newest.tag]).checkpoint.step == 20
    assert find_checkpoint(storage, tag="step-000000900").checkpoint.step == 900
    with pytest.raises(CheckpointNotFound, match=r"no complete checkpoint 'step-1' .*there are step-000000900, step"):
        find_checkpoint(storage, tag="step-1")


def test_checkpoint_of_another_cluster_is_neither_taken_nor_removed(storage: CheckpointStorage) -> None:
    other = save(storage, step=9, cluster="job-b")
    mine = save(storage, step=5)
    found = find_checkpoint(storage, cluster=CLUSTER)
    assert found.checkpoint == mine
    assert [(one.tag, one.reason) for one in found.skipped] == [(other.tag, "it is of cluster 'job-b', this is 'job-a'")]
    assert prune(storage, cluster=CLUSTER, keep=1) == ()
    assert find_checkpoint(storage, cluster="job-b").checkpoint == other


@pytest.mark.parametrize("kind", ["manifest flipped", "manifest cut", "manifest of another", "file missing", "file cut"])
def test_damaged_checkpoint_is_skipped_saying_why(storage: CheckpointStorage, kind: str) -> None:
    older, newer = save(storage, step=4), save(storage, step=5)
    if kind.startswith("manifest"):
        manifest = storage.manifest(newer.tag)
        new = {
            "flipped": manifest.replace(b'"step": "5"', b'"step": "4"'),
            "cut": manifest[:-40],
            "of another": storage.manifest(older.tag),
        }
        damage(storage, newer.tag, MANIFEST, new[kind.removeprefix("manifest ")])
    else:
        file = newer.files[1]
        damage(storage, newer.tag, file.name, None if "missing" in kind else bytes(content_of(storage, newer.tag, file)[:-1]))
    found = find_checkpoint(storage, cluster=CLUSTER)
    assert found.checkpoint == older
    assert [one.tag for one in found.skipped] == [newer.tag]
    assert found.skipped[0].reason.startswith(newer.tag), found.skipped
    assert [one.checkpoint for one in list_checkpoints(storage)[0]] == [older]
    with pytest.raises((DataLoss, CheckpointNotFound), match=newer.tag):
        find_checkpoint(storage, cluster=CLUSTER, tag=newer.tag)


@pytest.mark.parametrize("position", [0, 9, -1], ids=["length", "header", "value"])
def test_flipped_bit_is_found_when_the_file_is_read(storage: CheckpointStorage, position: int) -> None:
    checkpoint = save(storage, step=5)
    content = content_of(storage, checkpoint.tag, checkpoint.files[1])
    content[position] ^= 1
    damage(storage, checkpoint.tag, checkpoint.files[1].name, bytes(content))
    check_file(storage, checkpoint.tag, checkpoint.files[0])
    with pytest.raises(DataLoss, match=f"^{checkpoint.tag}/{checkpoint.files[1].name}: "):
        verify_checkpoint(storage, checkpoint)


def test_swapped_files_are_found(storage: CheckpointStorage) -> None:
    checkpoint = save(storage, step=5)
    contents = [bytes(content_of(storage, checkpoint.tag, file)) for file in checkpoint.files]
    for file, content in zip(checkpoint.files, reversed(contents), strict=True):
        damage(storage, checkpoint.tag, file.name, content)
    with pytest.raises(DataLoss, match=r"sha256 mismatch|the manifest says"):
        verify_checkpoint(storage, checkpoint)


def test_manifest_of_another_hash_is_refused(storage: CheckpointStorage) -> None:
    checkpoint = save(storage, step=5)
    with pytest.raises(DataLoss, match=r"sha256 mismatch; do all roles have the same --checkpoint-dir"):
        read_checkpoint(storage, checkpoint.tag, sha256="0" * 64)


def test_the_newest_checkpoints_are_kept_and_the_others_removed(storage: CheckpointStorage) -> None:
    for step in (1, 2, 3, 4):
        save(storage, step=step)
    write_files(storage, step=5)
    write_files(storage, step=6)
    assert prune(storage, cluster=CLUSTER, keep=2, spare=["step-000000006"]) == ("step-000000001", "step-000000002", "step-000000005")
    assert tags_of(storage) == [("step-000000003", True), ("step-000000004", True), ("step-000000006", False)]


def test_a_trial_is_left_to_its_maker(storage: CheckpointStorage) -> None:
    for is_last in (False, True):
        PlaceTrial(storage).run("doctor-1", is_last=is_last)
        assert prune(storage, cluster=CLUSTER, keep=1) == ()
    assert tags_of(storage) == []


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(storage: CheckpointStorage) -> None:
    checkpoints = [save(storage, step=step) for step in (1, 2, 3)]
    damage(storage, checkpoints[2].tag, checkpoints[2].files[0].name, b"")
    assert prune(storage, cluster=CLUSTER, keep=1) == (checkpoints[0].tag,)
    assert find_checkpoint(storage).checkpoint == checkpoints[1]


def test_manifest_that_was_seen_is_not_read_for_each_that_is_added(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    known, reads, manifest = KnownCheckpoints(), Counter[str](), storage.manifest

    def read(tag: str) -> bytes:
        reads[tag] += 1
        return manifest(tag)

    monkeypatch.setattr(storage, "manifest", read)
    for step in range(1, 6):
        save(storage, step=step)
        prune(storage, cluster=CLUSTER, keep=3, known=known)
    assert reads == {f"step-{step:09}": 2 for step in range(1, 6)}
    assert [step for step, _ in tags_of(storage)] == ["step-000000003", "step-000000004", "step-000000005"]


@pytest.mark.parametrize("tag", ["../../x", "/abs", "a/b", "..", ".", "", "a\0b", "x" * 65, "a b", "-x", "ä"])
def test_tag_that_could_lead_elsewhere_is_refused(storage: CheckpointStorage, tag: str) -> None:
    for touch in (storage.manifest, storage.remove, storage.remove_incomplete):
        with pytest.raises(InvalidSpec, match="checkpoint tag"):
            touch(tag)
    with pytest.raises(InvalidSpec, match="checkpoint tag"), storage.create(tag, "a", num_bytes=1):
        pass
    with pytest.raises(InvalidSpec, match="checkpoint tag"), storage.open(tag, "a"):
        pass


@pytest.mark.parametrize("name", ["../x", "/abs", "a/b", "..", ".", "", "a\0b", ".hidden", MANIFEST, "x" * 129, "ä"])
def test_name_that_could_lead_elsewhere_is_refused(storage: CheckpointStorage, name: str) -> None:
    with pytest.raises(InvalidSpec, match="checkpoint file"), storage.create("t", name, num_bytes=1):
        pass
    with pytest.raises(InvalidSpec, match="checkpoint file"), storage.open("t", name):
        pass


def test_files_that_are_no_checkpoints_are_left_alone(storage: CheckpointStorage) -> None:
    if isinstance(storage, LocalStorage):
        root = Path(storage.place)
        (root / "my notes").mkdir(parents=True)
        (root / "README").write_text("mine")
        (root / ".git").mkdir()
    save(storage, step=5)
    assert tags_of(storage) == [("step-000000005", True)]
    prune(storage, cluster=CLUSTER, keep=1)
    if isinstance(storage, LocalStorage):
        assert (root / "README").read_text() == "mine"
        assert (root / "my notes").is_dir()


@pytest.mark.parametrize("place", ["", "  ", "a\0b", "file://host/ckpt", "nosuchkind://bucket/run"])
def test_an_invalid_place_is_refused(place: str) -> None:
    with pytest.raises(InvalidSpec, match="checkpoint directory"):
        open_storage(place)


def test_place_is_a_path_or_a_url(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).place == str(tmp_path)
    assert open_storage(f"file://{tmp_path}/a%20b").place == f"{tmp_path}/a b"
    assert isinstance(open_storage("memory://run"), RemoteStorage)
    assert RemoteStorage("memory://user:secret@bucket/run").place == "memory://bucket/run"


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EACCES, True), (errno.EROFS, True), (errno.ESTALE, False), (errno.EIO, False)])
def test_a_directory_that_is_not_allowed_is_refused_at_the_start_and_one_that_is_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, "for a reason")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(InvalidSpec, match=r"cannot write to .*: for a reason") if is_refused else nullcontext():
        storage_of_role(str(tmp_path / "ckpt"))


@pytest.mark.parametrize("holds_checkpoints", [False, True])
def test_a_directory_that_has_become_read_only_is_refused_at_the_start_unless_it_holds_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_checkpoints: bool
) -> None:
    """A role that is started again in the middle of a training would else end it."""
    if holds_checkpoints:
        save(LocalStorage(tmp_path), step=5)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with nullcontext() if holds_checkpoints else pytest.raises(InvalidSpec, match=r"cannot write to .*: Permission denied"):
        storage_of_role(str(tmp_path))
