"""Protobuf to checked values and back, for what both services speak of: specs, slices, optimizers, push ids, durations. Knows no RPC.

`encode_…` makes a message of a value; `decode_…` checks a message that came from anywhere and raises MalformedMessage, InvalidSpec or
LimitExceeded with the place in its text. What is particular to one service is in `codec_shard` and `codec_chief`.
"""

import enum
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import InvalidSpec, MalformedMessage, PsError
from ps_protocol.layout import VariableSlice
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule, check_optimizer_name
from ps_protocol.shard import PushId
from ps_protocol.tensors import DataType, VariableSpec
from ps_protocol.v1 import tensor_pb2 as pb

_DATA_TYPES: dict[int, DataType] = {pb.DATA_TYPE_FLOAT32: DataType.FLOAT32, pb.DATA_TYPE_FLOAT64: DataType.FLOAT64}

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


def encode_variable(variable: VariableSpec) -> pb.VariableSpec:
    """Encodes the specification of one variable."""
    return pb.VariableSpec(name=variable.name, data_type=f"DATA_TYPE_{variable.data_type.name}", shape=variable.shape)


def decode_variable(message: pb.VariableSpec) -> VariableSpec:
    """Decodes and checks the specification of one variable."""
    data_type = _DATA_TYPES.get(message.data_type)
    if data_type is None:
        known = ", ".join(data_type.value for data_type in DataType)
        raise InvalidSpec(f"variable {message.name!r}: dtype {message.data_type} unknown; want one of {known}")
    return VariableSpec(name=message.name, data_type=data_type, shape=tuple(message.shape))


def encode_slice(piece: VariableSlice) -> pb.VariableSlice:
    """Encodes some rows of a variable."""
    return pb.VariableSlice(variable=encode_variable(piece.variable), start=piece.start, stop=piece.stop)


def decode_slice(message: pb.VariableSlice) -> VariableSlice:
    """Decodes and checks some rows of a variable."""
    require(message, "variable")
    return VariableSlice(variable=decode_variable(message.variable), start=message.start, stop=message.stop)


def encode_optimizer(optimizer: OptimizerSpec) -> pb.OptimizerSpec:
    """Encodes an optimizer with its learning rate."""
    rate = optimizer.learning_rate
    schedule = pb.LearningRateSchedule(name=rate.name, arguments=rate.arguments, boundaries=rate.boundaries, values=rate.values)
    return pb.OptimizerSpec(name=optimizer.name, hyperparameters=optimizer.hyperparameters, learning_rate=schedule)


def decode_optimizer(message: pb.OptimizerSpec) -> OptimizerSpec:
    """Decodes and checks an optimizer with its learning rate."""
    # First: an unknown optimizer explains whatever else may look odd.
    check_optimizer_name(message.name)
    require(message, "learning_rate")
    rate = message.learning_rate
    schedule = Schedule(name=rate.name, arguments=dict(rate.arguments), boundaries=tuple(rate.boundaries), values=tuple(rate.values))
    return OptimizerSpec(name=message.name, hyperparameters=dict(message.hyperparameters), learning_rate=schedule)


def encode_push_id(push_id: PushId) -> pb.PushId:
    """Encodes the name of a contribution."""
    return pb.PushId(worker=push_id.worker, incarnation=push_id.incarnation, sequence=push_id.sequence)


def decode_push_id(message: pb.PushId) -> PushId:
    """Decodes the name of a contribution; raises MalformedMessage if a part of it was left out."""
    if message.incarnation < 1 or message.sequence < 1:
        raise MalformedMessage(f"push id: got incarnation {message.incarnation}, sequence {message.sequence}, want both >= 1")
    return PushId(worker=message.worker, incarnation=message.incarnation, sequence=message.sequence)
