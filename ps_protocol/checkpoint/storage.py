"""The storage of checkpoints, as a seam, and a file system's directory as the first such place. Knows names and bytes; no content."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Protocol

from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec, PermissionDenied, PsError, StorageFailed, StorageFull
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import format_bytes
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.checkpoint import check_tag
from ps_protocol.roles.shard import CheckpointFile

# Where checkpoints are kept, as a seam: files under a tag, made whole by a manifest.
#
# A place holds one directory for each checkpoint: its files, and MANIFEST.json, which is written last. What has no manifest is incomplete,
# and no checkpoint. `LocalStorage` keeps them in a directory, `RemoteStorage` wherever fsspec reaches. All roles are given
# the same place: each parameter server creates its file, the chief commits.


MANIFEST = "MANIFEST.json"
SHARED_HINT = "do all roles have the same --checkpoint-dir, on storage that they share?"
MAX_MANIFEST_BYTES = 512 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_DIRECTORY = (errno.ENOTDIR, errno.EEXIST)


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


@light_dataclass(frozen=True, slots=True, kw_only=True)
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

    def put(self, name: str, content: bytes) -> None:
        """Replaces a small file of the place itself, beside all tags; a reader gets the old or the new content.

        It is on stable storage when this returns. Raises StorageFull.
        """

    def get(self, name: str) -> bytes:
        """Returns a small file of the place itself. Raises CheckpointNotFound; DataLoss if it is longer than a manifest can be."""

    def num_free_bytes(self) -> int | None:
        """Returns how many bytes there is room for; None: unknown."""


def check_name(name: str) -> str:
    """Returns a file's name as it is. Raises InvalidSpec if it could be anything but the name of a file in the checkpoint's directory."""
    is_plain = bool(name) and len(name) <= 128 and name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)
    if not is_plain or name.startswith(".") or name == MANIFEST:
        raise InvalidSpec(f"checkpoint file {name[:80]!r}: want 1 to 128 letters, digits, '.', '_' or '-', the first not a '.'")
    return name


def check_room(num_bytes: int, *, num_free_bytes: int | None, place: str) -> None:
    """Raises StorageFull if fewer bytes are free than needed."""
    if num_free_bytes is not None and num_bytes > num_free_bytes:
        need, free = format_bytes(num_bytes), format_bytes(num_free_bytes)
        if need == free:  # rounded, it would read as room enough
            need, free = f"{num_bytes} bytes", f"{num_free_bytes} bytes"
        raise StorageFull(f"checkpoint: need {need}, {free} free on {place}; make room")


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
        raise DataLoss(f"{where}: {num_bytes} bytes, want at most {MAX_MANIFEST_BYTES}")


def storage_error(error: OSError, *, what: str) -> PsError:
    """Returns the error of the system as one of ours; `what` names the file and what was being done with it."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _FULL:
        return StorageFull(f"{what}: {reason}; make room")
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


# Checkpoints in a directory of a file system: temporary directory, fsync, manifest last, rename.


INCOMPLETE = ".incomplete"
_REMOVED = ".removed"
_LEFTOVERS = (INCOMPLETE, _REMOVED)
# So much is given to the disk at a time.
_PART_BYTES = 4 << 20


