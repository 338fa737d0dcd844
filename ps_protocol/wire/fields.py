"""Compiles the conversion between the fields of a dataclass and those of its message, once, into closures. Knows no particular message.

A field and its namesake are compiled by the dataclass's annotation:

- a number, a text or bytes is the message's own; `X | None` is a field with presence, left out for None. With presence and without None,
  a field that was left out is the dataclass's default, which is left out in turn.
- `tuple[X, ...]` is a repeated field; `tuple[X, ...] | None` has a `has_…` beside it. `Mapping` is a map, and so is a tuple of pairs; both
  come sorted, so that nothing depends on the order in which a map travels.
- a dataclass is a message: required, unless it may be None or has a default, which is left out as well. A fixed tuple is the message whose
  fields are its elements in order.
- an enum goes by the names of its members; 0 is a field that was left out: None, the default, or a fault.
- seconds (`…_s`) are a Duration of at most MAX_DURATION_S, and a PsError is a CallError. Those of `max_wait` are 20 at most.

Each error names the place of the fault, for example "variables[3]: policy.name: got 9".
"""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.wire.call_errors import decode_call_error, encode_call_error

Encode: TypeAlias = Callable[[Any], Any]
Write: TypeAlias = Callable[[Any, Any], None]
Decode: TypeAlias = Callable[[Any], Any]
Encoded = TypeVar("Encoded")
Decoded = TypeVar("Decoded")
Choice = TypeVar("Choice", bound=enum.Enum)

_PLAIN = (int, float, str, bool, bytes)
# What a Duration may be, by its own definition: ten thousand years. A message can hold more, and then no sum of them can be encoded.
MAX_DURATION_S = 315_576_000_000
_MISSING = dataclasses.MISSING


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A dataclass and its message.

    `label`: what a field with such a message is called in errors about choices, as in "policy.name". `filled`: fields of the message that
    the value does not have; who sends it fills them in. `check`: raises what is wrong with a message before it is decoded. `place`: begins
    the text of what is malformed in it. `encode` and `decode` take the place of the compiled ones; `write`, in place of `encode`, fills an
    empty message.
    """

    value: type
    message: type[Message]
    label: str = ""
    filled: frozenset[str] = frozenset()
    check: Callable[[Any], None] | None = None
    place: Callable[[Any], str] | None = None
    encode: Encode | None = None
    write: Write | None = None
    decode: Decode | None = None


def _no_message(value: Any, message: Any) -> None:
    raise TypeError(f"{type(value).__name__} is no message of its own")


@light_dataclass(frozen=True, slots=True)
class Coder:
    """The functions that encode and decode one kind of value; `write` encodes into an empty message."""

    encode: Encode
    decode: Decode
    write: Write = _no_message


class Coders:
    """The coders of pairs, each made when it is first used: most processes use a few. `made` has them."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = {pair.value: pair for pair in pairs}
        self.made: dict[type, Coder] = {}

    def of(self, kind: type) -> Coder:
        """Returns what encodes and decodes these values."""
        coder = self.made.get(kind)
        if coder is None:
            # Two threads may both make one; either serves.
            coder = self.made[kind] = compile_pair(self._pairs[kind], self.of)
        return coder


def require(message: Message, field: str) -> None:
    """Raises MalformedMessage unless the message has this field."""
    if not message.HasField(field):
        raise MalformedMessage(f"{message.DESCRIPTOR.name}: {field} is missing; set it")


def decode_choice(choices: type[Choice], value: int, *, field: str) -> Choice:
    """Returns the member with this number; raises MalformedMessage if there is none (0: the field was left out)."""
    members: dict[int, Choice] = _members(choices)  # calling the type takes four times as long
    if value not in members:
        raise _unknown_choice(members, value, field=field)
    return members[value]


@functools.cache
def _members(choices: type[enum.Enum]) -> dict[int, Any]:
    return {choice.value: choice for choice in choices}


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


