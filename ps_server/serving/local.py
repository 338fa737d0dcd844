"""A shard in the caller's own process: the `Shard` Protocol without a wire.

Calls return when they are done, so `timeout_s` has nothing to bound and is ignored.
"""

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.history import History
from ps_protocol.roles.shard import (
    ONLY_REPLICA,
    Adoption,
    ApplyReply,
    ApplyRequest,
    MetricCell,
    PushHeader,
    PushReply,
    ReplicaState,
    RestoreProgress,
    RestoreRequest,
    RowsRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardSpec,
    ShardStatus,
)
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.boards import BoardRegistry
from ps_server.shard.checkpoints import RunInBackground
from ps_server.shard.handles import Reading
from ps_server.shard.shard import Shard

# Large enough that the loop costs nothing; small enough that a copy that has become useless ends soon.
_CHUNK_BYTES = 8 << 20


class InProcessShard:
    """Implements Shard. Thread-safe. `memory_limit_bytes` None: no limit. `accumulators` and `boards`: those that lie here.

    `storage`: where checkpoints are; None: nowhere. `run_in_background`, `history`, `clock`: see Shard.
    """

    def __init__(
        self,
        *,
        index: int,
        memory_limit_bytes: int | None = None,
        storage: CheckpointStorage | None = None,
        run_in_background: RunInBackground | None = None,
        history: History | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = Shard(
            index=index,
            process_incarnation=new_process_incarnation(),
            memory_limit_bytes=memory_limit_bytes,
            storage=storage,
            run_in_background=run_in_background,
            history=history,
            clock=clock,
        )
        self.accumulators = AccumulatorRegistry(owner=f"ps {index}", budget=self._shard.budget)
        self.boards = BoardRegistry(owner=f"ps {index}", budget=self._shard.budget, process_incarnation=self._shard.process_incarnation)

    def adopt(
        self,
        fence: Fence,
        *,
        chief_address: str = "",
        session_keys: tuple[bytes, ...] = (),
        replica: ReplicaState = ONLY_REPLICA,
    ) -> Adoption:
        """Puts the shard under a chief; see Shard.adopt."""
        return self._shard.adopt(fence, chief_address=chief_address, session_keys=session_keys, replica=replica)

    def hear_chief(self, fence: Fence) -> None:
        """Notes a sign of life, if it is one of the chief that has the shard."""
        self._shard.hear_chief(fence)

    def keep_record(self, fence: Fence, *, version: int, record: bytes) -> None:
        """Keeps a record for the chief's successor."""
        self._shard.keep_record(fence, version=version, record=record)

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Copies a step and has it written, or says how far that is."""
        return self._shard.save(request, max_wait_s=max_wait_s)

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Begins to bring the shard back to a checkpoint, or says how far that is."""
        return self._shard.restore(request, max_wait_s=max_wait_s)

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values; False if they exist already."""
        with self._shard.open_creation(spec) as creation:
            for offset, data in values.chunks(_CHUNK_BYTES):
                if not creation.write(offset, data):
                    break
            return creation.finish()

    def read_variables(
        self,
        into: Segments,
        *,
        epoch: int,
        step: int | None,
        layout_hash: str,
        held_step: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Copies the variables of a step into the caller's memory; returns their step."""
        return _copy(self._shard.open_variables(epoch=epoch, step=step, layout_hash=layout_hash), into)

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """Does nothing."""

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns None: this transport copies."""
        return None

    def gradient_memory(self) -> Array | None:
        """Returns None: this transport copies."""
        return None

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, or applies it."""
        with self._shard.open_push(header) as push:
            for offset, data in gradients.chunks(_CHUNK_BYTES):
                if not push.write(offset, data):
                    break
            return push.finish()

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        self._shard.configure(settings)

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's means."""
        return self._shard.prepare_step(request)

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Averages the contributions and makes the next step."""
        return self._shard.apply_step(request)

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

    def read_metrics(self, *, epoch: int) -> Sequence[MetricCell]:
        """Returns the metrics that workers have reported."""
        return self._shard.read_metrics(epoch=epoch)

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies one slot of all variables into the caller's memory; returns its step."""
        return _copy(self._shard.open_slot(name, epoch=epoch, layout_hash=layout_hash), into)

    def status(self) -> ShardStatus:
        """Returns step, memory and counters."""
        return self._shard.status()

    def shutdown(self, fence: Fence, *, reason: str) -> None:
        """Makes every later call raise ShuttingDown."""
        self._shard.shutdown(fence, reason=reason)

    def close(self) -> None:
        """Does nothing: there is no connection."""


def new_process_incarnation() -> int:
    """Returns the random number of one start of a parameter server."""
    return secrets.randbits(63) | 1


def _copy(reading: Reading, into: Segments) -> int:
    writer = into.writer()
    for offset, data in reading.chunks(_CHUNK_BYTES):
        writer.write(offset, data)
        reading.check()
    writer.finish()
    return reading.step
