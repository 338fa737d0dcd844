"""Makes one full checkpoint of a delta and those that it rests on. Knows files and the format; no cluster."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ps_protocol.checkpoint.catalog import max_tensors_of
from ps_protocol.checkpoint.manifest import ManifestEncoder
from ps_protocol.checkpoint.storage import CheckpointStorage, LocalStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, TensorEntry, TensorFileReader, open_file, write_file
from ps_protocol.errors import DataLoss
from ps_protocol.model.keys import OCCURRENCES_PART, ROWS_PART
from ps_protocol.model.variables import Array
from ps_protocol.roles.checkpoint import Checkpoint


@contextmanager
def folded(
    storage: CheckpointStorage, checkpoint: Checkpoint, *, directory: Path | None, on_read: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[tuple[CheckpointStorage, Checkpoint]]:
    """Yields a full checkpoint and its storage as they are; of a delta, a full one with its values, until the block ends.

    That one takes twice its size in `directory` (None: that of temporary files) while it is made. Raises DataLoss, OSError and others of
    the storages.
    """
    if not checkpoint.bases:
        yield storage, checkpoint
        return
    with tempfile.TemporaryDirectory(prefix=f".{checkpoint.tag}.", dir=directory) as place:
        full = LocalStorage(Path(place) / "full")
        files = []
        for shard in range(checkpoint.num_shards):
            with tempfile.TemporaryDirectory(dir=place) as parts:
                whole = _WholeTensors(Path(parts))
                for file in checkpoint.files_of(shard):
                    with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, shard), on_read=on_read) as reader:
                        whole.read(reader, where=f"{file.tag or checkpoint.tag}/{file.name}")
                        metadata = reader.metadata
                files.append(
                    write_file(
                        full,
                        checkpoint.tag,
                        shard=shard,
                        num_shards=checkpoint.num_shards,
                        tensors=[SavedTensor(name=name, array=array) for name, array in whole.arrays.items()],
                        metadata=metadata,
                    )
                )
        merged = replace(checkpoint, files=tuple(files), bases=())
        full.commit(checkpoint.tag, ManifestEncoder().encode(merged, saved_at=""), files=merged.files)
        yield full, merged


class _WholeTensors:
    """The tensors of one shard, each in a file of the directory, as they are after the files that have been read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.arrays: dict[str, Array] = {}
        self._names: dict[str, str] = {}

    def read(self, reader: TensorFileReader, *, where: str) -> None:
        """Reads the next file of the shard. Raises DataLoss if it does not fit those before."""
        before, numbers = self.arrays, dict[str, Array]()
        # In the order of the file, and without what only an earlier one has.
        self.arrays = {}
        for entry in reader:
            name, _, part = entry.name.rpartition("@")
            if part == ROWS_PART:
                numbers[name] = np.empty(entry.shape, np.int64)
                reader.read_into(numbers[name])
                continue
            rows = None if part == OCCURRENCES_PART else numbers.get(entry.name, numbers.get(name))
            if rows is None:
                self.arrays[entry.name] = self._memory(entry, entry.shape)
                reader.read_into(self.arrays[entry.name])
                continue
            values, old = np.empty(entry.shape, entry.dtype), before.get(entry.name)
            reader.read_into(values)
            if old is None or (old.shape[1:], old.dtype) != (entry.shape[1:], entry.dtype) or rows.shape != entry.shape[:1]:
                raise DataLoss(f"{where}: tensor {entry.name!r} does not fit the checkpoint that it rests on")
            num_rows = max(old.shape[0], int(rows.max(initial=-1)) + 1)
            if num_rows > old.shape[0] + rows.size or int(rows.min(initial=0)) < 0:
                raise DataLoss(f"{where}: tensor {entry.name!r} has rows that no checkpoint before it leads to")
            whole = self._memory(entry, (num_rows, *entry.shape[1:]))
            whole[rows] = values
            self.arrays[entry.name] = whole

    def _memory(self, entry: TensorEntry, shape: tuple[int, ...]) -> Array:
        """Returns the memory of a tensor, mapped from its file, with what it had."""
        num_bytes = int(np.prod(shape)) * entry.dtype.itemsize
        if not num_bytes:
            return np.empty(shape, entry.dtype)
        path = self._directory / self._names.setdefault(entry.name, str(len(self._names)))
        path.touch()
        os.truncate(path, num_bytes)
        return np.memmap(path, np.uint8, mode="r+").view(entry.dtype).reshape(shape)
