"""A parameter server behind gRPC, as workers have it: the `Shard` of another process. Knows methods and messages; no retries.

`Pushes` and `Reads` carry contributions and variables, and go on where one broke off, if their caller gives the same object again. The
receiver knows what has come: a sender asks the server how much that is, and a reader says from which byte on it wants the rest.
"""

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import numpy as np

from ps_protocol.encodings.arena import decoding_writer
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.moves import MovingWriter
from ps_protocol.errors import MalformedMessage, PsError, StepNotReady, Unavailable
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.memory import keep_freed_memory
from ps_protocol.process.waiting import CallDeadlines, Progress
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import (
    LEAST_RESUMED_BYTES,
    MAX_STEP,
    MAX_WAIT_SLICE_S,
    PushHeader,
    PushReply,
    ReadRequest,
    RowsRequest,
    ShardSpec,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, not_understood
from ps_protocol.rpc.client_stream import LongLivedStream, Streams
from ps_protocol.rpc.memory import SharedMemory, share_memory
from ps_protocol.rpc.payloads import Payloads, next_payload
from ps_protocol.sockets.data_socket import DataSocket, Receive
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message, pack_read_request
from ps_protocol.wire.frames import FRAME_BYTES, Frame, FrameWriter, encode_frame, encode_stream, from_offset, parse, write_frames

# The streams of rows, which begin with a step.


def kept_open(messages: Iterable[bytes], *, until: threading.Event) -> Iterator[bytes]:
    """The messages, and then an empty one, behind which the stream does not end before it may."""
    yield from messages
    yield b""
    until.wait()


def step_of(message: bytes) -> int:
    """Returns the step that the first message of a stream names; raises MalformedMessage."""
    header, _ = parse(message, pb.ReadRowsResponse)
    if header is None:
        raise MalformedMessage("its stream does not begin with a step")
    return header.step


def receive_into(messages: Iterator[bytes], writer: FrameWriter, *, wanted: int | None) -> int:
    """Writes the frames of a stream and returns its step. Raises MalformedMessage, also if that is not the step that was wanted;
    TruncatedStream.
    """
    header, frame = parse(next(messages, b""), pb.ReadRowsResponse)
    if header is None:
        raise MalformedMessage("its stream does not begin with a step")
    check_step(header.step, wanted)
    write_frames(frame, messages, pb.ReadRowsResponse, writer)
    return header.step


def check_step(step: int, wanted: int | None) -> None:
    """Raises MalformedMessage unless a step is the wanted one, or is possible where the latest is wanted."""
    if step == wanted or (wanted is None and 0 <= step <= MAX_STEP):
        return
    asked = "the latest step" if wanted is None else f"step {wanted}"
    raise MalformedMessage(f"{asked} was requested, and it answers with step {step}; install the same version on both sides")


# Contributions and variables over long-lived streams.


# From here on the page faults of message buffers are what a transfer costs; see `keep_freed_memory`.
LARGE_BYTES = 1 << 20
_keep_freed_memory_once = cache(keep_freed_memory)
# A contribution whose messages are made all at once.
_SMALL_BYTES = 64 << 10
# Of a contribution whose bytes the server has taken; all else it answers as soon as it knows.
_RECEIVED = (pb.PUSH_RESULT_STAGED, pb.PUSH_RESULT_APPLIED)


def prepare(num_bytes: int) -> None:
    """Has this process keep what message buffers of a large transfer leave."""
    if num_bytes >= LARGE_BYTES:
        _keep_freed_memory_once()


class Pushes:
    """Thread-safe. Sends one contribution a call."""

    def __init__(self, streams: Streams, payloads: Payloads, progress: Progress) -> None:
        self._streams, self._payloads, self._progress = streams, payloads, progress
        # Of the large contribution whose frames were sent last.
        self._last: PushHeader | None = None

    def send(self, header: PushHeader, gradients: Segments, *, timeout_s: float) -> PushReply:
        """Sends one contribution and returns the outcome; the same header again goes on where the contribution broke off.

        Raises what the answer says, and as `Streams.use`.
        """
        prepare(gradients.nbytes)
        message = codec.encode(header)
        message.content_bytes = gradients.nbytes
        message.resumes = header is self._last

        def exchange(use: LongLivedStream) -> pb.PushResponse:
            data_socket = None if message.resumes else self._payloads.socket_for(use, gradients.nbytes)
            if message.resumes:
                received = self._resume(use, message, gradients)
            elif data_socket is None:
                message.ClearField("payload")
                if gradients.nbytes >= LEAST_RESUMED_BYTES:
                    self._last = header
                messages = encode_stream(pb.PushRequest(header=message), gradients)
                if gradients.nbytes > _SMALL_BYTES:
                    received = use.stream.exchange(self._progress.counted(messages))
                else:
                    # A small one leaves as a request, for which gRPC has one event, with its answer.
                    *before, last = messages
                    for one in before:
                        use.stream.send(one)
                    use.stream.request(last)
                    received = use.stream.answer()
            else:
                received = self._exchange_by_socket(use, data_socket, message, gradients)
            answer = decode_message(pb.PushResponse, received)
            if answer.reply.result not in _RECEIVED:
                # The server reads no more of it.
                use.let_go_of_socket()
            if answer.push_id != message.push_id:
                raise MalformedMessage(f"an answer to push {answer.push_id}, not to {header.push_id}")
            return answer

        answer = self._streams.use(exchange, timeout_s=timeout_s, awaited=f"the receipt of gradients for step {header.step}")
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        try:
            return codec.decode(PushReply, answer.reply)
        except PsError as error:
            raise not_understood(self._streams.connection.target, error) from None

    def _resume(self, use: LongLivedStream, header: pb.PushHeader, gradients: Segments) -> bytes:
        """Sends what the server says that it lacks of a contribution that broke off, and returns the outcome."""
        use.stream.request(pb.PushRequest(header=header).SerializeToString())
        answer = use.stream.answer()
        here = decode_message(pb.PushResponse, answer)
        if not here.HasField("received_bytes"):
            return answer
        if here.received_bytes > gradients.nbytes:
            raise MalformedMessage(f"{here.received_bytes} bytes of push {here.push_id} are there, and it has {gradients.nbytes}")
        frames = from_offset(gradients.chunks(FRAME_BYTES), here.received_bytes)
        return use.stream.exchange(self._progress.counted(encode_frame(b"", offset=offset, data=data) for offset, data in frames))

    def _exchange_by_socket(self, use: LongLivedStream, data_socket: DataSocket, header: pb.PushHeader, gradients: Segments) -> bytes:
        payload = next_payload(data_socket)
        header.payload.CopyFrom(payload)
        use.stream.send(pb.PushRequest(header=header).SerializeToString())
        use.stream.flush()
        chunks = self._progress.counted(data for _, data in gradients.chunks(FRAME_BYTES))
        with contextlib.suppress(Unavailable):  # the answer says why the server has closed it
            data_socket.send(payload.number, gradients.nbytes, chunks)
        return use.stream.receive()


_NOTHING_CUT = None, None


class Reads:
    """Thread-safe. At most one step is expected on a stream; a read of anything else breaks it off, since its answer may be large."""

    def __init__(self, streams: Streams, payloads: Payloads, progress: Progress, *, is_same_process: Callable[[], bool]) -> None:
        self._streams, self._payloads, self._progress = streams, payloads, progress
        self._is_same_process = is_same_process
        # What an answer wrote that broke off, and what it was an attempt of.
        self._cut: tuple[object, FrameWriter | None] = _NOTHING_CUT

    def expect(self, request: ReadRequest, *, timeout_s: float) -> None:
        """Asks for a step that need not be there yet, and does not wait for it. Raises what `Streams.use` raises."""

        def ask(use: LongLivedStream) -> None:
            if not _is_under_way(use, request):
                # How large the answer is, is known from reads before it.
                data_socket = use.data_socket
                if data_socket is not None and data_socket.is_over:
                    use.let_go_of_socket()
                    data_socket = None
                payload = None if data_socket is None else next_payload(data_socket)
                use.stream.request(pack_read_request(request, max_wait_s=MAX_WAIT_SLICE_S, payload=payload))
            use.asked = request

        self._streams.use(ask, timeout_s=timeout_s, awaited="nothing")

    def read(
        self,
        request: ReadRequest,
        into: Callable[[], FrameWriter],
        *,
        attempt_of: object,
        moving: Callable[[], FrameWriter] | None = None,
        timeout_s: float,
        awaited: str,
    ) -> int:
        """Fills memory, by a writer that `into` makes, and returns the step. Raises what the answer says, and as `Streams.use`.

        `attempt_of`: the same object where an answer that broke off is asked for again; it goes on from there. `moving`: makes a writer for
        how the values moved since the step that the memory has.
        """
        (of, cut), self._cut = self._cut, _NOTHING_CUT
        # What is written in frames; what comes over a data socket counts only as a whole.
        writer = cut = cut if of is attempt_of else None

        def receive(use: LongLivedStream) -> int | PsError:
            nonlocal writer
            if _is_under_way(use, request):
                # From its first byte on, whatever is here of it.
                new = into()
                writer = new if use.data_socket is None else None
                found = self._answer(use, request, new, moving)
                if not isinstance(found, StepNotReady):
                    return found
                # The wait for it timed out, but now it may be there.
            new = cut or into()
            data_socket = None if cut is not None else self._payloads.socket_for(use, new.nbytes)
            payload = None if data_socket is None else next_payload(data_socket)
            writer = new if data_socket is None else None
            use.stream.request(pack_read_request(request, payload=payload, offset=new.num_written))
            return self._answer(use, request, new, moving)

        try:
            # After the loss of all servers, another life of the cluster may come to a step of the same number.
            if cut is not None and not self._is_same_process():
                cut = None
            found = self._streams.use(receive, timeout_s=timeout_s, awaited=awaited)
        except Unavailable:
            if request.step is not None and moving is None and writer is not None and writer.num_written >= LEAST_RESUMED_BYTES:
                self._cut = attempt_of, writer
            raise
        if isinstance(found, PsError):
            try:
                raise found
            finally:
                # It holds this frame. If the frame held it too, memory that is shared with a server that is gone would stay mapped.
                del found
        return found

    def _answer(
        self, use: LongLivedStream, request: ReadRequest, writer: FrameWriter, moving: Callable[[], FrameWriter] | None
    ) -> int | PsError:
        header, frame = self._parse(use.stream.receive())
        if header is None:
            raise MalformedMessage("an answer does not begin with a header")
        if header.HasField("error"):
            return decode_call_error(header.error)
        if header.step != request.step:  # which nearly always spares the call
            check_step(header.step, request.step)
        if header.step == request.held_step and not header.num_bytes:
            return header.step
        self._progress.num_read_bytes += header.num_bytes - writer.num_written
        if moving is not None and header.num_bytes != writer.nbytes:
            writer = moving()
        if header.by_socket:
            if self._receive(use, writer, num_bytes=header.num_bytes):
                return header.step
            # The server has taken it back, and says why.
            reason, _ = self._parse(use.stream.receive())
            if reason is not None and reason.HasField("error"):
                return decode_call_error(reason.error)
            raise MalformedMessage("variables were taken back, and no error followed")
        if header.num_bytes != writer.nbytes:
            raise MalformedMessage(f"it answers with {header.num_bytes} bytes of variables, and {writer.nbytes} are wanted")
        if frame is not None:
            writer.write(frame.offset, frame.data)
        while writer.num_written < header.num_bytes:
            again, frame = self._parse(use.stream.receive())
            if again is not None:
                if again.HasField("error"):
                    return decode_call_error(again.error)
                raise MalformedMessage("a header came again in the middle of an answer")
            self._progress.num_pieces += 1
            if frame is None or not frame.data:
                # Otherwise a server could do so without end.
                raise MalformedMessage("a message in the middle of an answer has no bytes of it")
            writer.write(frame.offset, frame.data)
        writer.finish()
        return header.step

    def _receive(self, use: LongLivedStream, writer: FrameWriter, *, num_bytes: int) -> bool:
        data_socket = use.data_socket
        if data_socket is None or num_bytes != writer.nbytes:
            raise MalformedMessage(f"{num_bytes} bytes over a data socket; {writer.nbytes} over one that was named")

        def fill(receive: Receive) -> bool:
            writer.fill(receive)
            self._progress.num_pieces += 1
            return True

        return data_socket.receive(data_socket.last_number, num_bytes, fill)

    def _parse(self, message: bytes) -> tuple[pb.ReadHeader | None, Frame | None]:
        header, frame = parse(message, pb.ReadResponse)
        return (None if header is None else header.header), frame


def _is_under_way(use: LongLivedStream, request: ReadRequest) -> bool:
    """Whether the request has been sent already; not any more then. If another one has, the stream is broken off."""
    asked, use.asked = use.asked, None
    if asked is not None and asked != request:
        use.break_off()
    return asked == request


log = logging.getLogger("lockstep.rpc")

SERVICE = "ps_protocol.v1.ParameterService"
# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the model. A server that is gone is noticed by keepalive long before.
TENSOR_TIMEOUT_S = 120.0


class GrpcShard:
    """The parameter server at `address`, as workers have it. Implements Shard: thread-safe, one attempt a call.

    Nothing is sent before the first call. `index` and `cluster` are what `handshake` insists on; None and "" accept any.
    `variables_encoding`: see `know_layout`. What is called with every step goes over long-lived streams, of which each call has one to
    itself. `least_socket_bytes`: gradients and variables of so many bytes travel over data sockets beside them, where the server has those;
    None: nothing does. `must_use_sockets`: raise Unimplemented or Unavailable where they cannot be had. `progress`: what counts the pieces
    of all large payloads; the caller may share it with others. Once the server shares its memory (`share`), that carries what it can.
    """

    def __init__(
        self,
        address: str,
        *,
        index: int | None = None,
        cluster: str = "",
        variables_encoding: FloatEncoding = FloatEncoding.AS_IS,
        access: Access = DEFAULT_ACCESS,
        least_socket_bytes: int | None = None,
        must_use_sockets: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.address = address
        self._progress = progress or Progress()
        self._index, self._cluster = index, cluster
        self.connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._payloads = Payloads(self.connection, least_bytes=least_socket_bytes, is_required=must_use_sockets)
        pushing, reading = (Streams(self.connection, method, deadlines=self._deadlines) for method in ("Push", "Read"))
        self._streams = pushing, reading
        self._pushes = Pushes(pushing, self._payloads, self._progress)
        self._reads = Reads(reading, self._payloads, self._progress, is_same_process=self._is_same_process)
        self._variables_encoding = variables_encoding
        self._layouts: dict[str, Layout] = {}
        # That answered the last handshake.
        self._process: int | None = None
        # Where there is none, or none any more, everything travels.
        self._memory: SharedMemory | None = None

    @property
    def transport(self) -> str:
        """How gradients and variables travel."""
        if self._memory is not None and self._memory.is_open:
            return "shared_memory"
        return "sockets" if self._payloads.has_opened else "grpc"

    def handshake(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HandshakeReply:
        """Returns the server's identity; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""
        found = self.connection.handshake(Role.PARAMETER_SERVER, index=self._index, cluster=self._cluster, timeout_s=timeout_s)
        self._process = found.identity.process_incarnation
        return found

    def _is_same_process(self) -> bool:
        """Asks whether the process is there that answered the last handshake."""
        return self._process == self.handshake().identity.process_incarnation

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks by an RPC with one message each way, and returns the answer."""
        limit_s = CONTROL_TIMEOUT_S + getattr(request, "max_wait_s", 0.0) if timeout_s is None else timeout_s
        return self.connection.call(request, timeout_s=limit_s)

    def share(
        self,
        *,
        epoch: int,
        worker: int,
        incarnation: int,
        layout: Layout,
        secret: int = 0,
        num_buffers: int = 1,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> SharedMemory:
        """Has the server's memory carry what one incarnation of a worker pushes and reads, until it is lost; returns it.

        The variables must stand. `secret`: the worker's, see Participant. `num_buffers`: for gradients, at first; it asks for more when
        they are needed. Blocks for a few calls. Raises MemoryNotShared if it cannot be, and what any call raises: then all is as before.
        """
        claim = pb.MemoryClaim(
            epoch=epoch, worker=worker, incarnation=incarnation, layout_hash=layout.hash, num_buffers=num_buffers, secret=secret
        )
        memory = share_memory(self.connection, claim, layout=layout, timeout_s=timeout_s, deadlines=self._deadlines)
        self._memory = memory
        return memory

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Sends all variables with their initial values; False if they exist already."""
        header = pb.CreateVariablesRequest(spec=codec.encode(spec))
        answer = self.connection.stream_up(
            "CreateVariables",
            self._progress.counted(encode_stream(header, values)),
            pb.CreateVariablesResponse,
            timeout_s=_limit(timeout_s),
            awaited=f"the creation of {len(spec.layout.slices)} variables",
        )
        return answer.created

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        """Receives variables, or a slot, into the caller's memory; returns their step.

        The same request again, into the same memory, goes on where an answer of a step broke off.
        """
        asked, memory = request, self._memory
        if memory is not None and (found := memory.read(request, into)) is not None:
            return found
        prepare(into.nbytes)
        request = self._as_it_travels(request)
        moving: Callable[[], FrameWriter] | None = None
        if request.encoding is FloatEncoding.INT4_BLOCKS:
            moving = partial(MovingWriter, self._layouts[request.layout_hash], into.pieces[0])
        if request.slot:
            awaited = f"slot {request.slot!r}"
        else:
            awaited = "the variables" if request.step is None else f"the variables of step {request.step}"
        writer = partial(self._variables_writer, request, into)
        return self._reads.read(request, writer, attempt_of=asked, moving=moving, timeout_s=_limit(timeout_s), awaited=awaited)

    def expect(self, request: ReadRequest) -> None:
        """Asks for a step on a long-lived stream, which then leaves as soon as it is there; not if it will be read where it lies."""
        if self._memory is not None and self._memory.is_open:
            return
        with contextlib.suppress(PsError):  # what is wrong will be wrong when it is read, too
            self._reads.expect(self._as_it_travels(request), timeout_s=CONTROL_TIMEOUT_S)

    def know_layout(self, layout: Layout) -> None:
        """Lets variables of this layout travel in the encoding that this client was made with; before, and others, travel as they are."""
        if self._variables_encoding is not FloatEncoding.AS_IS:
            self._layouts[layout.hash] = layout

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Sends one contribution, or leaves it in memory; if it is dropped as stale, the answer may come before all is sent.

        The same header again, with the same gradients, goes on where the contribution broke off.
        """
        memory = self._memory
        if memory is None:
            return self._pushes.send(header, gradients, timeout_s=_limit(timeout_s))
        reply = memory.push_by(partial(self._pushes.send, timeout_s=_limit(timeout_s)), header, gradients)
        if not memory.is_open and self._memory is memory:
            self._memory = None
            log.warning("%s: its memory is no longer shared; gradients and variables are sent from now on", self.connection.target)
        return reply

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
        header = pb.ReadRowsRequest(header=codec.encode(request))
        header.header.num_rows = wanted.size
        sent, is_over = encode_stream(header, Segments([wanted.reshape(-1).view(np.uint8)])), threading.Event()

        def receive(messages: Iterator[bytes]) -> int:
            if meanwhile is not None:
                first = next(messages, b"")
                meanwhile(step_of(first))
                is_over.set()
                messages = itertools.chain([first], messages)
            return receive_into(self._progress.counted(messages), into.writer(), wanted=request.step)

        try:
            return self.connection.stream_both(
                "ReadRows",
                sent if meanwhile is None else kept_open(sent, until=is_over),
                receive,
                timeout_s=_limit(timeout_s),
                awaited=f"{wanted.size} rows of table {request.table}",
            )
        finally:
            is_over.set()

    def close(self) -> None:
        """Gives memory back and closes the connection; calls under way end with Cancelled. The server continues. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        for streams in self._streams:
            streams.close()
        self._deadlines.close()
        self.connection.close()

    def _as_it_travels(self, request: ReadRequest) -> ReadRequest:
        """Returns a request for variables in the encoding of this client, if they can be; slots travel as they are.

        What the caller has of another step than the wanted one only counts where it can be moved from there.
        """
        encoding = self._variables_encoding if not request.slot and request.layout_hash in self._layouts else FloatEncoding.AS_IS
        if encoding is FloatEncoding.INT4_BLOCKS and (request.held_step is None or request.step is None):
            encoding = FloatEncoding.AS_IS
        is_moved = encoding is FloatEncoding.INT4_BLOCKS
        held_step = request.held_step if is_moved or request.step in (None, request.held_step) else None
        return dataclasses.replace(request, encoding=encoding, held_step=held_step)

    def _variables_writer(self, request: ReadRequest, into: Segments) -> FrameWriter:
        if request.encoding in (FloatEncoding.AS_IS, FloatEncoding.INT4_BLOCKS):
            return into.writer()
        return decoding_writer(self._layouts[request.layout_hash], request.encoding, into)


def _limit(timeout_s: float | None) -> float:
    return TENSOR_TIMEOUT_S if timeout_s is None else timeout_s
