"""Streams from a shard that begin with a step, into memory. Knows messages and frames; no call."""

import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from ps_protocol.errors import MalformedMessage
from ps_protocol.framing import FrameWriter, parse, write_frames
from ps_protocol.v1 import parameter_service_pb2 as pb

Downward = TypeVar("Downward", pb.ReadVariablesResponse, pb.ReadSlotResponse, pb.ReadRowsResponse)


def kept_open(messages: Iterable[bytes], *, until: threading.Event) -> Iterator[bytes]:
    """The messages, and then an empty one, behind which the stream does not end before it may."""
    yield from messages
    yield b""
    until.wait()


def step_of(message: bytes, message_type: type[Downward], *, source: str) -> int:
    """Returns the step that the first message of a stream names; raises MalformedMessage."""
    header, _ = parse(message, message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    return header.step


def receive_into(
    messages: Iterator[bytes], message_type: type[Downward], writer: FrameWriter, *, source: str, held_step: int | None = None
) -> int:
    """Writes the frames of a stream and returns its step; that of `held_step` may have none. Raises MalformedMessage, TruncatedStream."""
    header, frame = parse(next(messages, b""), message_type)
    if header is None:
        raise MalformedMessage(f"{source}: the stream does not begin with a step")
    if frame is not None:
        writer.write(frame.offset, frame.data)
    write_frames(messages, message_type, writer)
    if writer.num_written or header.step != held_step:
        writer.finish()
    return header.step
