"""The calls of the named accumulators."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ps_protocol import codec_accumulators
from ps_protocol.accumulators import GradientHeader, content_of
from ps_protocol.codec import decode_message, require
from ps_protocol.errors import MalformedMessage, TruncatedStream
from ps_protocol.framing import Frame, encode_stream, parse
from ps_protocol.segments import Segments
from ps_protocol.status import answering
from ps_protocol.v1 import accumulator_service_pb2 as accumulator_pb
from ps_server.accumulator_registry import AccumulatorRegistry, IncomingGradient
from ps_server.idle_streams import IdleStreams

SERVICE: str = accumulator_pb.DESCRIPTOR.services_by_name["AccumulatorService"].full_name


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
            spec = codec_accumulators.decode_spec(message.spec)
            created = self._registry.create(spec)
            return accumulator_pb.CreateAccumulatorResponse(
                created=created, step=self._registry.describe(spec.name).step
            ).SerializeToString()

    def ApplyGradient(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Adds a gradient."""
        with self._answering(context), self._idle_streams.watching(context, name="ApplyGradient") as stream:
            messages = stream.incoming(requests)
            header, frame = _first(messages)
            with self._registry.open_gradient(header) as incoming:
                _feed(incoming, frame, messages)
                return codec_accumulators.encode_gradient_reply(incoming.finish()).SerializeToString()

    def TakeGradient(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Waits for gradients and sends what was made of them."""
        with self._answering(context), self._idle_streams.watching(context, name="TakeGradient") as stream:
            with self._registry.open_take(
                codec_accumulators.decode_take_request(decode_message(accumulator_pb.TakeGradientRequest, request))
            ) as taking:
                if not context.add_callback(taking.abandon):
                    taking.abandon()
                taken = taking.wait()
            first = accumulator_pb.TakeGradientResponse(header=codec_accumulators.encode_taken(taken))
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
            return codec_accumulators.encode_accumulator_status(status).SerializeToString()

    def DeleteAccumulator(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Drops an accumulator."""
        with self._answering(context):
            deleted = self._registry.delete(decode_message(accumulator_pb.DeleteAccumulatorRequest, request).name)
            return accumulator_pb.DeleteAccumulatorResponse(deleted=deleted).SerializeToString()

    def _answering(self, context: grpc.ServicerContext) -> contextlib.AbstractContextManager[None]:
        return answering(context, server_name=self._name)


def accumulator_service_handler(service: AccumulatorService) -> grpc.GenericRpcHandler:
    """Returns the handler of every RPC of the service's descriptor, for `server.add_generic_rpc_handlers((handler,))`."""
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
    }
    methods = accumulator_pb.DESCRIPTOR.services_by_name["AccumulatorService"].methods
    calls = {method.name: kinds[method.client_streaming, method.server_streaming](getattr(service, method.name)) for method in methods}
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def _first(messages: Iterator[bytes]) -> tuple[GradientHeader, Frame | None]:
    message = next(messages, None)
    if message is None:
        raise TruncatedStream("the stream ended before its first ApplyGradientRequest; nothing was changed; send it again")
    first, frame = parse(message, accumulator_pb.ApplyGradientRequest)
    if first is None:
        raise MalformedMessage("ApplyGradientRequest: the first message of the stream has no header; begin with it")
    return codec_accumulators.decode_gradient_header(first.header), frame


def _feed(incoming: IncomingGradient, frame: Frame | None, messages: Iterator[bytes]) -> None:
    """Writes frames until the stream ends, or until no more are wanted: then the rest of the stream is not waited for."""
    while not incoming.is_settled:
        if frame is not None:
            incoming.write(frame.offset, frame.data)
        message = next(messages, None)
        if message is None:
            return
        header, frame = parse(message, accumulator_pb.ApplyGradientRequest)
        if header is not None:
            raise MalformedMessage("ApplyGradientRequest: a header came again in the middle of the stream; send it first only")
