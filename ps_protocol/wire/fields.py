"""What the generated coders call: choices, durations, repeated and required fields, each with the place of what is wrong. Knows no message.

Each error names the place of the fault, for example "variables[3]: policy.name: got 9".
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.wire.call_errors import decode_call_error, encode_call_error

__all__ = [
    "MAX_DURATION_S",
    "MAX_KEPT_BYTES",
    "NUM_KEPT",
    "MalformedMessage",
    "chosen",
    "decode_call_error",
    "decode_choice",
    "decode_duration",
    "decode_each",
    "decode_max_wait",
    "default_of",
    "encode_call_error",
    "encode_duration",
    "missing",
    "require",
    "write_duration",
    "write_max_wait",
]

Encoded = TypeVar("Encoded")
Decoded = TypeVar("Decoded")
Choice = TypeVar("Choice", bound=enum.Enum)

# What a Duration may be, by its own definition: ten thousand years. A message can hold more, and then no sum of them can be encoded.
MAX_DURATION_S = 315_576_000_000
# So many of the values that come with every step are found by their bytes, and none of a stranger that has added fields of his own to it.
NUM_KEPT, MAX_KEPT_BYTES = 2_048, 128


def require(message: Message, field: str) -> None:
    """Raises MalformedMessage unless the message has this field."""
    if not message.HasField(field):
        missing(message, field)


def missing(message: Message, field: str) -> NoReturn:
    """Raises MalformedMessage: the message has not this field."""
    raise MalformedMessage(f"{message.DESCRIPTOR.name}: {field} is missing; set it")


def default_of(kind: Any, name: str) -> Any:
    """Returns the default of a dataclass's field."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def chosen(known: Mapping[int, Choice], number: int, field: str) -> Choice:
    """Returns the member with this number; raises MalformedMessage if there is none (0: the field was left out)."""
    try:
        return known[number]
    except KeyError:
        names = ", ".join(f"{number} ({known[number].name})" for number in sorted(known))
        raise MalformedMessage(f"{field}: got {number}, want one of {names}") from None


def decode_choice(choices: type[Choice], value: int, *, field: str) -> Choice:
    """Returns the member with this value; raises MalformedMessage if there is none (0: the field was left out)."""
    return chosen({choice.value: choice for choice in choices}, value, field)


def decode_each(messages: Iterable[Encoded], decode: Callable[[Encoded], Decoded], *, field: str) -> tuple[Decoded, ...]:
    """Decodes a repeated field; an error's text begins with the place, for example "variables[3]: "."""
    decoded: list[Decoded] = []
    try:
        for message in messages:
            decoded.append(decode(message))
    except PsError as error:
        raise type(error)(f"{field}[{len(decoded)}]: {error.message}", facts=error.facts) from None
    return tuple(decoded)


def write_duration(seconds: float, duration: Duration) -> None:
    """Encodes seconds, to the nanosecond; a negative number counts as 0."""
    duration.seconds, duration.nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)


def encode_duration(seconds: float) -> Duration:
    """Returns the duration, to the nanosecond; a negative number counts as 0."""
    duration = Duration()
    write_duration(seconds, duration)
    return duration


def write_max_wait(seconds: float, duration: Duration) -> None:
    """Encodes how long a call may block; more than 20 s counts as 20 s."""
    write_duration(min(seconds, MAX_WAIT_SLICE_S), duration)


def decode_duration(duration: Duration, *, field: str) -> float:
    """Returns seconds; 0 if the duration was left out. Raises MalformedMessage for one that is negative, or longer than MAX_DURATION_S."""
    if not (0 <= duration.seconds < MAX_DURATION_S and 0 <= duration.nanos < 1_000_000_000):
        got = f"{duration.seconds} s and {duration.nanos} ns"
        raise MalformedMessage(f"{field}: got {got}, want 0 to {MAX_DURATION_S} s, and less than a second of ns")
    return _seconds_of(duration)


def decode_max_wait(duration: Duration) -> float:
    """Returns how many seconds a call may block, never more than 20."""
    return min(max(0.0, _seconds_of(duration)), MAX_WAIT_SLICE_S)


def _seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
