"""Exports whole variables of a checkpoint to one file that other programs read. Knows files and the format; no cluster."""

import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint_fold import folded
from ps_protocol.checkpoint.catalog import max_tensors_of
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, TensorEntry, TensorFileReader, encode_header, open_file, tensor_name
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.model.keys import KEYS_PART, USE_PART
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import Placement
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.checkpoint import Checkpoint

# The key, in the metadata of a file with slots, of the checkpoint's manifest and of each shard file's metadata and tensor names.
ORIGIN = "lockstep"
# Of the rows that a Parquet file has in one group.
_GROUP_BYTES = 16 << 20


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The owner of a tensor in a file: a variable, or (with `part`) one of its slots or its average."""

    piece: VariableSlice
    part: str

    @property
    def whole_name(self) -> str:
        """The name of the whole tensor in the exported file: the variable's own, or for example "w@velocity"."""
        variable = self.piece.variable
        whole = VariableSlice(variable=variable, start=0, stop=variable.num_rows)
        return tensor_name(whole, self.part) if self.part else variable.name


def export(
    storage: CheckpointStorage,
    checkpoint: Checkpoint,
    path: Path,
    *,
    has_slots: bool = False,
    variable: str = "",
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[str, ...]:
    """Writes all variables of a checkpoint, each whole, to a file ending in .npz, .safetensors or .parquet, and returns their names.

    `has_slots`: also writes the optimizers' slots and the averages, for example as "w@velocity", and to a .safetensors file what is needed
    to make the checkpoint again (`ORIGIN`). Holds at most one slice in memory. A .npz file takes twice its size on disk while it is
    written, and stores bfloat16 as float32, because NumPy has no bfloat16. An existing file is replaced once the new one is complete.
    A table with keys has the rows of all slices one after the other, and their keys as another tensor, for example "users@row keys". Rows
    that are gone by their age are left out, unless `has_slots`.
    `variable`: only this one. A .parquet file has one table, without slots, as columns `key` (of one without keys, the row's number) and
    `row`, a list of fixed size; bfloat16 is float32 there too.
    `on_read` is called with the number of bytes each time some of the checkpoint have been read. Raises InvalidSpec, DataLoss if the
    checkpoint is damaged, and OSError.
    """
    write = {".npz": _write_npz, ".safetensors": _write_safetensors, ".parquet": _write_parquet}.get(path.suffix)
    if write is None:
        raise InvalidSpec(f"{path}: want a name that ends in .npz, .safetensors or .parquet")
    known = {placed.slice.variable.name: placed.slice.variable for placed in checkpoint.placement}
    if write is _write_parquet:
        check_pyarrow()
        tables = [name for name, one in known.items() if one.is_sparse]
        if not variable and len(tables) == 1:
            variable = tables[0]
        if has_slots or variable not in tables:
            raise InvalidSpec(f"{path}: a Parquet file has one table, without slots; choose one: {', '.join(tables) or 'there is none'}")
    if variable and variable not in known:
        raise InvalidSpec(f"checkpoint {checkpoint.tag} has no variable {variable!r}; it has {', '.join(known)}")
    with folded(storage, checkpoint, directory=path.parent, on_read=on_read) as (full_storage, full):
        there = {} if has_slots else _rows_there(full_storage, full)
        wholes, origin = _wholes(full_storage, full, there, has_slots=has_slots, variable=variable)
        if not wholes:
            raise InvalidSpec(f"checkpoint {checkpoint.tag} has no variables")
        about = {ORIGIN: json.dumps(origin)} if has_slots and write is _write_safetensors else {}
        on_read = (lambda num_bytes: None) if checkpoint.bases else on_read
        with _joined(full_storage, full, wholes, there, about=about, directory=path.parent, on_read=on_read) as (joined, arrays):
            write(joined, arrays, path)
    return tuple(wholes)


@contextmanager
def _joined(
    storage: CheckpointStorage,
    checkpoint: Checkpoint,
    wholes: Mapping[str, TensorEntry],
    there: Mapping[str, Array],
    *,
    about: Mapping[str, str],
    directory: Path,
    on_read: Callable[[int], None],
) -> Iterator[tuple[Path, Mapping[str, Array]]]:
    """Yields a temporary safetensors file of whole tensors, and each tensor as an array mapped from the file."""
    shapes = [SavedTensor(name=name, array=np.broadcast_to(np.zeros((), whole.dtype), whole.shape)) for name, whole in wholes.items()]
    # "pt": libraries on top of PyTorch require this value before they load the tensors as a state_dict.
    known = {"format": "pt", "tag": checkpoint.tag, "step": str(checkpoint.step), "cluster": checkpoint.cluster}
    header, ordered = encode_header(shapes, {**known, **about})
    with temporary_beside(directory / f"{checkpoint.tag}.joined") as path:
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(tensor.array.nbytes for tensor in ordered))
        # One map for all tensors: each map would hold a descriptor.
        memory, arrays, offset = np.memmap(path, np.uint8, mode="r+"), {}, len(header)
        for tensor in ordered:
            end = offset + tensor.array.nbytes
            arrays[tensor.name] = memory[offset:end].view(tensor.array.dtype).reshape(tensor.array.shape)
            offset = end
        parts, num_rows = parts_of(checkpoint.placement), dict.fromkeys(arrays, 0)
        for file in checkpoint.files:
            with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard), on_read=on_read) as reader:
                for entry in reader:
                    part = parts(entry.name)
                    if part is None or part.whole_name not in arrays:
                        continue
                    if part.piece.variable.keys is not None:
                        start, kept = num_rows[part.whole_name], there.get(tensor_name(part.piece))
                        num_rows[part.whole_name] += _num_rows(entry, kept)
                        rows = arrays[part.whole_name][start : num_rows[part.whole_name]]
                        if kept is None:
                            reader.read_into(rows)
                        else:
                            every = np.empty(entry.shape, entry.dtype)
                            reader.read_into(every)
                            rows[...] = every[kept]
                    else:
                        copy_slice(reader, entry, part.piece, arrays[part.whole_name])
        memory.flush()
        yield path, arrays