def write_max_wait(seconds: float, duration: Duration) -> None:
    """Encodes how long a call may block; more than 20 s counts as 20 s."""
    duration.seconds, duration.nanos = divmod(max(0, round(min(seconds, MAX_WAIT_SLICE_S) * 1e9)), 1_000_000_000)


def decode_duration(duration: Duration, *, field: str) -> float:
    """Returns seconds; 0 if the duration was left out. Raises MalformedMessage for one that is negative, or longer than MAX_DURATION_S."""
    if not (0 <= duration.seconds < MAX_DURATION_S and 0 <= duration.nanos < 1_000_000_000):
        got = f"{duration.seconds} s and {duration.nanos} ns"
        raise MalformedMessage(f"{field}: got {got}, want 0 to {MAX_DURATION_S} s, and less than a second of ns")
    return _seconds_of(duration)


def encode_max_wait(seconds: float) -> Duration:
    """Encodes how long a call may block; more than 20 s counts as 20 s."""
    return encode_duration(min(seconds, MAX_WAIT_SLICE_S))


def decode_max_wait(duration: Duration) -> float:
    """Returns how many seconds a call may block, never more than 20."""
    return min(max(0.0, _seconds_of(duration)), MAX_WAIT_SLICE_S)


def _seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def compile_pair(pair: Pair, coder_of: Callable[[type], Coder]) -> Coder:
    """Returns what encodes and decodes the values of a pair; `coder_of` gives that of each dataclass within it."""
    encode = pair.encode if pair.write is None else _made(pair.message, pair.write)
    decode = pair.decode
    if encode is None or decode is None:
        compiled = _compile_fields(pair, coder_of)
        encode, decode = encode or compiled[0], decode or compiled[1]
    return Coder(encode, decode, pair.write or _copied(encode))


def _made(message_type: type[Message], write: Write) -> Encode:
    def encode(value: Any) -> Any:
        message = message_type()
        write(value, message)
        return message

    return encode


def _copied(encode: Encode) -> Write:
    def write(value: Any, message: Any) -> None:
        message.CopyFrom(encode(value))

    return write


def message_fields(pair: Pair) -> dict[str, str]:
    """Returns which field of the message each of the dataclass's is, by names. Raises TypeError if there is none."""
    known = pair.message.DESCRIPTOR.fields_by_name
    names = {}
    for field in dataclasses.fields(pair.value):
        name = field.name if field.name in known else field.name.removesuffix("_s")
        if name not in known:
            raise TypeError(f"{pair.message.DESCRIPTOR.name} has no field for {pair.value.__name__}.{field.name}")
        names[field.name] = name
    return names


def _compile_fields(pair: Pair, coder_of: Callable[[type], Coder]) -> tuple[Encode, Decode]:
    hints, names = typing.get_type_hints(pair.value), message_fields(pair)
    label = f"{pair.label}." if pair.label else ""
    # Each field of the message with the attribute that it is of; then what makes it of that, where it is not the same.
    attributes: dict[str, str] = {}
    writes: list[tuple[str, Encode]] = []
    same: list[str] = []
    reads: list[tuple[str, Callable[[Any], Any]]] = []
    for field in dataclasses.fields(pair.value):
        descriptor: Any = pair.message.DESCRIPTOR.fields_by_name[names[field.name]]
        attributes[descriptor.name] = field.name
        hint, is_optional = _without_none(hints[field.name])
        if hint in _PLAIN and not is_optional and not descriptor.has_presence:
            same.append(field.name)
            continue
        if typing.get_origin(hint) is tuple and is_optional:
            attributes[f"has_{descriptor.name}"] = field.name
            writes += [(f"has_{descriptor.name}", lambda value: value is not None), (descriptor.name, lambda value: value or ())]
            reads.append((field.name, _read_tuple_if(descriptor.name)))
            continue
        encode, read = _field(descriptor, hint, is_optional, _default(field), label + descriptor.name, coder_of)
        if encode is not None:
            writes.append((descriptor.name, encode))
        reads.append((field.name, read))
    return _encoder(pair.message, attributes, writes), _decoder(pair, same, reads)


