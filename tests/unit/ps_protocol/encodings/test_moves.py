"""How a step moved the variables travels in 4 bits an element where that is exact, and not otherwise."""

import numpy as np
import pytest

from ps_protocol.encodings.moves import MovingWriter, encode_moves, moves_nbytes
from ps_protocol.model.variables import Array
from tests.unit.ps_protocol.encodings.test_encodings import MIXED, arena


def moved(before: Array, numbers: int, exponents: tuple[int, int], seed: int = 1) -> Array:
    """As an optimizer moves float32 variables: each element by a whole number of a power of two."""
    rng, after = np.random.default_rng(seed), before.copy()
    for index, piece in enumerate(MIXED.slices):
        if piece.variable.data_type.dtype == np.float32 and piece.variable.name != "count":
            steps = rng.integers(-numbers, numbers + 1, piece.shape).astype(np.float32)
            MIXED.view(after, index)[...] -= steps * np.float32(2.0 ** rng.integers(*exponents))
    return after


@pytest.mark.parametrize("numbers", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("exponents", [(-12, -5), (-40, -20), (3, 9)])
@pytest.mark.parametrize("frame", [1, 67, 1 << 20])
def test_moves_take_a_reader_to_the_last_bit(numbers: int, exponents: tuple[int, int], frame: int) -> None:
    before = arena(MIXED)
    after = moved(before, numbers, exponents)
    encoded = encode_moves(MIXED, before, after)
    assert encoded is not None and encoded.nbytes == moves_nbytes(MIXED) < MIXED.nbytes / 6
    writer = MovingWriter(MIXED, before)
    for start in range(0, encoded.nbytes, frame):
        writer.write(start, encoded[start : start + frame].data)
    writer.finish()
    assert before.tobytes() == after.tobytes()


def test_what_four_bits_do_not_say_is_not_said_so() -> None:
    before = arena(MIXED)
    assert encode_moves(MIXED, before, moved(before, 300, (-8, -7))) is None
    assert encode_moves(MIXED, before, arena(MIXED, seed=5)) is None
    for number in (np.nan, np.inf, -np.inf):
        after = before.copy()
        MIXED.view(after, 0)[3] = number
        assert encode_moves(MIXED, before, after) is None


def test_a_zero_that_lost_its_sign_is_not_said_in_four_bits() -> None:
    before = arena(MIXED)
    MIXED.view(before, 0).reshape(-1)[3] = -0.0
    after = moved(before, 7, (-8, -7))
    MIXED.view(after, 0).reshape(-1)[3] = 0.0
    assert encode_moves(MIXED, before, after) is None
    MIXED.view(after, 0).reshape(-1)[3] = -0.0
    assert encode_moves(MIXED, before, after) is not None