def _rows_there(storage: CheckpointStorage, checkpoint: Checkpoint) -> dict[str, Array]:
    """Returns which rows are not gone by their age, by name of the slice, for tables whose rows have one. Raises DataLoss."""
    aging = {
        tensor_name(one.slice, USE_PART): (tensor_name(one.slice), keys)
        for one in checkpoint.placement
        if (keys := one.slice.variable.keys) is not None and keys.max_age_steps
    }
    there: dict[str, Array] = {}
    for file in checkpoint.files if aging else ():
        with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard)) as reader:
            for entry in reader:
                if entry.name in aging:
                    name, keys = aging[entry.name]
                    used = np.empty(entry.num_bytes // 4, np.uint32)
                    reader.read_into(used)
                    there[name] = ~keys.are_gone(used, step=checkpoint.step)
    return there


def _num_rows(entry: TensorEntry, kept: Array | None) -> int:
    return entry.shape[0] if kept is None else int(np.count_nonzero(kept))


def _wholes(
    storage: CheckpointStorage, checkpoint: Checkpoint, there: Mapping[str, Array], *, has_slots: bool, variable: str = ""
) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Returns the tensors to export by name, with their whole shapes (all slices joined), and the checkpoint's `ORIGIN`."""
    wholes: dict[str, TensorEntry] = {}
    shards: list[dict[str, Any]] = []
    parts = parts_of(checkpoint.placement)
    for file in checkpoint.files:
        with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard)) as reader:
            shards.append({"metadata": dict(reader.metadata), "tensors": [entry.name for entry in reader.tensors]})
            for entry in reader.tensors:
                part = parts(entry.name)
                if part is None or (part.part not in ("", KEYS_PART) and not has_slots) or variable not in ("", part.piece.variable.name):
                    continue
                is_keyed = part.piece.variable.keys is not None
                if entry.shape != part.piece.shape and not is_keyed:
                    raise DataLoss(f"{checkpoint.tag}/{file.name}: tensor {entry.name!r} has shape {entry.shape}, want {part.piece.shape}")
                shape = part.piece.variable.shape
                if is_keyed:
                    before = wholes.pop(part.whole_name, None)
                    num_rows = _num_rows(entry, there.get(tensor_name(part.piece)))
                    shape = (num_rows + (0 if before is None else before.shape[0]), *entry.shape[1:])
                stop = math.prod(shape) * entry.dtype.itemsize
                whole = TensorEntry(name=part.whole_name, code=entry.code, shape=shape, start=0, stop=stop)
                if wholes.setdefault(part.whole_name, whole) != whole:
                    raise InvalidSpec(f"tensor {part.whole_name!r} has two types, or two variables have this name with its slots")
    return wholes, {"manifest": storage.manifest(checkpoint.tag).decode(), "shards": shards}


