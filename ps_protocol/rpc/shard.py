"""A parameter server behind gRPC, as workers have it: the `Shard` of another process. Knows methods and messages; no retries."""

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ps_protocol.encodings.arena import decoding_writer
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.moves import MovingWriter
from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.memory import keep_freed_memory
from ps_protocol.process.waiting import CallDeadlines, Progress
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import (
    PushHeader,
    PushReply,
    ReadRequest,
    RowsRequest,
    ShardSpec,
)
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.client_stream import Streams
from ps_protocol.rpc.memory import SharedMemory, share_memory
from ps_protocol.rpc.payloads import Payloads
from ps_protocol.rpc.transfers import Pushes, Reads, check_step
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.frames import FrameWriter, encode_stream, parse, write_frames

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


log = logging.getLogger("lockstep.rpc")

SERVICE = "ps_protocol.v1.ParameterService"
# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the model. A server that is gone is noticed by keepalive long before.
TENSOR_TIMEOUT_S = 120.0
# From here on the page faults of message buffers are what a transfer costs; see `keep_freed_memory`.
LARGE_BYTES = 1 << 20


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
        self._is_prepared = False
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
        self._prepare(into.nbytes)
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
            return self._push(header, gradients, timeout_s=timeout_s)
        reply = memory.push_by(partial(self._push, timeout_s=timeout_s), header, gradients)
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

    def _push(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None) -> PushReply:
        self._prepare(gradients.nbytes)
        return self._pushes.send(header, gradients, timeout_s=_limit(timeout_s))

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

    def _prepare(self, num_bytes: int) -> None:
        if num_bytes >= LARGE_BYTES and not self._is_prepared:
            keep_freed_memory()
            self._is_prepared = True


def _limit(timeout_s: float | None) -> float:
    return TENSOR_TIMEOUT_S if timeout_s is None else timeout_s
