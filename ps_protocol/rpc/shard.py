"""A parameter server behind gRPC: the `Shard` of another process. Knows its methods and messages; no retries, no memory of its own."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from ps_protocol.encodings.arena import decoding_writer
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import MalformedMessage, PsError, StepNotReady
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.allocator import keep_freed_memory
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.shard import (
    MAX_WAIT_SLICE_S,
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
    VariablesRequest,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, handshake
from ps_protocol.rpc.client_stream import StandingStream, Stream
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message, encode_standing_request
from ps_protocol.wire.frames import Frame, FrameWriter, encode_stream, parse, write_frames

# Streams from a shard that begin with a step, into memory.


Downward = TypeVar("Downward", pb.ReadVariablesResponse, pb.ReadSlotResponse, pb.ReadRowsResponse)


def kept_open(messages: Iterable[bytes], *, until: threading.Event) -> Iterator[bytes]:
    """The messages, and then an empty one, behind which the stream does not end before it may."""
    yield from messages
    yield b""
    until.wait()


def step_of(message: bytes, message_type: type[Downward], *, source: str) -> int:
    """Returns the step that the first message of a stream names; raises MalformedMessage."""
    header, _ = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    return header.step


def receive_into(
    messages: Iterator[bytes], message_type: type[Downward], writer: FrameWriter, *, source: str, held_step: int | None = None
) -> int:
    """Writes the frames of a stream and returns its step; that of `held_step` may have none. Raises MalformedMessage, TruncatedStream."""
    header, frame = parse(next(messages, b""), message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    if frame is not None:
        writer.write(frame.offset, frame.data)
    write_frames(messages, message_type, writer)
    if writer.num_written or header.step != held_step:
        writer.finish()
    return header.step


# Variables read over a standing stream, also before they are there.


class VariablesStream:
    """One request at a time. At most one step is expected; a read of anything else breaks the stream, since its answer may be large."""

    def __init__(self, standing: StandingStream, *, source: str) -> None:
        self._standing = standing
        self._source = source
        # What was asked for before it was there, and on which stream.
        self._expected: tuple[VariablesRequest, Stream] | None = None

    def expect(self, request: VariablesRequest, *, timeout_s: float) -> None:
        """Asks for a step that need not be there yet, and does not wait for it. Raises what `StandingStream.use` raises."""

        def ask(standing: StandingStream) -> bool:
            if self._taken_up(standing, request) is None:
                standing.stream.send(encode_standing_request(request, max_wait_s=MAX_WAIT_SLICE_S))
            self._expected = request, standing.stream
            return True

        self._standing.use(ask, timeout_s=timeout_s, awaited="nothing")

    def read(self, request: VariablesRequest, writer: FrameWriter, *, timeout_s: float, awaited: str) -> int | None:
        """Fills the writer's memory and returns the step; None if that cannot be done over a standing stream now.

        Raises the errors of ReadVariables and what `StandingStream.use` raises.
        """

        def receive(standing: StandingStream) -> int | PsError:
            expected = self._taken_up(standing, dataclasses.replace(request, held_step=None))
            if expected is not None:
                found = self._answer(standing.stream, request, writer)
                if not isinstance(found, StepNotReady):
                    return found
                # It was waited for in vain; but now it may be there.
            standing.stream.send(encode_standing_request(request))
            return self._answer(standing.stream, request, writer)

        found = self._standing.use(receive, timeout_s=timeout_s, awaited=awaited)
        if isinstance(found, PsError):
            raise found
        return found

    def _taken_up(self, standing: StandingStream, request: VariablesRequest) -> VariablesRequest | None:
        """Returns the request if it is under way already. If another one is, the stream is broken off."""
        expected, self._expected = self._expected, None
        if expected is None or expected[1] is not standing.stream:
            return None
        if expected[0] == request:
            return request
        standing.break_off()
        return None

    def _answer(self, stream: Stream, request: VariablesRequest, writer: FrameWriter) -> int | PsError:
        header, frame = self._parse(stream.receive())
        if header is None:
            raise MalformedMessage(f"{self._source}: an answer does not begin with a header")
        if header.HasField("error"):
            return decode_call_error(header.error)
        if header.step == request.held_step and not header.num_bytes:
            return header.step
        while True:
            if frame is not None:
                writer.write(frame.offset, frame.data)
            if writer.num_written >= header.num_bytes:
                break
            again, frame = self._parse(stream.receive())
            if again is not None:
                if again.HasField("error"):
                    return decode_call_error(again.error)
                raise MalformedMessage(f"{self._source}: a header came again in the middle of an answer")
        writer.finish()
        return header.step

    def _parse(self, message: bytes) -> tuple[pb.VariablesHeader | None, Frame | None]:
        header, frame = parse(message, pb.StreamVariablesResponse)
        return (None if header is None else header.header), frame


SERVICE = "ps_protocol.v1.ParameterService"
# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the model. A server that is gone is noticed by keepalive long before.
TENSOR_TIMEOUT_S = 120.0
# From here on the page faults of message buffers are what a transfer costs; see `keep_freed_memory`.
LARGE_BYTES = 1 << 20


class GrpcShard:
    """The parameter server at `address`. Implements Shard: thread-safe, one attempt a call, nothing is sent before the first call.

    The chief's standing stream, CommandShard, is not here: it belongs to an event loop (`chief/shards/link.py`).
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
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)
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

    def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", life: int = 0) -> Adoption:
        """Puts the shard under a chief (AdoptShard)."""
        request = pb.AdoptShardRequest(epoch=epoch, chief_incarnation=chief_incarnation, chief_address=chief_address, life=life)
        return codec.decode(
            Adoption,
            self._connection.unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its adoption"),
        )

    def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes) -> None:
        """Has a record kept for the chief's successor (KeepRecord)."""
        request = pb.KeepRecordRequest(epoch=epoch, chief_incarnation=chief_incarnation, version=version, record=record)
        self._connection.unary("KeepRecord", request, pb.KeepRecordResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its record to be kept")

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Has a step saved, or asks how far that is (SaveShard)."""
        message = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s))
        awaited, timeout_s = f"step {request.step} to be saved", TENSOR_TIMEOUT_S + max_wait_s
        return codec.decode(
            SaveProgress, self._connection.unary("SaveShard", message, pb.SaveShardResponse, timeout_s=timeout_s, awaited=awaited)
        )

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Has the shard brought back to a checkpoint, or asks how far that is (RestoreShard)."""
        message = codec.encode_with(request, max_wait=codec.some_wait(max_wait_s))
        awaited, timeout_s = f"checkpoint {request.tag} to be restored", CONTROL_TIMEOUT_S + max_wait_s
        return codec.decode(
            RestoreProgress, self._connection.unary("RestoreShard", message, pb.RestoreShardResponse, timeout_s=timeout_s, awaited=awaited)
        )

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        message = codec.encode(settings)
        self._connection.unary("ConfigureShard", message, pb.ConfigureShardResponse, timeout_s=TENSOR_TIMEOUT_S, awaited="its new settings")

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's mean."""
        message = pb.PrepareStepRequest(apply=codec.encode(request))
        awaited = f"the norms of step {request.step}"
        answer = self._connection.unary("PrepareStep", message, pb.PrepareStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=awaited)
        return tuple(answer.sums)

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        message = codec.encode(request)
        return codec.decode(
            ApplyReply,
            self._connection.unary(
                "ApplyStep", message, pb.ApplyStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=f"step {request.step} to be applied"
            ),
        )

    def status(self) -> ShardStatus:
        """Returns step, memory and counters."""
        return codec.decode(
            ShardStatus,
            self._connection.unary(
                "GetShardStatus", pb.GetShardStatusRequest(), pb.GetShardStatusResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its status"
            ),
        )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(epoch=epoch, reason=reason)
        self._connection.unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its end")

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Sends all variables with their initial values; False if they stood already."""
        header = pb.CreateVariablesRequest(spec=codec.encode(spec))
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

        return self._connection.stream_down("ReadVariables", codec.encode(request), receive, timeout_s=limit_s, awaited=awaited)

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
        message, limit_s, awaited = codec.encode(header), _limit(timeout_s), f"the receipt of gradients for step {header.step}"

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
            return codec.decode(PushReply, reply)
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        return codec.decode(PushReply, answer.reply)

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
        header = pb.ReadRowsRequest(header=codec.encode_with(request, num_rows=wanted.size))

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
        return codec.decode_each(
            MetricCell,
            self._connection.unary(
                "ReadMetrics", request, pb.ReadMetricsResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="the metrics"
            ).cells,
            field="cells",
        )

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
