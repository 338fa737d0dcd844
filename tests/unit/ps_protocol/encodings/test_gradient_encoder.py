"""Encoded gradients over many steps: nothing is lost for ever or sent twice, and absent gradients are left alone."""

import numpy as np
import pytest

from ps_protocol.encodings.arena import decoding_writer, unpack
from ps_protocol.encodings.formats import FORMATS, FloatEncoding, Packed, encoded_ranges
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.model.layout import Layout, Segments, aligned_bytes
from ps_protocol.model.variables import Array
from tests.unit.ps_protocol.encodings.test_encodings import MIXED, arena, variable

LOSSY = {
    "bfloat16": FloatEncoding.BFLOAT16,
    "float16": FloatEncoding.FLOAT16,
    "int8": FloatEncoding.INT8_BLOCKS,
    "int4": FloatEncoding.INT4_BLOCKS,
    "top_k": FloatEncoding.TOP_K,
}
PLAIN = Layout([variable("a", 500), variable("b", 40)])


def encoder(layout: Layout, name: str, *, fraction: float = 0.1, feedback: float = 1.0) -> GradientEncoder:
    return GradientEncoder(layout, LOSSY[name], fraction=fraction, feedback=feedback)


def decoded(layout: Layout, encoding: FloatEncoding, encoded: Array) -> Array:
    memory = aligned_bytes(layout.nbytes)
    if isinstance(packed := FORMATS[encoding].coding, Packed):
        unpack(layout, packed, encoded, memory)
        return memory
    writer = decoding_writer(layout, encoding, Segments([memory]))
    writer.write(0, encoded.data)
    writer.finish()
    return memory


def sent(one: GradientEncoder, layout: Layout, gradients: Array, *, absent: tuple[int, ...] = ()) -> Array:
    encoded = one.encode(Segments([gradients]), absent=absent)
    assert encoded.nbytes == one.nbytes
    return decoded(layout, one.encoding, encoded)


