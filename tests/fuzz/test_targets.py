"""Arbitrary bytes from a network or a disk: the fuzzing targets hold, without the fuzzer, over damaged examples."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

# What bytes of protobuf, JSON and safetensors are made of; random bytes alone would not get past the first check.
_PIECES = (
    *(b"\x08", b"\x0a", b"\x12", b"\x80\x80", b"\xff" * 10, b"\0" * 8),
    *(b"{", b"}", b'"', b"[", b"]", b":", b",", b"-", b"9" * 20, b"NaN"),
)
# Fields of protobuf that no message here has, or has already.
_FIELDS = (b"\x78\x01", b"\x7a\x00", b"\x08\x05", b"\x12\x00", b"\x12\x02\x08\x05", b"\x0a\x00")
_NUM_DAMAGED = 200


def _damaged(example: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(example)
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(damaged))
        stop = min(len(damaged), start + chance.choice((0, 1, 2, 8)))
        damaged[start:stop] = chance.choice((b"", chance.choice(_PIECES), chance.randbytes(2), damaged[stop : stop + 9]))
    return bytes(damaged[: chance.choice((len(damaged), chance.randint(0, len(damaged)))) or None])


@pytest.mark.parametrize("name", TARGETS)
def test_every_example_decodes_or_is_refused(name: str) -> None:
    for example in TARGETS[name].examples:
        TARGETS[name].run(example)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_examples_decode_or_are_refused(name: str) -> None:
    chance = random.Random(7)
    for example in TARGETS[name].examples:
        for _ in range(_NUM_DAMAGED):
            TARGETS[name].run(_damaged(example, chance))


@pytest.mark.parametrize("name", TARGETS)
def test_examples_with_bytes_appended_decode_or_are_refused(name: str) -> None:
    examples = TARGETS[name].examples
    for example, more in itertools.product(examples, (*examples, *_FIELDS, *_PIECES)):
        TARGETS[name].run(example + more)


@pytest.mark.parametrize("name", TARGETS)
def test_examples_with_one_byte_slightly_changed_decode_or_are_refused(name: str) -> None:
    chance = random.Random(7)
    for example in TARGETS[name].examples:
        for position in sorted(chance.sample(range(len(example)), min(len(example), _NUM_DAMAGED))):
            for off in (-2, -1, 1, 2):
                TARGETS[name].run(example[:position] + bytes([(example[position] + off) % 256]) + example[position + 1 :])


@pytest.mark.parametrize("name", TARGETS)
@given(content=st.binary(max_size=300))
def test_random_bytes_decode_or_are_refused(name: str, content: bytes) -> None:
    TARGETS[name].run(content)
