"""Where checkpoints are kept, as a seam: files under a tag, made whole by a manifest. Knows names and bytes; not what is in them.

A place holds one directory for each checkpoint: its files, and MANIFEST.json, which is written last. What has no manifest is incomplete,
and no checkpoint. `checkpoint_local` keeps them in a directory, `checkpoint_remote` wherever fsspec reaches. All roles are given
the same place: each parameter server creates its file, the chief commits.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec, PermissionDenied, PsError, StorageFailed, StorageFull
from ps_protocol.shard_save_values import CheckpointFile

MANIFEST = "MANIFEST.json"
SHARED_HINT = "do all roles have the same --checkpoint-dir, on storage that they share?"
MAX_MANIFEST_BYTES = 512 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class FileWriter(Protocol):
    """A file that is being written."""

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`. Raises StorageFull, StorageFailed, PermissionDenied."""


class FileReader(Protocol):
    """A file that is being read."""

    @property
    def num_bytes(self) -> int:
        """Its size."""

    def read_into(self, memory: memoryview, *, offset: int) -> None:
        """Fills `memory` with the bytes from `offset` on. Raises DataLoss if the file ends before, StorageFailed if it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint of a place: its tag, whether it has been made whole, and the sizes of its files by name (without the manifest)."""

    tag: str
    is_whole: bool
    files: Mapping[str, int] = field(default_factory=dict)


class CheckpointStorage(Protocol):
    """A place for checkpoints. Every method blocks; all may be called from several threads and processes at once.

    Tags and names are checked before any file is touched: InvalidSpec if one could lead elsewhere, PermissionDenied if a link does.
    All raise StorageFailed if the system fails, PermissionDenied if it does not let this user.
    """

    @property
    def place(self) -> str:
        """The place as people name it."""

    def new_name(self, *, shard: int, num_shards: int) -> str:
        """Returns the name for a file of this shard that is about to be created."""

    def create(self, tag: str, name: str, *, num_bytes: int) -> AbstractContextManager[FileWriter]:
        """Creates a file of a checkpoint that is not whole yet; it is on stable storage when the block ends, and gone if the block raises.

        What an earlier attempt left under this name is replaced. Raises StorageFull if there is less room than `num_bytes`.
        """

    def commit(self, tag: str, manifest: bytes, *, files: Sequence[CheckpointFile]) -> None:
        """Makes a checkpoint whole: atomically, and on stable storage when it returns. One that has this tag already is replaced.

        Raises CheckpointNotFound if a file is missing, or is not as long as it should be; then nothing has changed.
        """

    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """Returns what is here, whole and incomplete, by tag; a tag can be there as both. Empty if the place does not exist."""

    def manifest(self, tag: str) -> bytes:
        """Returns the manifest of a whole checkpoint. Raises CheckpointNotFound; DataLoss if it is too long to be one."""

    def open(self, tag: str, name: str) -> AbstractContextManager[FileReader]:
        """Opens a file of a whole checkpoint for reading. Raises CheckpointNotFound if there is none, DataLoss if it lacks the file."""

    def remove(self, tag: str) -> None:
        """Removes a whole checkpoint; from the first moment on it is none. Does nothing if there is none."""

    def remove_incomplete(self, tag: str) -> None:
        """Removes what an attempt left that was never committed, or what a removal left. Does nothing if there is nothing."""

    def num_free_bytes(self) -> int | None:
        """Returns how many bytes there is room for; None: nobody knows."""


def check_name(name: str) -> str:
    """Returns a file's name as it is. Raises InvalidSpec if it could be anything but the name of a file in the checkpoint's directory."""
    is_plain = bool(name) and len(name) <= 128 and name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)
    if not is_plain or name.startswith(".") or name == MANIFEST:
        raise InvalidSpec(f"checkpoint file {name[:80]!r}: want 1 to 128 letters, digits, '.', '_' or '-', the first not a '.'")
    return name


def check_room(num_bytes: int, *, num_free_bytes: int | None, place: str) -> None:
    """Raises StorageFull if fewer bytes are free than needed."""
    if num_free_bytes is not None and num_bytes > num_free_bytes:
        raise StorageFull(f"checkpoint: need {size_text(num_bytes)}, {size_text(num_free_bytes)} free on {place}; training continues")


def check_files(files: Sequence[CheckpointFile], sizes: Mapping[str, int], *, where: str) -> None:
    """Raises CheckpointNotFound unless all files are there, as long as they should be."""
    for file in files:
        if file.name not in sizes:
            raise CheckpointNotFound(f"{where}: {file.name}, the file of ps {file.shard}, is not there; {SHARED_HINT}")
        if sizes[file.name] != file.num_bytes:
            sizes_text = f"{sizes[file.name]} bytes, ps {file.shard} wrote {file.num_bytes}"
            raise CheckpointNotFound(f"{where}: {file.name} has {sizes_text}")


def check_manifest_bytes(num_bytes: int, *, where: str) -> None:
    """Raises DataLoss if a manifest is longer than any."""
    if num_bytes > MAX_MANIFEST_BYTES:
        raise DataLoss(f"{where}/{MANIFEST}: {num_bytes} bytes, want at most {MAX_MANIFEST_BYTES}")


def storage_error(error: OSError, *, what: str) -> PsError:
    """Returns the error of the system as one of ours; `what` names the file and what was being done with it."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _FULL:
        return StorageFull(f"{what}: {reason}; make room, training continues")
    if error.errno in _REFUSED or isinstance(error, PermissionError):
        return PermissionDenied(f"{what}: {reason}; let this user write there, or choose another --checkpoint-dir")
    return StorageFailed(f"{what}: {reason}")


@contextmanager
def storage_failures(what: str) -> Iterator[None]:
    """Raises one of ours for an error of the system in the block; `what` is what the block does."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, what=f"cannot {what}") from error


def size_text(num_bytes: int) -> str:
    """Returns a size for people, for example "4.2 GiB"."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
