"""Values to messages and back: `encode(value)`, and `decode(type, message)`, which checks. Knows every pair of them; no RPC, no tensor.

`pairs` says which value is which message, and `make proto` makes `coders` of it. `decode` takes messages that came from anywhere, and
raises MalformedMessage, InvalidSpec or LimitExceeded with the place in its text.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import MalformedMessage
from ps_protocol.roles import shard
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS
from ps_protocol.roles.request import Answer, Request
from ps_protocol.v1 import chief_service_pb2, parameter_service_pb2
from ps_protocol.wire import fields
from ps_protocol.wire.coders import ANSWERS, MESSAGE, READ, WRITE
from ps_protocol.wire.fields import decode_max_wait, write_max_wait

Value = TypeVar("Value")
AnyMessage = TypeVar("AnyMessage", bound=Message)


# Typed as anything: the type of the message follows from that of the value, which no annotation can say.
def encode(value: Any) -> Any:
    """Returns the message of a value."""
    kind = type(value)
    message = MESSAGE[kind]()
    WRITE[kind](value, message)
    return message


def write(value: Any, message: Any) -> None:
    """Encodes a value into a message that is empty, as a field of another is."""
    WRITE[type(value)](value, message)


def pack(value: Any) -> bytes:
    """Returns the message of a value as bytes."""
    packed: bytes = encode(value).SerializeToString()
    return packed


def decode(value_type: type[Value], message: Message) -> Value:
    """Returns the value of a message, checked."""
    value: Value = READ[value_type](message)
    return value


def decode_each(value_type: type[Value], messages: Iterable[Message], *, field: str) -> tuple[Value, ...]:
    """Returns the values of a repeated field; an error's text begins with the place, for example "variables[3]: "."""
    return fields.decode_each(messages, READ[value_type], field=field)


def encode_answer(request_type: type, answer: Any) -> Any:
    """Returns the message of the answer to a request."""
    message_type, write_it, _ = ANSWERS[request_type]
    message = message_type()
    write_it(answer, message)
    return message


def write_answer(request_type: type, answer: Any, message: Any) -> None:
    """Encodes the answer to a request into a message that is empty, as a field of another is, and is there afterwards."""
    message.SetInParent()
    ANSWERS[request_type][1](answer, message)


def decode_answer(request: Request[Answer], message: Message) -> Answer:
    """Returns the answer to a request that a message is, checked."""
    answer: Answer = ANSWERS[type(request)][2](message)
    return answer


def decode_request(request_type: type, data: bytes) -> Any:
    """Returns the request that bytes are, checked."""
    return READ[request_type](decode_message(MESSAGE[request_type], data))


def answer_message(request: Request[Any]) -> Any:
    """Returns the type of the message that answers a request."""
    return ANSWERS[type(request)][0]


def decode_message(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message that came as bytes; raises MalformedMessage if they are none."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes are not a {message_type.DESCRIPTOR.name}; use the same .proto on both sides") from None


def pack_read_request(
    request: shard.ReadRequest, *, max_wait_s: float = 0.0, payload: parameter_service_pb2.Payload | None = None, offset: int = 0
) -> bytes:
    """Returns as bytes which variables are wanted, from which byte on, how long a step is waited for, and the data socket to use."""
    message = encode(request)
    if payload is not None:
        message.payload.CopyFrom(payload)
    if max_wait_s:
        write_max_wait(max_wait_s, message.max_wait)
    message.offset = offset
    packed: bytes = message.SerializeToString()
    return packed


def unpack_read_request(data: bytes) -> tuple[shard.ReadRequest, float, parameter_service_pb2.Payload | None, int]:
    """Returns the checked request that bytes are, the seconds that its step may be waited for (at most 20), the data socket to use, and the
    first byte that is wanted.
    """
    message = decode_message(parameter_service_pb2.ReadRequest, data)
    payload = message.payload if message.HasField("payload") else None
    max_wait_s = decode_max_wait(message.max_wait) if message.HasField("max_wait") else 0.0
    return decode(shard.ReadRequest, message), max_wait_s, payload, message.offset


class RecordPacker:
    """Makes bytes of records that come one after the other: what seldom changes, the model above all, is encoded once. For one thread."""

    def __init__(self) -> None:
        self._lasting: tuple[ChiefRecord, bytes] | None = None

    def pack(self, record: ChiefRecord) -> bytes:
        """Returns the record as bytes, as parameter servers keep it."""
        lasting = replace(record, oldest_kept=0, epoch=0, step=0, chosen=(), data=None, attached=NO_STEP_ATTACHMENTS)
        # As a rule they are the same objects, and compared as such.
        if self._lasting is None or self._lasting[0] != lasting:
            self._lasting = lasting, encode(lasting).SerializeToString(deterministic=True)
        of_step = ChiefRecord(
            model=None,
            policy=record.policy,
            oldest_kept=record.oldest_kept,
            epoch=record.epoch,
            step=record.step,
            chosen=record.chosen,
            data=record.data,
            attached=record.attached,
        )
        # A message in two parts is the message, and the policy is the same twice.
        packed: bytes = self._lasting[1] + encode(of_step).SerializeToString(deterministic=True)
        return packed


def unpack_record(packed: bytes) -> ChiefRecord:
    """Returns the record that bytes are. Raises MalformedMessage, InvalidSpec."""
    return decode(ChiefRecord, decode_message(chief_service_pb2.ChiefRecord, packed))