@pytest.mark.parametrize("name", LOSSY)
def test_the_encoded_contributions_of_many_steps_add_up_to_the_sum_of_the_gradients(name: str) -> None:
    one, steps = encoder(PLAIN, name), 60
    true, arrived = np.zeros(PLAIN.nbytes // 4), np.zeros(PLAIN.nbytes // 4)
    worst = 0.0
    for step in range(steps):
        gradients = arena(PLAIN, step)
        true += gradients.view(np.float32)
        arrived += sent(one, PLAIN, gradients).view(np.float32)
        worst = max(worst, float(np.abs(true - arrived).max()))
    # What is still owed is that of some steps, not of all: it does not grow with their number.
    assert np.abs(true - arrived).max() < {"top_k": 8.0, "int4": 0.5}.get(name, 0.05)
    assert worst > 0


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_owed_fades_by_its_share_with_each_contribution(name: str) -> None:
    one, owed = encoder(PLAIN, name, feedback=0.5), np.zeros(PLAIN.nbytes // 4, np.float32)
    for step in range(5):
        gradients = arena(PLAIN, step)
        wanted = gradients.view(np.float32) + np.float32(0.5) * owed
        alone = encoder(PLAIN, name, feedback=0.0).encode(Segments([wanted.view(np.uint8)]))
        np.testing.assert_array_equal(one.encode(Segments([gradients])), alone)
        owed = wanted - decoded(PLAIN, LOSSY[name], alone).view(np.float32)


@pytest.mark.parametrize("name", LOSSY)
def test_without_error_feedback_the_same_gradients_are_encoded_the_same_in_every_step(name: str) -> None:
    one, gradients = encoder(MIXED, name, feedback=0.0), arena(MIXED)
    first = sent(one, MIXED, gradients)
    np.testing.assert_array_equal(sent(one, MIXED, gradients), first)
    for part in encoded_ranges(MIXED, FloatEncoding.BFLOAT16):
        if not part.is_encoded:
            stretch = slice(part.arena.start, part.arena.stop)
            np.testing.assert_array_equal(first[stretch], gradients[stretch], "as it is")


@pytest.mark.parametrize("name", LOSSY)
def test_a_contribution_that_did_not_count_leaves_no_trace(name: str) -> None:
    one, other = encoder(PLAIN, name), encoder(PLAIN, name)
    for step in range(3):
        sent(one, PLAIN, arena(PLAIN, step))
        sent(other, PLAIN, arena(PLAIN, step))
    other.settle(is_counted=True)
    sent(other, PLAIN, arena(PLAIN, 99))
    other.settle(is_counted=False)
    other.settle(is_counted=True)  # of a step in which nothing was encoded
    np.testing.assert_array_equal(sent(other, PLAIN, arena(PLAIN, 3)), sent(one, PLAIN, arena(PLAIN, 3)))


@pytest.mark.parametrize("name", LOSSY)
def test_absent_gradients_are_not_read_and_their_carried_over_error_waits(name: str) -> None:
    one, other = encoder(PLAIN, name), encoder(PLAIN, name)
    before = sent(one, PLAIN, arena(PLAIN, 0)), sent(other, PLAIN, arena(PLAIN, 0))
    np.testing.assert_array_equal(*before)
    spoilt, zeroed = arena(PLAIN, 1), arena(PLAIN, 1)
    PLAIN.view(spoilt, 1)[...] = np.nan
    PLAIN.view(zeroed, 1)[...] = 0
    first, second = sent(one, PLAIN, spoilt, absent=(1,)), sent(other, PLAIN, zeroed, absent=(1,))
    np.testing.assert_array_equal(PLAIN.view(first, 0), PLAIN.view(second, 0))
    assert np.isnan(PLAIN.view(spoilt, 1)).all(), "the caller's memory is as it was"
    np.testing.assert_array_equal(sent(one, PLAIN, arena(PLAIN, 2)), sent(other, PLAIN, arena(PLAIN, 2)))
    alone, owing = encoder(PLAIN, name), encoder(PLAIN, name)
    sent(owing, PLAIN, arena(PLAIN, 0))
    sent(owing, PLAIN, aligned_bytes(PLAIN.nbytes), absent=(0, 1))
    sent(alone, PLAIN, arena(PLAIN, 0))
    np.testing.assert_array_equal(sent(owing, PLAIN, arena(PLAIN, 5)), sent(alone, PLAIN, arena(PLAIN, 5)))


@pytest.mark.parametrize("name", LOSSY)
def test_a_nonfinite_value_is_sent_and_not_carried_over_to_the_next_contribution(name: str) -> None:
    one, gradients = encoder(PLAIN, name), arena(PLAIN)
    PLAIN.view(gradients, 0)[[3, 5]] = np.inf, np.nan
    assert not np.isfinite(sent(one, PLAIN, gradients).view(np.float32)).all()
    assert np.isfinite(sent(one, PLAIN, arena(PLAIN, 1)).view(np.float32)).all()


@pytest.mark.parametrize("feedback", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("name", LOSSY)
def test_an_arena_in_pieces_is_sent_as_if_it_were_in_one(name: str, feedback: float) -> None:
    one, other = (encoder(PLAIN, name, feedback=feedback) for _ in range(2))
    for step in range(3):
        gradients = arena(PLAIN, step)
        cuts = [gradients[:400].copy(), gradients[400:1984].copy(), gradients[1984:].copy()]
        np.testing.assert_array_equal(other.encode(Segments(cuts)), one.encode(Segments([gradients])))


def test_top_k_sends_the_share_of_each_chunk_rounded_up_and_at_least_one() -> None:
    one = encoder(PLAIN, "top_k", fraction=0.01)
    assert one.nbytes == 8 + 4 + 2 * 6, "6 of 560 with padding"
    assert 1 <= np.count_nonzero(sent(one, PLAIN, arena(PLAIN)).view(np.float32)) <= 6
    assert encoder(PLAIN, "top_k", fraction=1e-9).nbytes == 8 + 4 + 2
