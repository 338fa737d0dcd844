"""Makes a checkpoint of a file of whole tensors: the reverse of an export. Knows files and the format; no cluster."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint_export import ORIGIN, Part, parts_of
from ps_protocol.checkpoint.catalog import max_tensors_of
from ps_protocol.checkpoint.manifest import ManifestEncoder, decode_manifest
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import Header, SavedTensor, TensorEntry, mapped, open_file, write_file
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.shard import CheckpointFile


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The checkpoint that was made, the names of the file's tensors that it uses, and of those that it does not use."""

    checkpoint: Checkpoint
    names: tuple[str, ...]
    unused: tuple[str, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _ShardFile:
    """The metadata and tensor names of one shard's file; not the values."""

    metadata: Mapping[str, str]
    tensors: tuple[str, ...]


def import_checkpoint(
    path: Path,
    storage: CheckpointStorage,
    *,
    source: CheckpointStorage | None = None,
    into: Checkpoint | None = None,
    tag: str = "",
    cluster: str = "",
    on_written: Callable[[int], None] = lambda num_bytes: None,
) -> Imported:
    """Makes a checkpoint in `storage` of a .safetensors file that was exported with slots; an unchanged file gives the same bits.

    `into`: a full checkpoint in `source` (None: in `storage`) that supplies what the file lacks: the model, counters, and the values of
    other tensors. A file without slots needs one. `tag`: the new name (empty: that of the original checkpoint, with "-imported" if that is
    taken). `cluster`: the name of the cluster that may use it (empty: unchanged). `on_written` is called with the number of bytes after
    each file. Raises InvalidSpec, LimitExceeded, DataLoss if a file is damaged, and errors of the storage; after an error no part of the
    checkpoint is left.
    """
    header, memory = mapped(path)
    if into is not None:
        base, shards = into, _shards_of(source or storage, into)
    else:
        base, shards = _origin(header, where=str(path))
    given = {entry.name: entry for entry in header.tensors}
    new_tag = tag or _free_tag(storage, base.tag)
    if any(stored.tag == new_tag for stored in storage.stored()):
        raise InvalidSpec(f"checkpoint {new_tag!r} already exists; choose another name with --tag")
    parts, used = parts_of(base.placement), dict[str, None]()
    files: list[CheckpointFile] = []
    try:
        for shard, file in enumerate(shards):
            tensors: list[SavedTensor] = []
            missing: list[str] = []
            for name in file.tensors:
                part = parts(name)
                entry = None if part is None else given.get(part.whole_name)
                if part is None or entry is None:
                    missing.append(name)
                    continue
                used[entry.name] = None
                tensors.append(SavedTensor(name=name, array=_slice_of(entry, memory, part, where=str(path))))
            if missing:
                tensors = _completed(tensors, missing, file, storage=source or storage, into=into, shard=shard, where=str(path))
            written = write_file(storage, new_tag, shard=shard, num_shards=len(shards), tensors=tensors, metadata=file.metadata)
            files.append(written)
            on_written(written.num_bytes)
        if not used:
            raise InvalidSpec(f"{path}: has no tensor of checkpoint {base.tag}; it has {', '.join(map(repr, list(given)[:5]))}")
        checkpoint = replace(base, tag=new_tag, cluster=cluster or base.cluster, files=tuple(files))
        saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        storage.commit(new_tag, ManifestEncoder().encode(checkpoint, saved_at=saved_at), files=checkpoint.files)
    except BaseException:
        storage.remove_incomplete(new_tag)
        raise
    return Imported(checkpoint=checkpoint, names=tuple(used), unused=tuple(name for name in given if name not in used))


def _origin(header: Header, *, where: str) -> tuple[Checkpoint, list[_ShardFile]]:
    text = header.metadata.get(ORIGIN)
    if text is None:
        raise InvalidSpec(
            f"{where}: has values only, since it was not written by `lockstep checkpoint export --slots`; --into TAG puts them in place of"
            " those of a checkpoint. To begin a training with them, give them to create_or_join() as first values"
        )
    try:
        fields = json.loads(text)
        checkpoint, _ = decode_manifest(fields["manifest"].encode(), where=where)
        shards = [_ShardFile(metadata=_texts(one["metadata"]), tensors=tuple(map(str, one["tensors"]))) for one in fields["shards"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: the metadata of its checkpoint cannot be read ({str(error)[:80]})") from None
    if len(shards) != checkpoint.num_shards:
        raise DataLoss(f"{where}: speaks of {len(shards)} files of a checkpoint that has {checkpoint.num_shards}")
    return checkpoint, shards


def _texts(fields: Any) -> dict[str, str]:
    return {str(name): str(text) for name, text in fields.items()}


def _shards_of(storage: CheckpointStorage, checkpoint: Checkpoint) -> list[_ShardFile]:
    shards = []
    for file in checkpoint.files:
        with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard)) as reader:
            shards.append(_ShardFile(metadata=dict(reader.metadata), tensors=tuple(entry.name for entry in reader.tensors)))
    return shards


def _free_tag(storage: CheckpointStorage, tag: str) -> str:
    taken = {stored.tag for stored in storage.stored()}
    return tag if tag not in taken else f"{tag}-imported"


def _slice_of(entry: TensorEntry, memory: Array, part: Part, *, where: str) -> Array:
    """Returns a shard's part of a whole tensor, as a view of the mapped file."""
    variable = part.piece.variable
    if variable.keys is not None:
        raise InvalidSpec(f"{where}: {variable.name!r} is a table with keys, which is not imported; restore the checkpoint itself")
    if entry.shape != variable.shape or entry.dtype != variable.data_type.dtype:
        raise InvalidSpec(
            f"{where}: tensor {entry.name!r} is {entry.shape} {entry.dtype},"
            f" the checkpoint's is {variable.shape} {variable.data_type.value}"
        )
    whole = memory[entry.start : entry.stop].view(entry.dtype).reshape(entry.shape)
    return whole[_index_of(part.piece)] if variable.shape else whole


def _index_of(piece: VariableSlice) -> tuple[slice, ...]:
    return (slice(None),) * piece.axis + (slice(piece.start, piece.stop),)


def _completed(
    tensors: Sequence[SavedTensor],
    missing: Sequence[str],
    file: _ShardFile,
    *,
    storage: CheckpointStorage,
    into: Checkpoint | None,
    shard: int,
    where: str,
) -> list[SavedTensor]:
    """Returns all tensors of a shard's file, in its order; takes missing ones from the checkpoint."""
    if into is None:
        lost = ", ".join(map(repr, missing[:5]))
        raise InvalidSpec(f"{where}: tensors are missing that were exported: {lost}; --into TAG takes them from a checkpoint")
    known = {tensor.name: tensor for tensor in tensors}
    wanted = set(missing)
    stored = into.files[shard]
    with open_file(storage, into.tag, stored, max_tensors=max_tensors_of(into, shard)) as reader:
        for entry in reader:
            if entry.name in wanted:
                values = np.empty(entry.shape, entry.dtype)
                reader.read_into(values)
                known[entry.name] = SavedTensor(name=entry.name, array=values)
    return [known[name] for name in file.tensors]
