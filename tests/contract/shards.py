"""Shards of every transport, and small models to put on them. Knows how to open and close; asserts nothing."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ps_protocol.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.segments import Segments
from ps_protocol.shard import ApplyReply, ApplyRequest, PushHeader, PushId, PushReply, Shard, ShardSpec
from ps_protocol.shard_client import GrpcShard
from ps_protocol.tensors import Array, DataType, VariableSpec
from ps_server.config import ParameterServerConfig
from ps_server.in_process_shard import InProcessShard
from ps_server.server import ParameterServer

TRANSPORTS = ("in_process", "grpc_tcp", "grpc_unix")
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
def open_shard(transport: str, *, socket_dir: Path, index: int = 0, max_memory_bytes: int | None = None) -> Iterator[Shard]:
    """A shard that nobody has adopted, over one of TRANSPORTS."""
    if transport == "in_process":
        yield InProcessShard(index=index, memory_limit_bytes=max_memory_bytes)
        return
    address = f"unix:{socket_dir / 'ps'}" if transport == "grpc_unix" else "127.0.0.1:0"
    with open_server(ParameterServerConfig(index=index, address=address, max_memory_bytes=max_memory_bytes)) as server:
        with contextlib.closing(GrpcShard(server.address, index=index)) as shard:
            yield shard


def variable(name: str, shape: tuple[int, ...] = (), data_type: DataType = DataType.FLOAT32) -> VariableSlice:
    """A whole variable."""
    spec = VariableSpec(name=name, data_type=data_type, shape=shape)
    return VariableSlice(variable=spec, start=0, stop=spec.num_rows)


def layout_of(*pieces: VariableSlice) -> Layout:
    """The layout of the given slices."""
    return Layout(pieces)


# Both element types, a matrix, a scalar, nothing at all, and padding behind most of them.
MIXED = layout_of(
    variable("w", (5, 7)), variable("bias", (3,)), variable("scale"), variable("none", (0, 4)), variable("d", (9,), DataType.FLOAT64)
)


class Trainer:
    """Does to one shard what chief and workers do, with push ids that count up."""

    def __init__(
        self, shard: Shard, layout: Layout = MIXED, *, optimizer: str = "sgd", hyperparameters: Mapping[str, float] | None = None
    ) -> None:
        self.shard = shard
        self.layout = layout
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
        self.shard.adopt(epoch=EPOCH, chief_incarnation=CHIEF)

    def create(self, value: float = 0.0, **changes: int) -> bool:
        """Adopts the shard and creates the variables."""
        self.adopt()
        return self.shard.create_variables(self.spec(**changes), Segments([self.arena(value)]))

    def header(
        self, worker: int = 0, *, step: int = 0, incarnation: int = 1, sequence: int | None = None, epoch: int = EPOCH
    ) -> PushHeader:
        """A header; with the worker's next sequence number unless one is given."""
        if sequence is None:
            sequence = self.last_sequence(worker, incarnation=incarnation) + 1
            self._sequences[worker, incarnation] = sequence
        push_id = PushId(worker=worker, incarnation=incarnation, sequence=sequence)
        return PushHeader(epoch=epoch, push_id=push_id, step=step, layout_hash=self.layout.hash)

    def last_sequence(self, worker: int = 0, *, incarnation: int = 1) -> int:
        """The sequence number given last; 0 if there is none."""
        return self._sequences.get((worker, incarnation), 0)

    def push(self, header: PushHeader, gradients: Array | None = None) -> PushReply:
        """Pushes; ones, unless gradients are given."""
        return self.shard.push_gradients(header, Segments([self.arena(1.0) if gradients is None else gradients]))

    def apply(self, *contributors: PushId, step: int = 0, chief_incarnation: int = CHIEF, epoch: int = EPOCH) -> ApplyReply:
        """Applies a step."""
        return self.shard.apply_step(
            ApplyRequest(epoch=epoch, chief_incarnation=chief_incarnation, step=step, contributors=tuple(sorted(contributors)))
        )

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
        return self.shard.read_variables(Segments([memory]), epoch=epoch, step=step, layout_hash=hash_), memory

    def slot(self, name: str) -> tuple[int, Array]:
        """The step and one slot."""
        memory = aligned_bytes(self.layout.nbytes)
        return self.shard.read_slot(name, Segments([memory]), epoch=EPOCH, layout_hash=self.layout.hash), memory


def views(layout: Layout, memory: Array) -> dict[str, Array]:
    """The slices of a shard's memory by the names of their variables."""
    return {piece.variable.name: layout.view(memory, index) for index, piece in enumerate(layout.slices)}