def _encoder(message_type: type[Message], attributes: Mapping[str, str], writes: list[tuple[str, Encode]]) -> Encode:
    names, get = tuple(attributes), _getter(list(attributes.values()))

    def encode(value: Any) -> Any:
        fields = dict(zip(names, get(value)))  # noqa: B905  # as many of both; to have that looked at costs something each time
        for name, write in writes:
            fields[name] = write(fields[name])
        return message_type(**fields)

    return encode


def _decoder(pair: Pair, same: list[str], reads: list[tuple[str, Callable[[Any], Any]]]) -> Decode:
    value_type, check, place, get = pair.value, pair.check, pair.place, _getter(same)

    def decode(message: Any) -> Any:
        if check is not None:
            check(message)
        fields = dict(zip(same, get(message)))  # noqa: B905  # as in `encode`
        for name, read in reads:
            fields[name] = read(message)
        return value_type(**fields)

    if place is None:
        return decode

    def decode_in_place(message: Any) -> Any:
        try:
            return decode(message)
        except MalformedMessage as error:
            raise MalformedMessage(f"{place(message)}: {error.message}", facts=error.facts) from None

    return decode_in_place


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda owner: ()
    get: Any = attrgetter(*names)
    return get if len(names) > 1 else lambda owner: (get(owner),)


def _read(name: str, decode: Decode) -> Callable[[Any], Any]:
    get: Any = attrgetter(name)
    return lambda message: decode(get(message))


def _read_tuple_if(name: str) -> Callable[[Any], Any]:
    return lambda message: tuple(getattr(message, name)) if getattr(message, f"has_{name}") else None


def _field(
    descriptor: FieldDescriptor, hint: Any, is_optional: bool, default: Any, label: str, coder_of: Callable[[type], Coder]
) -> tuple[Encode | None, Callable[[Any], Any]]:
    """Returns what encodes a field's value (None: nothing need be done), and what reads it from a message."""
    name, get = descriptor.name, attrgetter(descriptor.name)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice(descriptor, hint, is_optional, default, label)
    if typing.get_origin(hint) is tuple:
        encode, decode = _tuple(descriptor, typing.get_args(hint), coder_of)
        return encode, lambda message: decode(get(message))
    if typing.get_origin(hint) in (Mapping, dict):
        value_type = typing.get_args(hint)[1]
        if value_type in _PLAIN:
            return None, lambda message: dict(sorted(get(message).items()))
        coder = coder_of(value_type)
        return (
            lambda values: {key: coder.encode(value) for key, value in values.items()},
            lambda message: {key: coder.decode(value) for key, value in sorted(get(message).items())},
        )
    coder = _single(descriptor, hint, label, coder_of)
    if _is_duration(descriptor) and not is_optional and default is _MISSING:
        # Seconds that were left out are none.
        return coder.encode, _read(name, coder.decode)
    encode, decode = coder.encode, coder.decode
    if is_optional or default is not _MISSING:
        left_out = None if is_optional else default
        if coder is _SAME:
            return (
                None if left_out is None else lambda value: None if value == left_out else value,
                lambda message: get(message) if message.HasField(name) else left_out,
            )
        return (
            lambda value: None if value is None or value == left_out else encode(value),
            lambda message: decode(get(message)) if message.HasField(name) else left_out,
        )

    def read(message: Any) -> Any:
        require(message, name)
        return decode(get(message))

    return encode, read


def _single(descriptor: FieldDescriptor, hint: Any, label: str, coder_of: Callable[[type], Coder]) -> Coder:
    if descriptor.message_type is None:
        return _SAME
    if _is_duration(descriptor):
        return _MAX_WAIT if descriptor.name == "max_wait" else Coder(encode_duration, functools.partial(decode_duration, field=label))
    if hint is PsError:
        return _ERROR
    return coder_of(hint)


