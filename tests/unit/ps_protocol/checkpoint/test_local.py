"""Checkpoints in a directory: crashes, a full disk, symbolic links."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ps_protocol.checkpoint.catalog import find_checkpoint, prune, verify_checkpoint
from ps_protocol.checkpoint.storage import MANIFEST, LocalStorage, storage_error
from ps_protocol.errors import CheckpointNotFound, DataLoss, PermissionDenied, PsError, StorageFailed, StorageFull
from ps_protocol.process.failpoints import enable_failpoints
from tests.support.parameter_servers.checkpoints import CLUSTER, Crash, Disk, save, write_files


def save_and_prune(storage: LocalStorage) -> None:
    save(storage, step=2)
    prune(storage, cluster=CLUSTER, keep=1)


def num_calls_of_a_save(root: Path) -> int:
    storage, disk = LocalStorage(root), Disk(root, crash_at=1 << 30)
    save(storage, step=1)
    with disk.installed():
        save_and_prune(storage)
    return disk.num_calls


def test_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    num_calls = num_calls_of_a_save(tmp_path / "count")
    assert num_calls > 20
    seen = set()
    for crash_at in range(1, num_calls + 1):
        root = tmp_path / str(crash_at)
        storage, disk = LocalStorage(root), Disk(root, crash_at=crash_at)
        save(storage, step=1)
        disk.note_synced()
        with disk.installed(), pytest.raises(Crash):
            save_and_prune(storage)
        disk.tear()
        found = find_checkpoint(LocalStorage(root), cluster=CLUSTER)
        verify_checkpoint(storage, found.checkpoint)
        seen.add(found.checkpoint.step)
        save_and_prune(LocalStorage(root))
        assert [(stored.tag, stored.is_whole) for stored in storage.stored()] == [("step-000000002", True)], "the next run cleans up"
    assert seen == {1, 2}


def test_crash_of_one_shard_is_never_taken_for_a_whole_save(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, step=1)
    write_files(storage, step=2)
    (tmp_path / "step-000000002.incomplete" / "ps-00001-of-00002.safetensors").unlink()
    assert find_checkpoint(storage, cluster=CLUSTER).checkpoint.step == 1


def test_a_process_of_an_earlier_attempt_cannot_write_into_a_later_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageFailed, match=r"step-000000002\.incomplete.*No such file"):
        with storage.create("step-000000002", "ps-00000-of-00002.safetensors", num_bytes=10) as stopped:
            stopped.write(b"old")
            checkpoint = save(storage, step=2)
            stopped.write(b"woken")
    verify_checkpoint(storage, checkpoint)


@pytest.mark.parametrize("kind", ["error:enospc", "error:eio"])
@pytest.mark.parametrize(
    "point", ["ps.save.mid_file", "ps.save.before_fsync", "chief.manifest.before_write", "chief.manifest.before_rename"]
)
def test_failing_disk_leaves_the_old_checkpoint(tmp_path: Path, point: str, kind: str) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, step=1)
    enable_failpoints({"LOCKSTEP_FAILPOINTS": f"{point}={kind}"}, is_enabled=True)
    try:
        with pytest.raises(StorageFull if "enospc" in kind else StorageFailed, match=str(tmp_path)):
            save(storage, step=2)
    finally:
        enable_failpoints({}, is_enabled=False)
    assert find_checkpoint(storage, cluster=CLUSTER).checkpoint.step == 1
    save(storage, step=2)
    assert find_checkpoint(storage, cluster=CLUSTER).checkpoint.step == 2


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_the_disk_writes_the_first_bytes_while_later_bytes_are_produced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: sent.append((start, size)))
    monkeypatch.setattr(os, "fsync", lambda file: sent.append((0, 0)))
    with LocalStorage(tmp_path).create("t", "a", num_bytes=9 << 20) as writer:
        for _ in range(9):
            writer.write(bytes(1 << 20))
    assert sent[:3] == [(0, 4 << 20), (4 << 20, 4 << 20), (0, 0)]


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(4 << 30, r"need 4\.0 GiB, 256\.0 KiB free"), ((256 << 10) + 1, r"need 262145 bytes, 262144 bytes free")]
)
def test_save_without_room_is_refused_before_it_begins(num_bytes: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=256, f_frsize=1024))
    with pytest.raises(StorageFull, match=rf"{words} on {tmp_path}; make room"):
        with storage.create("t", "a", num_bytes=num_bytes):
            pass
    assert storage.stored() == () or storage.stored()[0].files == {}


@pytest.mark.parametrize(("code", "kind"), [(errno.EACCES, PermissionDenied), (errno.EROFS, PermissionDenied), (errno.EIO, StorageFailed)])
def test_an_error_of_the_operating_system_is_reported_with_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[PsError]
) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(kind, match=os.strerror(code)):
        save(LocalStorage(tmp_path / "ckpt"), step=1)


@pytest.mark.parametrize("kind", ["directory", "file", "manifest", "incomplete"])
def test_link_out_of_the_root_is_refused(tmp_path: Path, kind: str) -> None:
    outside, storage = LocalStorage(tmp_path / "outside"), LocalStorage(tmp_path / "ckpt")
    checkpoint = save(outside, step=1)
    save(storage, step=2)
    there, tag = tmp_path / "outside" / checkpoint.tag, checkpoint.tag
    link = tmp_path / "ckpt" / tag
    if kind == "incomplete":
        link.with_name(f"{tag}.incomplete").symlink_to(there)
        with pytest.raises(PermissionDenied, match=f"checkpoint path leaves {tmp_path}/ckpt"):
            write_files(storage, step=1)
        assert (there / MANIFEST).exists()
        return
    if kind == "directory":
        link.symlink_to(there)
    else:
        save(storage, step=1)
        name = MANIFEST if kind == "manifest" else checkpoint.files[0].name
        (link / name).unlink()
        (link / name).symlink_to(there / name)
    with pytest.raises(PermissionDenied, match=f"checkpoint path leaves {tmp_path}/ckpt"):
        storage.manifest(tag)
        with storage.open(tag, checkpoint.files[0].name):
            pass
    assert find_checkpoint(storage, cluster=CLUSTER).checkpoint.step == 2


def test_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk")
    storage = LocalStorage(tmp_path / "ckpt")
    verify_checkpoint(storage, save(storage, step=1))


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    checkpoint = save(storage, step=1)
    path = tmp_path / checkpoint.tag / checkpoint.files[0].name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataLoss, match="is not a file"):
        verify_checkpoint(storage, checkpoint)
    with pytest.raises(CheckpointNotFound):
        find_checkpoint(storage, cluster=CLUSTER)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_does_not_promise_that_training_continues(number: int) -> None:
    """With a checkpoint of every step it does not: only the chief knows."""
    error = storage_error(OSError(number, os.strerror(number)), what="cannot write /ckpt/a")
    assert (type(error), error.message) == (StorageFull, f"cannot write /ckpt/a: {os.strerror(number)}; make room")