def parts_of(placement: Placement) -> Callable[[str], Part | None]:
    """Returns a function that maps a tensor's name to its part; None: it belongs to no variable."""
    pieces = {tensor_name(placed.slice): placed.slice for placed in placement}

    def part_of(name: str) -> Part | None:
        if name in pieces:
            return Part(piece=pieces[name], part="")
        base, _, part = name.rpartition("@")
        return Part(piece=pieces[base], part=part) if base in pieces and part else None

    return part_of


def copy_slice(reader: TensorFileReader, entry: TensorEntry, piece: VariableSlice, whole: Array) -> None:
    """Reads a slice into its place in the whole variable."""
    if not piece.variable.shape:
        reader.read_into(whole)
        return
    box = whole[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),)]
    if box.flags.c_contiguous:
        reader.read_into(box)
    else:
        values = np.empty(entry.shape, entry.dtype)
        reader.read_into(values)
        box[...] = values


def _write_safetensors(joined: Path, arrays: Mapping[str, Array], path: Path) -> None:
    joined.replace(path)


def _write_npz(joined: Path, arrays: Mapping[str, Array], path: Path) -> None:
    with temporary_beside(path) as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(_plain(array)), allow_pickle=False)
        temporary.replace(path)


def check_pyarrow() -> None:
    """Raises InvalidSpec unless pyarrow is installed."""
    try:
        import pyarrow.parquet  # noqa: F401 (an extra, which nothing else needs)
    except ModuleNotFoundError:
        raise InvalidSpec("a .parquet file needs the package pyarrow: pip install 'lockstep-ps[parquet]'") from None


def _write_parquet(joined: Path, arrays: Mapping[str, Array], path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    # The keys' name is the longer one.
    names = sorted(arrays, key=len)
    rows = arrays[names[0]].reshape(len(arrays[names[0]]), math.prod(arrays[names[0]].shape[1:]))
    keys = arrays[names[1]] if len(names) > 1 else np.arange(len(rows))
    row_type = pa.list_(pa.from_numpy_dtype(_plain(rows[:0]).dtype), rows.shape[1])
    schema = pa.schema([("key", pa.from_numpy_dtype(keys.dtype)), ("row", row_type)])
    num_at_once = max(1, _GROUP_BYTES // (rows[:1].nbytes or 1))
    with temporary_beside(path) as temporary:
        with ParquetWriter(temporary, schema) as writer:
            for start in range(0, len(rows), num_at_once):
                part = slice(start, start + num_at_once)
                values = pa.FixedSizeListArray.from_arrays(pa.array(_plain(rows[part]).reshape(-1)), type=row_type)
                writer.write_table(pa.table([pa.array(keys[part]), values], schema))
        temporary.replace(path)


def _plain(array: Array) -> Array:
    """Returns an array of a type that other programs know."""
    return array.astype(np.float32) if array.dtype.name == DataType.BFLOAT16.value else array


@contextmanager
def temporary_beside(beside: Path) -> Iterator[Path]:
    """Yields the path of a new file in the same directory, and removes the file afterwards unless it was renamed."""
    path = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}.partial")
    path.open("xb").close()
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
