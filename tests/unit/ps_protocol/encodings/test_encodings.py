"""Encoded numbers: compared with slow references, and to the last bit where there is one right answer."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.encodings import halves as encodings_halves
from ps_protocol.encodings.arena import decoding_writer, encoded_frames
from ps_protocol.encodings.formats import FORMATS, FloatEncoding, Units, encoded_nbytes, encoded_ranges, stretch, units_of
from ps_protocol.encodings.halves import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16
from ps_protocol.encodings.integers import INT4, INT8, ScaledIntegers
from ps_protocol.encodings.top_k import CHUNK, TopKChunks
from ps_protocol.errors import FrameOutOfOrder, InvalidSpec, TruncatedStream
from ps_protocol.model.layout import Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec

HALVES = {FloatEncoding.BFLOAT16: np.dtype(ml_dtypes.bfloat16), FloatEncoding.FLOAT16: np.dtype(np.float16)}
EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)
UNITS = [units_of(FloatEncoding.INT8_BLOCKS), units_of(FloatEncoding.INT4_BLOCKS)]


def variable(name: str, size: int, data_type: DataType = DataType.FLOAT32, *, is_state: bool = False) -> VariableSlice:
    optimizer = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0)) if is_state else None
    spec = VariableSpec(name=name, data_type=data_type, shape=(size,), optimizer=optimizer)
    return VariableSlice(variable=spec, start=0, stop=size)


# Padding behind most, ranges that travel as they are between those that do not, and more than one block of integers.
MIXED = Layout(
    [
        variable("w", 777),
        variable("d", 9, DataType.FLOAT64),
        variable("h", 5, DataType.BFLOAT16),
        variable("b", 3),
        variable("count", 4, is_state=True),
    ]
)


def arena(layout: Layout, seed: int = 0) -> Array:
    rng, memory = np.random.default_rng(seed), aligned_bytes(layout.nbytes)
    for index, piece in enumerate(layout.slices):
        layout.view(memory, index)[...] = rng.standard_normal(piece.shape)
    return memory


def reference(values: Array, encoding: FloatEncoding) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(HALVES[encoding]).view(np.uint16)


def narrowed(values: Array, encoding: FloatEncoding) -> Array:
    bits = np.empty(values.size, np.uint16)
    (narrow_bfloat16 if encoding is FloatEncoding.BFLOAT16 else narrow_float16)(values, bits)
    return bits


def widen(bits: Array, out: Array, encoding: FloatEncoding) -> None:
    (widen_bfloat16 if encoding is FloatEncoding.BFLOAT16 else widen_float16)(bits, out)


@pytest.fixture(params=["ml_dtypes", "integers"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "integers":
        monkeypatch.setattr(encodings_halves, "_bfloat16", lambda: None)


def test_every_encoding_has_its_entry_and_its_units_fit_the_blocks_that_are_worked_on() -> None:
    assert [*FORMATS] == [*FloatEncoding]
    for entry in FORMATS.values():
        if isinstance(entry.coding, Units):
            assert 65536 % entry.coding.size == 0
            assert units_of(entry.encoding) is entry.coding
        else:
            with pytest.raises(InvalidSpec, match="its length is that of each contribution"):
                units_of(entry.encoding)


@pytest.mark.parametrize("encoding", HALVES)
@pytest.mark.usefixtures("bfloat16")
def test_every_half_precision_value_is_widened_and_narrowed_back_to_the_same_bits(encoding: FloatEncoding) -> None:
    # Also 64 at a time, so that what is not finite is not in every block.
    for patterns in (EVERY_PATTERN, *EVERY_PATTERN.reshape(-1, 64)):
        expected = patterns.view(HALVES[encoding]).astype(np.float32)
        out = np.empty(patterns.size, np.float32)
        widen(patterns, out, encoding)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        is_number = ~np.isnan(out)
        np.testing.assert_array_equal(narrowed(out, encoding)[is_number], patterns[is_number])


@pytest.mark.parametrize("encoding", HALVES)
@pytest.mark.usefixtures("bfloat16")
def test_float32_rounds_to_the_nearest_half_ties_to_even(encoding: FloatEncoding) -> None:
    halves = np.sort(EVERY_PATTERN.view(HALVES[encoding]).astype(np.float32)[:])
    halves = halves[np.isfinite(halves)]
    ties = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    nearly = [np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf)]
    random = np.random.default_rng(7).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    for values in (ties, *nearly, random, random[np.abs(random) < 60_000], random[:0]):
        values = np.ascontiguousarray(values)
        np.testing.assert_array_equal(narrowed(values, encoding), reference(values, encoding))


@pytest.mark.usefixtures("bfloat16")
def test_a_value_too_large_for_a_half_becomes_infinite_and_nan_stays_nan() -> None:
    values = np.array([65519, 65520, -1e30, np.inf, -np.inf, np.nan, -np.nan, 1e-9, -0.0], np.float32)
    out = np.empty(values.size, np.float32)
    widen(narrowed(values, FloatEncoding.FLOAT16), out, FloatEncoding.FLOAT16)
    np.testing.assert_array_equal(out, [65504, np.inf, -np.inf, np.inf, -np.inf, np.nan, np.nan, 0, -0.0])
    widen(narrowed(values, FloatEncoding.BFLOAT16), out, FloatEncoding.BFLOAT16)
    assert np.isnan(out[5:7]).all() and np.isinf(out[3:5]).all() and np.isfinite(out[:3]).all()
    assert list(np.signbit(out[5:7])) == list(np.signbit(values[5:7])) and np.signbit(out[8])


def test_halves_that_lie_at_an_odd_address_are_read_all_the_same() -> None:
    raw = np.zeros(2001, np.uint8)
    raw[1:] = reference(np.arange(1000, dtype=np.float32), FloatEncoding.BFLOAT16).view(np.uint8)
    out = np.empty(1000, np.float32)
    widen(raw[1:].view(np.uint16), out, FloatEncoding.BFLOAT16)
    np.testing.assert_array_equal(out[:257], np.arange(257))


@pytest.mark.parametrize(("integers", "largest"), [(INT8, 127), (INT4, 7)])
@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_integers_are_wrong_by_half_of_their_blocks_scale_at_most(
    integers: ScaledIntegers, largest: int, size: int, seed: int, magnitude: float
) -> None:
    values = (np.random.default_rng(seed).standard_normal(size) * magnitude).astype(np.float32)
    out = round_trip(integers, values)
    for start in range(0, size, integers.size):
        block = values[start : start + integers.size]
        scale = np.abs(block).max() / largest
        assert (np.abs(out[start : start + integers.size] - block) <= scale * 0.5001).all()


def test_integers_of_four_bits_lie_in_pairs_with_the_first_in_the_lower_half_of_a_byte() -> None:
    values = np.array([7, -7, 1, -1, 3], np.float32)
    encoded = np.full(4 + 3, 255, np.uint8)
    INT4.encode(values, encoded)
    assert encoded[:4].view("<f4")[0] == 1 and [*encoded[4:]] == [0x97, 0xF1, 0x03]
    out = np.empty(2, np.float32)
    INT4.decode(np.array([0, 0, 0, 64, 0x80], np.uint8), out)
    assert [*out] == [0, -16], "eight below zero, which nobody sends"


@pytest.mark.parametrize("integers", [INT8, INT4])
def test_integers_keep_zeros_and_each_blocks_largest_value_and_a_nonfinite_value_spoils_only_its_block(integers: ScaledIntegers) -> None:
    values = np.zeros(1024 + 16, np.float32)
    values[256:512] = np.linspace(-3, 3, 256)
    values[700], values[800], values[-1] = np.inf, 1e-38, np.nan
    out = round_trip(integers, values)
    assert not out[:256].any() and out[256] == -3 and out[511] == 3
    assert np.isnan(out[700 - 700 % integers.size :][: integers.size]).all(), "one that is not finite spoils its own block"
    assert not out[768:1024].any(), "too small for a scale"
    assert np.isnan(out[1024:]).all(), "the last block is a shorter one"


def round_trip(integers: ScaledIntegers, values: Array) -> Array:
    units = next(one for one in UNITS if one.encode == integers.encode)
    encoded, out = np.empty(units.nbytes(values.size), np.uint8), np.empty_like(values)
    integers.encode(values, encoded)
    integers.decode(encoded, out)
    return out


@pytest.mark.parametrize("encoding", [FloatEncoding.AS_IS, *HALVES])
@pytest.mark.parametrize("frame_bytes", [64, 999, 1 << 20])
def test_frames_of_an_arena_are_its_ranges_one_after_the_other(encoding: FloatEncoding, frame_bytes: int) -> None:
    memory = arena(MIXED)
    frames = [(offset, bytes(frame)) for offset, frame in encoded_frames(MIXED, memory, encoding, frame_bytes)]
    joined = b"".join(frame for _, frame in frames)
    ends = np.cumsum([len(frame) for _, frame in frames])
    assert [offset for offset, _ in frames] == [0, *ends[:-1]] and max(len(frame) for _, frame in frames) <= frame_bytes
    assert len(joined) == encoded_nbytes(MIXED, encoding)
    for one in encoded_ranges(MIXED, encoding):
        content = memory[one.arena.start : one.arena.stop]
        expected = reference(content.view(np.float32), encoding) if one.is_encoded else content
        assert joined[one.start : one.stop] == expected.tobytes()
        cut = stretch(MIXED, np.frombuffer(joined, np.uint8), encoding, one.arena, one.arena.start + 64, one.arena.stop)
        assert cut.size == one.size - 64 // one.arena.data_type.itemsize


@given(st.sampled_from([FloatEncoding.AS_IS, *HALVES]), st.lists(st.integers(1, 900)), st.lists(st.integers(1, 50)))
def test_a_writer_takes_frames_that_end_anywhere_into_pieces_that_end_at_variables(
    encoding: FloatEncoding, lengths: list[int], cuts: list[int]
) -> None:
    memory, tail = arena(MIXED), np.zeros(7, np.uint8)
    encoded = b"".join(bytes(frame) for _, frame in encoded_frames(MIXED, memory, encoding, 1 << 20)) + b"1234567"
    borders = sorted({0, MIXED.nbytes, *(64 * cut for cut in cuts if 64 * cut < MIXED.nbytes)})
    pieces = [aligned_bytes(stop - start) for start, stop in pairwise(borders)]
    writer = decoding_writer(MIXED, encoding, Segments(pieces), followed_by=[tail])
    for length in lengths:
        writer.write(writer.num_written, encoded[writer.num_written : writer.num_written + length])
    writer.write(writer.num_written, encoded[writer.num_written :])
    writer.finish()
    expected, found = memory.copy(), np.concatenate(pieces)
    for one in encoded_ranges(MIXED, encoding):
        if one.is_encoded:
            part = expected[one.arena.start : one.arena.stop].view(np.float32)
            part[:] = reference(part.copy(), encoding).view(HALVES[encoding])
    np.testing.assert_array_equal(found, expected)
    assert tail.tobytes() == b"1234567"


def test_a_writer_refuses_gaps_and_excess_bytes_and_reports_missing_ones() -> None:
    writer = decoding_writer(MIXED, FloatEncoding.BFLOAT16, Segments([aligned_bytes(MIXED.nbytes)]))
    nbytes = encoded_nbytes(MIXED, FloatEncoding.BFLOAT16)
    writer.write(0, b"123")
    for offset, length in ((0, 3), (4, 1), (3, nbytes)):
        with pytest.raises(FrameOutOfOrder):
            writer.write(offset, bytes(length))
    with pytest.raises(TruncatedStream):
        writer.finish()
    assert writer.num_written == 3


def test_only_float32_that_takes_gradients_is_encoded() -> None:
    encoded = [one.arena for one in encoded_ranges(MIXED, FloatEncoding.BFLOAT16) if one.is_encoded]
    assert [(one.data_type, MIXED.rules[one.rule]) for one in encoded] == [(DataType.FLOAT32, None)]
    with pytest.raises(InvalidSpec):
        next(encoded_frames(MIXED, arena(MIXED), FloatEncoding.INT8_BLOCKS, 100))


@given(st.integers(0, 2**32 - 1), st.integers(1, 9000), st.floats(0.0, 1.0), st.sampled_from(["normal", "few values", "zeros", "nan"]))
def test_top_k_are_the_largest_magnitudes_of_each_chunk_and_wrong_by_half_of_its_scale_at_most(
    seed: int, size: int, share: float, kind: str
) -> None:
    values, top_k = some_values(seed, size, kind), TopKChunks(max(1, int(share * CHUNK)))
    encoded, out = np.empty(top_k.nbytes(size), np.uint8), np.empty_like(values)
    top_k.encode(values, encoded)
    top_k.decode(encoded, out)
    for start in range(0, size, CHUNK):
        chunk, found = values[start : start + CHUNK], out[start : start + CHUNK]
        number = -(-top_k.count * chunk.size // CHUNK)
        if np.isnan(chunk).any():
            is_nan = np.isnan(chunk)
            assert np.count_nonzero(np.isnan(found)) == number
            assert np.count_nonzero(np.isnan(found[is_nan])) == min(number, np.count_nonzero(is_nan)), "the largest"
            continue
        magnitudes = np.sort(np.abs(chunk))[::-1]
        scale, sent = magnitudes[0] / 7, np.flatnonzero(found)
        assert sent.size <= number and (np.abs(found - chunk)[sent] <= scale * 0.5001).all()
        # What is not sent is no larger than what is, or is zero as an integer.
        left = np.abs(chunk[found == 0])
        assert not left.size or left.max() <= max(magnitudes[number - 1], scale * 0.5001)


def test_an_element_of_top_k_is_two_bytes_of_which_the_upper_four_bits_are_its_value() -> None:
    values, top_k = np.zeros(CHUNK + 16, np.float32), TopKChunks(2)
    values[[5, 4095, CHUNK + 3]] = 7.0, -3.0, -1.0
    encoded = np.empty(top_k.nbytes(values.size), np.uint8)
    assert encoded.size == 4 + 2 * 2 + 4 + 2, "of 16 elements 2 of 4096 is one"
    top_k.encode(values, encoded)
    assert encoded[:4].view("<f4")[0] == 1 and [*encoded[4:8].view("<u2")] == [7 << 12 | 5, 0xD << 12 | 4095]
    assert encoded[8:12].view("<f4")[0] == np.float32(1 / 7) and [*encoded[12:].view("<u2")] == [9 << 12 | 3]


def some_values(seed: int, size: int, kind: str) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == "few values":
        values = np.rint(values).astype(np.float32)
    elif kind == "zeros":
        values[rng.random(size) < 0.999] = 0
    elif kind == "nan":
        values[rng.random(size) < 0.0005] = np.nan
    return values
