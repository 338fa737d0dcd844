"""A checkpoint storage in a directory that lets a test look on, or fail, at every write. Knows the local storage; no server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ps_protocol.checkpoint.storage import FileWriter, LocalStorage, storage_failures


class WatchedStorage:
    """A CheckpointStorage. `on_write` is called before each write with its size; an OSError of it is one of the disk."""

    def __init__(self, root: Path, on_write: Callable[[int], object] = lambda size: None) -> None:
        self._storage = LocalStorage(root)
        self.on_write = on_write
        self.place, self.new_name, self.commit = self._storage.place, self._storage.new_name, self._storage.commit
        self.stored, self.manifest, self.open = self._storage.stored, self._storage.manifest, self._storage.open
        self.remove, self.remove_incomplete = self._storage.remove, self._storage.remove_incomplete
        self.num_free_bytes = self._storage.num_free_bytes

    @contextmanager
    def create(self, tag: str, name: str, *, num_bytes: int) -> Iterator[FileWriter]:
        """Creates a file, as the storage does."""
        with storage_failures(f"write {name}"), self._storage.create(tag, name, num_bytes=num_bytes) as writer:
            yield _Writer(writer, self)


class _Writer:
    def __init__(self, writer: FileWriter, owner: WatchedStorage) -> None:
        self._writer, self._owner = writer, owner

    def write(self, data: bytes | memoryview) -> None:
        self._owner.on_write(len(data))
        self._writer.write(data)
