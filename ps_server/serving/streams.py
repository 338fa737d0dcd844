"""The long-lived streams of a parameter server: contributions up, variables down, commands of the chief. Knows messages; decides nothing.

The thread that takes gRPC's events does only work that takes no longer than waking another thread. A thread of the stream does the rest,
and no message is taken meanwhile. An error is answered within its stream, which continues. A message that is too large, or a defect of
gRPC's, ends the stream.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import FrameOutOfOrder, LimitExceeded, MalformedMessage, PsError, TruncatedStream
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.request import requests_on
from ps_protocol.roles.shard import ApplyRequest, PushHeader, PushReply, ReadRequest
from ps_protocol.rpc.door import Methods
from ps_protocol.rpc.server_stream import Call, Peer, StreamThread
from ps_protocol.rpc.status import defect
from ps_protocol.sockets.data_socket import DataSocket
from ps_protocol.sockets.listener import NO_DATA_SOCKETS, DataListener
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.codec import decode_message, unpack_read_request
from ps_protocol.wire.frames import FRAME_BYTES, Frame, encode_frame, from_offset, parse, takes_long
from ps_server.model.shard_model import SMALL_BYTES
from ps_server.shard.handles import OpenPush, Reading, RowReading
from ps_server.shard.shard import ServedShard

# Ends streams in which nothing has moved for too long, since each holds a thread or memory.
#
# A long-lived stream rests between two of its calls, for as long as it likes.
#
# A chief's stream takes no place from other streams, and they take none from it: however many workers there are, or streams that somebody
# opens, the next command arrives. Of too many chiefs' streams the one that was used longest ago is ended.


log = logging.getLogger("lockstep.server")

IDLE_LIMIT_S = 30.0
# Each holds a thread: leaves some for all other calls.
MAX_SHARING = 3_072
# At rest or under way, beyond any cluster: a caller that opens streams without end is refused. Each takes about 24 KiB.
MAX_OPEN = 20_000
# Of chiefs, beside those: one for each chief, and a few that were lost and have not been seen to end.
MAX_OF_CHIEFS = 16

Message = TypeVar("Message")


class Stream:
    """One stream under way, and since when it has waited for its peer; None while it may, or while the server itself is at work."""

    def __init__(self, call: Call, name: str) -> None:
        self.call = call
        self.name = name
        self.is_resting = self.is_to_end = False
        self.waiting_since: float | None = None

    def begin_waiting(self) -> None:
        """Notes that its peer has to send the rest of a message."""
        self.waiting_since = time.monotonic()

    def begin_work(self) -> None:
        """Notes that its peer has sent the awaited message."""
        self.is_resting, self.waiting_since = False, None

    def incoming(self, messages: Iterator[Message]) -> Iterator[Message]:
        """Yields the peer's messages."""
        while True:
            if self.is_resting and self.is_to_end:
                self.call.cancel()
            self.waiting_since = None if self.is_resting else time.monotonic()
            message = next(messages, None)
            self.waiting_since = None
            if message is None:
                return
            yield message

    def outgoing(self, messages: Iterable[Message]) -> Generator[Message, None, None]:
        """Yields the messages for the peer; the next one is asked for when the peer has room for it."""
        for message in messages:
            self.waiting_since = time.monotonic()
            yield message
            self.waiting_since = None


