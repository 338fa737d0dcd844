"""Writes `coders.py`, the functions that turn values into messages and back, from PAIRS: `python -m ps_protocol.wire.generator`.

`make proto` runs it, and `make check` compares what it would write; no process imports it. A field and its namesake are coded by the
dataclass's annotation:

- a number, a text or bytes is the message's own; `X | None` is a field with presence, left out for None. With presence and without None,
  a field that was left out is the dataclass's default, which is left out in turn.
- `tuple[X, ...]` is a repeated field; `tuple[X, ...] | None` has a `has_…` beside it. `Mapping` is a map, and so is a tuple of pairs; both
  come sorted, so that nothing depends on the order in which a map travels.
- a dataclass is a message: required, unless it may be None or has a default, which is left out as well. A fixed tuple is the message whose
  fields are its elements in order.
- an enum goes by the names of its members; 0 is a field that was left out: None, the default, or a fault.
- seconds (`…_s`) are a Duration of at most MAX_DURATION_S, and a PsError is a CallError. Those of `max_wait` are 20 at most.

An answer to a request that is no dataclass is the one field of its message; None is a message without fields.
"""

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from ps_protocol.errors import PsError
from ps_protocol.roles.request import RPCS, Rpc
from ps_protocol.wire.pairs import PAIRS, Pair, defaults_of, is_value, message_fields, messages_of

TARGET = Path(__file__).with_name("coders.py")
_PLAIN = (int, float, str, bool, bytes)
_MISSING = dataclasses.MISSING
_HEAD = '''"""Made by `make proto` from `pairs`, not for editing: `write_…` fills an empty message with a value, `read_…` checks one."""
# mypy: ignore-errors

'''


def source() -> str:
    """Returns the module."""
    return _Module(PAIRS).text()


