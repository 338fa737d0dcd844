"""The seam to a parameter server: what chief and workers ask of a shard, whatever carries it. Knows steps and bytes; no transport."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ps_protocol.segments import Segments
from ps_protocol.shard_save_values import CheckpointFile as CheckpointFile
from ps_protocol.shard_save_values import RestoreProgress as RestoreProgress
from ps_protocol.shard_save_values import RestoreRequest as RestoreRequest
from ps_protocol.shard_save_values import SaveProgress as SaveProgress
from ps_protocol.shard_save_values import SaveRequest as SaveRequest
from ps_protocol.shard_save_values import SaveState as SaveState
from ps_protocol.shard_values import MAX_STEP as MAX_STEP
from ps_protocol.shard_values import Adoption as Adoption
from ps_protocol.shard_values import AppliedPush as AppliedPush
from ps_protocol.shard_values import ApplyReply as ApplyReply
from ps_protocol.shard_values import ApplyRequest as ApplyRequest
from ps_protocol.shard_values import Metric as Metric
from ps_protocol.shard_values import MetricCell as MetricCell
from ps_protocol.shard_values import PushHeader as PushHeader
from ps_protocol.shard_values import PushId as PushId
from ps_protocol.shard_values import PushReply as PushReply
from ps_protocol.shard_values import PushResult as PushResult
from ps_protocol.shard_values import RowsRequest as RowsRequest
from ps_protocol.shard_values import ShardSettings as ShardSettings
from ps_protocol.shard_values import ShardSpec as ShardSpec
from ps_protocol.shard_values import ShardStatus as ShardStatus
from ps_protocol.shard_values import SparsePart as SparsePart
from ps_protocol.shard_values import WorkerPushes as WorkerPushes
from ps_protocol.tensors import Array


class Shard(Protocol):
    """One parameter server. Every call may raise Unavailable, DeadlineExceeded or EpochMismatch.

    `timeout_s` bounds a call; None: the transport's default. All calls are idempotent, so a caller may repeat any that ended as
    Unavailable. Implementations are thread-safe.
    """

    def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", life: int = 0) -> Adoption:
        """Puts the shard under a chief, who listens at `chief_address`. Raises Superseded if a later one has it.

        `life`: of the cluster, see Participant; who pushes in another one is refused.
        """

    def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes) -> None:
        """Keeps a record for the chief's successor, unless the shard has such or a newer one. Raises Superseded."""

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Copies the values of a step, then writes them to storage in the background; asked again, waits for the end, `max_wait_s` at most.

        Idempotent per tag. Raises Superseded, StepMismatch, CheckpointStorageMissing.
        """

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Replaces whatever the shard has by a checkpoint's values, under the epoch of the request; asked again, waits for the end.

        Idempotent per epoch and tag. Raises Superseded, DataLoss, CheckpointNotFound, CheckpointMismatch, CheckpointStorageMissing.
        """

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values, all or nothing; False if they stood already.

        Raises VariableExists if others stand.
        """

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
        """Copies the variables of `step` (None: the latest) into the caller's memory and returns their step.

        If that is `held_step`, which the caller has there already, nothing is copied. Raises NotInitialized, StepGone, StepNotReady. After
        an error the contents of `into` are undefined.
        """

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """Says that the caller will read `step`, which need not be there yet: it may leave as soon as it is. A hint; never fails."""

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns the arena of a step where the shard has it, read-only; None if this transport copies: then `read_variables` does.

        It is overwritten as soon as the step after the next is being made. There are two such arrays, and they stay the same ones. Raises
        what `read_variables` raises.
        """

    def gradient_memory(self) -> Array | None:
        """Returns an arena to write the next gradients into, that `push_gradients` then need not copy; None if this transport copies.

        The same one until it has been pushed, and never one whose contribution may still be applied. It is not cleared. Raises
        TooManyPushes if there is none that is free, and no more can be had.
        """

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution, all or nothing. `gradients` may begin with what `gradient_memory` gave: then that is not copied."""

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works; waits for a step that is being applied. Raises Superseded."""

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sum of squares of the mean that `apply_step` would use, for each of `layout.slices` and `layout.tables`. No effect.

        Raises what `apply_step` raises.
        """

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Averages the contributions and lets the optimizer make the next step."""

    def read_rows(
        self,
        request: RowsRequest,
        indices: Array,
        into: Segments,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Copies rows of one table, or of one of its slots, into the caller's memory, and returns their step.

        `indices`: int64, counted from the slice's first row, any order, repetitions allowed. `into` has as many bytes as those rows.
        `meanwhile`, only where these are some, is called with the step while the shard counts the caller among the readers of that step.
        Raises IndexOutOfRange, SlotNotFound, NotInitialized, StepGone, StepNotReady. After an error the contents of `into` are undefined.
        """

    def read_metrics(self, *, epoch: int) -> Sequence[MetricCell]:
        """Returns what workers have reported, by name and worker."""

    def list_slots(self, *, epoch: int) -> Sequence[str]:
        """Returns the names of the optimizer's slots, sorted."""

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies one slot of all dense variables into the caller's memory and returns its step. Raises SlotNotFound.

        `averages.AVERAGE_SLOT` gives the moving averages; a variable that has none, or whose optimizer has no such slot, has zeros there.
        """

    def status(self) -> ShardStatus:
        """Reports step, memory and counters."""

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""

    def close(self) -> None:
        """Releases the caller's connection; the server goes on."""
