"""Contributions that follow each other in one standing stream. Knows their messages; no RPC, no memory.

A contribution that is small and comes in one message is staged by the thread that takes gRPC's events; from the first other one on, a
thread of its own serves the stream.
"""

from collections.abc import Iterator

import grpc

from ps_protocol import codec_shard as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.errors import MalformedMessage, PsError, TruncatedStream
from ps_protocol.framing import Frame, parse
from ps_protocol.shard import PushHeader, PushReply
from ps_protocol.standing_peer import Peer
from ps_protocol.status import defect
from ps_protocol.threaded_handler import ThreadedHandler
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_server.idle_streams import IdleStreams, Stream
from ps_server.store import ParameterStore


class PushStream:
    """See FinishingHandler. One stream of contributions."""

    def __init__(self, store: ParameterStore, peer: Peer, context: grpc.ServicerContext, *, idle_streams: IdleStreams, name: str) -> None:
        self._store, self._peer, self._idle_streams, self._name = store, peer, idle_streams, name
        self._stream = idle_streams.begin_standing(context, name="StreamPushes")
        self._threaded: ThreadedHandler | None = None

    def take(self, message: bytes) -> None:
        """Stages a small contribution and answers it, or leaves the message to the stream's thread."""
        if self._threaded is not None:
            self._threaded.take(message)
            return
        if self._store.is_quick:
            self._stream.is_resting = False
            answer = self._answer(message)
            if answer is not None:
                self._peer.send(answer)
                self._stream.rest()
                return
        self._threaded = ThreadedHandler(
            self._peer, _Contributions(self._store, self._stream, name=self._name).answers, first=message, server_name=self._name
        )

    def finish(self) -> None:
        """The worker sends no more."""
        if self._threaded is not None:
            self._threaded.finish()
        else:
            self._peer.end()

    def close(self) -> None:
        """The stream is over."""
        self._idle_streams.end_of(self._stream)
        if self._threaded is not None:
            self._threaded.close()

    def _answer(self, message: bytes) -> bytes | None:
        """Returns what a contribution is answered that is whole with this message; None for all others, which have had no effect."""
        try:
            header, frame = parse(message, pb.StreamPushesRequest)
        except PsError:
            return None
        if header is None or frame is None or frame.offset or header.header.content_bytes != len(frame.data):
            return None
        push_id = header.header.push_id
        try:
            with self._store.open_push(codec.decode_push_header(header.header)) as push:
                reply = push.finish_with(frame.data)
            return pb.StreamPushesResponse(push_id=push_id, reply=codec.encode_push_reply(reply)).SerializeToString()
        except PsError as error:
            failure = error
        except Exception:
            failure = defect(self._name)
        return pb.StreamPushesResponse(push_id=push_id, error=encode_call_error(failure)).SerializeToString()


class _Contributions:
    """One stream of contributions. After one that is answered before it is whole, its frames are dropped until the next header."""

    def __init__(self, store: ParameterStore, stream: Stream, *, name: str) -> None:
        self._store = store
        self._stream = stream
        self._messages: Iterator[bytes] = iter(())
        self._name = name
        self._is_dropping = False
        # Begins the next contribution, and was read too early.
        self._ahead: bytes | None = None

    def answers(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yields one answer for each contribution, in order."""
        self._messages = self._stream.incoming(messages)
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
