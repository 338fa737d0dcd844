"""Checkpoints of a tiny model, and storage that a test can watch, fail or crash at any call. Knows files; no server."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.checkpoint.manifest import ManifestEncoder
from ps_protocol.checkpoint.storage import CheckpointStorage, FileWriter, LocalStorage, storage_failures
from ps_protocol.checkpoint.tensor_file import SavedTensor, tensor_name, write_file
from ps_protocol.model.data import DataMarks, DataPass, DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement, PlacementPolicy, place
from ps_protocol.model.variables import Array, DataType, Partition, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord, tag_of
from ps_protocol.roles.contribution import StepAttachments, UserState
from ps_protocol.roles.shard import AppliedPush, CheckpointFile, WorkerPushes
from tests.support.chief.eras import fence

# Checkpoints of a tiny model for the tests of files, manifests and places.


CLUSTER = "job-a"
VARIABLES = (
    VariableSpec(name="layer/w", data_type=DataType.FLOAT32, shape=(7, 3), partition=Partition(axis=0, num_slices=3)),
    VariableSpec(name="layer/b", data_type=DataType.FLOAT64, shape=(5,)),
    VariableSpec(name="wide", data_type=DataType.FLOAT16, shape=(2, 6), partition=Partition(axis=1, num_slices=2)),
    VariableSpec(name="scale@[0:1]", data_type=DataType.BFLOAT16, shape=()),
    VariableSpec(name="none", data_type=DataType.FLOAT32, shape=(0, 4)),
)
MODEL = ModelSpec(
    variables=VARIABLES,
    optimizer=OptimizerSpec(name="momentum", hyperparameters={"momentum": 0.9}, learning_rate=constant(0.1)),
    placement=PlacementPolicy(),
)


def values_of(variable: VariableSpec, *, step: int, part: str = "") -> Array:
    """Returns the whole variable as it is at this step: other numbers for each variable, part and step."""
    first = step % 100 * 100 + 10 * MODEL.variables.index(variable) + (5 if part else 0)
    return (first + np.arange(variable.size)).reshape(variable.shape).astype(variable.data_type.dtype)


def tensors_of(placement: Placement, shard: int, *, step: int) -> list[SavedTensor]:
    """Returns values and velocity of all that lies on the shard."""
    tensors = []
    for placed, part in itertools.product(placement, ("", "velocity")):
        if placed.shard == shard:
            piece = placed.slice
            whole = values_of(piece.variable, step=step, part=part)
            box = (slice(None),) * piece.axis + (slice(piece.start, piece.stop),)
            tensors.append(SavedTensor(name=tensor_name(piece, part), array=whole[box] if piece.variable.shape else whole))
    return tensors


def checkpoint_of(files: Sequence[CheckpointFile], *, step: int, epoch: int = 1, cluster: str = CLUSTER) -> Checkpoint:
    """Returns what the manifest of such files says."""
    record = ChiefRecord(
        model=MODEL,
        policy=PolicySpec(),
        settings_version=4,
        num_rollbacks=1,
        last_rollback="ps 1 was restarted",
        epoch=epoch,
        step=step,
        data=DataMarks(
            data=DataSpec(name="train", num_samples=10, range_size=3, shuffle_seed=1),
            epoch=1,
            position=1,
            passes=(DataPass(epoch=1, done=b"\x05"),),
        ),
        attached=StepAttachments(user_states=(UserState(worker=1, json='{"best":0.5,"\\u00e9":"\\n"}'),)),
    )
    return Checkpoint(
        tag=tag_of(step=step, epoch=epoch),
        cluster=cluster,
        fence=fence(epoch, 3, life=2**63 + 9),
        step=step,
        num_shards=len(files),
        record=record,
        placement=place(MODEL, num_shards=len(files)),
        files=tuple(files),
        pushes=(WorkerPushes(worker=2, incarnation=1 << 20 | 1, applied=(AppliedPush(sequence=7, step=step),)),),
    )


def write_files(storage: CheckpointStorage, *, step: int, epoch: int = 1, num_shards: int = 2) -> tuple[CheckpointFile, ...]:
    """Writes all files of a checkpoint, without making it whole."""
    placement = place(MODEL, num_shards=num_shards)
    return tuple(
        write_file(
            storage,
            tag_of(step=step, epoch=epoch),
            shard=shard,
            num_shards=num_shards,
            tensors=tensors_of(placement, shard, step=step),
            metadata={"step": str(step)},
        )
        for shard in range(num_shards)
    )


def save(storage: CheckpointStorage, *, step: int, epoch: int = 1, num_shards: int = 2, cluster: str = CLUSTER) -> Checkpoint:
    """Makes a whole checkpoint."""
    files = write_files(storage, step=step, epoch=epoch, num_shards=num_shards)
    checkpoint = checkpoint_of(files, step=step, epoch=epoch, cluster=cluster)
    storage.commit(checkpoint.tag, ManifestEncoder().encode(checkpoint, saved_at="2026-01-02T03:04:05Z"), files=files)
    return checkpoint


# A disk on which a process can die at any call: what it had not made last is torn then. Knows files; no checkpoint.


# All that changes a disk, or makes a change last.
_CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")


class Crash(BaseException):
    """The process is dead: nothing that it does from here on has an effect."""


class Disk:
    """The real disk, until the crash: then what no fsync has made last is torn."""

    def __init__(self, root: Path, *, crash_at: int) -> None:
        self._root, self._crash_at = root, crash_at
        self._real = {name: getattr(os, name) for name in _CALLS}
        self._synced: dict[int, int] = {}
        self.num_calls = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._wrapped(name))
            yield

    def note_synced(self) -> None:
        """What is here now lasts."""
        self._synced = {path.stat().st_ino: path.stat().st_size for path in self._root.rglob("*") if path.is_file()}

    def tear(self) -> None:
        """Leaves half of every file whose last bytes were not on stable storage."""
        for path in self._root.rglob("*"):
            status = path.stat()
            if path.is_file() and self._synced.get(status.st_ino) != status.st_size:
                os.truncate(path, status.st_size // 2)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.num_calls += 1
            if self.num_calls >= self._crash_at:
                if name == "write" and self.num_calls == self._crash_at:
                    self._real[name](args[0], bytes(args[1])[: len(args[1]) // 2])
                raise Crash
            result = self._real[name](*args, **keywords)
            if name == "fsync":
                status = os.fstat(args[0])
                self._synced[status.st_ino] = status.st_size
            return result

        return call


# A checkpoint storage in a directory that lets a test look on, or fail, at every write. Knows the local storage; no server.


class WatchedStorage:
    """A CheckpointStorage. `on_write` is called before each write with its size; an OSError of it is one of the disk."""

    def __init__(self, root: Path, on_write: Callable[[int], object] = lambda size: None) -> None:
        self._storage = LocalStorage(root)
        self.on_write = on_write
        self.place, self.new_name, self.commit = self._storage.place, self._storage.new_name, self._storage.commit
        self.stored, self.manifest, self.open = self._storage.stored, self._storage.manifest, self._storage.open
        self.remove, self.remove_incomplete = self._storage.remove, self._storage.remove_incomplete
        self.num_free_bytes, self.put, self.get = self._storage.num_free_bytes, self._storage.put, self._storage.get

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