def main() -> int:
    """Writes the module, or with --check says whether it is as it should be; returns the exit code."""
    if "--check" not in sys.argv:
        TARGET.write_text(source(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != source():
        sys.stderr.write(f"{TARGET.name} is not what ps_protocol/wire/pairs.py and protos/ say: run 'make proto'\n")
        return 1
    return 0


class _Module:
    """The source under way. `_imports` has names by module, `_constants` what the functions use."""

    def __init__(self, pairs: tuple[Pair, ...]) -> None:
        self._pairs = pairs
        self._imports: dict[str, set[str]] = {"typing": {"Any"}, "ps_protocol.wire": {"fields", "special"}}
        self._constants: dict[str, str] = {}

    def text(self) -> str:
        functions = [line for pair in self._pairs for line in (*self._writer(pair), "", "", *self._reader(pair), "", "")]
        functions += [line for request, rpc in RPCS.items() for line in self._bare_answer(request, rpc)]
        tables = [
            "WRITE: dict[type, Any] = {",
            *(f"    {self._name(pair.value)}: write_{pair.value.__name__}," for pair in self._pairs),
            "}",
            "READ: dict[type, Any] = {",
            *(f"    {self._name(pair.value)}: read_{pair.value.__name__}," for pair in self._pairs),
            "}",
            "MESSAGE: dict[type, Any] = {",
            *(f"    {self._name(pair.value)}: {self._message(pair)}," for pair in self._pairs),
            "}",
            "# By the request: the message of its answer, and its writer and reader.",
            "ANSWERS: dict[type, Any] = {",
            *(f"    {self._name(request)}: ({', '.join(self._answer(request, rpc))})," for request, rpc in RPCS.items()),
            "}",
        ]
        if any(pair.is_kept for pair in self._pairs):
            self._imports["functools"] = {"lru_cache"}
        imports = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(self._imports.items())]
        constants = [f"{name} = {value}" for name, value in self._constants.items()]
        return _HEAD + "\n".join([*imports, "", *constants, "", "", *functions, *tables]) + "\n"

    def _name(self, kind: type) -> str:
        self._imports.setdefault(kind.__module__, set()).add(kind.__name__)
        return kind.__name__

    def _message(self, pair: Pair) -> str:
        return self._message_of(pair.message.DESCRIPTOR)

    def _message_of(self, descriptor: Any) -> str:
        module = descriptor.file.name.rpartition("/")[2].removesuffix(".proto") + "_pb2"
        self._imports.setdefault("ps_protocol.v1", set()).add(module)
        return f"{module}.{descriptor.full_name.removeprefix(f'{descriptor.file.package}.')}"

    # Answers.

    def _answer(self, request: Any, rpc: Rpc) -> tuple[str, str, str]:
        """Returns the message, the writer and the reader of an answer."""
        descriptor: Any = messages_of(rpc)[1].DESCRIPTOR
        name = str(request.answer.__name__) if is_value(request.answer) else descriptor.name
        return self._message_of(descriptor), f"write_{name}", f"read_{name}"

    def _bare_answer(self, request: Any, rpc: Rpc) -> Iterator[str]:
        """Yields the functions of an answer that has no pair."""
        if is_value(request.answer):
            return
        descriptor: Any = messages_of(rpc)[1].DESCRIPTOR
        hint, is_optional = _without_none(request.answer)
        fields = [] if hint is type(None) else [(field, hint) for field in descriptor.fields]
        if len(fields) != len(descriptor.fields) or len(fields) > 1:
            raise TypeError(f"{descriptor.name} has {len(descriptor.fields)} fields, and {request.__name__} is answered with {hint}")
        yield f"def write_{descriptor.name}(value: Any, message: Any) -> None:"
        lines = [line for field, hint in fields for line in self._written(field, hint, f"message.{field.name}", "value")]
        if is_optional:
            lines = ["if value is not None:", *(f"    {line}" for line in lines)]
        yield from (f"    {line}" for line in lines or ["pass"])
        yield from ("", "", f"def read_{descriptor.name}(message: Any) -> Any:")
        left_out = None if is_optional else ""
        yield f"    return {next((self._field_read(field, hint, left_out, '') for field, hint in fields), None)}"
        yield from ("", "")

    # Writing.

    def _writer(self, pair: Pair) -> Iterator[str]:
        yield f"def write_{pair.value.__name__}(value: {self._name(pair.value)}, message: Any) -> None:"
        names, hints = message_fields(pair), typing.get_type_hints(pair.value)
        if not defaults_of(pair.value):
            yield "    pass"
        for attribute, default in defaults_of(pair.value).items():
            if attribute in pair.writes:
                yield f"    special.{pair.writes[attribute].__name__}(value, message, WRITE)"
                continue
            descriptor: Any = pair.message.DESCRIPTOR.fields_by_name[names[attribute]]
            hint, is_optional = _without_none(hints[attribute])
            value, place = f"value.{attribute}", f"message.{descriptor.name}"
            condition = self._presence(pair, attribute, descriptor, hint, is_optional, default)
            if condition is None:
                yield from (f"    {line}" for line in self._written(descriptor, hint, place, value))
                continue
            yield f"    if {condition.format(value=value)}:"
            if typing.get_origin(hint) is tuple and is_optional:
                yield f"        message.has_{descriptor.name} = True"
            yield from (f"        {line}" for line in self._written(descriptor, hint, place, "one"))

    def _presence(self, pair: Pair, attribute: str, descriptor: Any, hint: Any, is_optional: bool, default: Any) -> str | None:
        """Returns when the field is written, with `one` as its value; None: always."""
        if is_optional:
            return "(one := {value}) is not None"
        if typing.get_origin(hint) is tuple or typing.get_origin(hint) in (Mapping, dict):
            return "one := {value}"
        if default is _MISSING or not descriptor.has_presence:
            return None
        left_out = self._constant(pair, attribute, default)
        # Nearly always the very object, which takes less time to see than that two are equal.
        return (
            f"(one := {{value}}) is not {left_out} and one != {left_out}"
            if left_out.startswith("_")
            else f"(one := {{value}}) != {left_out}"
        )

    def _written(self, descriptor: Any, hint: Any, place: str, value: str) -> Iterator[str]:
        """Yields the lines that write a value that is there."""
        if _is_choice(hint):
            yield f"{place} = {self._numbers(hint, descriptor)}[{value}]"
        elif typing.get_origin(hint) is tuple:
            yield from self._tuple_written(descriptor, typing.get_args(hint)[0], place, value)
        elif typing.get_origin(hint) in (Mapping, dict):
            item = typing.get_args(hint)[1]
            if item in _PLAIN:
                yield f"{place}.update({value})"
            else:
                yield f"for key, item in {value}.items():"
                yield f"    write_{item.__name__}(item, {place}[key])"
        elif _is_duration(descriptor):
            yield f"fields.{'write_max_wait' if descriptor.name == 'max_wait' else 'write_duration'}({value}, {place})"
        elif hint is PsError:
            yield f"{place}.CopyFrom(fields.encode_call_error({value}))"
        elif descriptor.message_type is not None:
            if not self._always_writes(hint):
                yield f"{place}.SetInParent()"
            yield f"write_{hint.__name__}({value}, {place})"
        else:
            yield f"{place} = {value}"

    def _tuple_written(self, descriptor: Any, item: Any, place: str, value: str) -> Iterator[str]:
        if item in _PLAIN:
            yield f"{place}.extend({value})"
        elif descriptor.message_type.GetOptions().map_entry:
            yield f"{place}.update(dict({value}))"
        elif typing.get_origin(item) is tuple:
            yield f"for item in {value}:"
            yield f"    element = {place}.add()"
            for number, (field, hint) in enumerate(zip(descriptor.message_type.fields, typing.get_args(item), strict=True)):
                yield from (f"    {line}" for line in self._written(field, hint, f"element.{field.name}", f"item[{number}]"))
        else:
            yield f"for item in {value}:"
            yield f"    write_{item.__name__}(item, {place}.add())"

    def _always_writes(self, kind: type) -> bool:
        """Whether each value of a message sets one of its fields, so that the message is there where it is a field of another."""
        pair = next(pair for pair in self._pairs if pair.value is kind)
        hints, fields = typing.get_type_hints(kind), pair.message.DESCRIPTOR.fields_by_name
        return any(hints[name] in _PLAIN and not fields[of].has_presence for name, of in message_fields(pair).items())

    # Reading.

    def _reader(self, pair: Pair) -> Iterator[str]:
        name, kind = pair.value.__name__, self._name(pair.value)
        if pair.is_kept:
            # Who calls is the same with every step: found by its bytes in a third of the time that it takes to be read.
            yield f"def read_{name}(message: Any) -> {kind}:"
            yield "    data = message.SerializeToString()"
            yield f"    return _kept_{name}(data) if len(data) <= fields.MAX_KEPT_BYTES else _read_{name}(message)"
            yield from ("", "", "@lru_cache(maxsize=fields.NUM_KEPT)", f"def _kept_{name}(data: bytes) -> {kind}:")
            yield f"    return _read_{name}({self._message(pair)}.FromString(data))"
            yield from ("", "")
        yield f"def {'_' if pair.is_kept else ''}read_{name}(message: Any) -> {kind}:"
        lines = list(self._read(pair))
        if pair.place is None:
            yield from (f"    {line}" for line in lines)
        else:
            yield "    try:"
            yield from (f"        {line}" for line in lines)
            yield "    except fields.MalformedMessage as error:"
            yield f'        words = f"{{special.{pair.place.__name__}(message)}}: {{error.message}}"'
            yield "        raise fields.MalformedMessage(words, facts=error.facts) from None"

    def _read(self, pair: Pair) -> Iterator[str]:
        if pair.check is not None:
            yield f"special.{pair.check.__name__}(message)"
        names, hints = message_fields(pair), typing.get_type_hints(pair.value)
        label = f"{pair.label}." if pair.label else ""
        made = f"{self._name(pair.value)}("
        yield f"return special.{pair.after.__name__}({made}" if pair.after else f"return {made}"
        for attribute, default in defaults_of(pair.value).items():
            if attribute in pair.reads:
                text = f"special.{pair.reads[attribute].__name__}(message, READ)"
            else:
                descriptor: Any = pair.message.DESCRIPTOR.fields_by_name[names[attribute]]
                hint, is_optional = _without_none(hints[attribute])
                left_out = None if is_optional else "" if default is _MISSING else self._constant(pair, attribute, default)
                text = self._field_read(descriptor, hint, left_out, label)
            yield f"    {attribute}={text},"
        yield "))" if pair.after else ")"

    def _field_read(self, descriptor: Any, hint: Any, left_out: str | None, label: str, message: str = "message") -> str:
        """Returns the expression that reads a field. `left_out`: what it is then; None, a constant, or "" where it must be there."""
        place, name = f"{message}.{descriptor.name}", descriptor.name
        if _is_choice(hint):
            known = self._members(hint, descriptor)
            chosen = f'fields.chosen({known}, {place}, "{label}{name}")'
            return chosen if left_out == "" or 0 in numbers_of(hint, descriptor).values() else f"{chosen} if {place} else {left_out}"
        if typing.get_origin(hint) is tuple:
            text = self._tuple_read(descriptor, typing.get_args(hint)[0], place)
            return f"{text} if {message}.has_{name} else None" if left_out is None else text
        if typing.get_origin(hint) in (Mapping, dict):
            item = typing.get_args(hint)[1]
            if item in _PLAIN:
                return f"dict(sorted({place}.items()))"
            return f"{{key: read_{item.__name__}(item) for key, item in sorted({place}.items())}}"
        if hint in _PLAIN and descriptor.message_type is None and not (descriptor.has_presence and left_out != ""):
            return (
                place
                if not descriptor.has_presence
                else f'{place} if {message}.HasField("{name}") else fields.missing({message}, "{name}")'
            )
        read = self._single_read(descriptor, hint, place, label)
        if _is_duration(descriptor) and left_out == "":
            return read  # seconds that were left out are none
        otherwise = f'fields.missing({message}, "{name}")' if left_out == "" else left_out
        return f'{read} if {message}.HasField("{name}") else {otherwise}'

    def _single_read(self, descriptor: Any, hint: Any, place: str, label: str) -> str:
        if descriptor.message_type is None:
            return place
        if _is_duration(descriptor):
            return (
                f"fields.decode_max_wait({place})"
                if descriptor.name == "max_wait"
                else f'fields.decode_duration({place}, field="{label}{descriptor.name}")'
            )
        if hint is PsError:
            return f"fields.decode_call_error({place})"
        return f"read_{hint.__name__}({place})"

    def _tuple_read(self, descriptor: Any, item: Any, place: str) -> str:
        if item in _PLAIN:
            return f"tuple({place})"
        if descriptor.message_type.GetOptions().map_entry:
            return f"tuple(sorted({place}.items()))"
        read = f"read_{getattr(item, '__name__', '')}"
        if typing.get_origin(item) is tuple:
            parts = [
                self._field_read(field, hint, "", "", "item")
                for field, hint in zip(descriptor.message_type.fields, typing.get_args(item), strict=True)
            ]
            read = f"lambda item: ({', '.join(parts)},)"
        return f'fields.decode_each({place}, {read}, field="{descriptor.name}") if {place} else ()'

    # Constants.

    def _constant(self, pair: Pair, attribute: str, default: Any) -> str:
        if default is None or type(default) in _PLAIN or default == ():
            return repr(default)
        if isinstance(default, enum.Enum):
            return f"{self._name(type(default))}.{default.name}"
        name = f"_{pair.value.__name__}_{attribute}"
        self._constants[name] = f'fields.default_of({self._name(pair.value)}, "{attribute}")'
        return name

    def _numbers(self, choices: type[enum.Enum], descriptor: Any) -> str:
        return self._table(choices, descriptor, "_NUMBERS", lambda member, number: f"{member}: {number}")

    def _members(self, choices: type[enum.Enum], descriptor: Any) -> str:
        return self._table(choices, descriptor, "_MEMBERS", lambda member, number: f"{number}: {member}")

    def _table(self, choices: type[enum.Enum], descriptor: Any, suffix: str, entry: Callable[[str, int], str]) -> str:
        kind = self._name(choices)
        name = f"_{kind}{suffix}"
        rows = (entry(f"{kind}.{choice.name}", number) for choice, number in numbers_of(choices, descriptor).items())
        text = f"{{{', '.join(rows)}}}"
        self._constants.setdefault(f"{name}: dict[Any, Any]", text)
        return name


def numbers_of(choices: type[enum.Enum], descriptor: Any) -> dict[Any, int]:
    """Returns the number of each member in a field's enum; the one that stands for 0 may have a name of its own. Raises TypeError."""
    values: dict[str, int] = {value.name: value.number for value in descriptor.enum_type.values} if descriptor.enum_type else {}
    prefix = next(name for name, number in values.items() if number == 0).removesuffix("UNSPECIFIED")
    numbers = {choice: values.get(f"{prefix}{choice.name}", 0) for choice in choices}
    if set(numbers.values()) | {0} != set(values.values()) or len(set(numbers.values())) < len(numbers):
        raise TypeError(f"{descriptor.full_name} has other choices than {choices.__name__}")
    return numbers


def _is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_duration(descriptor: FieldDescriptor) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.full_name == Duration.DESCRIPTOR.full_name


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


if __name__ == "__main__":
    sys.exit(main())
