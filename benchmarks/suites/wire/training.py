"""Trains on one parameter server with a wire format; workers run by turns in one process, so that a seed gives one result. Knows no chief.

The workers use the SDK's memory and encoders, and the real clients and server.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.harness.relay import Relay
from lockstep.demo.digits import DEFAULT, NETWORK, evaluate, initial_values, load_digits, optimizer_of, split
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, VariableSpec, data_type_of
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, PushHeader, ReadRequest, ShardSpec
from ps_protocol.rpc.shard import GrpcShard
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from worker_client import sgd
from worker_client.model.gradients import ShardParts, Staging
from worker_client.model.memory import ModelMemory
from worker_client.model.wire_format import WireFormat

_EPOCH, _CHIEF, _BATCH_SIZE = 1, 1, 32
_NUM_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """The bytes of one worker's step on the wire, to a parameter server and back, including all framing."""

    up: float
    down: float


class Training:
    """One model on one server, and its workers, which make each step together."""

    def __init__(
        self,
        server: ParameterServer,
        shard: GrpcShard,
        values: Mapping[str, Array],
        *,
        wire: WireFormat,
        optimizer: OptimizerSpec,
        num_workers: int,
    ) -> None:
        variables = tuple(VariableSpec(name=n, data_type=data_type_of(v, name=n), shape=v.shape) for n, v in values.items())
        model = ModelSpec(variables=variables, optimizer=optimizer, placement=PlacementPolicy())
        self._server, self._shard, self._layout = server, shard, layouts(place(model, num_shards=1), num_shards=1)[0]
        self._memory = ModelMemory(model, layouts=[self._layout], is_writable=True)
        self._workers = [
            (Staging(model, ModelMemory(model, layouts=[self._layout], is_writable=True)), ShardParts([self._layout], wire=wire))
            for _ in range(num_workers)
        ]
        self.step_number = 0
        for name, value in values.items():
            self._memory.views[name][...] = value
        server.shard.call(AdoptRequest(fence=Fence(era=Era(life=1, epoch=_EPOCH), chief_incarnation=_CHIEF)))
        shard.create_variables(ShardSpec(epoch=_EPOCH, shard=0, layout=self._layout, optimizer=optimizer), self._memory.segments[0])
        shard.know_layout(self._layout)

    def read(self) -> Mapping[str, Array]:
        """Reads the variables as a worker gets them."""
        self._shard.read(ReadRequest(epoch=_EPOCH, step=self.step_number, layout_hash=self._layout.hash), self._memory.segments[0])
        return self._memory.views

    def step(self, compute: Callable[[int, Mapping[str, Array]], None]) -> None:
        """Makes a step: every worker computes gradients into its own memory and pushes them, and the server applies their mean."""
        push_ids = []
        for worker, (staging, parts_of) in enumerate(self._workers):
            compute(worker, staging.views)
            part = parts_of.parts(staging.stage(staging.views, step=self.step_number))[0]
            push_id = PushId(worker=worker, incarnation=1, sequence=self.step_number + 1)
            header = PushHeader(era=Era(life=1, epoch=_EPOCH), push_id=push_id, step=self.step_number, layout_hash=self._layout.hash)
            header = replace(header, absent=part.absent, encoding=part.encoding, encoded_bytes=part.encoded_bytes)
            self._shard.push_gradients(header, part.segments)
            push_ids.append(push_id)
        request = ApplyRequest(
            fence=Fence(era=Era(life=1, epoch=_EPOCH), chief_incarnation=_CHIEF), step=self.step_number, contributors=tuple(push_ids)
        )
        self.step_number = self._server.shard.apply_step(request).step


def wire_bytes(wire: WireFormat, *, total_bytes: int, num_steps: int = 5) -> WireBytes:
    """Returns the bytes of one step of one worker: it reads everything and pushes everything."""
    values = {f"v{index:02d}": np.ones(total_bytes // 4 // 16, np.float32) for index in range(16)}
    random = np.random.default_rng(0)

    def fill(_: int, gradients: Mapping[str, Array]) -> None:
        for gradient in gradients.values():
            random.standard_normal(gradient.shape, np.float32, out=gradient)

    with _server(wire) as (server, shard, relay):
        training = Training(server, shard, values, wire=wire, optimizer=sgd(0.1), num_workers=1)
        before = relay.num_up, relay.num_down
        for step in range(_NUM_WARMUP_STEPS + num_steps):
            if step == _NUM_WARMUP_STEPS:
                before = relay.num_up, relay.num_down
            training.read()
            training.step(fill)
        return WireBytes(up=(relay.num_up - before[0]) / num_steps, down=(relay.num_down - before[1]) / num_steps)


def digits_accuracy(wire: WireFormat, *, seed: int, num_steps: int, num_workers: int = 2) -> float:
    """Trains the demo's model for some steps, and returns the share of test digits that it classifies correctly."""
    examples, test = split(load_digits())
    parts = [examples.part(index, num_parts=num_workers) for index in range(num_workers)]
    with _server(wire) as (server, shard, _):
        training = Training(server, shard, initial_values(seed=seed), wire=wire, optimizer=optimizer_of(DEFAULT), num_workers=num_workers)
        for step in range(num_steps):
            values = training.read()

            def compute(worker: int, gradients: Mapping[str, Array], step: int = step, values: Mapping[str, Array] = values) -> None:
                # Another seed also changes the order of the batches.
                batch = parts[worker].batch(_BATCH_SIZE, worker=worker, step=step + 1000 * seed)
                NETWORK.loss_and_gradients(values, batch.images, batch.labels, into=gradients)

            training.step(compute)
        return evaluate(training.read(), test.images, test.labels).accuracy


@contextlib.contextmanager
def _server(wire: WireFormat) -> Iterator[tuple[ParameterServer, GrpcShard, Relay]]:
    server = ParameterServer(ParameterServerConfig(index=0))
    try:
        server.start()
        with Relay(server.address) as relay:
            shard = GrpcShard(relay.address, index=0, variables_encoding=wire.variable_encoding)
            with contextlib.closing(shard):
                yield server, shard, relay
    finally:
        server.stop(0.0)
