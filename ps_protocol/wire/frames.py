"""The messages of the tensor streams, framed by hand so that a payload is copied once. Knows bytes and offsets; no tensor, no RPC."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.layout import Segments
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire.codec import decode_message

StreamMessage = TypeVar(
    "StreamMessage",
    pb.CreateVariablesRequest,
    pb.PushRequest,
    pb.ReadResponse,
    pb.ReadRowsRequest,
    pb.ReadRowsResponse,
    accumulator_service_pb2.ApplyGradientRequest,
    accumulator_service_pb2.TakeGradientResponse,
    board_service_pb2.PostOnBoardRequest,
    board_service_pb2.ReadBoardResponse,
)

FRAME_BYTES = 1 << 20
# As much besides its frame's data is decoded in a moment, also by `parse`'s caller.
_QUICK_BYTES = 16 << 10
_VARINT_FIELD_1 = 0x08
_BYTES_FIELD_1 = 0x0A
_BYTES_FIELD_2 = 0x12


@light_dataclass(frozen=True, slots=True)
class Frame:
    """A piece of an arena. `data` lives as long as it is referenced."""

    offset: int
    data: bytes | memoryview


class FrameWriter(Protocol):
    """Fills memory from frames that come in order, as SegmentWriter does."""

    num_written: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in all."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Takes the next bytes; raises FrameOutOfOrder."""

    def fill(self, receive: Callable[[memoryview], int]) -> None:
        """Has the next bytes written by `receive`, which returns how many these are."""

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""


def encode_frame(first: bytes, *, offset: int, data: bytes | memoryview) -> bytes:
    """Returns a stream message with a frame, copying `data` once.

    `first` is the serialised message without a frame (header only) for the first message of a stream, and b"" for the others.
    """
    inner = b"\x08" + _varint(offset) if offset else b""
    inner = b"".join((inner, b"\x12", _varint(len(data))))
    return b"".join((first, b"\x12", _varint(len(inner) + len(data)), inner, data))


def encode_stream(header: Message, content: Segments, *, frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Yields the messages of a whole stream: `header` is the stream's message without a frame; it travels together with the first frame.

    A frame's bytes are read when its message is asked for. Without content there is one message, the header alone.
    """
    first = header.SerializeToString()
    for offset, data in content.chunks(frame_bytes):
        yield encode_frame(first, offset=offset, data=data)
        first = b""
    if first:
        yield first


def from_offset(chunks: Iterable[tuple[int, memoryview]], start: int) -> Iterator[tuple[int, memoryview]]:
    """Yields of (offset, bytes) in order what lies from `start` on."""
    for offset, data in chunks:
        if offset >= start:
            yield offset, data
        elif offset + len(data) > start:
            yield start, data[start - offset :]


def parse(message: bytes, message_type: type[StreamMessage]) -> tuple[StreamMessage | None, Frame | None]:
    """Splits a stream message into its header (the message without its frame) and its frame; what it lacks is None.

    Raises MalformedMessage if it is not a `message_type`. The frame's data is a view into `message` where the layout is the usual one.
    """
    start = _end_of_field_1(message)
    span = _frame_span(message, start)
    if span is None:
        return _parse_slowly(message, message_type)
    offset, begin = span
    header = decode_message(message_type, message[:start]) if start else None
    frame = Frame(offset, memoryview(message)[begin:]) if begin >= 0 else None
    return (header if header is not None and _has_header(header) else None), frame


def takes_long(message: bytes) -> bool:
    """Whether decoding a stream message may take long: it has much besides its frame's data, such as a long list."""
    if len(message) <= _QUICK_BYTES:
        return False
    start = _end_of_field_1(message)
    return start > _QUICK_BYTES or _frame_span(message, start) is None


def write_frames(frame: Frame | None, messages: Iterable[bytes], message_type: type[StreamMessage], writer: FrameWriter) -> None:
    """Writes all frames of a stream, that of its first message first; raises MalformedMessage if a later one carries a header again."""
    if frame is not None:
        writer.write(frame.offset, frame.data)
    for message in messages:
        header, frame = parse(message, message_type)
        if header is not None:
            raise MalformedMessage(
                f"{_name(message_type)}: a header came again in the middle of the stream; send it in the first message only"
            )
        if frame is not None:
            writer.write(frame.offset, frame.data)
    writer.finish()


def _parse_slowly(message: bytes, message_type: type[StreamMessage]) -> tuple[StreamMessage | None, Frame | None]:
    parsed = decode_message(message_type, message)
    frame = Frame(parsed.frame.offset, parsed.frame.data) if parsed.HasField("frame") else None
    parsed.ClearField("frame")
    return (parsed if _has_header(parsed) else None), frame


def _name(message_type: type[StreamMessage]) -> str:
    return message_type.DESCRIPTOR.name


def _has_header(message: StreamMessage) -> bool:
    return message.HasField(message.DESCRIPTOR.fields_by_number[1].name)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Returns a value and the position after it; the position is -1 if there is none, or none that a library would write."""
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            is_usual = value < 1 << 64 and (byte or not index)
            return value, position + index + 1 if is_usual else -1
    return 0, -1


def _end_of_field_1(message: bytes) -> int:
    """Returns where a leading field 1 ends; 0 if there is none, -1 if it is cut off."""
    tag = message[0] if message else -1
    if tag not in (_VARINT_FIELD_1, _BYTES_FIELD_1):
        return 0
    value, position = _read_varint(message, 1)
    if position < 0 or tag == _VARINT_FIELD_1:
        return position
    return position + value if position + value <= len(message) else -1


def _frame_span(message: bytes, start: int) -> tuple[int, int] | None:
    """Returns the frame's offset and where its data begins, to end with the message (-1: no frame); None: another layout."""
    if start < 0:
        return None
    if start == len(message):
        return 0, -1
    size, position = _field_2(message, start)
    if position < 0 or position + size != len(message):
        return None
    offset = 0
    if position < len(message) and message[position] == _VARINT_FIELD_1:
        offset, position = _read_varint(message, position + 1)
    if position == len(message):
        return offset, position
    size, position = _field_2(message, position) if position >= 0 else (0, -1)
    return (offset, position) if position >= 0 and position + size == len(message) else None


def _field_2(message: bytes, position: int) -> tuple[int, int]:
    """Returns the length of field 2's bytes and where they begin; begin is -1 if another field stands here."""
    if message[position] != _BYTES_FIELD_2:
        return 0, -1
    return _read_varint(message, position + 1)
