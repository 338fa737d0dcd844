"""A parameter server behind gRPC: the `Shard` of another process. Knows its methods and messages; no retries, no memory of its own."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from ps_protocol import codec_shard as codec
from ps_protocol import codec_shard_status
from ps_protocol.connection import Connection
from ps_protocol.errors import MalformedMessage
from ps_protocol.framing import encode_stream, parse, write_frames
from ps_protocol.handshake import HandshakeReply, Role, name_of
from ps_protocol.handshake_client import handshake
from ps_protocol.segments import Segments
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    MetricCell,
    PushHeader,
    PushReply,
    RowsRequest,
    ShardSettings,
    ShardSpec,
    ShardStatus,
)
from ps_protocol.tensors import Array
from ps_protocol.v1 import parameter_service_pb2 as pb

Downward = TypeVar("Downward", pb.ReadVariablesResponse, pb.ReadSlotResponse, pb.ReadRowsResponse)

SERVICE = "ps_protocol.v1.ParameterService"
# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the model. A server that is gone is noticed by keepalive long before.
TENSOR_TIMEOUT_S = 120.0


class GrpcShard:
    """The parameter server at `address`. Implements Shard: thread-safe, one attempt a call, nothing is sent before the first call.

    `index` and `cluster` are what `handshake` insists on; None and "" accept any.
    """

    def __init__(self, address: str, *, index: int | None = None, cluster: str = "") -> None:
        self.address = address
        self._index, self._cluster = index, cluster
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE)

    def handshake(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HandshakeReply:
        """Returns who is there; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""
        return handshake(
            self._connection.channel,
            address=self.address,
            role=Role.PARAMETER_SERVER,
            index=self._index,
            cluster=self._cluster,
            timeout_s=timeout_s,
        )

    def adopt(self, *, epoch: int, chief_incarnation: int) -> Adoption:
        """Puts the shard under a chief."""
        request = pb.AdoptShardRequest(epoch=epoch, chief_incarnation=chief_incarnation)
        return codec.decode_adoption(
            self._connection.unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its adoption")
        )

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Sends all variables with their initial values; False if they stood already."""
        header = pb.CreateVariablesRequest(spec=codec.encode_shard_spec(spec))
        answer = self._connection.stream_up(
            "CreateVariables",
            encode_stream(header, values),
            pb.CreateVariablesResponse,
            timeout_s=_limit(timeout_s),
            awaited=f"the creation of {len(spec.layout.slices)} variables",
        )
        return answer.created

    def read_variables(self, into: Segments, *, epoch: int, step: int | None, layout_hash: str, timeout_s: float | None = None) -> int:
        """Receives the variables of a step into the caller's memory, frame by frame; returns their step."""
        request = pb.ReadVariablesRequest(epoch=epoch, step=step, layout_hash=layout_hash)
        wanted = "the variables" if step is None else f"the variables of step {step}"
        return self._read("ReadVariables", request, pb.ReadVariablesResponse, into, timeout_s=_limit(timeout_s), awaited=wanted)

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Sends one contribution; a server that drops it as stale may answer before all of it is sent."""
        first = pb.PushGradientsRequest(header=codec.encode_push_header(header))
        answer = self._connection.stream_up(
            "PushGradients",
            encode_stream(first, gradients),
            pb.PushGradientsResponse,
            timeout_s=_limit(timeout_s),
            awaited=f"the receipt of gradients for step {header.step}",
        )
        return codec.decode_push_reply(answer)

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        message = codec.encode_settings(settings)
        self._connection.unary("ConfigureShard", message, pb.ConfigureShardResponse, timeout_s=TENSOR_TIMEOUT_S, awaited="its new settings")

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's mean."""
        message = pb.PrepareStepRequest(apply=codec.encode_apply_request(request))
        awaited = f"the norms of step {request.step}"
        answer = self._connection.unary("PrepareStep", message, pb.PrepareStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=awaited)
        return tuple(answer.sums)

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        message = codec.encode_apply_request(request)
        return codec.decode_apply_reply(
            self._connection.unary(
                "ApplyStep", message, pb.ApplyStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=f"step {request.step} to be applied"
            )
        )

    def read_rows(
        self,
        request: RowsRequest,
        indices: Array,
        into: Segments,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Receives rows of a table into the caller's memory while their indices are sent; returns their step."""
        wanted = np.ascontiguousarray(indices, np.dtype("<i8"))
        header = pb.ReadRowsRequest(header=codec.encode_rows_request(request, num_rows=wanted.size))

        sent, is_over = encode_stream(header, Segments([wanted.reshape(-1).view(np.uint8)])), threading.Event()

        def receive(messages: Iterator[bytes]) -> int:
            if meanwhile is not None:
                first = next(messages, b"")
                meanwhile(_step(first, pb.ReadRowsResponse, source=self._connection.target))
                is_over.set()
                messages = itertools.chain([first], messages)
            return _receive(messages, pb.ReadRowsResponse, into, source=self._connection.target)

        try:
            return self._connection.stream_both(
                "ReadRows",
                sent if meanwhile is None else _kept_open(sent, until=is_over),
                receive,
                timeout_s=_limit(timeout_s),
                awaited=f"{wanted.size} rows of table {request.table}",
            )
        finally:
            is_over.set()

    def read_metrics(self, *, epoch: int) -> Sequence[MetricCell]:
        """Returns what workers have reported, by name and worker."""
        request = pb.ReadMetricsRequest(epoch=epoch)
        return codec_shard_status.decode_metric_cells(
            self._connection.unary("ReadMetrics", request, pb.ReadMetricsResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="the metrics")
        )

    def list_slots(self, *, epoch: int) -> Sequence[str]:
        """Returns the names of the optimizer's slots, sorted."""
        request = pb.ListSlotsRequest(epoch=epoch)
        answer = self._connection.unary(
            "ListSlots", request, pb.ListSlotsResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="the names of slots"
        )
        return tuple(answer.names)

    def read_slot(self, name: str, into: Segments, *, epoch: int, layout_hash: str, timeout_s: float | None = None) -> int:
        """Receives one slot of all variables into the caller's memory; returns its step."""
        request = pb.ReadSlotRequest(epoch=epoch, name=name, layout_hash=layout_hash)
        return self._read("ReadSlot", request, pb.ReadSlotResponse, into, timeout_s=_limit(timeout_s), awaited=f"slot {name!r}")

    def status(self) -> ShardStatus:
        """Returns step, memory and counters."""
        return codec_shard_status.decode_shard_status(
            self._connection.unary(
                "GetShardStatus", pb.GetShardStatusRequest(), pb.GetShardStatusResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its status"
            )
        )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(epoch=epoch, reason=reason)
        self._connection.unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its end")

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. The server goes on. Idempotent."""
        self._connection.close()

    def _read(self, method: str, request: Message, message_type: type[Downward], into: Segments, *, timeout_s: float, awaited: str) -> int:
        def receive(messages: Iterator[bytes]) -> int:
            return _receive(messages, message_type, into, source=self._connection.target)

        return self._connection.stream_down(method, request, receive, timeout_s=timeout_s, awaited=awaited)


def _kept_open(messages: Iterable[bytes], *, until: threading.Event) -> Iterator[bytes]:
    """The messages, and then an empty one, behind which the stream does not end before it may."""
    yield from messages
    yield b""
    until.wait()


def _step(message: bytes, message_type: type[Downward], *, source: str) -> int:
    header, _ = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    return header.step


def _receive(messages: Iterator[bytes], message_type: type[Downward], into: Segments, *, source: str) -> int:
    writer = into.writer()
    header, frame = parse(next(messages, b""), message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    if frame is not None:
        writer.write(frame.offset, frame.data)
    write_frames(messages, message_type, writer)
    writer.finish()
    return header.step


def _limit(timeout_s: float | None) -> float:
    return TENSOR_TIMEOUT_S if timeout_s is None else timeout_s
