"""A shard over gRPC as workers and their chief have it together, and shards that stand before others. Asserts nothing."""

import queue
from typing import TYPE_CHECKING, Any

from ps_protocol.errors import PsError
from ps_protocol.roles.request import RPCS, Answer, Request
from ps_protocol.roles.shard import Shard
from ps_protocol.rpc.commands import Commands
from ps_protocol.rpc.shard import TENSOR_TIMEOUT_S, GrpcShard
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.serving.local import InProcessShard


class CommandedShard(GrpcShard):
    """Implements Shard over gRPC, for all requests: also for those that only a chief sends, on a stream."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self._commands = Commands(self.connection)

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer."""
        field = RPCS[type(request)].field
        if not field:
            return super().call(request, timeout_s=timeout_s)
        found: queue.SimpleQueue[pb.CommandResponse | PsError] = queue.SimpleQueue()
        self._commands.begin(request, found.put, timeout_s=TENSOR_TIMEOUT_S if timeout_s is None else timeout_s)
        answer = found.get()
        if isinstance(answer, PsError):
            raise answer
        return codec.decode_answer(request, getattr(answer, field))

    def close(self) -> None:
        """Closes the connection."""
        self._commands.close()
        super().close()


class _Forwarding:
    """Has every method as the shard that it stands before has it, but for those of its own. As thread-safe as that one."""

    def __init__(self, shard: Shard) -> None:
        self._forward = shard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


if TYPE_CHECKING:

    class ForwardingShard(InProcessShard):
        """The same to a type checker, which cannot see what `__getattr__` gives."""

        _forward: Shard

        def __init__(self, shard: Shard) -> None: ...

else:
    ForwardingShard = _Forwarding
