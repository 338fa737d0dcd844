"""A model on any number of shards, trained by made-up gradients that depend on the step only; saved and restored as by a chief."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.checkpoint.manifest import ManifestEncoder, manifest_sha256
from ps_protocol.model.keys import spread
from ps_protocol.model.layout import Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import AVERAGE_SLOT, ModelSpec, layouts, place
from ps_protocol.model.variables import Array, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyRequest,
    Metric,
    PushHeader,
    ReadMetricsRequest,
    ReadRequest,
    RestoreRequest,
    RowsRequest,
    SaveRequest,
    SaveState,
    Shard,
    ShardSettings,
    ShardSpec,
    ShardStatusRequest,
    SparsePart,
)
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.shards import telling

NUM_WORKERS = 2
CHIEF = 2
# Of keyed tables, spread; a step has gradients for some of them.
KEYS = spread(np.arange(-40, 80, 3, dtype=np.int64))


@dataclass(kw_only=True)
class ShardedTraining:
    """Does to several shards what chief and two workers do."""

    shards: Sequence[Shard]
    model: ModelSpec
    checkpoint_dir: str
    epoch: int = 3
    step: int = 0
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    layouts: tuple[Layout, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.placement = place(self.model, num_shards=len(self.shards))
        self.layouts = layouts(self.placement, num_shards=len(self.shards))

    def spec(self, shard: int) -> ShardSpec:
        """A shard's part of the model, at the present step."""
        return ShardSpec(
            epoch=self.epoch,
            shard=shard,
            layout=self.layouts[shard],
            optimizer=self.model.optimizer,
            initial_step=self.step,
            averages=self.model.averages,
            clip=self.model.clip,
        )

    @property
    def settings(self) -> ShardSettings:
        """How the shards work."""
        version = 1 if self.optimizers else 0
        return ShardSettings(fence=fence(self.epoch, CHIEF), version=version, optimizers=self.optimizers)

    def create(self) -> None:
        """Adopts the shards and creates the variables."""
        for index, shard in enumerate(self.shards):
            shard.call(AdoptRequest(fence=fence(self.epoch, CHIEF)))
            pieces = [self._arena(index, seed=0)]
            for piece in self.layouts[index].tables:
                if piece.variable.initializer is None:
                    pieces.append(_bytes_of(_cut(_values(piece.variable, seed=0), piece)))
            assert shard.create_variables(self.spec(index), Segments(pieces))
            if self.optimizers:
                shard.call(telling(self.settings))

    def train(self, num_steps: int) -> None:
        """So many steps; each worker's gradients depend on the step only. Every other step has none of the last variable, a table."""
        for _ in range(num_steps):
            push_ids = tuple(PushId(worker=worker, incarnation=1, sequence=self.step + 1) for worker in range(NUM_WORKERS))
            request = ApplyRequest(fence=fence(self.epoch, CHIEF), step=self.step, contributors=push_ids)
            for index, shard in enumerate(self.shards):
                for push_id in push_ids:
                    self.push(index, push_id)
                shard.call(request)
            self.step += 1

    def save(self, tag: str, *, base: Checkpoint | None = None, has_deltas: bool = False) -> Checkpoint:
        """Saves the present step and makes the checkpoint whole: as a delta on `base`, or so that one `has_deltas` on it."""
        since = base.step if base is not None else -1 if has_deltas else None
        ask = SaveRequest(fence=fence(self.epoch, CHIEF), step=self.step, tag=tag, num_shards=len(self.shards), since=since)
        requests = [ask for _ in self.shards]
        for shard, request in zip(self.shards, requests, strict=True):
            assert shard.call(request).state in (SaveState.WRITING, SaveState.DONE)
        files = []
        for shard, request in zip(self.shards, requests, strict=True):
            progress = shard.call(replace(request, max_wait_s=10.0))
            assert progress.state is SaveState.DONE and progress.file is not None, progress
            files.append(progress.file)
        checkpoint = Checkpoint(
            tag=tag,
            cluster="lockstep",
            fence=fence(self.epoch, CHIEF),
            step=self.step,
            num_shards=len(self.shards),
            record=ChiefRecord(model=self.model, policy=PolicySpec(), optimizers=self.optimizers),
            placement=self.placement,
            files=tuple(files),
            bases=tuple(
                replace(one, tag=one.tag or base.tag) for file in files if base and file.is_delta for one in base.files_of(file.shard)
            ),
        )
        open_storage(self.checkpoint_dir).commit(tag, ManifestEncoder().encode(checkpoint, saved_at="now"), files=checkpoint.files)
        return checkpoint

    def restore_request(self, index: int, tag: str) -> RestoreRequest:
        """What the chief asks a shard for, once epoch and step are the new ones."""
        sha256 = manifest_sha256(open_storage(self.checkpoint_dir).manifest(tag))
        return RestoreRequest(
            fence=fence(self.epoch, CHIEF), spec=self.spec(index), tag=tag, manifest_sha256=sha256, settings=self.settings
        )

    def restore(self, tag: str, *, step: int, epoch: int) -> None:
        """Brings all shards back to a checkpoint."""
        self.step, self.epoch = step, epoch
        for shard in self.shards:
            shard.call(AdoptRequest(fence=fence(epoch, CHIEF)))
        for index, shard in enumerate(self.shards):
            request = self.restore_request(index, tag)
            if not shard.call(request).is_done:
                assert shard.call(replace(request, max_wait_s=10.0)).is_done

    def state(self) -> dict[str, bytes]:
        """All variables, slots and averages, put together from the shards, as bytes."""
        states = {variable.name: _zeros(variable) for variable in self.model.variables if variable.keys is None}
        for index, (shard, layout) in enumerate(zip(self.shards, self.layouts, strict=True)):
            self._read_dense(shard, layout, states)
            for position, piece in enumerate(layout.tables):
                self._read_table(shard, index, position, piece, states)
        # A slot that a variable does not have reads as zeros where another variable of its shard has it.
        return {name: values.tobytes() for name, values in sorted(states.items()) if "@" not in name or values.any()}

    def _read_dense(self, shard: Shard, layout: Layout, states: dict[str, Array]) -> None:
        memory = aligned_bytes(layout.nbytes)
        assert shard.read(ReadRequest(epoch=self.epoch, step=None, layout_hash=layout.hash), Segments([memory])) == self.step
        self._put(layout, memory, "", states)
        names = list(shard.call(ShardStatusRequest()).slots)
        if self.model.averages is not None and layout.slices:
            names.append(AVERAGE_SLOT)
        for name in names if layout.slices else ():
            memory = aligned_bytes(layout.nbytes)
            shard.read(ReadRequest(epoch=self.epoch, layout_hash=layout.hash, slot=name), Segments([memory]))
            self._put(layout, memory, f"@{name}", states)

    def _put(self, layout: Layout, memory: Array, part: str, states: dict[str, Array]) -> None:
        for position, piece in enumerate(layout.slices):
            target = states.setdefault(piece.variable.name + part, _zeros(piece.variable))
            _cut(target, piece)[...] = layout.view(memory, position)

    def _read_table(self, shard: Shard, index: int, position: int, piece: VariableSlice, states: dict[str, Array]) -> None:
        optimizer = piece.variable.optimizer or self.model.optimizer
        slots = {"momentum": ("momentum",), "adagrad": ("accumulator",), "adam": ("m", "v")}.get(optimizer.name, ())
        for slot in ("", *slots):
            keys = KEYS[_is_here(KEYS, piece)] if piece.variable.keys is not None else np.arange(piece.shape[0])
            into = np.empty((len(keys), *piece.shape[1:]), piece.variable.data_type.dtype)
            request = RowsRequest(epoch=self.epoch, layout_hash=self.layouts[index].hash, table=position, step=None, slot=slot)
            shard.read_rows(request, keys, Segments([_bytes_of(into)]))
            name = piece.variable.name + (f"@{slot}" if slot else "")
            if piece.variable.keys is not None:
                target = states.setdefault(name, np.zeros((len(KEYS), *into.shape[1:]), into.dtype))
                target[_is_here(KEYS, piece)] = into
            else:
                _cut(states.setdefault(name, _zeros(piece.variable)), piece)[...] = into

    def push(self, index: int, push_id: PushId) -> None:
        """Gives a shard its part of a contribution to the present step."""
        layout, seed = self.layouts[index], 1 + self.step * NUM_WORKERS + push_id.worker
        pieces, parts = ([self._arena(index, seed=seed)] if layout.slices else []), []
        for position, piece in enumerate(layout.tables):
            if self.step % 2 and piece.variable.name == self.model.variables[-1].name:
                continue
            rows, values = _rows(piece.variable, seed=seed)
            is_here = _is_here(rows, piece)
            parts.append(SparsePart(table=position, num_rows=int(is_here.sum())))
            pieces += [_bytes_of(rows[is_here] - piece.first_index), _bytes_of(values[is_here])]
        header = PushHeader(
            era=era(self.epoch),
            push_id=push_id,
            step=self.step,
            layout_hash=layout.hash,
            sparse=tuple(parts),
            metrics={"loss": Metric(value=float(seed))} if not index else {},
        )
        self.shards[index].push_gradients(header, Segments(pieces))

    def _arena(self, index: int, *, seed: int) -> Array:
        memory = aligned_bytes(self.layouts[index].nbytes)
        for position, piece in enumerate(self.layouts[index].slices):
            self.layouts[index].view(memory, position)[...] = _cut(_values(piece.variable, seed=seed), piece)
        return memory


