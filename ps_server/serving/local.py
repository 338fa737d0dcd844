"""A shard in the caller's own process: the `Shard` Protocol without a wire.

Calls return when they are done, so `timeout_s` has nothing to bound and is ignored.
"""

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import PushHeader, PushReply, ReadRequest, RowsRequest, ShardSpec
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.boards import BoardRegistry
from ps_server.shard.shard import ServedShard

# Large enough that the loop costs nothing; small enough that a copy that has become useless ends soon.
_CHUNK_BYTES = 8 << 20


class InProcessShard:
    """Implements Shard. Thread-safe. `accumulators` and `boards`: those that lie here. `options`: as those of ServedShard."""

    transport = "local"

    def __init__(self, *, index: int, **options: Any) -> None:
        self._shard = ServedShard(index=index, process_incarnation=new_process_incarnation(), **options)
        self.accumulators = AccumulatorRegistry(owner=f"ps {index}", budget=self._shard.budget)
        self.boards = BoardRegistry(owner=f"ps {index}", budget=self._shard.budget, process_incarnation=self._shard.process_incarnation)

    def know_layout(self, layout: Layout) -> None:
        """Nothing travels, so nothing travels encoded."""

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer."""
        return self._shard.call(request)

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values; False if they exist already."""
        with self._shard.open_creation(spec) as creation:
            for offset, data in values.chunks(_CHUNK_BYTES):
                if not creation.write(offset, data):
                    break
            return creation.finish()

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        """Copies the variables of a step, or a slot, into the caller's memory; returns their step."""
        reading = self._shard.open_slot(request) if request.slot else self._shard.open_variables(request)
        writer = into.writer()
        for offset, data in reading.chunks(_CHUNK_BYTES):
            writer.write(offset, data)
            reading.check()
        writer.finish()
        return reading.step

    def expect(self, request: ReadRequest) -> None:
        """Does nothing."""

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, or applies it."""
        with self._shard.open_push(header) as push:
            for offset, data in gradients.chunks(_CHUNK_BYTES):
                if not push.write(offset, data):
                    break
            return push.finish()

    def read_rows(
        self,
        request: RowsRequest,
        indices: Array,
        into: Segments,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Copies rows of one table, or of one of its slots, into the caller's memory; returns their step."""
        writer, offset = into.writer(), 0
        with self._shard.open_rows(request) as reading:
            num_rows = max(1, _CHUNK_BYTES // max(1, reading.row_bytes))
            for start in range(0, len(indices), num_rows):
                rows = reading.take(indices[start : start + num_rows]).reshape(-1).view(np.uint8)
                writer.write(offset, rows.data)
                offset += rows.nbytes
            if meanwhile is not None:
                meanwhile(reading.step)
        writer.finish()
        return reading.step

    def close(self) -> None:
        """Does nothing: there is no connection."""


def new_process_incarnation() -> int:
    """Returns the random number of one start of a parameter server."""
    return secrets.randbits(63) | 1
