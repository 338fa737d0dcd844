"""A parameter server behind gRPC: the `Shard` of another process. Knows its methods and messages; no retries, no memory of its own."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from google.protobuf.message import Message

from ps_protocol import codec_shard as codec
from ps_protocol import codec_shard_status
from ps_protocol.access import DEFAULT_ACCESS, Access
from ps_protocol.allocator import keep_freed_memory
from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.call_errors import decode_call_error
from ps_protocol.codec import decode_message
from ps_protocol.codec_reading import VariablesRequest, encode_read_request
from ps_protocol.connection import Connection
from ps_protocol.encodings import FloatEncoding
from ps_protocol.encodings_frames import decoding_writer
from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.framing import FrameWriter, encode_stream
from ps_protocol.handshake import HandshakeReply, Role, name_of
from ps_protocol.handshake_client import handshake
from ps_protocol.layout import Layout
from ps_protocol.receiving import Downward, kept_open, receive_into, step_of
from ps_protocol.segments import Segments
from ps_protocol.shard import (
    MetricCell,
    PushHeader,
    PushReply,
    RowsRequest,
    ShardSpec,
)
from ps_protocol.shard_chief_calls import CONTROL_TIMEOUT_S, TENSOR_TIMEOUT_S, ChiefCalls
from ps_protocol.standing_stream import StandingStream
from ps_protocol.tensors import Array
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.variables_stream import VariablesStream

SERVICE = "ps_protocol.v1.ParameterService"
# From here on the page faults of message buffers are what a transfer costs; see `keep_freed_memory`.
LARGE_BYTES = 1 << 20


class GrpcShard(ChiefCalls):
    """The parameter server at `address`. Implements Shard: thread-safe, one attempt a call, nothing is sent before the first call.

    The chief's standing stream, CommandShard, is not here: it belongs to an event loop (`chief/shard_stream.py`).
    `index` and `cluster` are what `handshake` insists on; None and "" accept any. `variables_encoding`: see `know_layout`.
    What is called with every step goes over standing streams, or by calls of its own if the server has none, or another thread uses them.
    """

    def __init__(
        self,
        address: str,
        *,
        index: int | None = None,
        cluster: str = "",
        variables_encoding: FloatEncoding = FloatEncoding.AS_IS,
        access: Access = DEFAULT_ACCESS,
    ) -> None:
        self.address = address
        self._index, self._cluster = index, cluster
        super().__init__(Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access))
        self._deadlines = CallDeadlines()
        self._pushes = StandingStream(self._connection, "StreamPushes", deadlines=self._deadlines)
        self._reads = StandingStream(self._connection, "StreamVariables", deadlines=self._deadlines)
        self._variables = VariablesStream(self._reads, source=self._connection.target)
        self._variables_encoding = variables_encoding
        self._layouts: dict[str, Layout] = {}
        self._is_prepared = False

    @property
    def connection(self) -> Connection:
        """The channel that all calls take."""
        return self._connection

    def handshake(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HandshakeReply:
        """Returns who is there; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""
        return handshake(
            self._connection.channel,
            address=self.address,
            role=Role.PARAMETER_SERVER,
            index=self._index,
            cluster=self._cluster,
            timeout_s=timeout_s,
            access=self._connection.access,
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
        """Receives the variables of a step (StreamVariables, else ReadVariables) into the caller's memory; returns their step."""
        self._prepare(into.nbytes)
        request = self._variables_request(epoch=epoch, step=step, layout_hash=layout_hash, held_step=held_step)
        awaited = "the variables" if step is None else f"the variables of step {step}"
        limit_s = _limit(timeout_s)
        found = self._variables.read(request, self._variables_writer(request, into), timeout_s=limit_s, awaited=awaited)
        if found is not None:
            return found

        def receive(messages: Iterator[bytes]) -> int:
            writer = self._variables_writer(request, into)
            return receive_into(messages, pb.ReadVariablesResponse, writer, source=self._connection.target, held_step=held_step)

        return self._connection.stream_down("ReadVariables", encode_read_request(request), receive, timeout_s=limit_s, awaited=awaited)

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """Asks for a step on the standing stream, which then leaves as soon as it is there."""
        request = self._variables_request(epoch=epoch, step=step, layout_hash=layout_hash)
        with contextlib.suppress(PsError):  # what is wrong will be wrong when it is read, too
            self._variables.expect(request, timeout_s=CONTROL_TIMEOUT_S)

    def know_layout(self, layout: Layout) -> None:
        """Lets variables of this layout travel in the encoding that this client was made with; before, and others, travel as they are."""
        if self._variables_encoding is not FloatEncoding.AS_IS:
            self._layouts[layout.hash] = layout

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """Returns None: this transport copies."""
        return None

    def gradient_memory(self) -> Array | None:
        """Returns None: this transport copies."""
        return None

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Sends one contribution (StreamPushes, else PushGradients); if it is dropped as stale, the answer may come before all is sent."""
        self._prepare(gradients.nbytes)
        message, limit_s, awaited = codec.encode_push_header(header), _limit(timeout_s), f"the receipt of gradients for step {header.step}"

        message.content_bytes = gradients.nbytes

        def exchange(standing: StandingStream) -> pb.StreamPushesResponse:
            sent = encode_stream(pb.StreamPushesRequest(header=message), gradients)
            answer = decode_message(pb.StreamPushesResponse, standing.stream.exchange(sent))
            if answer.push_id != message.push_id:
                raise MalformedMessage(f"{self._connection.target}: an answer to push {answer.push_id}, not to {header.push_id}")
            return answer

        answer = self._pushes.use(exchange, timeout_s=limit_s, awaited=awaited)
        if answer is None:
            sent = encode_stream(pb.PushGradientsRequest(header=message), gradients)
            reply = self._connection.stream_up("PushGradients", sent, pb.PushGradientsResponse, timeout_s=limit_s, awaited=awaited)
            return codec.decode_push_reply(reply)
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        return codec.decode_push_reply(answer.reply)

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
                meanwhile(step_of(first, pb.ReadRowsResponse, source=self._connection.target))
                is_over.set()
                messages = itertools.chain([first], messages)
            return receive_into(messages, pb.ReadRowsResponse, into.writer(), source=self._connection.target)

        try:
            return self._connection.stream_both(
                "ReadRows",
                sent if meanwhile is None else kept_open(sent, until=is_over),
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

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. The server goes on. Idempotent."""
        self._pushes.close()
        self._reads.close()
        self._deadlines.close()
        self._connection.close()

    def _variables_request(self, *, epoch: int, step: int | None, layout_hash: str, held_step: int | None = None) -> VariablesRequest:
        encoding = self._variables_encoding if layout_hash in self._layouts else FloatEncoding.AS_IS
        return VariablesRequest(epoch=epoch, step=step, layout_hash=layout_hash, encoding=encoding, held_step=held_step)

    def _variables_writer(self, request: VariablesRequest, into: Segments) -> FrameWriter:
        if request.encoding is FloatEncoding.AS_IS:
            return into.writer()
        return decoding_writer(self._layouts[request.layout_hash], request.encoding, into)

    def _prepare(self, num_bytes: int) -> None:
        if num_bytes >= LARGE_BYTES and not self._is_prepared:
            keep_freed_memory()
            self._is_prepared = True

    def _read(self, method: str, request: Message, message_type: type[Downward], into: Segments, *, timeout_s: float, awaited: str) -> int:
        def receive(messages: Iterator[bytes]) -> int:
            return receive_into(messages, message_type, into.writer(), source=self._connection.target)

        return self._connection.stream_down(method, request, receive, timeout_s=timeout_s, awaited=awaited)


def _limit(timeout_s: float | None) -> float:
    return TENSOR_TIMEOUT_S if timeout_s is None else timeout_s
