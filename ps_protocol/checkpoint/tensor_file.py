"""One file of a checkpoint in the safetensors format, written and read in one pass, hashed on the way. Runs nothing it reads."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ps_protocol.checkpoint.storage import CheckpointStorage, FileReader
from ps_protocol.errors import DataLoss, InvalidSpec, LimitExceeded
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import MAX_RANK, Array, DataType
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.shard import CheckpointFile

# The header of a safetensors file: names, types, shapes and places of its tensors.
#
# A file is the header's length (8 bytes, little-endian), the header (JSON), and the bytes of the tensors, little-endian, in C order, one
# after the other without a hole. Any safetensors library reads what is written here, and so does NumPy alone:
# docs/how-to/resume.md.


LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 100_000
_MAX_BYTES = 1 << 62
_ALIGNMENT = 64
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_BFLOAT16 = "BF16"
_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (8, 4, 2)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (8, 4, 2, 1)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (8, 4, 2, 1)},
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor to be written. `code`: its element type as safetensors has it, of as many bytes as the array's; empty: the array's own."""

    name: str
    array: Array
    code: str = ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a file: `code` is its element type as safetensors has it, `start` and `stop` are counted from the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its NumPy type; raises InvalidSpec if that is bfloat16 and ml_dtypes is not installed."""
        return DataType.BFLOAT16.dtype if self.code == _BFLOAT16 else _DTYPES[self.code]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file: its metadata, its tensors in file order, and the number of bytes before the first."""

    metadata: Mapping[str, str]
    tensors: tuple[TensorEntry, ...]
    num_bytes: int


def tensor_name(piece: VariableSlice, part: str = "") -> str:
    """Returns the name of a slice's values in a file: "w", "w[0:512]" or "w[:,0:5]"; with a part "w@velocity".

    An "@" or "[" in a variable's name is doubled, so that no two names are alike.
    """
    name = piece.variable.name.replace("@", "@@").replace("[", "[[")
    if not piece.is_whole:
        name = f"{name}[{':,' * piece.axis}{piece.start}:{piece.stop}]"
    elif name == _METADATA:
        name = f"{name}[:]"
    return f"{name}@{part}" if part else name


def encode_header(tensors: Sequence[SavedTensor], metadata: Mapping[str, str]) -> tuple[bytes, list[SavedTensor]]:
    """Returns the first bytes of a file, with the length, and the tensors in the order in which they must follow.

    Those of wide elements come first, so that each lies at a multiple of its element's size. Raises InvalidSpec, LimitExceeded.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.array.dtype.itemsize)
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for tensor in ordered:
        if tensor.name in entries:
            raise InvalidSpec(f"tensor {tensor.name!r} occurs twice; names in a file must be unique")
        start, end = end, end + tensor.array.nbytes
        entries[tensor.name] = {"dtype": _code_of(tensor), "shape": tensor.array.shape, "data_offsets": [start, end]}
    content = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-(LENGTH_BYTES + len(content)) % _ALIGNMENT)
    if len(content) > MAX_HEADER_BYTES:
        limit = f"header of {len(content)} bytes, {MAX_HEADER_BYTES} at most"
        raise LimitExceeded(f"checkpoint: {len(ordered)} tensors make a {limit}; use more parameter servers")
    return len(content).to_bytes(LENGTH_BYTES, "little") + content, ordered


def decode_length(prefix: bytes, *, file_bytes: int, where: str) -> int:
    """Returns how many bytes of header follow the first 8 of a file of so many bytes. Raises DataLoss, before anything is allocated."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
        raise _invalid(where, f"{file_bytes} bytes, the header alone has {LENGTH_BYTES + length}")
    if length > MAX_HEADER_BYTES:
        raise _invalid(where, f"a header of {length} bytes, {MAX_HEADER_BYTES} at most")
    return length


