"""Shards of every transport, workers that share their memory, and small models to put on them. Asserts nothing."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.model.layout import Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import NO_CLIP, ClipSpec
from ps_protocol.model.variables import Array, DataType, Initializer, SparseMean, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyReply,
    ApplyRequest,
    KeepRecordRequest,
    Metric,
    PushHeader,
    PushReply,
    ReadRequest,
    RowsRequest,
    Shard,
    ShardSettings,
    ShardSpec,
    SparsePart,
)
from ps_protocol.rpc.memory import MemoryNotShared, SharedMemory
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from ps_server.serving.local import InProcessShard
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.commanded_shard import CommandedShard, ForwardingShard

# All workers of a test behind one Shard, each of which shares the server's memory on its own, as soon as it pushes. Asserts nothing.


class SharingWorkers(ForwardingShard):
    """Implements Shard. A worker that cannot share goes by gRPC, as it would in a session; its connection is its own."""

    def __init__(self, shard: CommandedShard) -> None:
        super().__init__(shard)
        self.shard = shard
        self.of: dict[tuple[int, int], CommandedShard] = {}
        self.memories: dict[tuple[int, int], SharedMemory] = {}
        self._layout: Layout | None = None
        self._lock = threading.Lock()

    def worker(self, index: int, *, incarnation: int, epoch: int, secret: int = 0) -> CommandedShard:
        """The shard as one incarnation of a worker has it."""
        with self._lock:
            return self._worker_locked(index, incarnation, epoch, secret)

    def _worker_locked(self, index: int, incarnation: int, epoch: int, secret: int) -> CommandedShard:
        key = index, incarnation
        if key not in self.memories or not self.memories[key].is_open:
            if self._layout is None:
                return self.shard
            if key not in self.of:
                self.of[key] = CommandedShard(self.shard.address)
            try:
                self.memories[key] = self.of[key].share(
                    epoch=epoch, worker=index, incarnation=incarnation, layout=self._layout, secret=secret
                )
            except MemoryNotShared:
                return self.shard
        return self.of[key]

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables."""
        is_created = self.shard.create_variables(spec, values, timeout_s=timeout_s)
        self._layout = spec.layout
        return is_created

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Pushes as the worker in the header."""
        if self._layout is None or header.layout_hash != self._layout.hash:
            return self.shard.push_gradients(header, gradients, timeout_s=timeout_s)
        shard = self.worker(header.push_id.worker, incarnation=header.push_id.incarnation, epoch=header.era.epoch, secret=header.secret)
        return shard.push_gradients(header, gradients, timeout_s=timeout_s)

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        """Reads as the first worker that shares."""
        return self._reader.read(request, into, timeout_s=timeout_s)

    def expect(self, request: ReadRequest) -> None:
        """As the first worker that shares."""
        self._reader.expect(request)

    def close(self) -> None:
        """Ends all sharing."""
        for shard in self.of.values():
            shard.close()

    @property
    def _reader(self) -> CommandedShard:
        return next(iter(self.of.values()), self.shard)


# Shards of every transport, and small models to put on them. Knows how to open and close; asserts nothing.


TRANSPORTS = ("in_process", "grpc_tcp", "grpc_unix", "sockets_tcp", "sockets_unix", "shared_memory")
# Over TCP and over a Unix socket travels the same: what is about the bytes of a push or a read runs over both, all else over one of them.
EACH_WAY = ("in_process", "grpc_unix", "sockets_tcp", "shared_memory")
# Sockets carry the bytes of gRPC's calls: what is about no bytes does without them.
WITHOUT_SOCKETS = ("in_process", "grpc_unix", "shared_memory")
EPOCH = 3
CHIEF = 2


@contextlib.contextmanager
def open_server(config: ParameterServerConfig) -> Iterator[ParameterServer]:
    """A real parameter server, until the block ends."""
    server = ParameterServer(config)
    try:
        server.start()
        yield server
    finally:
        server.stop(0.0)


@contextlib.contextmanager
def open_shard(
    transport: str,
    *,
    socket_dir: Path,
    index: int = 0,
    max_memory_bytes: int | None = None,
    checkpoint_dir: str = "",
    table_dir: Path | None = None,
) -> Iterator[Shard]:
    """A shard that nobody has adopted, over one of TRANSPORTS."""
    if transport == "in_process":
        storage = open_storage(checkpoint_dir) if checkpoint_dir else None
        yield InProcessShard(index=index, memory_limit_bytes=max_memory_bytes, storage=storage, table_dir=table_dir)
        return
    address = f"unix:{socket_dir / f'ps{index}'}" if transport.endswith("_unix") else "127.0.0.1:0"
    config = ParameterServerConfig(
        index=index, address=address, max_memory_bytes=max_memory_bytes, checkpoint_dir=checkpoint_dir, table_dir=table_dir
    )
    with open_server(config) as server:
        least_bytes = 1 if transport.startswith("sockets") else None
        with contextlib.closing(
            CommandedShard(server.address, index=index, least_socket_bytes=least_bytes, must_use_sockets=least_bytes is not None)
        ) as shard:
            if transport != "shared_memory":
                yield shard
                return
            with contextlib.closing(SharingWorkers(shard)) as sharing:
                yield sharing


def shard_over(transports: Sequence[str]) -> Any:
    """Returns the fixture `shard`, which opens a shard that nobody has adopted over each of some transports."""

    @pytest.fixture(params=transports, name="shard")
    def opened(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Shard]:
        with open_shard(request.param, socket_dir=socket_dir) as found:
            yield found

    return opened


def variable(name: str, shape: tuple[int, ...] = (), data_type: DataType = DataType.FLOAT32) -> VariableSlice:
    """A whole variable."""
    spec = VariableSpec(name=name, data_type=data_type, shape=shape)
    return VariableSlice(variable=spec, start=0, stop=spec.num_rows)


def table(
    name: str,
    shape: tuple[int, ...],
    data_type: DataType = DataType.FLOAT32,
    *,
    rows: tuple[int, int] | None = None,
    optimizer: OptimizerSpec | None = None,
    sparse_mean: SparseMean = SparseMean.PER_INDEX,
    initializer: Initializer | None = None,
) -> VariableSlice:
    """A sparse variable, or those of its rows that lie here."""
    spec = VariableSpec(
        name=name, data_type=data_type, shape=shape, is_sparse=True, optimizer=optimizer, sparse_mean=sparse_mean, initializer=initializer
    )
    start, stop = rows or (0, spec.num_rows)
    return VariableSlice(variable=spec, start=start, stop=stop)


def layout_of(*pieces: VariableSlice) -> Layout:
    """The layout of the given slices."""
    return Layout(pieces)


# Both element types, a matrix, a scalar, nothing at all, and padding behind most of them.
MIXED = layout_of(
    variable("w", (5, 7)), variable("bias", (3,)), variable("scale"), variable("none", (0, 4)), variable("d", (9,), DataType.FLOAT64)
)


def telling(settings: ShardSettings) -> KeepRecordRequest:
    """Returns the request that has a shard work by settings."""
    return KeepRecordRequest(fence=settings.fence, version=settings.version, settings=settings, record=b"")


def keeping(version: int, record: bytes = b"", *, epoch: int = EPOCH) -> KeepRecordRequest:
    """Returns the request that has a shard keep a record, and work as the model says."""
    told = ShardSettings(fence=fence(epoch, CHIEF), version=1)
    return KeepRecordRequest(fence=told.fence, version=version, settings=told, record=record)


class Trainer:
    """Does to one shard what chief and workers do, with push ids that count up."""

    def __init__(
        self,
        shard: Shard,
        layout: Layout = MIXED,
        *,
        optimizer: str = "sgd",
        hyperparameters: Mapping[str, float] | None = None,
        clip: ClipSpec = NO_CLIP,
    ) -> None:
        self.shard = shard
        self.layout = layout
        self.clip = clip
        self.optimizer = OptimizerSpec(name=optimizer, hyperparameters=hyperparameters or {}, learning_rate=constant(0.5))
        self._sequences: dict[tuple[int, int], int] = {}

    def spec(
        self, layout: Layout | None = None, /, *, epoch: int = EPOCH, shard: int = 0, attempt: int = 1, max_staged: int = 2, step: int = 0
    ) -> ShardSpec:
        """The shard's part of the model."""
        return ShardSpec(
            epoch=epoch,
            shard=shard,
            layout=layout or self.layout,
            optimizer=self.optimizer,
            attempt=attempt,
            max_staged_per_worker=max_staged,
            initial_step=step,
            clip=self.clip,
        )

    def arena(self, value: float = 0.0) -> Array:
        """An arena with the same number in every element; the padding is zero."""
        memory = aligned_bytes(self.layout.nbytes)
        for index in range(len(self.layout.slices)):
            self.layout.view(memory, index)[...] = value
        return memory

    def random(self, seed: int) -> Array:
        """An arena of random numbers."""
        rng, memory = np.random.default_rng(seed), aligned_bytes(self.layout.nbytes)
        for index, piece in enumerate(self.layout.slices):
            self.layout.view(memory, index)[...] = rng.standard_normal(piece.shape)
        return memory

    def adopt(self) -> None:
        """Puts the shard under the chief."""
        self.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF)))

    def create(self, value: float = 0.0, **changes: int) -> bool:
        """Adopts the shard and creates the variables."""
        self.adopt()
        return self.shard.create_variables(self.spec(**changes), self.first_values(value))

    def first_values(self, value: float = 0.0) -> Segments:
        """The same number in every element of what a client sends to create the variables."""
        pieces = [self.arena(value)]
        for piece in self.layout.tables:
            if piece.variable.initializer is None:
                values = np.full(piece.shape, value, piece.variable.data_type.dtype)
                pieces.append(values.reshape(-1).view(np.uint8))
        return Segments(pieces)

    def header(
        self,
        worker: int = 0,
        *,
        step: int = 0,
        incarnation: int = 1,
        sequence: int | None = None,
        epoch: int = EPOCH,
        sparse: tuple[SparsePart, ...] = (),
        absent: tuple[int, ...] = (),
        metrics: Mapping[str, Metric] | None = None,
    ) -> PushHeader:
        """A header; with the worker's next sequence number unless one is given."""
        if sequence is None:
            sequence = self.last_sequence(worker, incarnation=incarnation) + 1
            self._sequences[worker, incarnation] = sequence
        push_id = PushId(worker=worker, incarnation=incarnation, sequence=sequence)
        return PushHeader(
            era=era(epoch),
            push_id=push_id,
            step=step,
            layout_hash=self.layout.hash,
            sparse=sparse,
            absent=absent,
            metrics=metrics or {},
        )

    def last_sequence(self, worker: int = 0, *, incarnation: int = 1) -> int:
        """The sequence number given last; 0 if there is none."""
        return self._sequences.get((worker, incarnation), 0)

    def push(self, header: PushHeader, gradients: Array | None = None) -> PushReply:
        """Pushes; ones, unless gradients are given."""
        return self.shard.push_gradients(header, Segments([self.arena(1.0) if gradients is None else gradients]))

    def push_rows(
        self,
        worker: int = 0,
        *,
        step: int = 0,
        rows: Mapping[int, tuple[Sequence[int], object]] | None = None,
        dense: Array | None = None,
        absent: tuple[int, ...] | None = None,
    ) -> tuple[PushHeader, PushReply]:
        """Pushes rows of tables by position, (indices, rows); without `dense`, without gradients of dense variables."""
        parts, pieces = [], []
        for position, (indices, values) in (rows or {}).items():
            piece = self.layout.tables[position]
            row_shape = piece.shape[1:]
            values = np.ascontiguousarray(np.broadcast_to(np.asarray(values, piece.variable.data_type.dtype), (len(indices), *row_shape)))
            parts.append(SparsePart(table=position, num_rows=len(indices)))
            pieces += [np.asarray(indices, "<i8").view(np.uint8), values.reshape(-1).view(np.uint8)]
        if absent is None:
            absent = () if dense is not None else tuple(range(len(self.layout.slices)))
        header = self.header(worker, step=step, sparse=tuple(parts), absent=absent)
        return header, self.shard.push_gradients(header, Segments([*([] if dense is None else [dense]), *pieces]))

    def request(
        self,
        *contributors: PushId,
        step: int = 0,
        chief_incarnation: int = CHIEF,
        epoch: int = EPOCH,
        weights: tuple[float, ...] = (),
        scales: tuple[float, ...] = (),
        discards: tuple[PushId, ...] = (),
        without: tuple[PushId, ...] = (),
    ) -> ApplyRequest:
        """What the chief would ask for; the contributors in the order of their ids."""
        return ApplyRequest(
            fence=fence(epoch, chief_incarnation),
            step=step,
            contributors=tuple(sorted(contributors)),
            weights=weights,
            scales=scales,
            discards=discards,
            without=without,
        )

    def apply(
        self,
        *contributors: PushId,
        step: int = 0,
        chief_incarnation: int = CHIEF,
        epoch: int = EPOCH,
        without: tuple[PushId, ...] = (),
    ) -> ApplyReply:
        """Applies a step."""
        request = self.request(*contributors, step=step, chief_incarnation=chief_incarnation, epoch=epoch, without=without)
        return self.shard.call(request)

    def train_rows(self, step: int, indices: Sequence[int], values: object, *, position: int = 0) -> ApplyReply:
        """One whole step of one worker that has a gradient for rows of one table only."""
        header, _ = self.push_rows(step=step, rows={position: (indices, values)})
        return self.apply(header.push_id, step=step)

    def configure(
        self,
        version: int,
        *,
        accepts_stale: bool = False,
        applies_on_arrival: bool = False,
        optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = (),
        rejects_nonfinite: bool = False,
        chief_incarnation: int = CHIEF,
    ) -> None:
        """Changes how the shard works."""
        settings = ShardSettings(
            fence=fence(EPOCH, chief_incarnation),
            version=version,
            accepts_stale=accepts_stale,
            applies_on_arrival=applies_on_arrival,
            optimizers=optimizers,
            rejects_nonfinite=rejects_nonfinite,
        )
        self.shard.call(telling(settings))

    def rows(self, indices: Sequence[int] | Array, *, position: int = 0, step: int | None = None, slot: str = "") -> tuple[int, Array]:
        """The step and some rows of a table, or of one of its slots."""
        piece = self.layout.tables[position]
        into = np.empty((len(indices), *piece.shape[1:]), piece.variable.data_type.dtype)
        request = RowsRequest(epoch=EPOCH, layout_hash=self.layout.hash, table=position, step=step, slot=slot)
        found = self.shard.read_rows(request, np.asarray(indices, "<i8"), Segments([into.reshape(-1).view(np.uint8)]))
        return found, into

    def train(self, step: int, *, value: float = 1.0, worker: int = 0) -> ApplyReply:
        """One whole step of one worker whose gradient is `value` everywhere."""
        header = self.header(worker, step=step)
        self.push(header, self.arena(value))
        return self.apply(header.push_id, step=step)

    def read(self, step: int | None = None, *, epoch: int = EPOCH, layout_hash: str | None = None) -> tuple[int, Array]:
        """The step and the arena."""
        memory = aligned_bytes(self.layout.nbytes)
        memory[:] = 255
        hash_ = self.layout.hash if layout_hash is None else layout_hash
        return self.shard.read(ReadRequest(epoch=epoch, step=step, layout_hash=hash_), Segments([memory])), memory

    def slot(self, name: str) -> tuple[int, Array]:
        """The step and one slot."""
        memory = aligned_bytes(self.layout.nbytes)
        return self.shard.read(ReadRequest(epoch=EPOCH, layout_hash=self.layout.hash, slot=name), Segments([memory])), memory


def views(layout: Layout, memory: Array) -> dict[str, Array]:
    """The slices of a shard's memory by the names of their variables."""
    return {piece.variable.name: layout.view(memory, index) for index, piece in enumerate(layout.slices)}
