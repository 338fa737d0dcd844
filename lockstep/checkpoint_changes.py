"""Writes what each new checkpoint has changed to a file of its own, for who serves tables. Knows files and the format; no cluster."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint_export import copy_slice, export, parts_of, temporary_beside
from ps_protocol.checkpoint.catalog import list_checkpoints, max_tensors_of
from ps_protocol.checkpoint.storage import CheckpointStorage, LocalStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, encode_header, open_file
from ps_protocol.errors import CheckpointNotFound, DataLoss
from ps_protocol.model.keys import KEYS_PART, ROWS_PART
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint

# Beside the files: the checkpoint whose file was written last, as JSON.
LAST = "LAST.json"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A file that was written: what a checkpoint has changed since the one named, or (empty) all that it has."""

    path: Path
    checkpoint: Checkpoint
    since: str


class ChangesDirectory:
    """The files of one place's checkpoints in a directory, of which readers may remove what they have taken."""

    def __init__(self, storage: CheckpointStorage, directory: Path, *, cluster: str) -> None:
        self._storage, self._directory, self._cluster = storage, directory, cluster

    def write_new(self, *, on_skipped: Callable[[str], None]) -> Iterator[Changes]:
        """Writes a file for each checkpoint since the last call, in this process or another, oldest first; at first for the newest alone.

        A file is whole under its name, and on stable storage before the next is begun. One name is written a second time only after a
        crash in the moment after it was written the first time. `on_skipped`: is told which cannot be read. Raises OSError and errors of
        the storage.
        """
        last = self._last()
        whole, _ = list_checkpoints(self._storage, cluster=self._cluster)
        order = (0, -1) if last is None else (last["epoch"], last["step"])
        newer = [one.checkpoint for one in whole if one.checkpoint.age_order > order]
        for checkpoint in newer if last is not None else newer[-1:]:
            since = last["tag"] if last is not None and last["tag"] in checkpoint.base_tags[-1:] else ""
            path = self._directory / f"{checkpoint.tag}.safetensors"
            try:
                self._write(checkpoint, path, since=since)
            except (DataLoss, CheckpointNotFound) as error:
                # Removed meanwhile, or damaged: what rests on it will have all rows.
                on_skipped(f"{checkpoint.tag}: {error.message}")
                continue
            last = {"tag": checkpoint.tag, "epoch": checkpoint.fence.epoch, "step": checkpoint.step}
            LocalStorage(self._directory).put(LAST, json.dumps(last).encode())
            yield Changes(path=path, checkpoint=checkpoint, since=since)

    def _last(self) -> dict[str, Any] | None:
        try:
            found = json.loads(LocalStorage(self._directory).get(LAST))
            return {"tag": str(found["tag"]), "epoch": int(found["epoch"]), "step": int(found["step"])}
        except CheckpointNotFound:
            return None
        except (ValueError, TypeError, KeyError):
            raise DataLoss(f"{self._directory / LAST}: it is not what was written; remove it, and all rows are written anew") from None

    def _write(self, checkpoint: Checkpoint, path: Path, *, since: str) -> None:
        if since:
            about = {"tag": checkpoint.tag, "step": str(checkpoint.step), "cluster": checkpoint.cluster, "since": since}
            header, tensors = encode_header(_changed(self._storage, checkpoint), about)
            with temporary_beside(path) as beside:
                with beside.open("wb") as file:
                    file.writelines([header, *(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data for tensor in tensors)])
                beside.replace(path)
        else:
            export(self._storage, checkpoint, path)
        for one in (path, path.parent):
            opened = os.open(one, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def _changed(storage: CheckpointStorage, checkpoint: Checkpoint) -> list[SavedTensor]:
    """Reads a delta's own files: whole dense variables, and rows of tables with their keys or numbers. Holds all of that in memory."""
    parts_of_name, dense, tables = parts_of(checkpoint.placement), dict[str, Array](), dict[str, list[Array]]()
    variables: dict[str, VariableSpec] = {}
    for file in checkpoint.files:
        # Of the slices of tables: the numbers of their rows in the whole table.
        numbers: dict[str, Array] = {}
        with open_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard)) as reader:
            for entry in reader:
                part = parts_of_name(entry.name)
                if part is None or part.part not in ("", KEYS_PART, ROWS_PART):
                    continue
                variable = variables[part.piece.variable.name] = part.piece.variable
                if not variable.is_sparse:
                    copy_slice(reader, entry, part.piece, dense.setdefault(variable.name, np.empty(variable.shape, entry.dtype)))
                    continue
                values = np.empty(entry.shape, entry.dtype)
                reader.read_into(values)
                slice_name = entry.name.removesuffix(f"@{part.part}") if part.part else entry.name
                if part.part == ROWS_PART:
                    numbers[slice_name] = values + part.piece.start
                else:
                    tables.setdefault(part.whole_name, []).append(values)
                if not part.part and variable.keys is None:
                    rows = numbers.get(slice_name, np.arange(part.piece.start, part.piece.stop))
                    tables.setdefault(f"{part.whole_name}@{ROWS_PART}", []).append(rows)
    joined = {name: np.concatenate(pieces) for name, pieces in tables.items()}
    return [SavedTensor(name=name, array=array) for name, array in {**dense, **joined}.items()]
