"""Protobuf to checked values and back, for who reads variables. Knows messages; no RPC, no tensor."""

from dataclasses import dataclass

from ps_protocol.codec import decode_duration, decode_message, encode_duration, require
from ps_protocol.codec_shard import decode_encoding, encode_encoding
from ps_protocol.encodings import FloatEncoding
from ps_protocol.v1 import parameter_service_pb2 as pb

# How long a server waits for a step that is asked for before it is there.
MAX_READ_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesRequest:
    """Which variables are wanted (`step` None: the latest), how they are to travel, and which step of them the reader has already."""

    epoch: int
    step: int | None
    layout_hash: str
    encoding: FloatEncoding = FloatEncoding.AS_IS
    held_step: int | None = None


def encode_read_request(request: VariablesRequest) -> pb.ReadVariablesRequest:
    """Encodes which variables are wanted."""
    return pb.ReadVariablesRequest(
        epoch=request.epoch,
        step=request.step,
        layout_hash=request.layout_hash,
        encoding=encode_encoding(request.encoding),
        held_step=request.held_step,
    )


def decode_read_request(message: pb.ReadVariablesRequest) -> VariablesRequest:
    """Decodes and checks which variables are wanted; raises InvalidSpec if they do not travel so."""
    return VariablesRequest(
        epoch=message.epoch,
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        encoding=decode_encoding(message.encoding, for_variables=True),
        held_step=message.held_step if message.HasField("held_step") else None,
    )


def encode_standing_request(request: VariablesRequest, *, max_wait_s: float = 0.0) -> bytes:
    """Encodes which variables are wanted on a standing stream, and how long a step that is not there yet is waited for."""
    message = pb.StreamVariablesRequest(read=encode_read_request(request))
    if max_wait_s:
        message.max_wait.CopyFrom(encode_duration(max_wait_s))
    return message.SerializeToString()


def decode_standing_request(request: bytes) -> tuple[VariablesRequest, float]:
    """Decodes and checks a request of a standing stream; the seconds to wait are never more than MAX_READ_WAIT_S."""
    message = decode_message(pb.StreamVariablesRequest, request)
    require(message, "read")
    wait_s = decode_duration(message.max_wait) if message.HasField("max_wait") else 0.0
    return decode_read_request(message.read), min(max(0.0, wait_s), MAX_READ_WAIT_S)
