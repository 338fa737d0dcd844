"""One file of a checkpoint, written and read in one pass, hashed on the way. Knows tensors and a storage; not whose they are."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ps_protocol.checkpoint_format import (
    LENGTH_BYTES,
    MAX_TENSORS,
    Header,
    SavedTensor,
    TensorEntry,
    decode_header,
    decode_length,
    encode_header,
)
from ps_protocol.checkpoint_storage import CheckpointStorage, FileReader
from ps_protocol.errors import DataLoss
from ps_protocol.failpoints import failpoint
from ps_protocol.shard_save_values import CheckpointFile
from ps_protocol.tensors import Array

# Small enough to be hashed while it is still in the processor's cache.
_PIECE_BYTES = 1 << 20


def write_file(
    storage: CheckpointStorage,
    tag: str,
    *,
    shard: int,
    num_shards: int,
    tensors: Sequence[SavedTensor],
    metadata: Mapping[str, str],
    between: Callable[[], object] = lambda: None,
) -> CheckpointFile:
    """Writes a shard's file of a checkpoint and returns what the manifest is to say of it; it is on stable storage then.

    Blocks; `between` is called after each piece, and may wait, or raise to break it off.
    The arrays must not change meanwhile. An array that is not C-contiguous is copied. Raises InvalidSpec or LimitExceeded if the
    tensors cannot be saved, StorageFull and others of the storage; then nothing is left of it.
    """
    header, ordered = encode_header(tensors, metadata)
    num_bytes = len(header) + sum(tensor.array.nbytes for tensor in ordered)
    name = storage.new_name(shard=shard, num_shards=num_shards)
    digest, num_written, is_past_middle = hashlib.sha256(), 0, False
    with storage.create(tag, name, num_bytes=num_bytes) as writer:
        for piece in _pieces(header, ordered):
            digest.update(piece)
            writer.write(piece)
            num_written += len(piece)
            between()
            if not is_past_middle and 2 * num_written >= num_bytes:
                is_past_middle = True
                failpoint("ps.save.mid_file")
    return CheckpointFile(name=name, shard=shard, num_bytes=num_bytes, sha256=digest.hexdigest())


class TensorFileReader:
    """A file of a checkpoint as it is read, once, from its first byte to its last; use `open_file`.

    Iterate over it for the tensors in the order in which they lie, and call `read_into` for what is wanted of each; what is left is
    skipped, but hashed. Only when the iteration has ended is it known that the bytes are those that were written: it raises DataLoss.
    """

    def __init__(self, reader: FileReader, *, file: CheckpointFile, where: str, max_tensors: int) -> None:
        if reader.num_bytes != file.num_bytes:
            raise DataLoss(f"{where}: {reader.num_bytes} bytes, the manifest says {file.num_bytes}")
        self._reader, self._file, self._where = reader, file, where
        self._digest, self._position, self._stop = hashlib.sha256(), 0, file.num_bytes
        self._scratch = memoryview(bytearray(min(_PIECE_BYTES, file.num_bytes)))
        self._header = self._read_header(max_tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata."""
        return self._header.metadata

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """All tensors, in the order in which they lie."""
        return self._header.tensors

    @property
    def num_bytes_read(self) -> int:
        """How far the reading is; may be asked for from another thread."""
        return self._position

    def __iter__(self) -> Iterator[TensorEntry]:
        for tensor in self._header.tensors:
            self._stop = self._header.num_bytes + tensor.stop
            yield tensor
            self._skip()
        self._check()

    def read_into(self, memory: Array | memoryview) -> None:
        """Fills `memory`, which is C-contiguous, with the next bytes of the tensor that the iteration is at.

        Raises DataLoss if the tensor has fewer bytes left.
        """
        flat = memory.reshape(-1).view(np.uint8).data if isinstance(memory, np.ndarray) else memory.cast("B")
        if self._position + len(flat) > self._stop:
            raise DataLoss(f"{self._where}: {len(flat)} bytes wanted of a tensor that has {self._stop - self._position} left")
        for start in range(0, len(flat), _PIECE_BYTES):
            piece = flat[start : start + _PIECE_BYTES]
            self._reader.read_into(piece, offset=self._position)
            self._digest.update(piece)
            self._position += len(piece)

    def _skip(self) -> None:
        while self._position < self._stop:
            self.read_into(self._scratch[: self._stop - self._position])

    def _read_header(self, max_tensors: int) -> Header:
        prefix = bytearray(min(LENGTH_BYTES, self._file.num_bytes))
        self.read_into(memoryview(prefix))
        length = decode_length(bytes(prefix), file_bytes=self._file.num_bytes, where=self._where)
        content = bytearray(length)
        self.read_into(memoryview(content))
        return decode_header(bytes(content), file_bytes=self._file.num_bytes, where=self._where, max_tensors=max_tensors)

    def _check(self) -> None:
        if self._position != self._file.num_bytes or self._digest.hexdigest() != self._file.sha256:
            raise DataLoss(f"{self._where}: sha256 mismatch; the file is not what was written")


@contextmanager
def open_file(storage: CheckpointStorage, tag: str, file: CheckpointFile, *, max_tensors: int = MAX_TENSORS) -> Iterator[TensorFileReader]:
    """Opens a file of a whole checkpoint. `max_tensors`: more than so many are taken for damage.

    Raises CheckpointNotFound, DataLoss and others of the storage.
    """
    with storage.open(tag, file.name) as reader:
        yield TensorFileReader(reader, file=file, where=f"{tag}/{file.name}", max_tensors=max_tensors)


def check_file(storage: CheckpointStorage, tag: str, file: CheckpointFile, *, max_tensors: int = MAX_TENSORS) -> None:
    """Reads a file from end to end. Raises DataLoss if it is not what was written."""
    with open_file(storage, tag, file, max_tensors=max_tensors) as reader:
        for _ in reader:
            pass


def _pieces(header: bytes, tensors: Sequence[SavedTensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        flat = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES]