class LocalStorage:
    """A CheckpointStorage in a directory, which is made by `make` or a first file. Its file system may be shared by several hosts."""

    def __init__(self, root: str | Path) -> None:
        if not str(root) or "\0" in str(root):
            raise InvalidSpec(f"checkpoint directory: got {str(root)!r}, want a path")
        self._root = Path(root).expanduser().absolute()

    @property
    def place(self) -> str:
        """The directory's path."""
        return str(self._root)

    def make(self) -> None:
        """Makes the directory. Raises InvalidSpec if there can be none, or if this user may not write to it.

        Storage that is only away for a while is no reason to raise, nor is one that holds checkpoints: a role that is started again in the
        middle of a training has to continue it, though its disk has become read-only.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if error.errno in (*_REFUSED, *_NO_DIRECTORY) and not self._holds_checkpoints():
                why = "there is a file" if error.errno in _NO_DIRECTORY else error.strerror
                raise InvalidSpec(f"--checkpoint-dir: cannot write to {self._root}: {why}; choose another directory") from None

    def _holds_checkpoints(self) -> bool:
        with suppress(PsError):
            return bool(self.stored())
        return False

    def new_name(self, *, shard: int, num_shards: int) -> str:
        """Returns for example "ps-00000-of-00002.safetensors"."""
        return f"ps-{shard:05}-of-{num_shards:05}.safetensors"

    @contextmanager
    def create(self, tag: str, name: str, *, num_bytes: int) -> Iterator["_LocalWriter"]:
        """Creates a file of a checkpoint that is not whole yet, as CheckpointStorage says."""
        path = self._directory(tag, INCOMPLETE) / check_name(name)
        with storage_failures(f"write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._check_inside(path.parent)
            check_room(num_bytes, num_free_bytes=self.num_free_bytes(), place=self.place)
            writer = _LocalWriter(path)
            try:
                with closing(writer):
                    yield writer
                    failpoint("ps.save.before_fsync")
                    writer.sync()
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise
            _sync_directory(path.parent)

    def commit(self, tag: str, manifest: bytes, *, files: Sequence[CheckpointFile]) -> None:
        """Makes a checkpoint whole, as CheckpointStorage says."""
        incomplete, whole = self._directory(tag, INCOMPLETE), self._directory(tag)
        with storage_failures(f"commit {whole}"):
            if not incomplete.is_dir():
                raise CheckpointNotFound(f"{incomplete} is not there; {SHARED_HINT}")
            self._check_inside(incomplete)
            check_files(files, _sizes(incomplete), where=str(incomplete))
            failpoint("chief.manifest.before_write")
            with closing(_LocalWriter(incomplete / MANIFEST)) as writer:
                writer.write(manifest)
                writer.sync()
            _sync_directory(incomplete)
            failpoint("chief.manifest.before_rename")
            self._set_aside(tag)
            incomplete.rename(whole)
            failpoint("chief.manifest.after_rename")
            _sync_directory(self._root)

    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """Returns what is here, as CheckpointStorage says. Symbolic links, and whatever is not named like a checkpoint, are left out."""
        found = []
        with storage_failures(f"list {self._root}"):
            for path in sorted(self._root.iterdir()) if self._root.is_dir() else ():
                tag, is_whole = _tag_of(path)
                if tag is not None and not path.is_symlink() and path.is_dir():
                    with suppress(FileNotFoundError):  # another process has just renamed or removed it
                        sizes = _sizes(path)
                        is_whole = is_whole and sizes.pop(MANIFEST, None) is not None
                        found.append(StoredCheckpoint(tag=tag, is_whole=is_whole, files=sizes))
        return tuple(found)

    def manifest(self, tag: str) -> bytes:
        """Returns the manifest of a whole checkpoint, as CheckpointStorage says."""
        return self._content(self._directory(tag) / MANIFEST, f"there is no whole checkpoint {tag!r} in {self._root}")

    def put(self, name: str, content: bytes) -> None:
        """Replaces a small file of the place itself, as CheckpointStorage says."""
        path = self._root / check_name(name)
        # Of a name of its own: another writer's is not renamed before it is whole.
        beside = self._root / f".{name}.{secrets.token_hex(4)}"
        with storage_failures(f"write {path}"):
            self._root.mkdir(parents=True, exist_ok=True)
            writer = _LocalWriter(beside)
            try:
                with closing(writer):
                    writer.write(content)
                    writer.sync()
                beside.rename(path)
            except BaseException:
                with suppress(OSError):
                    beside.unlink()
                raise
            _sync_directory(self._root)

    def get(self, name: str) -> bytes:
        """Returns a small file of the place itself, as CheckpointStorage says."""
        return self._content(self._root / check_name(name), f"there is no {name} in {self._root}")

    @contextmanager
    def open(self, tag: str, name: str) -> Iterator["_LocalReader"]:
        """Opens a file of a whole checkpoint for reading, as CheckpointStorage says."""
        path = self._directory(tag) / check_name(name)
        with storage_failures(f"read {path}"):
            try:
                reader = _LocalReader(self._check_inside(path))
            except FileNotFoundError:
                if (path.parent / MANIFEST).is_file():
                    raise DataLoss(f"{tag}/{name} is not there") from None
                raise CheckpointNotFound(f"there is no whole checkpoint {tag!r} in {self._root}") from None
            with closing(reader):
                yield reader

    def remove(self, tag: str) -> None:
        """Removes a whole checkpoint, as CheckpointStorage says."""
        with storage_failures(f"remove {self._directory(tag)}"):
            self._set_aside(tag)
            _remove_tree(self._directory(tag, _REMOVED))

    def remove_incomplete(self, tag: str) -> None:
        """Removes what was never committed, or what a removal left, as CheckpointStorage says."""
        for ending in _LEFTOVERS:
            path = self._directory(tag, ending)
            with storage_failures(f"remove {path}"):
                _remove_tree(path)
        if (path := self._directory(tag)).is_dir() and not (path / MANIFEST).exists():
            with storage_failures(f"remove {path}"):
                _remove_tree(path)

    def num_free_bytes(self) -> int | None:
        """Returns how many bytes the file system lets this user write."""
        path = self._root
        while not path.exists() and path != path.parent:
            path = path.parent
        free = os.statvfs(path)
        return free.f_bavail * free.f_frsize

    def _content(self, path: Path, missing: str) -> bytes:
        with storage_failures(f"read {path}"):
            try:
                reader = _LocalReader(self._check_inside(path))
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointNotFound(missing) from None
            with closing(reader):
                check_manifest_bytes(reader.num_bytes, where=str(path))
                content = bytearray(reader.num_bytes)
                reader.read_into(memoryview(content), offset=0)
                return bytes(content)

    def _directory(self, tag: str, ending: str = "") -> Path:
        if check_tag(tag).endswith(_LEFTOVERS):
            raise InvalidSpec(f"checkpoint tag {tag!r}: ends like a directory of an incomplete one; choose another name")
        return self._root / f"{tag}{ending}"

    def _check_inside(self, path: Path) -> Path:
        """Returns where the path really leads. Raises PermissionDenied if that is outside of the root."""
        root, real = self._root.resolve(), path.resolve()
        if not real.is_relative_to(root):
            raise PermissionDenied(f"checkpoint path leaves {self._root}: {path} leads to {real}; put the files there themselves")
        return real

    def _set_aside(self, tag: str) -> None:
        """Moves a whole checkpoint out of the way, at once; a directory with files cannot be renamed over."""
        aside, whole = self._directory(tag, _REMOVED), self._directory(tag)
        _remove_tree(aside)
        with suppress(FileNotFoundError):
            whole.rename(aside)


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        # A new inode: a process of an earlier attempt that still writes does not write into this file.
        with suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self._num_written = self._num_on_way = 0

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            num_bytes = os.write(self._file, rest)
            self._num_written += num_bytes
            rest = rest[num_bytes:]
        if self._num_written - self._num_on_way >= _PART_BYTES:
            self._send()

    def sync(self) -> None:
        os.fsync(self._file)

    def _send(self) -> None:
        """Has the system begin to write what it was given, while more is made: else all of it waits for `sync`."""
        with suppress(AttributeError, OSError):  # a hint; not every system knows it
            os.posix_fadvise(self._file, self._num_on_way, self._num_written - self._num_on_way, os.POSIX_FADV_DONTNEED)
        self._num_on_way = self._num_written

    def close(self) -> None:
        os.close(self._file)


class _LocalReader:
    def __init__(self, path: Path) -> None:
        # Not blocking: a pipe, for example, must not block the caller.
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        self._path = path
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._file)
            raise DataLoss(f"{path} is not a file")
        self.num_bytes = status.st_size

    def read_into(self, memory: memoryview, *, offset: int) -> None:
        rest = memory.cast("B")
        while rest:
            try:
                num_read = os.preadv(self._file, [rest], offset)
            except OSError as error:
                raise storage_error(error, what=f"cannot read {self._path}") from error
            if not num_read:
                raise DataLoss(f"{self._path.parent.name}/{self._path.name}: ends at byte {offset}, {len(rest)} bytes are missing")
            rest, offset = rest[num_read:], offset + num_read

    def close(self) -> None:
        os.close(self._file)


def _tag_of(path: Path) -> tuple[str | None, bool]:
    """Returns the tag that a directory belongs to, and whether it may be whole."""
    name = path.name
    is_leftover = name.endswith(_LEFTOVERS)
    tag = name.rpartition(".")[0] if is_leftover else name
    try:
        return check_tag(tag), not is_leftover
    except InvalidSpec:
        return None, False


def _sizes(directory: Path) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file(follow_symlinks=False)}


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_tree(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