def metrics_of(training: ShardedTraining) -> Mapping[tuple[str, int], tuple[float, int]]:
    """Totals and counts of the metrics, which the first shard has."""
    cells = training.shards[0].call(ReadMetricsRequest(epoch=training.epoch))
    return {(cell.name, cell.worker): (cell.total, cell.count) for cell in cells}


def _values(variable: VariableSpec, *, seed: int) -> Array:
    rng = np.random.default_rng([zlib.crc32(variable.name.encode()), seed])
    return np.asarray(rng.standard_normal(variable.shape)).astype(variable.data_type.dtype)


def _rows(variable: VariableSpec, *, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng([zlib.crc32(variable.name.encode()), seed])
    known = np.arange(variable.num_rows) if variable.keys is None else KEYS
    rows = np.sort(rng.choice(known, size=max(1, known.size // 2 if variable.keys is None else 9), replace=False)).astype("<i8")
    return rows, rng.standard_normal((rows.size, *variable.shape[1:])).astype(variable.data_type.dtype)


def _is_here(rows: Array, piece: VariableSlice) -> Array:
    least, greatest = piece.index_range
    return (rows >= least) & (rows <= greatest)


def _zeros(variable: VariableSpec) -> Array:
    return np.zeros(variable.shape, variable.data_type.dtype)


def _cut(values: Array, piece: VariableSlice) -> Array:
    return values[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),)] if piece.variable.shape else values[...]


def _bytes_of(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
