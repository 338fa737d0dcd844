"""Storage of a simulated cluster: files, torn where a process was killed, damaged where a fault damages them. Knows bytes.

Only closed files count as written; a manifest makes a checkpoint whole at one moment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ps_protocol.checkpoint.storage import StoredCheckpoint, check_files, check_name
from ps_protocol.errors import CheckpointNotFound, DataLoss, StorageFailed, StorageFull
from ps_protocol.roles.shard import CheckpointFile

# Of a shard's variable and its slot.
_VALUE_BYTES = 32


class Crash(BaseException):
    """The process that was writing is no more."""


class SimulatedStorage:
    """Implements CheckpointStorage. `fuse` counts writes down and ends in a Crash; `is_full` makes every write fail."""

    place = "simulated"

    def __init__(self, *, on_commit: Callable[[bytes], None]) -> None:
        self.fuse: int | None = None
        self.is_full = False
        self.is_broken = False
        self._on_commit = on_commit
        self._files: dict[str, dict[str, bytearray]] = {}
        self._whole: dict[str, tuple[bytes, dict[str, bytearray]]] = {}
        self._number = 0

    def new_name(self, *, shard: int, num_shards: int) -> str:
        """Returns a name that no attempt before has had."""
        self._number += 1
        return f"ps-{shard:05}-of-{num_shards:05}-{self._number}.safetensors"

    @contextmanager
    def create(self, tag: str, name: str, *, num_bytes: int) -> Iterator["_Writer"]:
        """Creates a file."""
        self.count()
        if self.is_full:
            raise StorageFull("simulated: no room")
        content = bytearray()
        files = self._files.setdefault(tag, {})
        files[check_name(name)] = content
        try:
            yield _Writer(self, content)
        except Crash:
            raise
        except BaseException:
            files.pop(name, None)
            raise

    def commit(self, tag: str, manifest: bytes, *, files: Sequence[CheckpointFile]) -> None:
        """Makes a checkpoint whole."""
        self.count()
        if self.is_full:
            raise StorageFull("simulated: no room")
        found = self._files.get(tag, {})
        check_files(files, {name: len(content) for name, content in found.items()}, where=tag)
        self.count()
        self._whole[tag] = manifest, self._files.pop(tag, {})
        self._on_commit(manifest)
        self.count()

    def stored(self) -> tuple[StoredCheckpoint, ...]:
        """Returns what is here."""
        if self.is_broken:
            raise StorageFailed("simulated: Input/output error")
        whole = [StoredCheckpoint(tag=tag, is_whole=True, files=_sizes(files)) for tag, (_, files) in self._whole.items()]
        return (*whole, *(StoredCheckpoint(tag=tag, is_whole=False, files=_sizes(files)) for tag, files in self._files.items()))

    def manifest(self, tag: str) -> bytes:
        """Returns a manifest."""
        if tag not in self._whole:
            raise CheckpointNotFound(f"simulated: there is no {tag}")
        return self._whole[tag][0]

    @contextmanager
    def open(self, tag: str, name: str) -> Iterator["_Reader"]:
        """Opens a file."""
        if tag not in self._whole:
            raise CheckpointNotFound(f"simulated: there is no {tag}")
        if name not in self._whole[tag][1]:
            raise DataLoss(f"simulated: {tag} lacks {name}")
        yield _Reader(bytes(self._whole[tag][1][name]))

    def remove(self, tag: str) -> None:
        """Removes a checkpoint."""
        self._whole.pop(tag, None)

    def remove_incomplete(self, tag: str) -> None:
        """Removes what is left of an attempt."""
        self._files.pop(tag, None)

    def put(self, name: str, content: bytes) -> None:
        """No simulated role has files of its own."""
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        """As `put`."""
        raise NotImplementedError

    def num_free_bytes(self) -> int | None:
        """Returns that nobody knows."""
        return None

    # -- faults

    def count(self) -> None:
        """One more moment at which a process can be killed."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                self.fuse = None
                raise Crash

    @property
    def whole_tags(self) -> list[str]:
        """The tags of whole checkpoints, in the order of their making."""
        return list(self._whole)

    def rot(self, tag: str, position: int) -> bool:
        """Changes one bit of a checkpoint; says whether there was one to change."""
        if tag not in self._whole:
            return False
        files = [content for content in self._whole[tag][1].values() if content]
        content = files[position % len(files)]
        # The values are the last few bytes, and what is wrong there nothing else than the sum of the file can show.
        at = len(content) - 1 - position % _VALUE_BYTES if position % 2 else position * 7919 % len(content)
        content[at] ^= 1 << position % 8
        return True


class _Writer:
    def __init__(self, storage: SimulatedStorage, content: bytearray) -> None:
        self._storage = storage
        self._content = content

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._storage.count()
        except Crash:
            self._content += bytes(data)[: len(data) // 2]  # torn
            raise
        self._content += bytes(data)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bytes = len(content)

    def read_into(self, memory: memoryview, *, offset: int) -> None:
        part = self._content[offset : offset + memory.nbytes]
        if len(part) != memory.nbytes:
            raise DataLoss("simulated: the file ends early")
        memory[:] = part


def _sizes(files: Mapping[str, bytearray]) -> dict[str, int]:
    return {name: len(content) for name, content in files.items()}
