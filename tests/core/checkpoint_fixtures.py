"""Checkpoints of a tiny model for the tests of files, manifests and places."""

import itertools
from collections.abc import Sequence

import numpy as np

from ps_protocol.checkpoint.manifest import encode_manifest
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, tensor_name, write_file
from ps_protocol.model.data import DataProgress, DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement, PlacementPolicy, place
from ps_protocol.model.variables import Array, DataType, Partition, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord, tag_of
from ps_protocol.roles.shard import AppliedPush, CheckpointFile, WorkerPushes

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
    return Checkpoint(
        tag=tag_of(step=step, epoch=epoch),
        cluster=cluster,
        epoch=epoch,
        step=step,
        chief_incarnation=3,
        life=2**63 + 9,
        num_shards=len(files),
        record=ChiefRecord(model=MODEL, policy=PolicySpec(), settings_version=4, num_rollbacks=1, last_rollback="ps 1 was restarted"),
        placement=place(MODEL, num_shards=len(files)),
        files=tuple(files),
        pushes=(WorkerPushes(worker=2, incarnation=1 << 20 | 1, applied=(AppliedPush(sequence=7, step=step),)),),
        data=DataProgress(data=DataSpec(name="train", num_samples=10, range_size=3, shuffle_seed=1), epoch=1, done=(4, 6)),
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
    storage.commit(checkpoint.tag, encode_manifest(checkpoint, saved_at="2026-01-02T03:04:05Z"), files=files)
    return checkpoint
