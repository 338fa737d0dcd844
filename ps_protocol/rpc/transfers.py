"""Contributions and variables on their way over long-lived streams or data sockets, and how each goes on after its connection broke.

The receiver knows what has come. So a sender of a contribution asks the server, which answers with that number of bytes; a reader of
variables says from which byte on it wants them. What came over a data socket counts only as a whole. Knows messages; no retries: to
go on, a caller gives the same object again.
"""

import contextlib
from collections.abc import Callable

from ps_protocol.errors import MalformedMessage, PsError, StepNotReady, Unavailable
from ps_protocol.model.layout import Segments
from ps_protocol.process.waiting import Progress
from ps_protocol.roles.shard import LEAST_RESUMED_BYTES, MAX_STEP, MAX_WAIT_SLICE_S, PushHeader, PushReply, ReadRequest
from ps_protocol.rpc.client import not_understood
from ps_protocol.rpc.client_stream import LongLivedStream, Streams
from ps_protocol.rpc.payloads import Payloads, next_payload
from ps_protocol.sockets.data_socket import DataSocket, Receive
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message, pack_read_request
from ps_protocol.wire.frames import FRAME_BYTES, Frame, FrameWriter, encode_frame, encode_stream, from_offset, parse

# A contribution whose messages are made all at once.
_SMALL_BYTES = 64 << 10
# Of a contribution whose bytes the server has taken; all else it answers as soon as it knows.
_RECEIVED = (pb.PUSH_RESULT_STAGED, pb.PUSH_RESULT_APPLIED)


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


def check_step(step: int, wanted: int | None) -> None:
    """Raises MalformedMessage unless a step is the wanted one, or is possible where the latest is wanted."""
    if step == wanted or (wanted is None and 0 <= step <= MAX_STEP):
        return
    asked = "the latest step" if wanted is None else f"step {wanted}"
    raise MalformedMessage(f"{asked} was requested, and it answers with step {step}; install the same version on both sides")