def _is_duration(descriptor: FieldDescriptor) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.full_name == Duration.DESCRIPTOR.full_name


def _tuple(descriptor: FieldDescriptor, arguments: tuple[Any, ...], coder_of: Callable[[type], Coder]) -> tuple[Encode | None, Decode]:
    item = arguments[0]
    name, message_type = descriptor.name, descriptor.message_type
    if item in _PLAIN:
        return None, tuple
    if message_type is not None and message_type.GetOptions().map_entry:
        return dict, lambda pairs: tuple(sorted(pairs.items()))
    coder = _elements(message_type, typing.get_args(item), coder_of) if typing.get_origin(item) is tuple else coder_of(item)
    return (
        lambda values: [coder.encode(value) for value in values],
        lambda messages: decode_each(messages, coder.decode, field=name),
    )


def _elements(message_type: Any, hints: tuple[Any, ...], coder_of: Callable[[type], Coder]) -> Coder:
    """Returns what makes a message of a fixed tuple, and back."""
    fields = list(zip(message_type.fields, hints, strict=True))
    compiled = [
        None if hint in _PLAIN else _field(descriptor, hint, False, _MISSING, descriptor.name, coder_of) for descriptor, hint in fields
    ]
    names = [descriptor.name for descriptor in message_type.fields]

    def encode(values: tuple[Any, ...]) -> dict[str, Any]:
        made = {}
        for name, value, one in zip(names, values, compiled, strict=True):
            made[name] = value if one is None or one[0] is None else one[0](value)
        return made

    def decode(message: Any) -> tuple[Any, ...]:
        return tuple(getattr(message, name) if one is None else one[1](message) for name, one in zip(names, compiled, strict=True))

    return Coder(encode, decode)


def _choice(
    descriptor: FieldDescriptor, choices: type[enum.Enum], is_optional: bool, default: Any, label: str
) -> tuple[Encode, Callable[[Any], Any]]:
    get = attrgetter(descriptor.name)
    numbers: dict[Any, int] = numbers_of(choices, descriptor)
    known = {number: choice for choice, number in numbers.items()}
    left_out = None if is_optional else default
    if 0 not in known and left_out is not _MISSING:
        known_or_not: dict[int, Any] = {**known, 0: left_out}
    else:
        known_or_not = dict(known)

    def read(message: Any) -> Any:
        number = get(message)
        try:
            return known_or_not[number]
        except KeyError:
            raise _unknown_choice(known, number, field=label) from None

    return {**numbers, None: None}.__getitem__, read


def numbers_of(choices: type[enum.Enum], descriptor: FieldDescriptor) -> dict[enum.Enum, int]:
    """Returns the number of each member in a field's enum; the one that stands for 0 may have a name of its own. Raises TypeError."""
    values: dict[str, int] = {value.name: value.number for value in descriptor.enum_type.values} if descriptor.enum_type else {}
    prefix = next(name for name, number in values.items() if number == 0).removesuffix("UNSPECIFIED")
    numbers = {choice: values.get(f"{prefix}{choice.name}", 0) for choice in choices}
    if set(numbers.values()) | {0} != set(values.values()) or len(set(numbers.values())) < len(numbers):
        raise TypeError(f"{descriptor.full_name} has other choices than {choices.__name__}")
    return numbers


def _unknown_choice(known: Mapping[int, enum.Enum], value: int, *, field: str) -> MalformedMessage:
    names = ", ".join(f"{number} ({known[number].name})" for number in sorted(known))
    return MalformedMessage(f"{field}: got {value}, want one of {names}")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is _MISSING else field.default_factory()


def _as_it_is(value: Any) -> Any:
    return value


_SAME = Coder(_as_it_is, _as_it_is)
_MAX_WAIT = Coder(encode_max_wait, decode_max_wait)
_ERROR = Coder(encode_call_error, decode_call_error)
