"""Hand-framed messages are protobuf, in both directions, for all bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_protocol.errors import FrameOutOfOrder, MalformedMessage, TruncatedStream
from ps_protocol.model.layout import Segments
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire.frames import FRAME_BYTES, Frame, StreamMessage, encode_frame, encode_stream, parse, takes_long, write_frames
from tests.support.examples import examples

PUSH = pb.PushRequest(
    header=pb.PushHeader(
        era=tensor_pb2.Era(life=1, epoch=3),
        push_id=tensor_pb2.PushId(worker=1, incarnation=2, sequence=1 << 63),
        step=1 << 40,
        layout_hash="abc",
    )
)
CREATE = pb.CreateVariablesRequest(spec=pb.ShardSpec(epoch=1, optimizer=tensor_pb2.OptimizerSpec(name="sgd")))
HEADERS: list[Any] = [PUSH, CREATE, pb.ReadResponse(header=pb.ReadHeader(step=1 << 40, num_bytes=8))]
HEADERS += [pb.ReadRowsResponse(step=step) for step in (1 << 40, 0, -1)]
HEADERS += [pb.ReadRowsRequest(header=pb.RowsHeader(epoch=1, table=2, step=0, num_rows=1 << 40))]
TYPES: list[Any] = list(StreamMessage.__constraints__)

each_type = pytest.mark.parametrize("message_type", TYPES, ids=lambda message_type: str(message_type.__name__))
headers = st.sampled_from(HEADERS)
offsets = st.integers(0, (1 << 64) - 1) | st.integers(0, 300)


def header_name(message: Any) -> str:
    return str(message.DESCRIPTOR.fields_by_number[1].name)


def meaning(message: bytes, message_type: Any) -> tuple[Any, tuple[int, bytes] | None]:
    """What `parse` says of the message."""
    header, frame = parse(message, message_type)
    value = None if header is None else getattr(header, header_name(header))
    return value, None if frame is None else (frame.offset, bytes(frame.data))


def meaning_by_protobuf(message: bytes, message_type: Any) -> tuple[Any, tuple[int, bytes] | None]:
    parsed = message_type.FromString(message)
    value = getattr(parsed, header_name(parsed)) if parsed.HasField(header_name(parsed)) else None
    return value, (parsed.frame.offset, parsed.frame.data) if parsed.HasField("frame") else None


def assert_means_the_same(message: bytes, message_type: Any) -> None:
    try:
        expected = meaning_by_protobuf(message, message_type)
    except DecodeError:
        with pytest.raises(MalformedMessage, match=f"are not a {message_type.__name__}"):
            parse(message, message_type)
        return
    assert meaning(message, message_type) == expected


@given(headers, offsets, st.binary(max_size=300), st.booleans())
def test_framed_message_is_byte_for_byte_what_protobuf_writes(header: Any, offset: int, data: bytes, is_first: bool) -> None:
    expected = type(header)(frame=tensor_pb2.ArenaFrame(offset=offset, data=data))
    if is_first:
        expected.MergeFrom(header)
    framed = encode_frame(header.SerializeToString() if is_first else b"", offset=offset, data=memoryview(data))
    # Protobuf leaves empty data out; to write it anyway means the same.
    assert type(header).FromString(framed) == expected
    assert not data or framed == expected.SerializeToString()


@given(headers, offsets, st.binary(max_size=300), st.booleans())
def test_a_framed_message_is_read_back_unchanged(header: Any, offset: int, data: bytes, is_first: bool) -> None:
    framed = encode_frame(header.SerializeToString() if is_first else b"", offset=offset, data=data)
    read_header, frame = parse(framed, type(header))
    assert frame is not None
    assert (frame.offset, bytes(frame.data)) == (offset, data)
    assert read_header == (header if is_first else None)


@given(headers, offsets, st.binary(max_size=300))
def test_messages_of_other_libraries_are_read(header: Any, offset: int, data: bytes) -> None:
    message = type(header)(frame=tensor_pb2.ArenaFrame(offset=offset, data=data))
    message.MergeFrom(header)
    assert_means_the_same(message.SerializeToString(), type(header))
    assert_means_the_same(header.SerializeToString(), type(header))


def varint(value: int, padding: int) -> bytes:
    """A varint with `padding` superfluous bytes, which is valid up to 10 bytes."""
    groups = [value >> shift & 0x7F for shift in range(0, max(7, value.bit_length()), 7)] + [0] * padding
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def field(number: int, wire_type: int, value: int, data: bytes, padding: int) -> bytes:
    tag = varint(number << 3 | wire_type, padding if padding > 2 else 0)
    if wire_type == 0:
        return tag + varint(value, padding)
    return tag + {1: bytes(8), 2: varint(len(data), padding) + data, 5: bytes(4)}[wire_type]


def fields(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    one = st.builds(
        field,
        st.sampled_from([1, 1, 2, 2, 2, 3, 15, 16]),
        st.sampled_from([0, 2, 2, 2, 1, 5]),
        offsets,
        data,
        st.sampled_from([0, 0, 0, 1, 5]),
    )
    return st.lists(one, max_size=4).map(b"".join)


odd_frames = fields(st.binary(max_size=20))
odd_messages = fields(odd_frames | st.sampled_from([PUSH.header.SerializeToString(), b"\xff"]))


@settings(max_examples=examples(400))
@given(odd_messages, st.sampled_from(TYPES))
@example(b"\x12\x00", pb.PushRequest)  # an empty frame
@example(b"\x12\x02\x08\x05", pb.PushRequest)  # a frame without data
@example(b"\x12\x02\x12\x00\x12\x02\x12\x00", pb.PushRequest)  # two frames, to be merged
@example(b"\x12\x05\x12\x01x\x08\x01", pb.PushRequest)  # data before the offset
@example(b"\x12\x83\x80\x80\x80\x80\x80\x00\x12\x01x", pb.PushRequest)  # a length in 7 bytes
@example(b"\x08" + b"\xff" * 9 + b"\x01", pb.ReadRowsResponse)  # step -1
@example(b"\x08" + b"\xff" * 9 + b"\x7f", pb.ReadRowsResponse)  # more than 64 bits
@example(b"\x08" + b"\xff" * 10, pb.ReadRowsResponse)  # no end
@example(b"\x0a\xff\xff\xff\xff\x0f", pb.PushRequest)  # a header of 4 GiB, announced only
@example(b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f", pb.PushRequest)
def test_unusual_layouts_mean_what_protobuf_says(message: bytes, message_type: Any) -> None:
    assert_means_the_same(message, message_type)


@settings(max_examples=examples(300))
@given(st.binary(max_size=60), st.sampled_from(TYPES))
def test_garbage_is_refused_exactly_when_protobuf_refuses_it(message: bytes, message_type: Any) -> None:
    assert_means_the_same(message, message_type)


@given(headers, st.data())
def test_cut_and_damaged_messages_mean_what_protobuf_says(header: Any, data: st.DataObject) -> None:
    message = bytearray(encode_frame(header.SerializeToString(), offset=data.draw(offsets), data=b"\x12\x34" * 30))
    assert_means_the_same(bytes(message[: data.draw(st.integers(0, len(message)))]), type(header))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    assert_means_the_same(bytes(message), type(header))


@each_type
def test_text_that_is_not_protobuf_is_refused_with_the_name_of_the_message(message_type: Any) -> None:
    with pytest.raises(MalformedMessage, match=f"9 bytes are not a {message_type.__name__}; use the same .proto on both sides"):
        parse(b"GET / HTT", message_type)


@each_type
def test_empty_message_has_neither_header_nor_frame(message_type: Any) -> None:
    assert parse(b"", message_type) == (None, None)


def test_payload_is_not_copied_when_it_is_read() -> None:
    message = encode_frame(PUSH.SerializeToString(), offset=5, data=bytes(1000))
    _, frame = parse(message, pb.PushRequest)
    assert frame is not None
    assert isinstance(frame.data, memoryview)
    assert frame.data.obj is message


def test_a_message_with_much_besides_the_data_of_a_frame_is_decoded_by_a_thread() -> None:
    data, many = bytes(FRAME_BYTES), pb.PushRequest(header=pb.PushHeader(absent=range(20_000))).SerializeToString()
    assert not takes_long(encode_frame(PUSH.SerializeToString(), offset=5, data=data))
    assert takes_long(many) and takes_long(encode_frame(many, offset=0, data=b"x"))
    assert takes_long(encode_frame(b"", offset=0, data=b"x") + many)
    assert takes_long(b"\x0a\xff\xff\xff\xff\x0f" + data)  # a header of 4 GiB, announced only


def stream(nbytes: int, frame_bytes: int = FRAME_BYTES) -> tuple[bytes, list[bytes]]:
    content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return content.tobytes(), list(encode_stream(PUSH, Segments([content[: nbytes // 3], content[nbytes // 3 :]]), frame_bytes=frame_bytes))


@pytest.mark.parametrize("nbytes", [1, 999, 3000, 10_000])
def test_stream_carries_the_arena_and_its_header_once(nbytes: int) -> None:
    content, messages = stream(nbytes, frame_bytes=1000)
    parsed = [parse(message, pb.PushRequest) for message in messages]
    assert [header for header, _ in parsed] == [PUSH] + [None] * (len(messages) - 1)
    assert b"".join(bytes(frame.data) for _, frame in parsed if frame) == content


def test_small_push_is_one_message_and_so_is_an_empty_one() -> None:
    assert len(list(encode_stream(PUSH, Segments([np.zeros(1000, np.uint8)])))) == 1
    assert list(encode_stream(PUSH, Segments([]))) == [PUSH.SerializeToString()]
    assert list(encode_stream(PUSH, Segments([np.zeros(0, np.uint8)]))) == [PUSH.SerializeToString()]


def test_message_of_a_large_tensor_fits_the_limit() -> None:
    _, messages = stream(3 * FRAME_BYTES)
    assert max(len(message) for message in messages) < FRAME_BYTES + 200


def test_rest_of_a_stream_is_written_in_order() -> None:
    content, messages = stream(5000, frame_bytes=1000)
    memory = np.zeros(5000, np.uint8)
    _, first = parse(messages[0], pb.PushRequest)
    assert first is not None
    write_frames(first, messages[1:], pb.PushRequest, Segments([memory]).writer())
    assert memory.tobytes() == content


def swapped(messages: list[bytes]) -> list[bytes]:
    return [messages[1], messages[0], *messages[2:]]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda messages: messages[:-1], TruncatedStream),
        (lambda messages: messages[1:], FrameOutOfOrder),
        (swapped, FrameOutOfOrder),
        (lambda messages: [messages[0], *messages], FrameOutOfOrder),
        (lambda messages: [*messages, encode_frame(b"", offset=4000, data=b"x")], FrameOutOfOrder),
        (lambda messages: [*messages, b"\xff"], MalformedMessage),
        (lambda messages: [PUSH.SerializeToString(), *messages], MalformedMessage),
    ],
    ids=["cut off", "first lost", "swapped", "repeated", "too long", "garbage", "second header"],
)
def test_spoiled_streams_are_refused(spoil: Callable[[list[bytes]], list[bytes]], error: type[Exception]) -> None:
    messages = [encode_frame(b"", offset=offset, data=bytes(1000)) for offset in range(0, 4000, 1000)]
    writer = Segments([np.zeros(4000, np.uint8)]).writer()
    with pytest.raises(error):
        write_frames(None, spoil(messages), pb.PushRequest, writer)


def test_frame_without_data_is_harmless() -> None:
    writer = Segments([np.zeros(2, np.uint8)]).writer()
    write_frames(None, [b"\x12\x00", b"", encode_frame(b"", offset=0, data=b"ab"), b"\x12\x02\x08\x02"], pb.PushRequest, writer)
    assert parse(b"\x12\x00", pb.PushRequest) == (None, Frame(0, memoryview(b"")))
