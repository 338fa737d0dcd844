"""All pairs of values and messages: each has the fields of the other, and can be encoded and decoded."""

import dataclasses
import enum
import itertools
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from google.protobuf.message import Message

from ps_protocol import errors
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model.data import DataMarks, DataPass, DataSpec
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.variables import DataType, SparseMean
from ps_protocol.roles.accumulators import AccumulatorSpec, Reduction
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardSpec
from ps_protocol.wire import codec
from ps_protocol.wire.pairs import PAIRS as ALL_PAIRS
from ps_protocol.wire.pairs import Pair, message_fields
from tests.wire.codecs.examples import ADAM, AVERAGES, CLIP, MIXED, PIECEWISE, RICH_MODEL, SPEC, VALUES

PAIRS = pytest.mark.parametrize("pair", ALL_PAIRS, ids=lambda pair: pair.value.__name__)
NUMBERS = itertools.count(3)
# What the types alone do not say.
DATA = DataSpec(name="train", num_samples=100, range_size=32, num_epochs=2, shuffle_seed=7)
KNOWN: dict[Any, Any] = {
    DataSpec: DATA,
    DataMarks: DataMarks(data=DATA, epoch=1, position=1, passes=(DataPass(epoch=1, done=b"\x01"), DataPass(epoch=2, done=b"\x00"))),
    DataType: DataType.FLOAT64,
    FloatEncoding: FloatEncoding.FLOAT16,
    errors.PsError: errors.StorageFull("no room", facts={"free": "0"}),
    Layout: Layout(MIXED),
    OptimizerSpec: ADAM,
    Schedule: PIECEWISE,
    ShardSpec: dataclasses.replace(SPEC, layout=Layout(MIXED), averages=AVERAGES, clip=CLIP),
    AccumulatorSpec: AccumulatorSpec(
        name="a", data_type=DataType.FLOAT16, shape=(2, 3), is_sparse=True, reduction=Reduction.SUM, sparse_mean=SparseMean.PER_REPLICA
    ),
    "sha256": "0123456789abcdef" * 4,
    "manifest_sha256": "fedcba9876543210" * 4,
    "policy": PolicySpec(name=PolicyName.SSP, staleness=5, max_staleness=4),
    "model": RICH_MODEL,
    "max_wait_s": 2.5,
}


def made(hint: Any, name: str = "") -> Any:
    """A value of this type, in which every field has something of its own."""
    for known in (name, hint):
        if isinstance(hint, type) and known in KNOWN and isinstance(KNOWN[known], hint):
            return KNOWN[known]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return made(arguments[0], name)
    if origin is tuple:
        return tuple(made(one) for one in (arguments if ... not in arguments else (arguments[0], arguments[0])))
    if origin is Mapping:
        return {made(arguments[0]): made(arguments[1])}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{field.name: made(hints[field.name], field.name) for field in dataclasses.fields(hint)})  # type: ignore[operator]
    if issubclass(hint, tuple):
        return hint(**{field: made(one, field) for field, one in typing.get_type_hints(hint).items()})
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    number = next(NUMBERS)
    return {bool: True, int: number, float: number / 4, str: f"text-{number}", bytes: b"%d" % number}[hint]


def values_in(value: Any) -> Iterator[Any]:
    """The value, and all values within it."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from values_in(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from values_in(one)
    elif isinstance(value, Mapping):
        yield from values_in(tuple(value.values()))
    elif isinstance(value, Layout):
        yield from values_in((*value.slices, *value.tables))


def fields_of(value_type: Any) -> dict[str, Any]:
    """The names of a value's fields, with their defaults."""
    if issubclass(value_type, tuple):
        return dict.fromkeys(typing.get_type_hints(value_type), dataclasses.MISSING)
    return {field.name: field.default for field in dataclasses.fields(value_type)}


def examples() -> dict[type, list[Any]]:
    """For each type of value, those of the other tests, and one that is made for this."""
    found: dict[type, list[Any]] = defaultdict(list)
    for value in values_in(VALUES):
        # The name of all contributions of an incarnation is no contribution's.
        if not isinstance(value, PushId) or value.sequence:
            found[type(value)].append(value)
    for pair in ALL_PAIRS:
        try:
            found[pair.value].append(made(pair.value))
        except errors.InvalidSpec:
            assert found[pair.value], f"{pair.value.__name__} needs an example"
    return found


EXAMPLES = examples()
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
    if pair.write is None:
        assert set(message_fields(pair)) == set(fields_of(pair.value))


def test_every_value_and_every_message_has_one_pair() -> None:
    assert len({pair.value for pair in ALL_PAIRS}) == len({pair.message for pair in ALL_PAIRS}) == len(ALL_PAIRS)
