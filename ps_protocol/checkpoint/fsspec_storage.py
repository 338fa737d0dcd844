"""Checkpoints at a URL, wherever fsspec reaches: object stores have no rename, so the manifest alone makes one whole."""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from ps_protocol.checkpoint.storage import MANIFEST, StoredCheckpoint, check_files, check_manifest_bytes, check_name, storage_failures
from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec, PsError, StorageFailed
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.checkpoint import check_tag
from ps_protocol.roles.shard import CheckpointFile

_BLOCK_BYTES = 8 << 20
_USER = re.compile(r"//[^/@]*@")


class RemoteStorage:
    """A CheckpointStorage at a URL. Its credentials are those that fsspec's package for it finds in the environment."""

    def __init__(self, url: str) -> None:
        self.place = _USER.sub("//", url)  # logs must not show a password
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise InvalidSpec(f"checkpoint directory {self.place!r}: a URL needs fsspec; pip install 'lockstep-ps[remote]'") from None
        try:
            # Other processes write there too: what was listed before may be wrong.
            self._files, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise InvalidSpec(f"checkpoint directory {self.place!r}: {error}") from None
        self._root = str(root).rstrip("/")

    def new_name(self, *, shard: int, num_shards: int) -> str:
        """Returns for example "ps-00000-of-00002-5f3a9c01.safetensors", another one each time."""
        return f"ps-{shard:05}-of-{num_shards:05}-{secrets.token_hex(4)}.safetensors"

    @contextmanager
    def create(self, tag: str, name: str, *, num_bytes: int) -> Iterator["_RemoteWriter"]:
        """Creates a file of a checkpoint that is not whole yet, as CheckpointStorage says; the free space is unknown."""
        path = f"{self._directory(tag)}/{check_name(name)}"
        with storage_failures(what := f"write {path}"):
            with _failures(what):
                self._files.makedirs(self._directory(tag), exist_ok=True)
                file = self._files.open(path, "wb", block_size=_BLOCK_BYTES)
            try:
                yield _RemoteWriter(file)
                failpoint("ps.save.before_fsync")
                with _failures(what):
                    file.close()  # only now is it there
            except BaseException:
                self._give_up(file, path)
                raise

    def commit(self, tag: str, manifest: bytes, *, files: Sequence[CheckpointFile]) -> None:
        """Makes a checkpoint whole, as CheckpointStorage says: writing an object is atomic."""
        path = f"{self._directory(tag)}/{MANIFEST}"
        with _failures(f"commit {path}"):
            check_files(files, self._found().get(tag, {}), where=f"{self.place}/{tag}")
            failpoint("chief.manifest.before_write")
            failpoint("chief.manifest.before_rename")
            self._files.pipe_file(path, manifest)
            failpoint("chief.manifest.after_rename")

    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """Returns what is here, as CheckpointStorage says."""
        stored = []
        with _failures(f"list {self.place}"):
            for tag, files in sorted(self._found().items()):
                is_whole = files.pop(MANIFEST, None) is not None
                stored.append(StoredCheckpoint(tag=tag, is_whole=is_whole, files=files))
        return tuple(stored)

    def manifest(self, tag: str) -> bytes:
        """Returns the manifest of a whole checkpoint, as CheckpointStorage says."""
        return self._content(f"{self._directory(tag)}/{MANIFEST}", f"there is no whole checkpoint {tag!r} in {self.place}")

    def put(self, name: str, content: bytes) -> None:
        """Replaces a small file of the place itself, as CheckpointStorage says: writing an object is atomic."""
        path = f"{self._root}/{check_name(name)}"
        with _failures(f"write {path}"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(path, content)

    def get(self, name: str) -> bytes:
        """Returns a small file of the place itself, as CheckpointStorage says."""
        return self._content(f"{self._root}/{check_name(name)}", f"there is no {name} in {self.place}")

    @contextmanager
    def open(self, tag: str, name: str) -> Iterator["_RemoteReader"]:
        """Opens a file of a whole checkpoint for reading, as CheckpointStorage says."""
        path = f"{self._directory(tag)}/{check_name(name)}"
        with _failures(f"read {path}"):
            try:
                num_bytes = int(self._files.info(path)["size"])
                file = self._files.open(path, "rb", block_size=_BLOCK_BYTES)
            except FileNotFoundError:
                if self._files.exists(f"{self._directory(tag)}/{MANIFEST}"):
                    raise DataLoss(f"{tag}/{name} is not there") from None
                raise CheckpointNotFound(f"there is no whole checkpoint {tag!r} in {self.place}") from None
        with closing(file):
            yield _RemoteReader(file, num_bytes=num_bytes, where=f"{tag}/{name}")

    def remove(self, tag: str) -> None:
        """Removes a whole checkpoint, as CheckpointStorage says."""
        directory = self._directory(tag)
        with _failures(f"remove {directory}"):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{directory}/{MANIFEST}")
                self._files.rm(directory, recursive=True)

    def remove_incomplete(self, tag: str) -> None:
        """Removes what was never committed; of a tag that is whole, the files that its manifest does not name."""
        directory = self._directory(tag)
        with _failures(f"remove {directory}"):
            files = self._found().get(tag, {})
            named = _named_in(self.manifest(tag)) if MANIFEST in files else set()
            for name in files.keys() - named - {MANIFEST}:
                with suppress(FileNotFoundError):
                    self._files.rm_file(f"{directory}/{name}")
            if MANIFEST not in files:
                with suppress(FileNotFoundError):
                    self._files.rm(directory, recursive=True)

    def num_free_bytes(self) -> int | None:
        """Returns None: the free space is unknown."""
        return None

    def _content(self, path: str, missing: str) -> bytes:
        with _failures(f"read {path}"):
            try:
                check_manifest_bytes(int(self._files.info(path)["size"]), where=path)
                return bytes(self._files.cat_file(path))
            except FileNotFoundError:
                raise CheckpointNotFound(missing) from None

    def _directory(self, tag: str) -> str:
        return f"{self._root}/{check_tag(tag)}"

    def _found(self) -> dict[str, dict[str, int]]:
        """Returns the sizes of all files by tag and name."""
        self._files.invalidate_cache()
        try:
            paths: dict[str, dict[str, Any]] = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        found: dict[str, dict[str, int]] = {}
        for path, about in paths.items():
            tag, _, name = path.removeprefix(self._root).lstrip("/").partition("/")
            with suppress(InvalidSpec):  # not ours
                if name and "/" not in name:
                    found.setdefault(check_tag(tag), {})[name] = int(about["size"])
        return found

    def _give_up(self, file: Any, path: str) -> None:
        """Leaves nothing of a file, as far as the system lets us: whatever fails now is less than what has failed before."""
        with suppress(Exception):
            if hasattr(file, "discard"):
                file.discard()  # closing it would make it whole
            else:
                file.close()
        with suppress(Exception):
            self._files.rm_file(path)


class _RemoteWriter:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        with _failures("write to the checkpoint"):
            self._file.write(data)


class _RemoteReader:
    def __init__(self, file: Any, *, num_bytes: int, where: str) -> None:
        self._file = file
        self._where = where
        self.num_bytes = num_bytes

    def read_into(self, memory: memoryview, *, offset: int) -> None:
        rest = memory.cast("B")
        with _failures(f"read {self._where}"):
            if self._file.tell() != offset:
                self._file.seek(offset)
            while rest:
                num_read = self._file.readinto(rest)
                if not num_read:
                    raise DataLoss(f"{self._where}: ends {len(rest)} bytes too early")
                rest = rest[num_read:]


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        with storage_failures(what):
            yield
    except PsError:
        raise
    except Exception as error:  # each of fsspec's packages has errors of its own
        raise StorageFailed(f"cannot {what}: {type(error).__name__}: {error}") from error


def _named_in(manifest: bytes) -> set[str]:
    try:
        return {str(file["name"]) for file in json.loads(manifest)["files"]}
    except (ValueError, KeyError, TypeError):
        return set()
