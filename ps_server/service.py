"""The calls of workers and the chief."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ps_protocol import codec_checkpoints, codec_shard_status
from ps_protocol import codec_shard as codec
from ps_protocol.addresses import parse_address
from ps_protocol.codec import decode_message, require
from ps_protocol.codec_reading import decode_read_request
from ps_protocol.errors import MalformedMessage, TruncatedStream
from ps_protocol.framing import Frame, StreamMessage, parse
from ps_protocol.one_line import printable
from ps_protocol.status import answering
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.arena_stream import content_messages
from ps_server.idle_streams import IdleStreams
from ps_server.index_stream import index_blocks, row_messages
from ps_server.store import ParameterStore
from ps_server.transactions import Creation, Push

SERVICE: str = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name


class ParameterService:
    """Serves one store. Thread-safe. `on_chief_call` is told of each call that a chief makes; it must not block.

    `is_chief`: whether a caller may speak for the chief, in a method that others may call as well.
    """

    def __init__(
        self,
        store: ParameterStore,
        *,
        idle_streams: IdleStreams,
        on_chief_call: Callable[[], None],
        is_chief: Callable[[grpc.ServicerContext], bool] = lambda context: True,
    ) -> None:
        self._store = store
        self._idle_streams = idle_streams
        self._on_chief_call, self._is_chief = on_chief_call, is_chief
        self._name = f"ps {store.index}"

    def AdoptShard(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            message = decode_message(pb.AdoptShardRequest, request)
            if message.chief_address:
                parse_address(message.chief_address)
            self._on_chief_call()
            adoption = self._store.adopt(
                epoch=message.epoch,
                chief_incarnation=message.chief_incarnation,
                chief_address=message.chief_address,
                life=message.life,
                is_alone=message.alone,
                forgets=message.forget,
            )
            return codec_checkpoints.encode_adoption(adoption).SerializeToString()

    def CreateVariables(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._answering(context), self._idle_streams.watching(context, name="CreateVariables") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages, pb.CreateVariablesRequest)
            with self._store.open_creation(codec.decode_shard_spec(header.spec)) as creation:
                _feed(creation, frame, messages, pb.CreateVariablesRequest)
                return pb.CreateVariablesResponse(created=creation.finish()).SerializeToString()

    def ReadVariables(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._answering(context), self._idle_streams.watching(context, name="ReadVariables") as stream:
            wanted = decode_read_request(decode_message(pb.ReadVariablesRequest, request))
            reading = self._store.open_variables(epoch=wanted.epoch, step=wanted.step, layout_hash=wanted.layout_hash)
            header = pb.ReadVariablesResponse(step=reading.step).SerializeToString()
            if reading.step == wanted.held_step:
                yield header
            else:
                yield from stream.outgoing(content_messages(header, reading, wanted.encoding))

    def PushGradients(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._answering(context), self._idle_streams.watching(context, name="PushGradients") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages, pb.PushGradientsRequest)
            with self._store.open_push(codec.decode_push_header(header.header)) as push:
                _feed(push, frame, messages, pb.PushGradientsRequest)
                return codec.encode_push_reply(push.finish()).SerializeToString()

    def ApplyStep(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            message = codec.decode_apply_request(decode_message(pb.ApplyStepRequest, request))
            self._on_chief_call()
            reply = self._store.apply_step(message)
            return codec.encode_apply_reply(reply).SerializeToString()

    def ConfigureShard(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            settings = codec.decode_settings(decode_message(pb.ConfigureShardRequest, request))
            self._on_chief_call()
            self._store.configure(settings)
            return pb.ConfigureShardResponse().SerializeToString()

    def PrepareStep(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            message = decode_message(pb.PrepareStepRequest, request)
            require(message, "apply")
            self._on_chief_call()
            sums = self._store.prepare_step(codec.decode_apply_request(message.apply))
            return pb.PrepareStepResponse(sums=sums).SerializeToString()

    def ReadRows(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._answering(context), self._idle_streams.watching(context, name="ReadRows") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages, pb.ReadRowsRequest)
            with self._store.open_rows(codec.decode_rows_request(header.header)) as rows:
                blocks = index_blocks(frame, messages, num_rows=header.header.num_rows)
                yield from stream.outgoing(row_messages(rows, blocks))

    def ReadMetrics(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            cells = self._store.read_metrics(epoch=decode_message(pb.ReadMetricsRequest, request).epoch)
            return codec_shard_status.encode_metric_cells(cells).SerializeToString()

    def ListSlots(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            names = self._store.list_slots(epoch=decode_message(pb.ListSlotsRequest, request).epoch)
            return pb.ListSlotsResponse(names=names).SerializeToString()

    def ReadSlot(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._answering(context), self._idle_streams.watching(context, name="ReadSlot") as stream:
            message = decode_message(pb.ReadSlotRequest, request)
            reading = self._store.open_slot(message.name, epoch=message.epoch, layout_hash=message.layout_hash)
            header = pb.ReadSlotResponse(step=reading.step).SerializeToString()
            yield from stream.outgoing(content_messages(header, reading))

    def GetShardStatus(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            message = decode_message(pb.GetShardStatusRequest, request)
            # Else anybody who may look could make a chief that is gone seem alive, and keep its successor waiting.
            if self._is_chief(context):
                self._store.hear_chief(message.chief_incarnation)
                self._on_chief_call()
            return codec_shard_status.encode_shard_status(self._store.status()).SerializeToString()

    def ShutdownShard(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._answering(context):
            message = decode_message(pb.ShutdownShardRequest, request)
            self._store.shutdown(epoch=message.epoch, reason=printable(message.reason))
            return pb.ShutdownShardResponse().SerializeToString()

    def _answering(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        return answering(context, server_name=self._name)


def parameter_service_handler(*parts: object) -> grpc.GenericRpcHandler:
    """Returns the handler of the RPCs of the service's descriptor, for `server.add_generic_rpc_handlers((handler,))`.

    `parts`: the objects that together have a method, or a handler of gRPC's, for each RPC; the first that has it serves it. What none has
    is not served.
    """
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for method in pb.DESCRIPTOR.services_by_name["ParameterService"].methods:
        serve = next((getattr(part, method.name) for part in parts if hasattr(part, method.name)), None)
        if isinstance(serve, grpc.RpcMethodHandler):
            handlers[method.name] = serve
        elif serve is not None:
            handlers[method.name] = kinds[method.client_streaming, method.server_streaming](serve)
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _first(messages: Iterator[bytes], message_type: type[StreamMessage]) -> tuple[StreamMessage, Frame | None]:
    name = message_type.DESCRIPTOR.name
    message = next(messages, None)
    if message is None:
        raise TruncatedStream(f"the stream ended before its first {name}; nothing was changed; send it again")
    header, frame = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{name}: the first message of the stream has no header; begin with it")
    return header, frame


def _feed(target: Push | Creation, frame: Frame | None, messages: Iterator[bytes], message_type: type[StreamMessage]) -> None:
    """Writes frames until the stream ends, or until no more are wanted: then the rest of the stream is not waited for."""
    while True:
        if target.is_settled or (frame is not None and not target.write(frame.offset, frame.data)):
            return
        message = next(messages, None)
        if message is None:
            return
        header, frame = parse(message, message_type)
        if header is not None:
            raise MalformedMessage(f"{message_type.DESCRIPTOR.name}: a header came again in the middle of the stream; send it first only")
