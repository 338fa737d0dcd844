"""Contributions that follow each other in one standing stream."""

import enum
import queue
import threading
from collections.abc import Generator

import grpc

from ps_protocol import codec_shard as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import MalformedMessage, PsError, TruncatedStream
from ps_protocol.framing import Frame, parse, takes_long
from ps_protocol.shard import PushHeader, PushReply
from ps_protocol.standing_peer import Peer
from ps_protocol.status import defect
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_server.idle_streams import IdleStreams, Stream
from ps_server.store import ParameterStore
from ps_server.transactions import Push


class _Wish(enum.Enum):
    """What a flow of contributions goes on with: a message (None: no more will come), or None in a thread that may take long."""

    MESSAGE = enum.auto()
    TIME = enum.auto()


_Flow = Generator[_Wish, bytes | None, None]


class PushStream:
    """See FinishingHandler. One stream of contributions."""

    def __init__(self, store: ParameterStore, peer: Peer, context: grpc.ServicerContext, *, idle_streams: IdleStreams, name: str) -> None:
        self._peer, self._idle_streams, self._name = peer, idle_streams, name
        self._stream = idle_streams.begin_standing(context, name="StreamPushes")
        self._flow: _Flow = _Contributions(store, peer, self._stream, name=name).flow()
        self._lock = threading.Lock()
        self._is_running = self._is_closed = False
        self._long: queue.SimpleQueue[bool] | None = None
        self._go_on(None)

    def take(self, message: bytes) -> None:
        """Takes in the next message of a contribution, and answers the contribution that it completes; or has the stream's thread do it."""
        if self._go_on(message) is _Wish.TIME:
            self._peer.pause()
            if self._long is None:
                self._long = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._long,), name="standing-stream", daemon=True).start()
            self._long.put(True)

    def finish(self) -> None:
        """The worker sends no more: what is not whole is answered as such."""
        self._go_on(None)
        self._peer.end()

    def close(self) -> None:
        """The stream is over; what is not whole is dropped."""
        self._idle_streams.end_of(self._stream)
        if self._long is not None:
            self._long.put(False)
        with self._lock:
            self._is_closed, is_left_to_others = True, self._is_running
        if not is_left_to_others:
            self._flow.close()

    def _work(self, long: "queue.SimpleQueue[bool]") -> None:
        while long.get():
            try:
                while self._go_on(None) is _Wish.TIME:
                    pass
                self._peer.go_on()
            except Exception:
                self._peer.end(defect(self._name))

    def _go_on(self, message: bytes | None) -> _Wish | None:
        """Lets the flow go on to its next wish; None if it is over. One thread at a time, but for `close`."""
        with self._lock:
            if self._is_closed:
                return None
            self._is_running = True
        try:
            return self._flow.send(message)
        except StopIteration:
            return None
        finally:
            with self._lock:
                self._is_running, is_over = False, self._is_closed
            if is_over:
                self._flow.close()


class _Contributions:
    """One stream of contributions. After one that is answered before it is whole, its frames are dropped until the next header."""

    def __init__(self, store: ParameterStore, peer: Peer, stream: Stream, *, name: str) -> None:
        self._store, self._peer, self._stream, self._name = store, peer, stream, name
        self._is_dropping = False
        # Begins the next contribution, and was read too early.
        self._ahead: bytes | None = None

    def flow(self) -> _Flow:
        """Takes messages, and sends one answer for each contribution, in order."""
        while True:
            message, self._ahead = self._ahead, None
            if message is None:
                self._stream.rest()
                message = yield _Wish.MESSAGE
                self._stream.is_resting = False
            if message is None:
                return
            answer = yield from self._answer(message)
            if answer is not None:
                self._peer.send(answer)

    def _answer(self, message: bytes) -> Generator[_Wish, bytes | None, bytes | None]:
        """Takes in the contribution that begins with `message`, or drops a frame of one that has its answer."""
        push_id: tensor_pb2.PushId | None = None
        try:
            if takes_long(message):
                yield _Wish.TIME
            header, frame = parse(message, pb.StreamPushesRequest)
            if header is None:
                raise MalformedMessage("StreamPushesRequest: a frame that belongs to no contribution; begin each with its header")
            push_id, self._is_dropping = header.header.push_id, False
            reply = yield from self._take(codec.decode_push_header(header.header), frame, num_bytes=header.header.content_bytes)
            return pb.StreamPushesResponse(push_id=push_id, reply=codec.encode_push_reply(reply)).SerializeToString()
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold this frame, and with it the model
        except Exception:
            failure = defect(self._name)
        if self._is_dropping and push_id is None:
            return None
        self._is_dropping = True
        return pb.StreamPushesResponse(push_id=push_id, error=encode_call_error(failure)).SerializeToString()

    def _take(self, header: PushHeader, frame: Frame | None, *, num_bytes: int) -> Generator[_Wish, bytes | None, PushReply]:
        with self._store.open_push(header) as push:
            if frame is not None and not frame.offset and num_bytes == len(frame.data) and self._is_quick(push):
                return push.finish_with(frame.data)
            if num_bytes:
                # Nothing but their number tells where the contribution ends.
                push.expect(num_bytes)
            while not push.is_settled:
                if frame is not None and header.encoding is FloatEncoding.INT8_BLOCKS:
                    yield _Wish.TIME
                if (frame is not None and not push.write(frame.offset, frame.data)) or push.is_whole:
                    break
                frame = yield from self._next_frame()
            # Whoever sends on does not know yet that nothing more is wanted.
            self._is_dropping = push.is_settled
            if not self._is_quick(push):
                yield _Wish.TIME
            return push.finish()

    def _is_quick(self, push: Push) -> bool:
        return push.is_small and self._store.is_quick

    def _next_frame(self) -> Generator[_Wish, bytes | None, Frame | None]:
        self._stream.begin_waiting()
        message = yield _Wish.MESSAGE
        self._stream.waiting_since = None
        if message is not None and takes_long(message):
            yield _Wish.TIME
        if message is None:
            raise TruncatedStream("the stream ended in the middle of a contribution; nothing was changed; send it again")
        header, frame = parse(message, pb.StreamPushesRequest)
        if header is not None:
            self._ahead = message
            raise TruncatedStream("the next contribution began in the middle of this one; nothing was changed; send it again")
        return frame