class IdleStreams:
    """Watches streams from one thread of its own, between `start` and `stop`. Thread-safe.

    A stream that is cut ends as CANCELLED.
    """

    def __init__(self, *, limit_s: float = IDLE_LIMIT_S, max_open: int = MAX_OPEN) -> None:
        self._limit_s = limit_s
        self._max_open = max_open
        self._is_ending = False
        self._streams: set[Stream] = set()
        # Those of workers that share memory.
        self._sharing: set[Stream] = set()
        # Those of chiefs, the one that was used last at the end.
        self._of_chiefs: dict[Stream, None] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle-streams", daemon=True)

    @property
    def num_streams(self) -> int:
        """Streams under way."""
        return len(self._streams)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin_sharing(self, call: Call, *, name: str) -> Stream:
        """Watches one stream that rests from its beginning on, in a thread, until `end_of`. Raises LimitExceeded."""
        stream = Stream(call, name)
        stream.is_resting = True
        with self._lock:
            if len(self._sharing) >= MAX_SHARING or self._is_ending:
                raise LimitExceeded(f"{name}: {MAX_SHARING} workers at most share memory with one server; do without")
            self._sharing.add(stream)
            self._add(stream)
        return stream

    def begin(self, call: Call, *, name: str, is_of_chief: bool = False) -> Stream:
        """Watches one stream until `end_of`. Its peer is to send. Raises LimitExceeded but for a chief."""
        stream, unused = Stream(call, name), None
        stream.begin_waiting()
        with self._lock:
            if is_of_chief:
                unused = next(iter(self._of_chiefs)) if len(self._of_chiefs) >= MAX_OF_CHIEFS else None
                self._of_chiefs[stream] = None
            elif len(self._streams) - len(self._of_chiefs) >= self._max_open:
                raise LimitExceeded(f"{name}: {self._max_open} streams are open at this server; end some of them")
            self._add(stream)
        if unused is not None:
            self.end_of(unused)
            unused.call.cancel()
        return stream

    def rest(self, stream: Stream) -> None:
        """Lets a stream rest whose peer has its answer."""
        if stream in self._of_chiefs:
            with self._lock:
                if stream in self._of_chiefs:
                    self._of_chiefs[stream] = self._of_chiefs.pop(stream)
        stream.is_resting = True
        if stream.is_to_end:
            stream.call.cancel()

    def _add(self, stream: Stream) -> None:
        stream.is_to_end = self._is_ending
        self._streams.add(stream)

    def end_of(self, stream: Stream) -> None:
        """Ends a stream that has begun."""
        with self._lock:
            self._streams.discard(stream)
            self._sharing.discard(stream)
            self._of_chiefs.pop(stream, None)

    def end_long_lived(self) -> None:
        """Cancels each stream as soon as it rests: for a server that is about to end."""
        with self._lock:
            self._is_ending = True
            streams = [*self._streams]
        for stream in streams:
            # In this order: a stream that becomes idle meanwhile looks.
            stream.is_to_end = True
            if stream.is_resting:
                stream.call.cancel()

    def _run(self) -> None:
        while not self._stopping.wait(self._limit_s / 4):
            now = time.monotonic()
            with self._lock:
                idle = [stream for stream in self._streams if now - (stream.waiting_since or now) > self._limit_s]
            for stream in idle:
                log.warning(
                    "cut an idle stream rpc=%s peer=%s limit_s=%.3g",
                    stream.name,
                    stream.call.peer(),
                    self._limit_s,
                )
                stream.call.cancel()


# An arena as it goes out, message by message.


def content_messages(
    first: bytes, reading: Reading, encoding: FloatEncoding = FloatEncoding.AS_IS, *, start: int = 0
) -> Generator[bytes, None, None]:
    """Yields a reading's messages, from a byte on; `first`, serialised, is joined with the first frame, or goes alone. Raises StepGone."""
    chunks: Iterable[tuple[int, memoryview]] = reading.chunks(FRAME_BYTES, encoding)
    for offset, data in from_offset(chunks, start) if start else chunks:
        message = encode_frame(first, offset=offset, data=data)
        # After the copy and before it is visible.
        reading.check()
        yield message
        first = b""
    if first:
        yield first


# The indices of rows as they come in frames, and the rows as they go out.


_INDEX = np.dtype("<i8")


