"""The RPCs of a parameter server: decode, one call to the shard, encode. Knows messages and statuses; decides nothing.

All methods take and give bytes. The tensor streams are framed by hand, and malformed messages are refused here, with a reason.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from ps_protocol.errors import MalformedMessage, TruncatedStream, Unimplemented
from ps_protocol.model.layout import Segments
from ps_protocol.roles.accumulators import AccumulatorSpec, GradientHeader, TakeRequest, content_of
from ps_protocol.roles.board import BoardRequest, PostHeader
from ps_protocol.roles.request import Request, requests_of
from ps_protocol.roles.shard import DataSocketRequest, Invitation, RowsRequest, ShardSpec, ShardStatus, ShardStatusRequest
from ps_protocol.rpc.server import plain_methods
from ps_protocol.rpc.status import answering
from ps_protocol.shared_memory import segment as memory_segments
from ps_protocol.shared_memory.segment import SharedSegment
from ps_protocol.sockets.listener import NO_DATA_SOCKETS, DataListener
from ps_protocol.v1 import accumulator_service_pb2 as accumulator_pb
from ps_protocol.v1 import board_service_pb2 as board_pb
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.codec import decode_message
from ps_protocol.wire.fields import require
from ps_protocol.wire.frames import Frame, StreamMessage, encode_stream, parse
from ps_protocol.wire.special import encode_taken
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.boards import BoardRegistry
from ps_server.serving.streams import IdleStreams, index_blocks, row_messages
from ps_server.shard.shard import Shard
from ps_server.shard.sharing import Claim, Sharing

_DESCRIPTORS = {
    descriptor.full_name: descriptor
    for descriptor in (
        pb.DESCRIPTOR.services_by_name["ParameterService"],
        accumulator_pb.DESCRIPTOR.services_by_name["AccumulatorService"],
        board_pb.DESCRIPTOR.services_by_name["BoardService"],
    )
}
SERVICE, ACCUMULATOR_SERVICE, BOARD_SERVICE = _DESCRIPTORS


class ParameterService:
    """Serves one shard. Thread-safe. `is_chief`: whether a caller may speak for the chief, in a method that others may call as well."""

    def __init__(
        self,
        shard: Shard,
        *,
        idle_streams: IdleStreams,
        is_chief: Callable[[grpc.ServicerContext], bool] = lambda context: True,
        data_sockets: DataListener = NO_DATA_SOCKETS,
    ) -> None:
        self._shard = shard
        self._idle_streams, self._data_sockets = idle_streams, data_sockets
        self._is_chief = is_chief
        self._name = f"ps {shard.index}"
        self._boot_id = memory_segments.boot_id()
        answers = dict.fromkeys(requests_of("ParameterService").values(), self._answer)
        self.plain = plain_methods(
            {**answers, ShardStatusRequest: self._answer_status, DataSocketRequest: self._invite},
            server_name=self._name,
        )

    def _answer(self, request: Request[Any], context: grpc.ServicerContext) -> object:
        return self._shard.call(request)

    def _answer_status(self, request: ShardStatusRequest, context: grpc.ServicerContext) -> ShardStatus:
        # Else any caller that may read the status could make a dead chief seem alive, and keep its successor waiting.
        status = self._shard.call(request if self._is_chief(context) else ShardStatusRequest())
        # The shard does not know whether it has a process of its own.
        return replace(status, report=replace(status.report, cpu_s=time.process_time()))

    def _invite(self, request: DataSocketRequest, context: grpc.ServicerContext) -> Invitation:
        return self._data_sockets.invite()

    def CreateVariables(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._answering(context), self._idle_streams.watching(context, name="CreateVariables") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages, pb.CreateVariablesRequest)
            with self._shard.open_creation(codec.decode(ShardSpec, header.spec)) as creation:
                _feed(creation, frame, messages, pb.CreateVariablesRequest)
                return pb.CreateVariablesResponse(created=creation.finish()).SerializeToString()

    def ReadRows(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._answering(context), self._idle_streams.watching(context, name="ReadRows") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages, pb.ReadRowsRequest)
            with self._shard.open_rows(codec.decode(RowsRequest, header.header)) as rows:
                blocks = index_blocks(frame, messages, num_rows=header.header.num_rows)
                yield from stream.outgoing(row_messages(rows, blocks))

    def ShareMemory(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with (
            self._answering(context),
            self._idle_streams.sharing(context, name="ShareMemory") as stream,
        ):
            messages = (decode_message(pb.ShareMemoryRequest, message) for message in stream.incoming(requests))
            claim = self._claim(next(messages, None))
            with self._shard.open_sharing(claim, on_end=context.cancel) as sharing:
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

    def _answering(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        return answering(context, server_name=self._name)


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
        # The error that ends the stream may keep this frame and its variables for long: none of them may be as large as the model.
        offered = ()
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
    """Serves one registry. Thread-safe. `server_name` is for texts."""

    def __init__(self, registry: AccumulatorRegistry, *, idle_streams: IdleStreams, server_name: str) -> None:
        self._registry = registry
        self._idle_streams = idle_streams
        self._name = server_name

    def CreateAccumulator(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Creates an accumulator, or finds it."""
        with self._answering(context):
            message = decode_message(accumulator_pb.CreateAccumulatorRequest, request)
            require(message, "spec")
            spec = codec.decode(AccumulatorSpec, message.spec)
            created = self._registry.create(spec)
            return accumulator_pb.CreateAccumulatorResponse(
                created=created, step=self._registry.describe(spec.name).step
            ).SerializeToString()

    def ApplyGradient(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Adds a gradient."""
        with self._answering(context), self._idle_streams.watching(context, name="ApplyGradient") as stream:
            messages = stream.incoming(requests)
            first, frame = _first(messages, accumulator_pb.ApplyGradientRequest)
            with self._registry.open_gradient(codec.decode(GradientHeader, first.header)) as incoming:
                _feed(incoming, frame, messages, accumulator_pb.ApplyGradientRequest)
                return codec.pack(incoming.finish())

    def TakeGradient(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Waits for gradients and sends their mean or sum."""
        with self._answering(context), self._idle_streams.watching(context, name="TakeGradient") as stream:
            with self._registry.open_take(codec.decode(TakeRequest, decode_message(accumulator_pb.TakeGradientRequest, request))) as taking:
                if not context.add_callback(taking.abandon):
                    taking.abandon()
                taken = taking.wait()
            first = accumulator_pb.TakeGradientResponse(header=encode_taken(taken))
            content = Segments([]) if taken.values is None else content_of(taken.values, taken.indices)
            yield from stream.outgoing(encode_stream(first, content))

    def SetAccumulatorStep(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Sets the step."""
        with self._answering(context):
            message = decode_message(accumulator_pb.SetAccumulatorStepRequest, request)
            self._registry.set_step(message.name, message.step)
            return accumulator_pb.SetAccumulatorStepResponse().SerializeToString()

    def GetAccumulator(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Reports an accumulator."""
        with self._answering(context):
            status = self._registry.describe(decode_message(accumulator_pb.GetAccumulatorRequest, request).name)
            return codec.pack(status)

    def DeleteAccumulator(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Drops an accumulator."""
        with self._answering(context):
            deleted = self._registry.delete(decode_message(accumulator_pb.DeleteAccumulatorRequest, request).name)
            return accumulator_pb.DeleteAccumulatorResponse(deleted=deleted).SerializeToString()

    def _answering(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        return answering(context, server_name=self._name)


class BoardService:
    """Serves the boards. Thread-safe. `server_name` is for texts."""

    def __init__(self, boards: BoardRegistry, *, idle_streams: IdleStreams, server_name: str) -> None:
        self._boards, self._idle_streams, self._name = boards, idle_streams, server_name

    def PostOnBoard(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Keeps a post."""
        with answering(context, server_name=self._name), self._idle_streams.watching(context, name="PostOnBoard") as stream:
            messages = stream.incoming(requests)
            first, frame = _first(messages, board_pb.PostOnBoardRequest)
            with self._boards.open_post(codec.decode(PostHeader, first.header)) as incoming:
                _feed(incoming, frame, messages, board_pb.PostOnBoardRequest)
                return board_pb.PostOnBoardResponse(process_incarnation=incoming.finish()).SerializeToString()

    def ReadBoard(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Waits for a post and sends it."""
        with answering(context, server_name=self._name), self._idle_streams.watching(context, name="ReadBoard") as stream:
            found = self._boards.read(codec.decode(BoardRequest, decode_message(board_pb.ReadBoardRequest, request)))
            first = board_pb.ReadBoardResponse(header=codec.encode(found.header))
            content = Segments([] if found.post is None else [found.post.content])
            yield from stream.outgoing(encode_stream(first, content))


def service_handler(service: str, *parts: object) -> grpc.GenericRpcHandler:
    """Returns the handler of the RPCs of a service's descriptor, for `server.add_generic_rpc_handlers((handler,))`.

    `parts`: the objects that together serve each RPC: by a handler in `plain`, or a method or handler of its name. What none has is not
    served.
    """
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for part in parts:
        handlers |= getattr(part, "plain", {})
    for method in _DESCRIPTORS[service].methods:
        serve = next((getattr(part, method.name) for part in parts if hasattr(part, method.name)), None)
        if isinstance(serve, grpc.RpcMethodHandler):
            handlers[method.name] = serve
        elif serve is not None:
            handlers[method.name] = kinds[method.client_streaming, method.server_streaming](serve)
    return grpc.method_handlers_generic_handler(service, handlers)


class Incoming(Protocol):
    """The receiver of the frames of one stream: a push, a creation, a gradient of a named accumulator, a post."""

    @property
    def is_answered(self) -> bool:
        """Whether no more bytes are wanted."""

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted any more."""


def _first(messages: Iterator[bytes], message_type: type[StreamMessage]) -> tuple[StreamMessage, Frame | None]:
    name = message_type.DESCRIPTOR.name
    message = next(messages, None)
    if message is None:
        raise TruncatedStream(f"the stream ended before its first {name}; nothing was changed; send it again")
    header, frame = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{name}: the first message of the stream has no header; begin with it")
    return header, frame


def _feed(incoming: Incoming, frame: Frame | None, messages: Iterator[bytes], message_type: type[StreamMessage]) -> None:
    """Writes frames until the stream ends, or until no more are wanted: then the rest of the stream is not waited for."""
    while not incoming.is_answered and (frame is None or incoming.write(frame.offset, frame.data)):
        message = next(messages, None)
        if message is None:
            return
        header, frame = parse(message, message_type)
        if header is not None:
            raise MalformedMessage(f"{message_type.DESCRIPTOR.name}: a header came again in the middle of the stream; send it first only")
