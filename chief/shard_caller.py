"""The way to a parameter server that a step takes when all is well: one attempt, in the calling thread. Repeats nothing."""

import itertools
from typing import Protocol, runtime_checkable

from ps_protocol import codec_shard as codec
from ps_protocol.access import DEFAULT_ACCESS, Access
from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.call_errors import decode_call_error
from ps_protocol.codec import decode_message
from ps_protocol.connection import Connection
from ps_protocol.errors import Unavailable, Unimplemented
from ps_protocol.shard import ApplyRequest
from ps_protocol.standing_stream import StandingStream
from ps_protocol.v1 import parameter_service_pb2 as pb

_SERVICE: str = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name
# Short: whoever insists asks again, says what is wrong, and waits as long as a step may take.
_TIMEOUT_S = 1.0


class ShardCaller(Protocol):
    """Has steps applied by one shard. For one thread at a time, but for `close`."""

    @property
    def is_quick(self) -> bool:
        """Whether a step would now be applied in a moment, without waiting for anybody: then any thread may do it."""

    def apply_step(self, request: ApplyRequest) -> None:
        """Blocks until the step is applied, about 1 s at most. Raises PsError; the step may be applied all the same."""

    def close(self) -> None:
        """Breaks the call under way. Idempotent, never waits; may be called by any thread."""


@runtime_checkable
class DirectLink(Protocol):
    """A link that has such a way, too."""

    def open_caller(self) -> ShardCaller:
        """Returns the way; whoever opens it closes it."""


class GrpcShardCaller:
    """Implements ShardCaller over a standing stream of its own."""

    def __init__(self, address: str, *, name: str, access: Access = DEFAULT_ACCESS) -> None:
        self._connection = Connection(address, name=name, service=_SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._stream = StandingStream(self._connection, "CommandShard", deadlines=self._deadlines)
        self._numbers = itertools.count(1)

    @property
    def is_quick(self) -> bool:
        """False: it is another process."""
        return False

    def apply_step(self, request: ApplyRequest) -> None:
        """Blocks until the step is applied."""
        number = next(self._numbers)
        data = pb.CommandShardRequest(call=number, apply=codec.encode_apply_request(request)).SerializeToString()

        def exchange(standing: StandingStream) -> pb.CommandShardResponse:
            stream = standing.stream
            stream.send(data)
            return decode_message(pb.CommandShardResponse, stream.receive())

        answer = self._stream.use(exchange, timeout_s=_TIMEOUT_S, awaited=f"step {request.step} to be applied")
        if answer is None:
            raise Unimplemented(f"{self._connection.target}: it has no stream of commands")
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        if answer.call != number:
            self._stream.cancel()
            raise Unavailable(f"{self._connection.target}: it answers command {answer.call}, not {number}")

    def close(self) -> None:
        """Breaks the call under way."""
        self._stream.close()
        self._deadlines.close()
        self._connection.close()