def decode_header(content: bytes, *, file_bytes: int, where: str, max_tensors: int = MAX_TENSORS) -> Header:
    """Checks and returns a header, of a file of so many bytes. Raises DataLoss unless the tensors fill the file without overlap or hole."""
    # Counted in the text: as objects they would take many times as much memory.
    if content.count(b'"data_offsets"') > max_tensors:
        raise _invalid(where, f"more than {max_tensors} tensors")
    try:
        fields = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"its header is not JSON ({str(error)[:80]})") from None
    if not isinstance(fields, dict) or not content.startswith(b"{"):
        raise _invalid(where, "its header is not a JSON object")
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(where, f"{_METADATA} is not an object of strings")
    entries = [_decode_entry(name, value, where=where) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    num_bytes = LENGTH_BYTES + len(content)
    _check_places(entries, file_bytes - num_bytes, where=where)
    return Header(metadata=metadata, tensors=tuple(entries), num_bytes=num_bytes)


def mapped(path: Path) -> tuple[Header, Array]:
    """Returns the header of a file on this machine, and the bytes that follow it as a memory map. Raises OSError, DataLoss."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = decode_length(file.read(LENGTH_BYTES), file_bytes=file_bytes, where=str(path))
        header = decode_header(file.read(length), file_bytes=file_bytes, where=str(path))
    return header, np.memmap(path, np.uint8, mode="r")[header.num_bytes :].view(np.ndarray)


def _code_of(tensor: SavedTensor) -> str:
    dtype = tensor.array.dtype
    if tensor.code:
        return tensor.code
    if dtype.name == DataType.BFLOAT16.value:
        return _BFLOAT16
    if dtype not in _CODES:
        raise InvalidSpec(f"tensor {tensor.name!r}: {dtype} cannot be saved; want one of {', '.join(_CODES.values())}, {_BFLOAT16}")
    return _CODES[dtype]


def _decode_entry(name: str, value: object, *, where: str) -> TensorEntry:
    what = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise _invalid(where, f"{what} does not have just {', '.join(sorted(_FIELDS))}")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or (code not in _DTYPES and code != _BFLOAT16):
        raise _invalid(where, f"{what} has dtype {str(code)[:40]!r}")
    if not _is_naturals(shape) or len(shape) > MAX_RANK or math.prod(extent for extent in shape if extent) > _MAX_BYTES:
        raise _invalid(where, f"{what} has shape {str(shape)[:80]}")
    if not _is_naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= _MAX_BYTES:
        raise _invalid(where, f"{what} has data_offsets {str(offsets)[:80]}")
    itemsize = 2 if code == _BFLOAT16 else _DTYPES[code].itemsize
    if offsets[1] - offsets[0] != math.prod(shape) * itemsize:
        raise _invalid(
            where, f"{what} has {offsets[1] - offsets[0]} bytes, shape {tuple(shape)} {code} needs {math.prod(shape) * itemsize}"
        )
    return TensorEntry(name=name, code=code, shape=tuple(shape), start=offsets[0], stop=offsets[1])


def _is_naturals(value: object) -> bool:
    # Not isinstance: a bool is an int.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_places(entries: Sequence[TensorEntry], data_bytes: int, *, where: str) -> None:
    end = 0
    for entry in entries:
        if entry.start != end:
            kind = "overlaps the one before" if entry.start < end else "leaves a hole before it"
            raise _invalid(where, f"tensor {entry.name[:80]!r} begins at {entry.start}, want {end}: it {kind}")
        end = entry.stop
    if end != data_bytes:
        raise _invalid(where, f"{data_bytes} bytes of tensors, its header speaks of {end}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _invalid(where: str, why: str) -> DataLoss:
    return DataLoss(f"{where}: not a valid safetensors file: {why}")


# One file of a checkpoint, written and read in one pass, hashed on the way.


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

    def __init__(
        self,
        reader: FileReader,
        *,
        file: CheckpointFile,
        where: str,
        max_tensors: int,
        on_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        if reader.num_bytes != file.num_bytes:
            raise DataLoss(f"{where}: {reader.num_bytes} bytes, the manifest says {file.num_bytes}")
        self._reader, self._file, self._where, self._on_read = reader, file, where, on_read
        # The number of bytes read so far; may be called from another thread.
        self._digest, self.num_bytes_read, self._stop = hashlib.sha256(), 0, file.num_bytes
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
        if self.num_bytes_read + len(flat) > self._stop:
            raise DataLoss(f"{self._where}: {len(flat)} bytes wanted of a tensor that has {self._stop - self.num_bytes_read} left")
        for start in range(0, len(flat), _PIECE_BYTES):
            piece = flat[start : start + _PIECE_BYTES]
            self._reader.read_into(piece, offset=self.num_bytes_read)
            self._digest.update(piece)
            self.num_bytes_read += len(piece)
            self._on_read(len(piece))

    def _skip(self) -> None:
        while self.num_bytes_read < self._stop:
            self.read_into(self._scratch[: self._stop - self.num_bytes_read])

    def _read_header(self, max_tensors: int) -> Header:
        prefix = bytearray(min(LENGTH_BYTES, self._file.num_bytes))
        self.read_into(memoryview(prefix))
        length = decode_length(bytes(prefix), file_bytes=self._file.num_bytes, where=self._where)
        content = bytearray(length)
        self.read_into(memoryview(content))
        return decode_header(bytes(content), file_bytes=self._file.num_bytes, where=self._where, max_tensors=max_tensors)

    def _check(self) -> None:
        if self.num_bytes_read != self._file.num_bytes or self._digest.hexdigest() != self._file.sha256:
            raise DataLoss(f"{self._where}: sha256 mismatch; the file is not what was written")


@contextmanager
def open_file(
    storage: CheckpointStorage,
    tag: str,
    file: CheckpointFile,
    *,
    max_tensors: int = MAX_TENSORS,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[TensorFileReader]:
    """Opens a file that a whole checkpoint names. `max_tensors`: more than so many are taken for damage.

    `on_read`: called with the number of bytes as they are read.

    Raises CheckpointNotFound, DataLoss and others of the storage.
    """
    tag = file.tag or tag
    with storage.open(tag, file.name) as reader:
        yield TensorFileReader(reader, file=file, where=f"{tag}/{file.name}", max_tensors=max_tensors, on_read=on_read)


def check_file(
    storage: CheckpointStorage,
    tag: str,
    file: CheckpointFile,
    *,
    max_tensors: int = MAX_TENSORS,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Reads a file from end to end. Raises DataLoss if it is not what was written."""
    with open_file(storage, tag, file, max_tensors=max_tensors, on_read=on_read) as reader:
        for _ in reader:
            pass


def _pieces(header: bytes, tensors: Sequence[SavedTensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        flat = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES]
