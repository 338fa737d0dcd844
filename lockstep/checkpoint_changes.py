"""What each new checkpoint has changed, for who serves tables, as arrays or in files. Knows files and the format; no cluster."""

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from lockstep.checkpoint_export import Part, export, parts_of
from ps_protocol.checkpoint.catalog import list_checkpoints, max_tensors_of, open_storage
from ps_protocol.checkpoint.storage import CheckpointStorage, LocalStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, encode_header, mapped, open_file, tensor_name
from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec
from ps_protocol.model.keys import KEYS_PART, ROWS_PART, USE_PART, KeySpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import shown
from ps_protocol.model.variables import Array
from ps_protocol.roles.checkpoint import Checkpoint, check_tag
from ps_protocol.roles.shard import CheckpointFile

# Beside the files: the tag of the checkpoint whose file was written last.
LAST = "LAST"
# And the directory in which files are written.
UNFINISHED = ".unfinished"
# And in them, the keys that had a row in the checkpoint before and have none now.
GONE_PART = "gone keys"

_LOOK_EVERY_S = 0.5
_ROW_PARTS = (KEYS_PART, ROWS_PART, USE_PART)


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What a checkpoint has changed `since` the one before it, a tag; or (empty) all that it has, in place of all before.

    `arrays`: dense variables, and the rows of tables that have changed, by the variables' names. Of a table with keys, "users@row keys" has
    the key of each of the rows, and "users@gone keys" the keys whose rows were there before and made room or grew too old. Of others,
    "words@row numbers" has the rows' numbers. With all rows there are keys only. Some may be mapped from a file that has no name any more.
    """

    tag: str
    step: int
    cluster: str
    since: str
    arrays: Mapping[str, Array]


def changes(
    place: str | Path,
    *,
    since: str = "",
    cluster: str = "",
    follows: bool = False,
    directory: Path | None = None,
    on_skipped: Callable[[str], None] = lambda words: None,
) -> Iterator[Changes]:
    """Returns an iterator over what each checkpoint has changed after the one of the tag `since`, oldest first.

    At first, and where that one is no longer there, it yields all that the newest has. So who keeps the tag of what it has taken over, and
    begins again with it, gets every checkpoint's changes once. `follows`: goes on with each new checkpoint, without an end, and blocks
    until there is one. `cluster`: only checkpoints of this one. `directory`: for temporary files as large as a checkpoint. `on_skipped`: is
    told once which cannot be read. Raises InvalidSpec at once for another `place` or `since`; OSError and errors of the storage.
    """
    if not isinstance(since, str):
        raise InvalidSpec(f"since: got {shown(since)}, want the tag of the changes that were taken over last, such as 'step-000001200'")
    storage = open_storage(str(place) if isinstance(place, Path) else place)
    return _changes(storage, since=since, cluster=cluster, follows=follows, directory=directory, on_skipped=on_skipped)


def _changes(
    storage: CheckpointStorage, *, since: str, cluster: str, follows: bool, directory: Path | None, on_skipped: Callable[[str], None]
) -> Iterator[Changes]:
    rows: dict[str, _KeyedRows] | None = None
    skipped = set[str]()
    while True:
        whole = {one.checkpoint.tag: one.checkpoint for one in list_checkpoints(storage, cluster=cluster)[0]}
        tags = [*whole]
        for tag in tags[tags.index(since) + 1 :] if since in whole else tags[-1:]:
            checkpoint = whole[tag]
            rests = since in whole and checkpoint.base_tags[-1:] == (since,)
            if tag in skipped:
                continue
            try:
                if rests:
                    rows = _rows_of(storage, whole[since]) if rows is None else rows
                    arrays = _changed(storage, checkpoint, rows, since=whole[since].step)
                else:
                    rows, arrays = None, _all(storage, checkpoint, directory)
            except (DataLoss, CheckpointNotFound) as error:
                # Removed meanwhile, or damaged: what rests on it will have all rows.
                rows = None
                skipped.add(tag)
                on_skipped(f"{tag}: {error.message}")
                continue
            yield Changes(tag=tag, step=checkpoint.step, cluster=checkpoint.cluster, since=since if rests else "", arrays=arrays)
            since = tag
        if not follows:
            return
        time.sleep(_LOOK_EVERY_S)  # polls: a directory or an object store tells nobody of a new checkpoint


def write_changes(
    storage: CheckpointStorage, directory: Path, *, cluster: str, follows: bool, on_skipped: Callable[[str], None]
) -> Iterator[tuple[Path, Changes]]:
    """Writes a file for each of the `changes` since the last call, in this process or another; readers may remove what they have taken.

    A file is whole under its name, and on stable storage before the next is begun. One name is written a second time only after a crash in
    the moment after it was written the first time. One call at a time has a directory: it removes what a killed one has left unfinished.
    """
    known, unfinished = LocalStorage(directory), directory / UNFINISHED
    try:
        since = check_tag(known.get(LAST).decode())
    except CheckpointNotFound:
        since = ""
    except (InvalidSpec, ValueError):
        raise DataLoss(f"{directory / LAST}: it is not what was written; remove it, and all rows are written anew") from None
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for one in _changes(storage, since=since, cluster=cluster, follows=follows, directory=unfinished, on_skipped=on_skipped):
            path = directory / f"{one.tag}.safetensors"
            # "pt": as in an export.
            about = {"format": "pt", "tag": one.tag, "step": str(one.step), "cluster": one.cluster}
            saved = [SavedTensor(name=name, array=array) for name, array in one.arrays.items()]
            header, tensors = encode_header(saved, about | ({"since": one.since} if one.since else {}))
            written = unfinished / path.name
            with written.open("wb") as file:
                file.writelines([header, *(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data for tensor in tensors)])
                file.flush()
                os.fsync(file.fileno())
            written.replace(path)
            opened = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
            known.put(LAST, one.tag.encode())
            yield path, one
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _KeyedRows:
    """Keys of a slice's rows in their order, and the step that used each last, modulo 2^32, if rows grow old."""

    def __init__(self, spec: KeySpec) -> None:
        self._spec = spec
        self._keys, self._used = np.empty(0, spec.kind.value), np.empty(0, np.uint32)

    def update(self, parts: Mapping[str, Array], *, since: int, step: int) -> tuple[Array, Array]:
        """Takes over the parts of a file; returns which of its rows are there at a step, and the keys that have lost theirs since."""
        before, was_there = self._keys, self._are_there(self._used, since)
        keys, numbers = parts[KEYS_PART], parts.get(ROWS_PART)
        used = parts.get(USE_PART, np.zeros(keys.size, np.uint32))
        self._keys, self._used = _with_rows(before, numbers, keys), _with_rows(self._used, numbers, used)
        stays, size = np.zeros(before.size, bool), min(before.size, self._keys.size)
        stays[:size] = (before[:size] == self._keys[:size]) & self._are_there(self._used, step)[:size]
        there = self._are_there(used, step)
        return there, np.setdiff1d(before[was_there & ~stays], keys[there])

    def _are_there(self, used: Array, step: int) -> Array:
        return ~self._spec.are_gone(used, step=step) if self._spec.max_age_steps else np.ones(used.size, bool)


