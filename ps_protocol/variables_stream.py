"""Variables read over a standing stream, also before they are there. Knows requests and frames; no shard."""

import dataclasses

from ps_protocol.call_errors import decode_call_error
from ps_protocol.codec_reading import MAX_READ_WAIT_S, VariablesRequest, encode_standing_request
from ps_protocol.direct_stream import Stream
from ps_protocol.errors import MalformedMessage, PsError, StepNotReady
from ps_protocol.framing import Frame, FrameWriter, parse
from ps_protocol.standing_stream import StandingStream
from ps_protocol.v1 import parameter_service_pb2 as pb


class VariablesStream:
    """One request at a time. At most one step is expected; a read of anything else breaks the stream, since its answer may be large."""

    def __init__(self, standing: StandingStream, *, source: str) -> None:
        self._standing = standing
        self._source = source
        # What was asked for before it was there, and on which stream.
        self._expected: tuple[VariablesRequest, Stream] | None = None

    def expect(self, request: VariablesRequest, *, timeout_s: float) -> None:
        """Asks for a step that need not be there yet, and does not wait for it. Raises what `StandingStream.use` raises."""

        def ask(standing: StandingStream) -> bool:
            if self._taken_up(standing, request) is None:
                standing.stream.send(encode_standing_request(request, max_wait_s=MAX_READ_WAIT_S))
            self._expected = request, standing.stream
            return True

        self._standing.use(ask, timeout_s=timeout_s, awaited="nothing")

    def read(self, request: VariablesRequest, writer: FrameWriter, *, timeout_s: float, awaited: str) -> int | None:
        """Fills the writer's memory and returns the step; None if that cannot be done over a standing stream now.

        Raises the errors of ReadVariables and what `StandingStream.use` raises.
        """

        def receive(standing: StandingStream) -> int | PsError:
            expected = self._taken_up(standing, dataclasses.replace(request, held_step=None))
            if expected is not None:
                found = self._answer(standing.stream, request, writer)
                if not isinstance(found, StepNotReady):
                    return found
                # It was waited for in vain; but now it may be there.
            standing.stream.send(encode_standing_request(request))
            return self._answer(standing.stream, request, writer)

        found = self._standing.use(receive, timeout_s=timeout_s, awaited=awaited)
        if isinstance(found, PsError):
            raise found
        return found

    def _taken_up(self, standing: StandingStream, request: VariablesRequest) -> VariablesRequest | None:
        """Returns the request if it is under way already. If another one is, the stream is broken off."""
        expected, self._expected = self._expected, None
        if expected is None or expected[1] is not standing.stream:
            return None
        if expected[0] == request:
            return request
        standing.break_off()
        return None

    def _answer(self, stream: Stream, request: VariablesRequest, writer: FrameWriter) -> int | PsError:
        header, frame = self._parse(stream.receive())
        if header is None:
            raise MalformedMessage(f"{self._source}: an answer does not begin with a header")
        if header.HasField("error"):
            return decode_call_error(header.error)
        if header.step == request.held_step and not header.num_bytes:
            return header.step
        while True:
            if frame is not None:
                writer.write(frame.offset, frame.data)
            if writer.num_written >= header.num_bytes:
                break
            again, frame = self._parse(stream.receive())
            if again is not None:
                if again.HasField("error"):
                    return decode_call_error(again.error)
                raise MalformedMessage(f"{self._source}: a header came again in the middle of an answer")
        writer.finish()
        return header.step

    def _parse(self, message: bytes) -> tuple[pb.VariablesHeader | None, Frame | None]:
        header, frame = parse(message, pb.StreamVariablesResponse)
        return (None if header is None else header.header), frame
