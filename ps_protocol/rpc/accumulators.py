"""The named accumulators of another process behind gRPC. Knows methods and messages; no retries, one attempt a call."""

from collections.abc import Iterator

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.accumulators import (
    AccumulatorStatus,
    AccumulatorStatusRequest,
    CreateAccumulatorRequest,
    GradientHeader,
    GradientReply,
    Taken,
    TakeRequest,
    arrays_of,
    content_of,
)
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, understanding
from ps_protocol.v1 import accumulator_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.frames import encode_stream, parse, write_frames

SERVICE = "ps_protocol.v1.AccumulatorService"
# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the gradient.
TENSOR_TIMEOUT_S = 120.0


class GrpcAccumulators:
    """The accumulators of the parameter server at `address`. Implements Accumulators; nothing is sent before the first call.

    `index` and `cluster` are what `handshake` insists on; None and "" accept any.
    """

    def __init__(self, address: str, *, index: int | None = None, cluster: str = "", access: Access = DEFAULT_ACCESS) -> None:
        self.address = address
        self._index, self._cluster = index, cluster
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)
        # Element types as they were when this process created or found the accumulators.
        self._data_types: dict[str, DataType] = {}

    def handshake(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HandshakeReply:
        """Returns the server's identity; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this parameter server."""
        return self._connection.handshake(Role.PARAMETER_SERVER, index=self._index, cluster=self._cluster, timeout_s=timeout_s)

    def call(self, request: Request[Answer]) -> Answer:
        """Asks, and returns the answer."""
        found = self._connection.call(request, timeout_s=CONTROL_TIMEOUT_S)
        for one in (request, found):
            if isinstance(one, CreateAccumulatorRequest | AccumulatorStatus):
                self._data_types[one.spec.name] = one.spec.data_type
        return found

    def apply_gradient(self, header: GradientHeader, values: Array, indices: Array | None = None) -> GradientReply:
        """Sends a gradient; a server that drops it as stale may answer before all of it is sent."""
        first = pb.ApplyGradientRequest(header=codec.encode(header))
        answer = self._connection.stream_up(
            "ApplyGradient",
            encode_stream(first, content_of(values, indices)),
            pb.ApplyGradientResponse,
            timeout_s=TENSOR_TIMEOUT_S,
            awaited=f"the receipt of a gradient by accumulator {header.name!r}",
        )
        with understanding(self._connection.target):
            return codec.decode(GradientReply, answer)

    def take_gradient(self, request: TakeRequest) -> Taken:
        """Waits for gradients and takes them."""
        data_type = self._data_types.get(request.name) or self.call(AccumulatorStatusRequest(name=request.name)).spec.data_type

        def receive(messages: Iterator[bytes]) -> Taken:
            return _receive(messages, data_type)

        return self._connection.stream_down(
            "TakeGradient",
            codec.encode(request),
            receive,
            timeout_s=min(request.max_wait_s, MAX_WAIT_SLICE_S) + TENSOR_TIMEOUT_S,
            awaited=f"{request.num_required} gradients of accumulator {request.name!r}",
        )

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. The server continues. Idempotent."""
        self._connection.close()


def _receive(messages: Iterator[bytes], data_type: DataType) -> Taken:
    first, frame = parse(next(messages, b""), pb.TakeGradientResponse)
    if first is None:
        raise MalformedMessage("its stream does not begin with what was taken")
    header = first.header
    if not header.is_ready:
        return Taken(count=header.count, step=header.step)
    # The same check of sizes as a server's, before anything is allocated.
    shape, dense_shape = tuple(header.shape), tuple(header.dense_shape)
    probe = GradientHeader(name="taken", client=1, sequence=1, local_step=0, shape=shape, num_indices=header.num_indices)
    content = aligned_bytes(probe.num_bytes(data_type))
    write_frames(frame, messages, pb.TakeGradientResponse, Segments([content]).writer())
    values, indices = arrays_of(content, data_type=data_type, shape=shape, num_indices=header.num_indices)
    if not dense_shape:
        return Taken(count=header.count, step=header.step, values=values)
    return Taken(count=header.count, step=header.step, values=values, indices=indices, dense_shape=dense_shape)