def _with_rows(before: Array, numbers: Array | None, rows: Array) -> Array:
    if numbers is None:
        return rows
    after = np.zeros(max(before.size, int(numbers.max(initial=-1)) + 1), before.dtype)
    after[: before.size] = before
    after[numbers] = rows
    return after


def _rows_of(storage: CheckpointStorage, checkpoint: Checkpoint) -> dict[str, _KeyedRows]:
    """Reads which rows the slices of keyed tables have. Reads every byte of the checkpoint, and of those that it rests on."""
    rows = {tensor_name(one.slice): _KeyedRows(keys) for one in checkpoint.placement if (keys := one.slice.variable.keys) is not None}
    for file in (file for shard in range(checkpoint.num_shards) if rows for file in checkpoint.files_of(shard)):
        for piece, parts in _slices(storage, checkpoint, file, _ROW_PARTS):
            if piece.variable.keys is not None:
                rows[tensor_name(piece)].update(parts, since=checkpoint.step, step=checkpoint.step)
    return rows


def _changed(storage: CheckpointStorage, checkpoint: Checkpoint, rows: Mapping[str, _KeyedRows], *, since: int) -> dict[str, Array]:
    """Reads a delta's own files. Holds all of them in memory."""
    dense, tables = dict[str, Array](), defaultdict[str, list[Array]](list)
    for file in checkpoint.files:
        for piece, parts in _slices(storage, checkpoint, file, ("", *_ROW_PARTS)):
            values, variable = parts[""], piece.variable
            if not variable.is_sparse:
                whole = dense.setdefault(variable.name, np.empty(variable.shape, values.dtype))
                whole[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),) if variable.shape else ...] = values
                continue
            if variable.keys is None:
                found = {"": values, ROWS_PART: piece.start + parts.get(ROWS_PART, np.arange(len(values)))}
            else:
                there, gone = rows[tensor_name(piece)].update(parts, since=since, step=checkpoint.step)
                found = {"": values[there], KEYS_PART: parts[KEYS_PART][there], GONE_PART: gone}
            for part, array in found.items():
                tables[Part(piece=piece, part=part).whole_name].append(array)
    return dense | {name: np.concatenate(pieces) for name, pieces in tables.items()}


def _slices(
    storage: CheckpointStorage, checkpoint: Checkpoint, file: CheckpointFile, wanted: tuple[str, ...]
) -> Iterator[tuple[VariableSlice, dict[str, Array]]]:
    """Yields the slices of a file, with those of their parts that are wanted."""
    part_of, found = parts_of(checkpoint.placement), dict[str, tuple[VariableSlice, dict[str, Array]]]()
    with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard)) as reader:
        for entry in reader:
            part = part_of(entry.name)
            if part is not None and part.part in wanted:
                values = np.empty(entry.shape, entry.dtype)
                reader.read_into(values)
                found.setdefault(tensor_name(part.piece), (part.piece, {}))[1][part.part] = values
    yield from found.values()


def _all(storage: CheckpointStorage, checkpoint: Checkpoint, directory: Path | None) -> dict[str, Array]:
    """Returns whole variables, mapped from a file that is gone already."""
    with tempfile.TemporaryDirectory(prefix=f".{checkpoint.tag}.", dir=directory) as place:
        path = Path(place) / "all.safetensors"
        export(storage, checkpoint, path)
        header, content = mapped(path)
    return {one.name: content[one.start : one.stop].view(one.dtype).reshape(one.shape) for one in header.tensors}
