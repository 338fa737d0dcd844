"""Words of an encoded arena: differences, their bytes, digests, selections."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_protocol.weights.words import Patch, Selection, decode_patch, encode_patch, joined, merged, overwrite


def piece(name: str, *shape: int, data_type: DataType = DataType.FLOAT32, optimizer: OptimizerSpec | None = None) -> VariableSlice:
    variable = VariableSpec(name=name, shape=shape, data_type=data_type, optimizer=optimizer)
    return VariableSlice(variable=variable, start=0, stop=shape[0] if shape else 1)


# Types that are encoded and types that are not, a slice without elements, and a statistic, which is not encoded.
LAYOUT = Layout(
    [
        piece("a", 1000),
        piece("none", 0),
        piece("half", 7, data_type=DataType.FLOAT16),
        piece("b", 300, 100),
        piece("d", 5, data_type=DataType.FLOAT64),
        piece("mean", 9, optimizer=OptimizerSpec(name="assign_mean", learning_rate=constant(0.0))),
    ]
)
ENCODINGS = (FloatEncoding.AS_IS, FloatEncoding.BFLOAT16)


def random_words(count: int, *, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


def changed(words: Array, *, share: float, seed: int = 1) -> Array:
    """Returns words of which about this share is another."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(words.size) < share, words ^ np.uint16(1 + seed % 7), words)


def difference(before: Array, after: Array) -> Patch:
    """Returns what makes the later words of the earlier ones, found block by block."""
    words = before.copy()
    patch = joined([overwrite(words, after[start : start + 100], start) for start in range(0, words.size, 100)])
    np.testing.assert_array_equal(words, after)
    return patch


def applied(words: Array, patch: Patch) -> Array:
    after = words.copy()
    patch.apply(after)
    return after


@given(share=st.sampled_from([0.0, 0.0005, 0.02, 0.3, 0.9, 1.0]), count=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_a_patch_makes_the_later_words_of_the_earlier_ones_and_back_bit_by_bit(share: float, count: int, seed: int) -> None:
    before = random_words(count, seed=seed)
    after = np.where(np.random.default_rng(seed).random(count) < share, random_words(count, seed=seed + 1), before)
    patch = decode_patch(encode_patch(difference(before, after)), num_words=count)
    np.testing.assert_array_equal(applied(before, patch), after)
    patch.undo(after)
    np.testing.assert_array_equal(after, before)


def test_a_word_of_seventy_that_changes_a_little_takes_ten_bits() -> None:
    rng = np.random.default_rng(0)
    before = random_words(1 << 18)
    after = np.where(rng.random(before.size) < 1 / 70, before + rng.choice([1, 2, 65535], before.size).astype(np.uint16), before)
    assert len(encode_patch(difference(before, after))) < 10 / 8 * np.count_nonzero(before != after)


@given(seed=st.integers(0, 1000), shares=st.lists(st.sampled_from([0.0, 0.01, 0.4]), min_size=1, max_size=4))
def test_merged_patches_do_what_they_do_one_after_the_other(seed: int, shares: list[float]) -> None:
    first = random_words(500, seed=seed)
    steps, patches = [first], []
    for number, share in enumerate(shares):
        steps.append(changed(steps[-1], share=share, seed=seed + number))
        patches.append(difference(steps[-2], steps[-1]))
    found = merged(patches)
    np.testing.assert_array_equal(applied(first, found), steps[-1])
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_slices_lie_where_the_encoded_arena_has_them(encoding: FloatEncoding) -> None:
    selection = Selection(LAYOUT, encoding)
    assert selection.num_words * 2 == encoded_nbytes(LAYOUT, encoding)
    words = random_words(selection.num_words)
    sizes = {"a": 1000, "none": 0, "half": 7, "b": 30_000, "d": 5, "mean": 9}
    for place, index in enumerate(selection.of):
        variable = LAYOUT.slices[index].variable
        content, is_encoded = selection.content_of(words, place)
        # What takes plain updates travels as it is.
        assert is_encoded == (encoding is not FloatEncoding.AS_IS and variable.name in ("a", "none", "b"))
        assert content.nbytes == sizes[variable.name] * (2 if is_encoded else variable.data_type.itemsize)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_reader_of_some_slices_gets_their_part_of_a_patch(encoding: FloatEncoding) -> None:
    whole, part = Selection(LAYOUT, encoding), Selection(LAYOUT, encoding, (3, 2))
    before = random_words(whole.num_words)
    after = changed(before, share=0.05)
    patch = difference(before, after)
    held = part.taken_from(before, whole).copy()
    found = part.of_patch(patch, whole)
    np.testing.assert_array_equal(applied(held, found), part.taken_from(after, whole))
    np.testing.assert_array_equal(part.digests(applied(held, found)), whole.digests(after)[[whole.place(index) for index in part.of]])


def test_slices_that_the_layout_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="the layout has 6"):
        Selection(LAYOUT, FloatEncoding.AS_IS, (6,))


GOOD = encode_patch(Patch(positions=np.array([3, 900], np.uint32), changes=np.array([1, 65535], np.uint16)))


def packed(count: int, gaps: bytes, changes: bytes, *, gap_bytes: int | None = None) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    head = np.array([count, len(gaps) if gap_bytes is None else gap_bytes], "<u4").tobytes()
    return head + packer.compress(gaps + changes) + packer.flush()


@pytest.mark.parametrize(
    "content",
    [
        GOOD[:-1],
        GOOD[:5],
        b"",
        GOOD + b"\0",
        GOOD[:8] + b"\xff" * (len(GOOD) - 8),
        packed(2, b"\x03\xff", b"\0" * 4),  # the last gap goes on for ever
        packed(3, b"\x03\x04", b"\0" * 6),  # more words than gaps
        packed(1, b"\xff\xff\xff\xf0", b"\0" * 2),  # beyond the last word
        packed(1, b"\xff" * 9 + b"\0", b"\0" * 2),
        packed(2, b"\x03\x04", b"\0" * 3),
        packed(2, b"\x03\x04", b"\0" * 5),
        packed(1001, b"\0" * 1001, b"\0" * 2002),
        packed(1, b"\0", b"\0" * (1 << 24)),  # many bytes in few
        packed(0xFFFFFFFF, b"", b""),
    ],
)
def test_bytes_that_are_no_patch_are_refused(content: bytes) -> None:
    with pytest.raises(MalformedMessage, match="a patch: "):
        decode_patch(content, num_words=1000)
