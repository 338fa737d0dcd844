"""Words of an encoded arena: differences, their bytes, digests, selections."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_protocol.weights import words as module
from ps_protocol.weights.words import Patch, Selection, decode_patch, difference, encode_patch, merged


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


def applied(words: Array, patch: Patch) -> Array:
    after = words.copy()
    after[patch.positions] = patch.values
    return after


@given(share=st.sampled_from([0.0, 0.0005, 0.02, 0.3, 0.9, 1.0]), count=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_a_patch_makes_the_later_words_of_the_earlier_ones_bit_by_bit(share: float, count: int, seed: int) -> None:
    before = random_words(count, seed=seed)
    after = changed(before, share=share, seed=seed + 1)
    patch = difference(before, after, max_changed=count)
    assert patch is not None
    sent = encode_patch(patch, num_words=count, words=after)
    np.testing.assert_array_equal(applied(before, decode_patch(sent, num_words=count)), after)


def test_pieces_of_a_patch_meet_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_WORDS", 64)
    before = random_words(1000)
    after = changed(before, share=0.1)
    after[[0, 63, 64, 127, 999]] += 1
    after[640:704] += 1  # a piece of which all changes
    patch = difference(before, after, max_changed=1000)
    assert patch is not None
    sent = encode_patch(patch, num_words=1000, words=after)
    np.testing.assert_array_equal(applied(before, decode_patch(sent, num_words=1000)), after)


def test_a_word_of_fifty_takes_three_bytes() -> None:
    before = random_words(1 << 18)
    after = changed(before, share=0.02)
    patch = difference(before, after, max_changed=before.size)
    assert patch is not None
    assert before.nbytes / len(encode_patch(patch, num_words=before.size)) > 30


def test_where_most_changes_there_is_no_patch() -> None:
    before = random_words(1 << 12)
    assert difference(before, changed(before, share=0.5), max_changed=1 << 10) is None


@given(seed=st.integers(0, 1000), shares=st.lists(st.sampled_from([0.0, 0.01, 0.4]), min_size=1, max_size=4))
def test_merged_patches_do_what_they_do_one_after_the_other(seed: int, shares: list[float]) -> None:
    first = random_words(500, seed=seed)
    steps, patches = [first], []
    for number, share in enumerate(shares):
        steps.append(changed(steps[-1], share=share, seed=seed + number))
        patch = difference(steps[-2], steps[-1], max_changed=500)
        assert patch is not None
        patches.append(patch)
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
    patch = difference(before, after, max_changed=before.size)
    assert patch is not None
    held = part.taken_from(before, whole).copy()
    found = part.of_patch(patch, whole)
    np.testing.assert_array_equal(applied(held, found), part.taken_from(after, whole))
    np.testing.assert_array_equal(part.digests(applied(held, found)), whole.digests(after)[[whole.place(index) for index in part.of]])


def test_slices_that_the_layout_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="the layout has 6"):
        Selection(LAYOUT, FloatEncoding.AS_IS, (6,))


GOOD = encode_patch(Patch(positions=np.array([3, 900], np.uint32), values=np.array([1, 2], np.uint16)), num_words=1000)


@pytest.mark.parametrize(
    "content",
    [
        GOOD[:-1],
        GOOD[:5],
        b"",
        GOOD + b"\0",
        GOOD[:8] + b"\xff" * (len(GOOD) - 8),
        np.array([2, 2], "<u4").tobytes() + b"\x03\xff" + b"\0" * 4,  # the last gap goes on for ever
        np.array([3, 2], "<u4").tobytes() + b"\x03\x04" + b"\0" * 6,  # more words than gaps
        np.array([1, 4], "<u4").tobytes() + b"\xff\xff\xff\xf0" + b"\0" * 2,  # beyond the last word
        np.array([0xFFFFFFFF, 0], "<u4").tobytes() + b"\0" * 10,
    ],
)
def test_bytes_that_are_no_patch_are_refused(content: bytes) -> None:
    with pytest.raises(MalformedMessage, match="a patch: "):
        decode_patch(content, num_words=1000)
