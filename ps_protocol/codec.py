"""Protobuf to checked values and back, for what all services speak of: element types, push ids, durations, choices. Knows no RPC.

`encode_…` makes a message of a value; `decode_…` checks a message that came from anywhere and raises MalformedMessage, InvalidSpec or
LimitExceeded with the place in its text. What a model is made of is in `codec_variables`, and what is particular to one service in
`codec_shard`, `codec_chief` and so on.
"""

import enum
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import InvalidSpec, MalformedMessage, PsError
from ps_protocol.shard import PushId
from ps_protocol.tensors import DataType
from ps_protocol.v1 import tensor_pb2 as pb
from ps_protocol.variable_options import SparseMean

_DATA_TYPES: dict[int, DataType] = {pb.DataType.Value(f"DATA_TYPE_{data_type.name}"): data_type for data_type in DataType}

Choice = TypeVar("Choice", bound=enum.Enum)
Encoded = TypeVar("Encoded")
Decoded = TypeVar("Decoded")
AnyMessage = TypeVar("AnyMessage", bound=Message)


def decode_message(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message that came as bytes; raises MalformedMessage if they are none."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes are not a {message_type.DESCRIPTOR.name}; send what the .proto describes") from None


def require(message: Message, field: str) -> None:
    """Raises MalformedMessage unless the message has this field."""
    if not message.HasField(field):
        raise MalformedMessage(f"{message.DESCRIPTOR.name}: {field} is missing; set it")


def decode_choice(choices: type[Choice], value: int, *, field: str) -> Choice:
    """Returns the member with this number; raises MalformedMessage if there is none (0: the field was left out)."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(f"{choice.value} ({choice.name})" for choice in choices)
        raise MalformedMessage(f"{field}: got {value}, want one of {known}") from None


def decode_each(messages: Iterable[Encoded], decode: Callable[[Encoded], Decoded], *, field: str) -> tuple[Decoded, ...]:
    """Decodes a repeated field; an error's text begins with the place, for example "variables[3]: "."""
    decoded: list[Decoded] = []
    try:
        for message in messages:
            decoded.append(decode(message))
    except PsError as error:
        raise type(error)(f"{field}[{len(decoded)}]: {error.message}", facts=error.facts) from None
    return tuple(decoded)


def encode_duration(seconds: float) -> Duration:
    """Returns the duration, to the nanosecond; a negative one counts as 0."""
    whole, nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def decode_duration(duration: Duration) -> float:
    """Returns seconds; 0 if the duration was left out."""
    return duration.seconds + duration.nanos / 1e9


def encode_data_type(data_type: DataType) -> str:
    """Encodes an element type, as a message's constructor takes it."""
    return f"DATA_TYPE_{data_type.name}"


def decode_data_type(value: int, *, what: str) -> DataType:
    """Returns the element type; raises InvalidSpec naming `what` if there is none, or none that this server knows."""
    data_type = _DATA_TYPES.get(value)
    if data_type is None:
        known = ", ".join(data_type.value for data_type in DataType)
        raise InvalidSpec(f"{what}: dtype {value} unknown; want one of {known}")
    return data_type


def encode_sparse_mean(sparse_mean: SparseMean) -> str:
    """Encodes what the rows of a sparse gradient are divided by, as a message's constructor takes it."""
    return f"SPARSE_MEAN_{sparse_mean.name}"


def decode_sparse_mean(value: int) -> SparseMean:
    """Returns what the rows of a sparse gradient are divided by; PER_INDEX if it was left out."""
    return decode_choice(SparseMean, value or SparseMean.PER_INDEX.value, field="sparse_mean")


def encode_push_id(push_id: PushId) -> pb.PushId:
    """Encodes the name of a contribution."""
    return pb.PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=push_id.sequence)


def decode_push_id(message: pb.PushId) -> PushId:
    """Decodes the name of a contribution; raises MalformedMessage if a part of it was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")
    return PushId(worker=message.worker, incarnation=message.incarnation, sequence=message.sequence)
