"""Checksums: equal for equal bytes, different for the changes that programs, networks and memory make."""

import numpy as np
import pytest

from ps_protocol.model.checksums import checksum
from ps_protocol.model.variables import Array

# None, less than a word, words and a rest, one block and a rest, several levels of blocks.
_LENGTHS = (0, 3, 8, 77, 4096 * 8, 4096 * 8 + 13, 5 * 4096 * 8 + 5, 4097 * 4096 * 8)


def _random(length: int) -> Array:
    return np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("length", _LENGTHS)
def test_a_checksum_depends_on_the_bytes_alone(length: int) -> None:
    memory = _random(length)
    shifted = np.empty(length + 3, np.uint8)[3:]
    shifted[:] = memory
    assert checksum([memory]) == checksum([shifted]), "wherever they lie"
    assert 0 <= checksum([memory]) < 2**64


@pytest.mark.parametrize("length", [length for length in _LENGTHS if length])
def test_a_flipped_bit_anywhere_changes_the_checksum(length: int) -> None:
    memory = _random(length)
    before = checksum([memory])
    for at in {0, length // 2, length - 1, max(0, length - 9)}:
        for bit in (0, 7):
            memory[at] ^= 1 << bit
            assert checksum([memory]) != before, (at, bit)
            memory[at] ^= 1 << bit
    assert checksum([memory]) == before


def test_numbers_in_another_order_or_with_another_sign_change_it() -> None:
    gradients = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    others = [np.roll(gradients, 1), gradients[::-1].copy(), -gradients, gradients * 2, np.zeros_like(gradients)]
    blocks = gradients.copy()
    blocks[:8192], blocks[8192:16384] = gradients[8192:16384], gradients[:8192]
    last = gradients.copy()
    last[-2:] = last[-2:][::-1]
    assert len({checksum([one]) for one in (gradients, *others, blocks, last)}) == len(others) + 3


def test_parts_count_in_their_order_and_by_their_lengths() -> None:
    one, other, zeros = _random(64), _random(77), np.zeros(8, np.uint8)
    found = [[one, other], [other, one], [one], [one, zeros], [one, zeros[:4]], [np.concatenate([one, zeros])], [zeros], [zeros[:4]], []]
    assert len({checksum(parts) for parts in found}) == len(found)


def test_a_checksum_is_the_same_on_every_machine() -> None:
    assert checksum([np.arange(100_000, dtype="<u4").view(np.uint8)]) == 5560766158701804105
