"""Shards as workers and their chief have them together, over gRPC, and over one another. Asserts nothing."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from chief.shards.link import GrpcShardLink
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    MetricCell,
    PushHeader,
    PushReply,
    RestoreProgress,
    RestoreRequest,
    RowsRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardSpec,
    ShardStatus,
    WholeShard,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.shard import CONTROL_TIMEOUT_S, TENSOR_TIMEOUT_S, GrpcShard

Result = TypeVar("Result")


class WholeGrpcShard(GrpcShard):
    """Implements WholeShard over gRPC: a worker's client and a chief's link. Not to be called in an event loop."""

    def __init__(
        self, address: str, *, index: int | None = None, cluster: str = "", access: Access = DEFAULT_ACCESS, **options: Any
    ) -> None:
        super().__init__(address, index=index, cluster=cluster, access=access, **options)
        self._link = GrpcShardLink(address, index=index or 0, cluster=cluster, access=access)

    def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = ()) -> Adoption:
        """Puts the shard under a chief."""
        return _run(self._link.adopt(fence, chief_address=chief_address, session_keys=session_keys, timeout_s=CONTROL_TIMEOUT_S))

    def keep_record(self, fence: Fence, *, version: int, record: bytes) -> None:
        """Has a record kept for the chief's successor."""
        _run(self._link.keep_record(fence, version=version, record=record, timeout_s=CONTROL_TIMEOUT_S))

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Has a step saved, or asks how far that is."""
        return _run(self._link.save(request, max_wait_s=max_wait_s, timeout_s=TENSOR_TIMEOUT_S + max_wait_s))

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Has the shard brought back to a checkpoint, or asks how far that is."""
        return _run(self._link.restore(request, max_wait_s=max_wait_s, timeout_s=CONTROL_TIMEOUT_S + max_wait_s))

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        _run(self._link.configure(settings, timeout_s=TENSOR_TIMEOUT_S))

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's mean."""
        return _run(self._link.prepare_step(request, timeout_s=TENSOR_TIMEOUT_S))

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        return _run(self._link.apply_step(request, timeout_s=TENSOR_TIMEOUT_S))

    def shutdown(self, fence: Fence, *, reason: str) -> None:
        """Ends the server."""
        _run(self._link.shutdown(fence, reason=reason, timeout_s=CONTROL_TIMEOUT_S))

    def close(self) -> None:
        """Closes the connections."""
        _run(self._link.close())
        super().close()


def _run(call: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(call)


class ForwardingShard:
    """Implements WholeShard over another one; every method is as that one has it. As thread-safe as it."""

    def __init__(self, shard: WholeShard) -> None:
        self._forward = shard

    def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = ()) -> Adoption:
        """Puts the shard under a chief."""
        return self._forward.adopt(fence, chief_address=chief_address, session_keys=session_keys)

    def keep_record(self, fence: Fence, *, version: int, record: bytes) -> None:
        """Keeps a record for the chief's successor."""
        self._forward.keep_record(fence, version=version, record=record)

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Has a step saved."""
        return self._forward.save(request, max_wait_s=max_wait_s)

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Has the shard brought back to a checkpoint."""
        return self._forward.restore(request, max_wait_s=max_wait_s)

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables with their initial values; False if they stood already."""
        return self._forward.create_variables(spec, values, timeout_s=timeout_s)

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
        return self._forward.read_variables(into, epoch=epoch, step=step, layout_hash=layout_hash, held_step=held_step, timeout_s=timeout_s)

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """Says that the variables of a step will be read."""
        self._forward.expect_variables(epoch=epoch, step=step, layout_hash=layout_hash)

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns the shard's own memory of a step, if there is a way to it."""
        return self._forward.variables_view(epoch=epoch, step=step, layout_hash=layout_hash)

    def gradient_memory(self) -> Array | None:
        """Returns memory of the shard to write gradients into, if there is a way to it."""
        return self._forward.gradient_memory()

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution."""
        return self._forward.push_gradients(header, gradients, timeout_s=timeout_s)

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        self._forward.configure(settings)

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's means."""
        return self._forward.prepare_step(request)

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        return self._forward.apply_step(request)

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
        return self._forward.read_rows(request, indices, into, timeout_s=timeout_s, meanwhile=meanwhile)

    def read_metrics(self, *, epoch: int) -> Sequence[MetricCell]:
        """Returns what workers have reported."""
        return self._forward.read_metrics(epoch=epoch)

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Copies one slot of all variables into the caller's memory; returns its step."""
        return self._forward.read_slot(name, into, epoch=epoch, layout_hash=layout_hash, timeout_s=timeout_s)

    def status(self) -> ShardStatus:
        """Returns step, memory and counters."""
        return self._forward.status()

    def shutdown(self, fence: Fence, *, reason: str) -> None:
        """Ends the server."""
        self._forward.shutdown(fence, reason=reason)

    def close(self) -> None:
        """Releases the connection."""
        self._forward.close()
