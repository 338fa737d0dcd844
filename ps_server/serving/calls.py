"""The RPCs of a parameter server: decode, one call to the shard, encode. Knows messages; decides nothing.

All methods take and give bytes. The tensor streams are framed by hand, and malformed messages are refused here, with a reason. A thread
serves each call: the shard's locks, its storage and its callers may take long.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ps_protocol.errors import MalformedMessage, TruncatedStream, Unimplemented
from ps_protocol.model.layout import Segments
from ps_protocol.roles.accumulators import GradientHeader, TakeRequest, content_of
from ps_protocol.roles.board import BoardRequest, PostHeader
from ps_protocol.roles.request import RPCS, requests_of
from ps_protocol.roles.shard import DataSocketRequest, Invitation, RowsRequest, ShardSpec, ShardStatus, ShardStatusRequest
from ps_protocol.rpc.door import Blocking, CallThreads, Methods, by_thread, only_message, plain
from ps_protocol.rpc.server_stream import Call, Handler, Peer
from ps_protocol.shared_memory import segment as memory_segments
from ps_protocol.shared_memory.segment import SharedSegment
from ps_protocol.sockets.listener import NO_DATA_SOCKETS, DataListener
from ps_protocol.v1 import accumulator_service_pb2 as accumulator_pb
from ps_protocol.v1 import board_service_pb2 as board_pb
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.codec import decode_message
from ps_protocol.wire.frames import Frame, StreamMessage, encode_stream, parse
from ps_protocol.wire.special import encode_taken
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.boards import BoardRegistry
from ps_server.serving.streams import IdleStreams, Stream, index_blocks, row_messages
from ps_server.shard.shard import ServedShard
from ps_server.shard.sharing import Claim, Sharing

SERVICE: str = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name
ACCUMULATOR_SERVICE: str = accumulator_pb.DESCRIPTOR.services_by_name["AccumulatorService"].full_name
BOARD_SERVICE: str = board_pb.DESCRIPTOR.services_by_name["BoardService"].full_name


class Serving:
    """What all services of a server need: threads for its calls, and who watches those with tensors."""

    def __init__(self, *, idle_streams: IdleStreams, threads: CallThreads) -> None:
        self.idle_streams, self.threads = idle_streams, threads

    def plain(self, service: str, act: Callable[[Any, Call], object]) -> Methods:
        """Returns the methods of a service with one message each way."""
        return {RPCS[kind].path: by_thread(plain(kind, act), self.threads) for kind in requests_of(service).values()}

    def streamed(
        self,
        path: str,
        serve: Callable[[Iterator[bytes], Call], Iterator[bytes]],
        *,
        watch: Callable[..., Stream] | None = None,
    ) -> Methods:
        """Returns the method whose calls a thread serves, message by message. `watch`: begins to watch a stream."""
        name = path.rpartition("/")[2]

        def begin(peer: Peer, call: Call) -> Handler:
            stream = (watch or self.idle_streams.begin)(call, name=name)
            return Blocking(
                peer,
                lambda messages: stream.outgoing(serve(stream.incoming(messages), call)),
                threads=self.threads,
                on_close=lambda: self.idle_streams.end_of(stream),
            )

        return {path: begin}


class ParameterService:
    """Serves one shard. Thread-safe. `is_chief`: whether a caller may speak for the chief, in a method that others may call as well."""

    def __init__(
        self,
        shard: ServedShard,
        serving: Serving,
        *,
        is_chief: Callable[[Call], bool] = lambda call: True,
        data_sockets: DataListener = NO_DATA_SOCKETS,
    ) -> None:
        self._shard = shard
        self._data_sockets = data_sockets
        self._is_chief = is_chief
        self._name = f"ps {shard.index}"
        self._boot_id = memory_segments.boot_id()
        # What the shard does not answer alone.
        self._others: dict[type, Callable[[Any, Call], object]] = {
            ShardStatusRequest: self._answer_status,
            DataSocketRequest: self._invite,
        }
        self.methods: Methods = {
            **serving.plain("ParameterService", self._answer),
            **serving.streamed(f"/{SERVICE}/CreateVariables", self._create),
            **serving.streamed(f"/{SERVICE}/ReadRows", self._read_rows),
            **serving.streamed(f"/{SERVICE}/ShareMemory", self._share, watch=serving.idle_streams.begin_sharing),
        }

    def _answer(self, request: Any, call: Call) -> object:
        other = self._others.get(type(request))
        return other(request, call) if other is not None else self._shard.call(request)

    def _answer_status(self, request: ShardStatusRequest, call: Call) -> ShardStatus:
        # Else any caller that may read the status could make a dead chief seem alive, and keep its successor waiting.
        status = self._shard.call(request if self._is_chief(call) else ShardStatusRequest())
        # The shard does not know whether it has a process of its own.
        return replace(status, report=replace(status.report, cpu_s=time.process_time()))

    def _invite(self, request: DataSocketRequest, call: Call) -> Invitation:
        return self._data_sockets.invite()

    def _create(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        header, frame = _first(messages, pb.CreateVariablesRequest)
        with self._shard.open_creation(codec.decode(ShardSpec, header.spec)) as creation:
            if not creation.is_answered:
                _feed(creation.write, frame, messages, pb.CreateVariablesRequest)
            created = creation.finish()
        yield pb.CreateVariablesResponse(created=created).SerializeToString()

    def _read_rows(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        header, frame = _first(messages, pb.ReadRowsRequest)
        with self._shard.open_rows(codec.decode(RowsRequest, header.header)) as rows:
            blocks = index_blocks(frame, messages, num_rows=header.header.num_rows)
            yield from row_messages(rows, blocks)

    def _share(self, requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        messages = (decode_message(pb.ShareMemoryRequest, message) for message in requests)
        claim = self._claim(next(messages, None))
        with self._shard.open_sharing(claim, on_end=call.cancel) as sharing:
            for response in _granted(sharing, claim.num_buffers, messages):
                yield response.SerializeToString()

    def _claim(self, message: pb.ShareMemoryRequest | None) -> Claim:
        if message is None or not message.HasField("claim"):
            raise MalformedMessage("ShareMemoryRequest: the stream does not begin with a claim; begin with it")
        claim = message.claim
        if not self._boot_id or claim.boot_id != self._boot_id:
            raise Unimplemented(f"{self._name}: you run on another host; memory is shared on one only", facts={"same_host": "false"})
        return Claim(
            epoch=claim.epoch,
            worker=claim.worker,
            incarnation=claim.incarnation,
            layout_hash=claim.layout_hash,
            num_buffers=claim.num_buffers,
            secret=claim.secret,
        )


def _granted(sharing: Sharing, num_buffers: int, messages: Iterator[pb.ShareMemoryRequest]) -> Iterator[pb.ShareMemoryResponse]:
    """Answers requests for memory until the stream ends."""
    while True:
        offered = sharing.offer(num_buffers)
        if offered:
            yield pb.ShareMemoryResponse(offer=_offer(offered))
            proof = next(messages, None)
            if proof is None:
                raise TruncatedStream("the stream ended before the proof that its memory is mapped; nothing was changed")
            if not proof.HasField("proof"):
                raise MalformedMessage("ShareMemoryRequest: want the proof of what was offered, and nothing else")
            sharing.prove(proof.proof.nonces, offered)
        yield pb.ShareMemoryResponse(grant=pb.MemoryGrant(num_buffers=sharing.num_buffers))
        wish = next(messages, None)
        if wish is None:
            return
        if not wish.HasField("num_buffers"):
            raise MalformedMessage("ShareMemoryRequest: want the number of buffers that the worker asks for, and nothing else")
        num_buffers = wish.num_buffers


def _offer(segments: Sequence[SharedSegment]) -> pb.MemoryOffer:
    pieces = [pb.MemorySegment(descriptor=segment.descriptor, num_bytes=segment.num_bytes) for segment in segments]
    return pb.MemoryOffer(pid=os.getpid(), segments=pieces)


class AccumulatorService:
    """Serves one registry. Thread-safe."""

    def __init__(self, registry: AccumulatorRegistry, serving: Serving) -> None:
        self._registry = registry
        self.methods: Methods = {
            **serving.plain("AccumulatorService", lambda request, call: registry.call(request)),
            **serving.streamed(f"/{ACCUMULATOR_SERVICE}/ApplyGradient", self._apply),
            **serving.streamed(f"/{ACCUMULATOR_SERVICE}/TakeGradient", self._take),
        }

    def _apply(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        first, frame = _first(messages, accumulator_pb.ApplyGradientRequest)
        header = codec.decode(GradientHeader, first.header)
        yield codec.pack(
            self._registry.receive_gradient(
                header, lambda writer: _feed(writer.write, frame, messages, accumulator_pb.ApplyGradientRequest)
            )
        )

    def _take(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        request = codec.decode(TakeRequest, decode_message(accumulator_pb.TakeGradientRequest, only_message(messages)))
        with self._registry.open_take(request) as taking:
            if not call.add_callback(taking.abandon):
                taking.abandon()
            taken = taking.wait()
        first = accumulator_pb.TakeGradientResponse(header=encode_taken(taken))
        content = Segments([]) if taken.values is None else content_of(taken.values, taken.indices)
        yield from encode_stream(first, content)


class BoardService:
    """Serves the boards. Thread-safe."""

    def __init__(self, boards: BoardRegistry, serving: Serving) -> None:
        self._boards = boards
        self.methods: Methods = {
            **serving.streamed(f"/{BOARD_SERVICE}/PostOnBoard", self._post),
            **serving.streamed(f"/{BOARD_SERVICE}/ReadBoard", self._read),
        }

    def _post(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        first, frame = _first(messages, board_pb.PostOnBoardRequest)
        header = codec.decode(PostHeader, first.header)
        process_incarnation = self._boards.receive(header, lambda writer: _feed(writer.write, frame, messages, board_pb.PostOnBoardRequest))
        yield board_pb.PostOnBoardResponse(process_incarnation=process_incarnation).SerializeToString()

    def _read(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        found = self._boards.read(codec.decode(BoardRequest, decode_message(board_pb.ReadBoardRequest, only_message(messages))))
        first = board_pb.ReadBoardResponse(header=codec.encode(found.header))
        content = Segments([] if found.post is None else [found.post.content])
        yield from encode_stream(first, content)


def _first(messages: Iterator[bytes], message_type: type[StreamMessage]) -> tuple[StreamMessage, Frame | None]:
    name = message_type.DESCRIPTOR.name
    message = next(messages, None)
    if message is None:
        raise TruncatedStream(f"the stream ended before its first {name}; nothing was changed; send it again")
    header, frame = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{name}: the first message of the stream has no header; begin with it")
    return header, frame


def _feed(
    write: Callable[[int, bytes | memoryview], bool | None],
    frame: Frame | None,
    messages: Iterator[bytes],
    message_type: type[StreamMessage],
) -> None:
    """Writes frames until the stream ends, or until `write` returns False, as no more are wanted: the rest is not waited for then."""
    while frame is None or write(frame.offset, frame.data) is not False:
        message = next(messages, None)
        if message is None:
            return
        header, frame = parse(message, message_type)
        if header is not None:
            raise MalformedMessage(f"{message_type.DESCRIPTOR.name}: a header came again in the middle of the stream; send it first only")
