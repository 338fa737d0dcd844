"""Shards as workers and their chief have them together, over gRPC, and over one another. Asserts nothing."""

import asyncio
import atexit
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from chief.shards.link import GrpcShardLink
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    WholeShard,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.shard import CONTROL_TIMEOUT_S, TENSOR_TIMEOUT_S, GrpcShard
from ps_server.serving.local import InProcessShard

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


# To make an event loop and to close it takes as long as a call. Each loop is in one thread at a time.
_idle_loops: list[asyncio.AbstractEventLoop] = []


def _run(call: Coroutine[Any, Any, Result]) -> Result:
    try:
        loop = _idle_loops.pop()
    except IndexError:
        loop = asyncio.new_event_loop()
        atexit.register(loop.close)
    try:
        return loop.run_until_complete(call)
    finally:
        _idle_loops.append(loop)


class _Forwarding:
    """Has every method as the shard that it stands before has it, but for those of its own. As thread-safe as that one."""

    def __init__(self, shard: WholeShard) -> None:
        self._forward = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


if TYPE_CHECKING:

    class ForwardingShard(InProcessShard):
        """The same to a type checker, which cannot see what `__getattr__` gives."""

        _forward: WholeShard

        def __init__(self, shard: WholeShard) -> None: ...

else:
    ForwardingShard = _Forwarding
