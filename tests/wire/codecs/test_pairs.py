"""All pairs of values and messages: each has the fields of the other, and can be encoded and decoded."""

import dataclasses
import typing
from typing import Any

import pytest
from google.protobuf.message import Message

from ps_protocol.roles.shard import PrepareRequest
from ps_protocol.wire import codec
from ps_protocol.wire.pairs import PAIRS as ALL_PAIRS
from ps_protocol.wire.pairs import Pair, message_fields
from tests.wire.codecs.examples import EXAMPLES

PAIRS = pytest.mark.parametrize("pair", ALL_PAIRS, ids=lambda pair: pair.value.__name__)


def fields_of(value_type: Any) -> dict[str, Any]:
    """The names of a value's fields, with their defaults."""
    if issubclass(value_type, tuple):
        return dict.fromkeys(typing.get_type_hints(value_type), dataclasses.MISSING)
    return {field.name: field.default for field in dataclasses.fields(value_type)}


LEFT_OUT = ["0", "0.0", "''", "b''", "()", "{}", "False", "None"]


@PAIRS
def test_examples_have_every_field_of_the_value(pair: Pair) -> None:
    """Each as something else than what it is when it is left out: so what does not travel is missed when the value comes back."""
    for name, default in fields_of(pair.value).items():
        left_out = LEFT_OUT if default is dataclasses.MISSING else [repr(default)]
        assert any(repr(getattr(value, name)) not in left_out for value in EXAMPLES[pair.value]), name


@PAIRS
def test_message_has_every_field_from_the_value(pair: Pair) -> None:
    told = {descriptor.name for value in EXAMPLES[pair.value] for descriptor, _ in codec.encode(value).ListFields()}
    assert told | pair.filled == set(pair.message.DESCRIPTOR.fields_by_name)


@PAIRS
def test_every_example_comes_back(pair: Pair) -> None:
    for value in EXAMPLES[pair.value]:
        message: Message = codec.encode(value)
        assert type(message) is pair.message
        decoded: Any = codec.decode(pair.value, pair.message.FromString(message.SerializeToString()))
        assert decoded == value or repr(decoded) == repr(value)  # two errors are never equal


@PAIRS
def test_fields_have_the_same_names_on_both_sides(pair: Pair) -> None:
    assert set(message_fields(pair)) | set(pair.writes) == set(fields_of(pair.value))


def test_every_value_and_every_message_has_one_pair() -> None:
    pairs = [pair for pair in ALL_PAIRS if pair.value is not PrepareRequest]  # the same message as a step to apply
    assert len({pair.value for pair in pairs}) == len({pair.message for pair in pairs}) == len(pairs)