def index_blocks(frame: Frame | None, messages: Iterator[bytes], *, num_rows: int) -> Iterator[Array]:
    """Yields `num_rows` indices in blocks, as their frames come: `frame` is that of the first message, the rest are in `messages`.

    Holds one frame at a time, so that a caller cannot make the server allocate more by asking for more. Raises FrameOutOfOrder,
    TruncatedStream, MalformedMessage.
    """
    num_bytes, received, rest = num_rows * _INDEX.itemsize, 0, b""
    while True:
        if frame is not None:
            _check_place(frame, received=received, num_bytes=num_bytes)
            received += len(frame.data)
            # A frame may end in the middle of an index.
            data = rest + bytes(frame.data)
            whole = len(data) // _INDEX.itemsize * _INDEX.itemsize
            rest = data[whole:]
            yield np.frombuffer(data, _INDEX, count=whole // _INDEX.itemsize)
        message = next(messages, None)
        if message is None:
            break
        header, frame = parse(message, pb.ReadRowsRequest)
        if header is not None:
            raise MalformedMessage("ReadRowsRequest: a header came again in the middle of the stream; send it first only")
    if received != num_bytes:
        raise TruncatedStream(
            f"{received} of {num_bytes} bytes of indices received; send {_INDEX.itemsize} for each of the {num_rows} rows"
        )


def row_messages(rows: RowReading, blocks: Iterator[Array]) -> Iterator[bytes]:
    """Yields the messages that answer ReadRows, in the order of the indices; without rows there is one, the header alone."""
    first, offset = pb.ReadRowsResponse(step=rows.step).SerializeToString(), 0
    rows_at_once = max(1, FRAME_BYTES // max(1, rows.row_bytes))
    for indices in blocks:
        for start in range(0, len(indices), rows_at_once):
            taken = rows.take(indices[start : start + rows_at_once]).reshape(-1).view(np.uint8)
            for begin, data in Segments([taken]).chunks(FRAME_BYTES):
                yield encode_frame(first, offset=offset + begin, data=data)
                first = b""
            offset += taken.nbytes
    if first:
        yield first


def _check_place(frame: Frame, *, received: int, num_bytes: int) -> None:
    if frame.offset != received:
        raise FrameOutOfOrder(f"frame at offset {frame.offset}, expected {received}; send frames in order, with no gap or overlap")
    if received + len(frame.data) > num_bytes:
        raise FrameOutOfOrder(f"frame at offset {received} has {len(frame.data)} bytes and ends beyond the indices' {num_bytes}")


# The data socket that carries a stream's payloads.


class StreamSocket:
    """The data socket that a stream has named last; it ends with the stream. `close` may come from any thread."""

    def __init__(self, listener: DataListener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._socket: DataSocket | None = None
        self._is_closed = False

    def named(self, nonce: bytes) -> DataSocket:
        """Returns the data socket with this nonce; it takes the place of another one. Raises MalformedMessage if there is none."""
        found = self._socket
        if found is not None and found.nonce == nonce:
            return found
        found = self._listener.claim(nonce)
        with self._lock:
            former, self._socket = self._socket, found
            is_closed = self._is_closed
        if former is not None:
            former.close()
        if is_closed:
            found.close()
        return found

    def close(self) -> None:
        """Closes the data socket, if there is one."""
        with self._lock:
            found, self._is_closed = self._socket, True
        if found is not None:
            found.close()


# Contributions that follow each other in one long-lived stream.


class _Wish(enum.Enum):
    """What a flow of contributions needs next: a message (None: no more will come), or None in a thread that may take long."""

    MESSAGE = enum.auto()
    TIME = enum.auto()


_Flow = Generator[_Wish, bytes | None, None]


class PushStream:
    """See FinishingHandler. One stream of contributions."""

    def __init__(
        self,
        shard: ServedShard,
        peer: Peer,
        call: Call,
        *,
        idle_streams: IdleStreams,
        data_sockets: DataListener = NO_DATA_SOCKETS,
        name: str,
    ) -> None:
        self._peer, self._idle_streams, self._name = peer, idle_streams, name
        self._stream, self._socket = idle_streams.begin(call, name="Push"), StreamSocket(data_sockets)
        self._thread = StreamThread(peer, server_name=name)
        self._flow: _Flow = _Contributions(
            shard, peer, self._stream, self._socket, idle_streams=idle_streams, answer=self._answer, name=name
        ).flow()
        self._lock = threading.Lock()
        self._is_running = self._is_closed = False
        self._advance(None)

    def take(self, message: bytes) -> None:
        """Takes in the next message of a contribution, and answers the contribution that it completes; or has the stream's thread do it."""
        if self._advance(message) is _Wish.TIME:
            self._peer.pause()
            self._thread.do(self._take_time)

    def finish(self) -> None:
        """Handles the worker's end of the stream: an incomplete contribution is answered with an error."""
        self._advance(None)
        self._peer.end()

    def close(self) -> None:
        """Ends the stream; drops an incomplete contribution."""
        self._idle_streams.end_of(self._stream)
        self._socket.close()
        self._thread.end()
        with self._lock:
            self._is_closed, is_left_to_others = True, self._is_running
        if not is_left_to_others:
            self._flow.close()

    def _take_time(self) -> None:
        while self._advance(None) is _Wish.TIME:
            pass
        self._peer.resume()

    def _answer(self, message: bytes) -> None:
        """Sends an answer after which nothing is sent before the worker's next message."""
        if self._thread.has_begun:
            # The next message would be taken while the thread is still at this one.
            self._peer.send(message)
        else:
            self._peer.answer(message)

    def _advance(self, message: bytes | None) -> _Wish | None:
        """Runs the flow to its next wish; None if it is over. One thread at a time, but for `close`."""
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
    """One stream of contributions. After one that is answered before it is whole, its frames are dropped until the next header.

    `answer` sends an answer after which nothing is sent before the next message.
    """

    def __init__(
        self,
        shard: ServedShard,
        peer: Peer,
        stream: Stream,
        data_socket: StreamSocket,
        *,
        idle_streams: IdleStreams,
        answer: Callable[[bytes], None],
        name: str,
    ) -> None:
        self._shard, self._peer, self._stream, self._idle_streams, self._name = shard, peer, stream, idle_streams, name
        self._send_last = answer
        self._socket = data_socket
        self._is_dropping = self._has_ended = False
        # Begins the next contribution, and was read too early.
        self._ahead: bytes | None = None

    def flow(self) -> _Flow:
        """Takes messages, and sends one answer for each contribution, in order."""
        while True:
            message, self._ahead = self._ahead, None
            if message is None:
                message = yield _Wish.MESSAGE
                self._stream.begin_work()
            if message is None:
                return
            answer = yield from self._answer(message)
            if self._ahead is not None:
                if answer is not None:
                    self._peer.send(answer)
                continue
            if answer is not None:
                self._send_last(answer)
            self._idle_streams.rest(self._stream)

    def _answer(self, message: bytes) -> Generator[_Wish, bytes | None, bytes | None]:
        """Takes in the contribution that begins with `message`, or drops a frame of one that has its answer."""
        push_id: tensor_pb2.PushId | None = None
        try:
            if takes_long(message):
                yield _Wish.TIME
            header, frame = parse(message, pb.PushRequest)
            if header is None:
                raise MalformedMessage("PushRequest: a frame that belongs to no contribution; begin each with its header")
            push_id, self._is_dropping = header.header.push_id, False
            value, num_bytes = codec.decode(PushHeader, header.header), header.header.content_bytes
            if header.header.HasField("payload"):
                yield _Wish.TIME
                # No frames of it follow, whatever its outcome.
                self._is_dropping = True
                reply = self._receive(value, header.header.payload, num_bytes=num_bytes)
            else:
                reply = yield from self._take(value, frame, num_bytes=num_bytes, resumes=header.header.resumes)
            response = pb.PushResponse(push_id=push_id)
            codec.write(reply, response.reply)
            return response.SerializeToString()
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold this frame, and with it the model
        except Exception:
            failure = defect(self._name)
        if self._is_dropping and push_id is None:
            return None
        self._is_dropping = True
        return pb.PushResponse(push_id=push_id, error=encode_call_error(failure)).SerializeToString()

    def _take(self, header: PushHeader, frame: Frame | None, *, num_bytes: int, resumes: bool) -> Generator[_Wish, bytes | None, PushReply]:
        with self._shard.open_push(header, resumes=resumes) as push:
            if resumes and not push.is_answered:
                push_id = codec.encode(header.push_id)
                self._peer.send(pb.PushResponse(push_id=push_id, received_bytes=push.num_received).SerializeToString())
            if frame is not None and not frame.offset and num_bytes == len(frame.data) and self._is_quick(push):
                return push.finish_with(frame.data)
            if num_bytes:
                # Only their number shows where the contribution ends.
                push.expect(num_bytes)
            while not push.is_answered:
                if frame is not None and FORMATS[header.encoding].is_decoded_on_arrival:
                    yield _Wish.TIME
                if (frame is not None and not push.write(frame.offset, frame.data)) or push.is_whole:
                    break
                frame = yield from self._next_frame()
                if self._has_ended:
                    return push.finish()  # raises, and names the missing parts
            # A caller that still sends does not know yet that nothing more is wanted.
            self._is_dropping = push.is_answered
            if not self._is_quick(push):
                yield _Wish.TIME
            return push.finish()

    def _receive(self, header: PushHeader, payload: pb.Payload, *, num_bytes: int) -> PushReply:
        """Receives a contribution over the data socket. Closes the socket if the contribution is not received to its end."""
        data_socket, is_received = self._socket.named(payload.socket), False
        try:
            with self._shard.open_push(header) as push:
                push.expect(num_bytes)
                if not push.is_answered:
                    is_received = data_socket.receive(
                        payload.number, num_bytes, push.receive, on_wait=self._stream.begin_waiting, on_bytes=self._stream.begin_work
                    )
                    if not is_received and not push.is_answered:
                        raise TruncatedStream("the contribution was taken back by its sender; nothing was changed; send it again")
                return push.finish()
        finally:
            if not is_received:
                data_socket.close()

    def _is_quick(self, push: OpenPush) -> bool:
        return push.is_small and self._shard.is_quick

    def _next_frame(self) -> Generator[_Wish, bytes | None, Frame | None]:
        self._stream.begin_waiting()
        message = yield _Wish.MESSAGE
        self._stream.begin_work()
        if message is not None and takes_long(message):
            yield _Wish.TIME
        self._has_ended = message is None
        if message is None:
            return None
        header, frame = parse(message, pb.PushRequest)
        if header is not None:
            self._ahead = message
            raise TruncatedStream("the next contribution began in the middle of this one; nothing was changed; send it again")
        return frame


# Variables that are asked for over one long-lived stream, also before they are there.
#
# A request that has to wait holds no thread. What is small is copied and sent by the thread that takes gRPC's events, or that has made the
# step; what is large, or what the reader is slow to take, by a thread of the stream's own. There is one request at a time: the next one is
# taken when this one is answered.


# Answers that a reader has not taken; from here on they are made one by one, as it takes them.
_MAX_UNSENT = 4


class VariablesStream:
    """See Handler. One stream of variables."""

    def __init__(
        self,
        shard: ServedShard,
        peer: Peer,
        call: Call,
        *,
        idle_streams: IdleStreams,
        data_sockets: DataListener = NO_DATA_SOCKETS,
        deadlines: CallDeadlines,
        name: str,
    ) -> None:
        self._shard, self._peer, self._idle_streams, self._deadlines, self._name = shard, peer, idle_streams, deadlines, name
        self._socket = StreamSocket(data_sockets)
        # How the present answer travels; None: in frames. And its first byte.
        self._payload: tuple[DataSocket, int] | None = None
        self._offset = 0
        self._stream = idle_streams.begin(call, name="Read")
        self._waiting: _Wait | None = None
        self._thread = StreamThread(peer, server_name=name)

    def take(self, message: bytes) -> None:
        """Answers a request, now or when its step is there."""
        self._peer.pause()
        self._stream.begin_work()
        try:
            wanted, max_wait_s, payload, self._offset = unpack_read_request(message)
            self._payload = None if payload is None else (self._socket.named(payload.socket), payload.number)
        except PsError as error:
            self._break_off(error)
            return
        if max_wait_s > 0 and not wanted.slot:
            self._waiting = wait = _Wait(self, wanted)
            if not self.look(wait):
                wait.begin(self._deadlines, max_wait_s)
        elif wanted.slot:
            # A step that is being applied is waited for.
            self._thread.do(partial(self.answer, wanted))
        else:
            self.answer(wanted)

    def close(self) -> None:
        """The stream is over."""
        self._idle_streams.end_of(self._stream)
        self._socket.close()
        wait = self._waiting
        if wait is not None and wait.claim():
            self._shard.forget(wait.look)
        self._thread.end()

    def look(self, wait: "_Wait") -> bool:
        """Answers a request whose step is there, or which is wrong; False if it waits on."""
        wanted = wait.wanted
        try:
            reading = self._shard.await_variables(wait.look, wanted)
            if reading is None:
                return False
            if wait.claim():
                self._send(wanted, reading)
        except PsError as error:
            if wait.claim():
                self._break_off(error)
        except Exception:
            if wait.claim():
                self._break_off(defect(self._name))
        return True

    def answer(self, wanted: ReadRequest) -> None:
        """Answers a request that does not wait, or not any more."""
        try:
            self._send(wanted, self._shard.open_slot(wanted) if wanted.slot else self._shard.open_variables(wanted))
        except PsError as error:
            self._break_off(error)
        except Exception:
            self._break_off(defect(self._name))

    def forget(self, wait: "_Wait") -> None:
        """Has the shard forget a request."""
        self._shard.forget(wait.look)

    def _send(self, wanted: ReadRequest, reading: Reading) -> None:
        header = pb.ReadHeader(step=reading.step)
        if reading.step == wanted.held_step:
            self._end_with(pb.ReadResponse(header=header).SerializeToString())
            return
        if wanted.encoding is FloatEncoding.INT4_BLOCKS:
            self._by_thread(partial(self._send_moves, header, reading))
        else:
            self._send_values(header, reading, wanted.encoding)

    def _send_moves(self, header: pb.ReadHeader, reading: Reading) -> None:
        """Sends how the values moved, where that is exact; else the values as they are."""
        self._send_values(header, reading.moves() or reading, FloatEncoding.AS_IS)

    def _send_values(self, header: pb.ReadHeader, reading: Reading, encoding: FloatEncoding) -> None:
        header.num_bytes = num_bytes = reading.nbytes(encoding)
        if self._payload is not None and num_bytes:
            header.by_socket = True
            self._peer.send(pb.ReadResponse(header=header).SerializeToString())
            self._by_thread(partial(self._send_by_socket, *self._payload, reading, encoding))
            return
        first = pb.ReadResponse(header=header).SerializeToString()
        if num_bytes <= SMALL_BYTES and self._peer.num_unsent < _MAX_UNSENT:
            *before, last = content_messages(first, reading, encoding, start=self._offset)
            for message in before:
                self._peer.send(message)
            self._end_with(last)
            return
        self._by_thread(partial(self._send_one_by_one, first, reading, encoding))

    def _send_one_by_one(self, first: bytes, reading: Reading, encoding: FloatEncoding) -> None:
        with closing(content_messages(first, reading, encoding, start=self._offset)) as messages:
            for message in self._stream.outgoing(messages):
                if not self._peer.wait_for_room():
                    return
                self._peer.send(message)
        self._done()

    def _send_by_socket(self, data_socket: DataSocket, number: int, reading: Reading, encoding: FloatEncoding) -> None:
        with closing(reading.chunks(FRAME_BYTES, encoding)) as chunks:
            sent = (data for _, data in self._stream.outgoing(chunks))
            data_socket.send(number, reading.nbytes(encoding), sent, confirm=reading.check)
        self._done()

    def _by_thread(self, work: Callable[[], object]) -> None:
        """Leaves a part of an answer to the stream's thread; if it fails, that is the answer."""

        def run() -> None:
            try:
                work()
            except PsError as error:
                self._break_off(error)
            except Exception:
                self._break_off(defect(self._name))

        self._thread.do(run)

    def _break_off(self, error: PsError) -> None:
        self._peer.send(pb.ReadResponse(header=pb.ReadHeader(error=encode_call_error(error))).SerializeToString())
        self._done()

    def _end_with(self, message: bytes) -> None:
        """Sends the last message of an answer, and asks for the next request by the same operation."""
        self._peer.answer(message)
        self._idle_streams.rest(self._stream)

    def _done(self) -> None:
        self._idle_streams.rest(self._stream)
        self._peer.resume()


class _Wait:
    """A request that waits for its step. Thread-safe: it is answered once, by the step, the time or the end of the stream."""

    def __init__(self, stream: VariablesStream, wanted: ReadRequest) -> None:
        self.wanted = wanted
        self._stream = stream
        self._lock = threading.Lock()
        self._is_answered = False
        self._watched: tuple[CallDeadlines, int] | None = None

    def begin(self, deadlines: CallDeadlines, max_wait_s: float) -> None:
        """Lets it wait so long."""
        number = deadlines.begin(self, timeout_s=max_wait_s)
        with self._lock:
            self._watched = deadlines, number
            is_late = self._is_answered
        if is_late:
            deadlines.end(number)

    def claim(self) -> bool:
        """Returns True to exactly one caller, which answers the request."""
        with self._lock:
            if self._is_answered:
                return False
            self._is_answered = True
            watched = self._watched
        if watched is not None:
            watched[0].end(watched[1])
        return True

    def look(self) -> None:
        """Something has changed."""
        if not self._is_answered:
            self._stream.look(self)

    def expire(self) -> None:
        """Its time is up."""
        if self.claim():
            self._stream.forget(self)
            self._stream.answer(self.wanted)


# The long-lived stream of the chief: its commands to a parameter server with every step, in order.
#
# A chief may be silent for as long as it likes, so nothing cuts its stream but the end of the server.


_PATH = "/ps_protocol.v1.ParameterService"
_COMMANDS = requests_on("ParameterService", "Command")


class CommandStream:
    """See FinishingHandler. The stream of a chief; as soon as a command may take long, this and all later ones are left to its thread."""

    def __init__(self, shard: ServedShard, peer: Peer, call: Call, *, idle_streams: IdleStreams, name: str) -> None:
        self._shard, self._peer, self._idle_streams, self._name = shard, peer, idle_streams, name
        self._caller = call.peer
        self._stream = idle_streams.begin(call, name="Command", is_of_chief=True)
        self._thread = StreamThread(peer, server_name=name)

    def take(self, message: bytes) -> None:
        """Carries out a command, or has the stream's thread do it."""
        if not self._thread.has_begun and self._shard.is_quick:
            self._stream.begin_work()
            self._peer.pause()
            self._carry_out(message, self._peer.answer)
            self._idle_streams.rest(self._stream)
        else:
            self._peer.pause()
            self._thread.do(partial(self._take_time, message))

    def finish(self) -> None:
        """The chief sends no more: the stream ends when all is done."""
        if self._thread.has_begun:
            self._thread.do(self._peer.end)
        else:
            self._peer.end()

    def close(self) -> None:
        """The stream is over."""
        self._idle_streams.end_of(self._stream)
        self._thread.end()

    def _take_time(self, message: bytes) -> None:
        # The next one may come while this is at work.
        self._peer.resume()
        self._stream.begin_work()
        answers: list[bytes] = []
        self._carry_out(message, answers.append)
        for answer in answers:
            if self._peer.wait_for_room():
                self._peer.send(answer)
        self._idle_streams.rest(self._stream)

    def _carry_out(self, data: bytes, answer: Callable[[bytes], object]) -> None:
        """Carries out a command and answers it before readers learn of the new step. Raises MalformedMessage."""
        try:
            message = decode_message(pb.CommandRequest, data)
        except MalformedMessage as error:
            log.warning("cannot understand the chief at %s: %s; its stream of commands is ended", self._caller(), error.message)
            raise
        try:
            self._do(message, lambda reply: answer(reply.SerializeToString()))
            return
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold this frame, and with it the model
        except Exception:
            failure = defect(self._name)
        answer(pb.CommandResponse(call=message.call, error=encode_call_error(failure)).SerializeToString())

    def _do(self, message: pb.CommandRequest, answer: Callable[[pb.CommandResponse], object]) -> None:
        field = message.WhichOneof("command")
        if field is None:
            raise MalformedMessage(f"command {message.call}: it asks for nothing that this server knows")
        request_type = _COMMANDS[field]

        def reply(found: object) -> None:
            response = pb.CommandResponse(call=message.call)
            codec.write_answer(request_type, found, getattr(response, field))
            answer(response)

        request: Any = codec.decode(request_type, getattr(message, field))
        if isinstance(request, ApplyRequest):
            self._shard.apply_step(request, on_applied=reply)
        else:
            reply(self._shard.call(request))


class StreamService:
    """Serves one shard. Thread-safe; events serve a stream as long as its payloads are small."""

    def __init__(
        self,
        shard: ServedShard,
        *,
        idle_streams: IdleStreams,
        data_sockets: DataListener = NO_DATA_SOCKETS,
    ) -> None:
        name = f"ps {shard.index}"
        self._deadlines = deadlines = CallDeadlines()
        self.methods: Methods = {
            f"{_PATH}/Push": lambda peer, call: PushStream(
                shard, peer, call, idle_streams=idle_streams, data_sockets=data_sockets, name=name
            ),
            f"{_PATH}/Read": lambda peer, call: VariablesStream(
                shard, peer, call, idle_streams=idle_streams, data_sockets=data_sockets, deadlines=deadlines, name=name
            ),
            f"{_PATH}/Command": lambda peer, call: CommandStream(shard, peer, call, idle_streams=idle_streams, name=name),
        }

    def close(self) -> None:
        """Frees the resources that the streams share, when they are over. Idempotent."""
        self._deadlines.close()
