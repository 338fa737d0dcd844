"""The standing streams between a worker and a parameter server: contributions up, variables down. Decides nothing.

What fails is answered within its stream, which goes on. A message that is too large, or a defect of gRPC's, ends the stream.
"""

from collections.abc import Iterator

import grpc

from ps_protocol import codec_shard as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.codec_reading import decode_standing_request
from ps_protocol.errors import MalformedMessage, PsError, TruncatedStream
from ps_protocol.framing import Frame, parse
from ps_protocol.shard import PushHeader, PushReply
from ps_protocol.status import answering, defect
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_server.arena_stream import content_messages
from ps_server.idle_streams import IdleStreams, Stream
from ps_server.store import ParameterStore


class StreamService:
    """Serves one store. Thread-safe; each stream holds a thread while it lasts."""

    def __init__(self, store: ParameterStore, *, idle_streams: IdleStreams) -> None:
        self._store = store
        self._idle_streams = idle_streams
        self._name = f"ps {store.index}"

    def StreamPushes(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers each contribution of a stream."""
        with answering(context, server_name=self._name), self._idle_streams.standing(context, name="StreamPushes") as stream:
            yield from _Contributions(self._store, stream, requests, name=self._name).answers()

    def StreamVariables(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers each request of a stream; one that is not there yet waits, and leaves with the stream."""
        with answering(context, server_name=self._name), self._idle_streams.standing(context, name="StreamVariables") as stream:
            context.add_callback(self._store.look_again)
            for request in stream.incoming(requests):
                try:
                    yield from self._variables(request, stream)
                except PsError as error:
                    yield _broken_off(error)
                except grpc.RpcError:
                    raise
                except Exception:
                    yield _broken_off(defect(self._name))
                stream.is_resting = True

    def _variables(self, request: bytes, stream: Stream) -> Iterator[bytes]:
        wanted, max_wait_s = decode_standing_request(request)
        reading = self._store.open_variables(
            epoch=wanted.epoch,
            step=wanted.step,
            layout_hash=wanted.layout_hash,
            max_wait_s=max_wait_s,
            is_wanted=stream.context.is_active,
        )
        if reading.step == wanted.held_step:
            yield pb.StreamVariablesResponse(header=pb.VariablesHeader(step=reading.step)).SerializeToString()
            return
        header = pb.VariablesHeader(step=reading.step, num_bytes=reading.nbytes(wanted.encoding))
        first = pb.StreamVariablesResponse(header=header).SerializeToString()
        stream.is_resting = False
        yield from stream.outgoing(content_messages(first, reading, wanted.encoding))


class _Contributions:
    """One stream of contributions. After one that is answered before it is whole, its frames are dropped until the next header."""

    def __init__(self, store: ParameterStore, stream: Stream, requests: Iterator[bytes], *, name: str) -> None:
        self._store = store
        self._stream = stream
        self._messages = stream.incoming(requests)
        self._name = name
        self._is_dropping = False
        # Begins the next contribution, and was read too early.
        self._ahead: bytes | None = None

    def answers(self) -> Iterator[bytes]:
        """Yields one answer for each contribution, in order."""
        while True:
            message, self._ahead = self._ahead, None
            if message is None:
                self._stream.is_resting = True
                message = next(self._messages, None)
                self._stream.is_resting = False
            if message is None:
                return
            answer = self._answer(message)
            if answer is not None:
                yield answer

    def _answer(self, message: bytes) -> bytes | None:
        """Takes in the contribution that begins with `message`, or drops a frame of one that has its answer."""
        push_id: tensor_pb2.PushId | None = None
        try:
            header, frame = parse(message, pb.StreamPushesRequest)
            if header is None:
                raise MalformedMessage("StreamPushesRequest: a frame that belongs to no contribution; begin each with its header")
            push_id, self._is_dropping = header.header.push_id, False
            reply = self._take(codec.decode_push_header(header.header), frame, num_bytes=header.header.content_bytes)
            return pb.StreamPushesResponse(push_id=push_id, reply=codec.encode_push_reply(reply)).SerializeToString()
        except PsError as error:
            failure = error
        except grpc.RpcError:
            raise
        except Exception:
            failure = defect(self._name)
        if self._is_dropping and push_id is None:
            return None
        self._is_dropping = True
        return pb.StreamPushesResponse(push_id=push_id, error=encode_call_error(failure)).SerializeToString()

    def _take(self, header: PushHeader, frame: Frame | None, *, num_bytes: int) -> PushReply:
        with self._store.open_push(header) as push:
            if num_bytes:
                # Nothing but their number tells where the contribution ends.
                push.expect(num_bytes)
            while not push.is_settled and (frame is None or push.write(frame.offset, frame.data)) and not push.is_whole:
                frame = self._next_frame()
            # Whoever sends on does not know yet that nothing more is wanted.
            self._is_dropping = push.is_settled
            return push.finish()

    def _next_frame(self) -> Frame | None:
        message = next(self._messages, None)
        if message is None:
            raise TruncatedStream("the stream ended in the middle of a contribution; nothing was changed; send it again")
        header, frame = parse(message, pb.StreamPushesRequest)
        if header is not None:
            self._ahead = message
            raise TruncatedStream("the next contribution began in the middle of this one; nothing was changed; send it again")
        return frame


def _broken_off(error: PsError) -> bytes:
    return pb.StreamVariablesResponse(header=pb.VariablesHeader(error=encode_call_error(error))).SerializeToString()
