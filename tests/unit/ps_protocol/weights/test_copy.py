"""A copy of a shard's weights that steps bring forward, the patches between them, and a reader's copy that follows it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec, MalformedMessage, StepGone
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights import copy as module
from ps_protocol.weights.copy import LEASE_S, MAX_COPIES, Transfer, WeightCopy
from ps_protocol.weights.words import Patch, Selection, encode_patch
from tests.support.chief.eras import era
from tests.unit.ps_protocol.weights.test_words import LAYOUT, changed, random_words

REQUEST = FetchRequest(era=era(1), layout_hash=LAYOUT.hash, encoding=FloatEncoding.BFLOAT16)


def blocks_of(words: Array) -> Iterator[tuple[int, Array]]:
    for start in range(0, words.size, 1000):
        yield start, words[start : start + 1000]


class Source:
    """A shard whose words are known at each step. `held_bytes`: what it has allocated; `spare_bytes`: what it may have beside its words."""

    def __init__(self) -> None:
        self.held_bytes, self.spare_bytes, self.now = 0, 1 << 40, 0.0
        selection = Selection(LAYOUT, FloatEncoding.BFLOAT16)
        self.versions = WeightCopy(selection, keeps_patches=True, allocate=self._allocate, reserve=self._reserve, release=self._release)
        self.at: dict[int, Array] = {}

    def make(self, step: int, *, share: float = 0.02) -> None:
        """Makes a step, in which about this share of the words changes."""
        newest = self.at[max(self.at)] if self.at else random_words(self.versions.selection.num_words)
        self.at[step] = words = changed(newest, share=share, seed=step)
        self.versions.advance(step, blocks_of(words), now=self.now)

    def fetch(self, request: FetchRequest) -> Transfer:
        """Returns all pages of an answer."""
        transfer = Transfer(request)
        while not transfer.is_whole:
            transfer.take(self.page(transfer.request))
        return transfer

    def page(self, request: FetchRequest) -> FetchReply:
        return self.versions.answer(request, newest_step=max(self.at), now=self.now)

    def _allocate(self, nbytes: int) -> Array:
        self.held_bytes += nbytes
        return np.zeros(nbytes, np.uint8)

    def _reserve(self, nbytes: int) -> bool:
        is_free = self.held_bytes + nbytes <= self.versions.words.nbytes + self.spare_bytes
        self.held_bytes += nbytes if is_free else 0
        return is_free

    def _release(self, nbytes: int) -> None:
        self.held_bytes -= nbytes


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def copy() -> WeightCopy:
    return WeightCopy(Selection(LAYOUT, FloatEncoding.BFLOAT16))


def take(copy: WeightCopy, received: Transfer) -> None:
    """Makes a copy what was received."""
    update = copy.understood(received)
    assert not copy.put(update)
    copy.keep(update)


def bring(copy: WeightCopy, source: Source, step: int | None = None) -> bool:
    """Brings a copy forward; returns whether by a patch."""
    received = source.fetch(replace(REQUEST, held_step=copy.step, step=step))
    take(copy, received)
    return received.first.is_patch


def test_a_reader_gets_the_whole_once_and_then_what_changes(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    assert not bring(copy, source)
    for step in range(1, 20):
        source.make(step)
        assert bring(copy, source)
        assert copy.step == step
        np.testing.assert_array_equal(copy.words, source.at[step])


def test_a_reader_that_was_away_gets_one_patch_for_the_steps_between(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    bring(copy, source)
    for step in (1, 4, 9):
        source.make(step)
    assert bring(copy, source)
    np.testing.assert_array_equal(copy.words, source.at[9])


def test_a_reader_that_was_away_for_too_long_gets_the_whole(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    bring(copy, source)
    for step in range(1, 100):
        source.make(step)
    assert not bring(copy, source)
    np.testing.assert_array_equal(copy.words, source.at[99])


def test_where_most_words_change_all_are_sent(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    bring(copy, source)
    source.make(1, share=0.8)
    assert not bring(copy, source)
    np.testing.assert_array_equal(copy.words, source.at[1])


def test_a_step_that_is_no_longer_the_newest_can_be_had_by_patches_while_they_are_kept(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    bring(copy, source)
    for step in (1, 2, 3):
        source.make(step)
    assert bring(copy, source, step=2)
    np.testing.assert_array_equal(copy.words, source.at[2])
    with pytest.raises(StepGone) as caught:
        source.fetch(replace(REQUEST, step=2))
    assert caught.value.facts == {"step": "3"}


def test_a_whole_copy_stays_while_a_slow_reader_fetches_it(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    source.make(0)
    transfer = Transfer(REQUEST)
    transfer.take(source.page(transfer.request))
    for step in (1, 2, 3):
        source.now += LEASE_S - 1  # from one page to the next
        source.make(step, share=0.9)
        transfer.take(source.page(transfer.request))
    while not transfer.is_whole:
        transfer.take(source.page(transfer.request))
    np.testing.assert_array_equal(transfer.content.view(np.uint16), source.at[0])
    assert source.held_bytes == 2 * source.versions.selection.num_words * 2
    source.now += LEASE_S + 1
    for step in (4, 5):
        source.make(step, share=0.9)
    assert source.held_bytes == source.versions.selection.num_words * 2
    with pytest.raises(StepGone):
        source.page(replace(transfer.request, offset=0))


def test_who_has_fetched_all_of_a_copy_keeps_nothing(source: Source, copy: WeightCopy) -> None:
    for step in range(6):
        source.make(step, share=0.8)
        assert not bring(copy, source)
        assert copy.step == step
    assert source.held_bytes == source.versions.selection.num_words * 2


def test_many_slow_readers_share_few_copies(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    for step in range(12):
        source.make(step, share=0.9)
        source.page(REQUEST)
    assert source.held_bytes <= (1 + MAX_COPIES) * source.versions.selection.num_words * 2
    source.versions.close()
    assert source.held_bytes == 0


def test_where_there_is_no_room_for_more_copies_newcomers_share_the_last_one_if_it_is_news(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    for step in range(3):
        source.make(step, share=0.9)
        source.page(REQUEST)  # somebody begins to read all of it
    assert source.page(REQUEST).step == 1
    assert source.page(replace(REQUEST, held_step=0)).step == 1
    assert source.page(replace(REQUEST, held_step=1)).step == 2, "which stays until the next step"
    source.now += LEASE_S
    assert source.page(REQUEST).step == 2


def test_without_room_for_patches_and_messages_all_words_are_sent(
    source: Source, copy: WeightCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    source.spare_bytes = 0
    for step in range(3):
        source.make(step)
        assert not bring(copy, source)
        np.testing.assert_array_equal(copy.words, source.at[step])
        assert source.held_bytes == source.versions.words.nbytes
    source.spare_bytes = 1 << 20
    source.make(3)
    assert bring(copy, source)


def test_patches_and_messages_are_counted_and_given_back(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    bring(copy, source)
    source.make(1)
    with_patch = source.held_bytes
    assert with_patch > source.versions.words.nbytes
    assert bring(copy, source)
    assert source.held_bytes > with_patch
    source.versions.forget()
    assert source.held_bytes == source.versions.words.nbytes


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_what_cannot_be_copied_to_its_end_shows_nothing_of_it(source: Source, copy: WeightCopy, share: float) -> None:
    source.make(0)
    bring(copy, source)

    def overwritten() -> Iterator[tuple[int, Array]]:
        yield from [*blocks_of(changed(source.at[0], share=share, seed=9))][:-1]
        raise StepGone("it was overwritten")

    with pytest.raises(StepGone):
        source.versions.advance(1, overwritten(), now=0.0)
    source.make(2)
    assert bring(copy, source) == (share < 0.5)  # where nearly all had changed, it cannot be taken back
    np.testing.assert_array_equal(copy.words, source.at[2])


@pytest.mark.parametrize("is_read_whole", [False, True])
def test_a_slow_reader_gets_all_pages_of_a_patch_whose_parts_are_let_go(
    source: Source, copy: WeightCopy, monkeypatch: pytest.MonkeyPatch, is_read_whole: bool
) -> None:
    """Also where others read all words of its step."""
    source.make(0)
    bring(copy, source)
    monkeypatch.setattr(module, "PAGE_BYTES", 5_000)
    source.make(1, share=0.3)
    transfer = Transfer(replace(REQUEST, held_step=0))
    transfer.take(source.page(transfer.request))
    if is_read_whole:
        source.page(REQUEST)
    source.make(2, share=0.3)
    assert source.versions.patch_since(0) is None
    while not transfer.is_whole:
        transfer.take(source.page(transfer.request))
    take(copy, transfer)
    np.testing.assert_array_equal(copy.words, source.at[1])
    source.versions.forget()
    with pytest.raises(StepGone):
        source.page(replace(REQUEST, held_step=0, step=1, offset=5_000))


def test_who_gets_all_words_asks_for_no_pages_of_a_patch(source: Source, copy: WeightCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    source.make(0)
    bring(copy, source)
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    source.make(1, share=0.8)
    transfer = Transfer(replace(REQUEST, held_step=0))
    transfer.take(source.page(transfer.request))
    assert (transfer.request.step, transfer.request.held_step) == (1, None)


def overwritten() -> Iterator[tuple[int, Array]]:
    yield 0, random_words(Selection(LAYOUT, FloatEncoding.BFLOAT16).num_words, seed=9)
    raise StepGone("it was overwritten")


def test_a_whole_copy_stays_for_a_slow_reader_though_no_later_step_can_be_copied(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    source.make(0)
    transfer = Transfer(REQUEST)
    transfer.take(source.page(transfer.request))
    for step in (1, 2, 3):
        with pytest.raises(StepGone):
            source.versions.advance(step, overwritten(), now=0.0)
    assert source.versions.step is None
    while not transfer.is_whole:
        transfer.take(source.page(transfer.request))
    np.testing.assert_array_equal(transfer.content.view(np.uint16), source.at[0])
    with pytest.raises(StepGone):
        source.page(replace(REQUEST, step=1))


def test_a_reader_that_keeps_patches_gives_them_to_others(source: Source) -> None:
    selection = source.versions.selection
    relay, reader = WeightCopy(selection, keeps_patches=True), WeightCopy(selection)
    source.make(0)
    for step in range(1, 6):
        bring(relay, source)
        if step != 3:
            first = relay.answer(replace(REQUEST, held_step=reader.step), newest_step=step, now=0.0)
            transfer = Transfer(REQUEST)
            transfer.take(first)
            take(reader, transfer)
            assert first.is_patch == (step > 1)
            np.testing.assert_array_equal(reader.words, source.at[step - 1])
        source.make(step)


def test_nothing_of_a_step_is_given_once_it_is_forgotten(source: Source) -> None:
    for step in range(3):
        source.make(step)
        source.page(replace(REQUEST, held_step=step - 1 if step else None))
    source.versions.forget()
    with pytest.raises(StepGone):
        source.page(REQUEST)
    assert source.held_bytes == source.versions.selection.num_words * 2


def test_readers_of_one_step_are_given_the_same_bytes_which_are_made_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def encode(patch: Patch) -> bytes:
        made.append(patch)
        return encode_patch(patch)

    monkeypatch.setattr(module, "encode_patch", encode)
    source.make(0)
    source.make(1)
    pages = {source.page(replace(REQUEST, held_step=0)).content for _ in range(8)}
    assert (len(pages), len(made)) == (1, 1)


def test_an_offset_beyond_the_end_is_refused(source: Source) -> None:
    source.make(0)
    with pytest.raises(InvalidSpec, match="offset"):
        source.page(replace(REQUEST, offset=1 << 40))


# A reader's copy.


@pytest.mark.parametrize("is_patch", [True, False])
def test_a_wrong_word_is_noticed_and_its_slice_is_fetched_whole(source: Source, copy: WeightCopy, is_patch: bool) -> None:
    source.make(0)
    bring(copy, source)
    place = copy.selection.place(3)
    source.make(1)
    received = source.fetch(replace(REQUEST, held_step=0 if is_patch else None))
    damaged = copy.words if is_patch else received.content.view(np.uint16)
    copy.selection.words_of(damaged, place)[:] ^= np.uint16(4)
    update = copy.understood(received)
    assert copy.put(update) == (place,)
    copy.undo(update)
    update = copy.mended(update, (place,), source.fetch(replace(REQUEST, step=1, slices=(3,))))
    assert not copy.put(update)
    copy.keep(update)
    np.testing.assert_array_equal(copy.words, source.at[1])


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_an_update_that_is_undone_leaves_the_copy_as_it_was(source: Source, copy: WeightCopy, share: float) -> None:
    source.make(0)
    bring(copy, source)
    source.make(1, share=share)
    update = copy.understood(source.fetch(replace(REQUEST, held_step=0)))
    update.digests[copy.selection.place(3)] += np.uint64(1)
    assert copy.put(update) == (copy.selection.place(3),)
    copy.undo(update)
    assert copy.step == 0
    np.testing.assert_array_equal(copy.words, source.at[0])
    np.testing.assert_array_equal(copy.digests, copy.selection.digests(source.at[0]))


def test_a_slice_that_is_wrong_again_is_noticed(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    received = source.fetch(REQUEST)
    received.content[100] ^= 1
    update = copy.understood(received)
    places = copy.put(update)
    copy.undo(update)
    again = source.fetch(replace(REQUEST, step=0, slices=tuple(copy.selection.of[place] for place in places)))
    again.content[100] ^= 1
    update = copy.mended(update, places, again)
    assert copy.put(update) == places
    copy.undo(update)
    assert copy.step is None


@pytest.mark.parametrize("wrong", [{"step": 9}, {"is_patch": True}, {"num_bytes": 3}, {"content": b""}])
def test_a_page_of_another_answer_is_refused(source: Source, wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 20_000)
    source.make(0)
    transfer = Transfer(REQUEST)
    transfer.take(source.page(transfer.request))
    with pytest.raises(MalformedMessage, match="a page of"):
        transfer.take(replace(source.page(transfer.request), **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"digests": (1, 2)}, {"is_patch": False}])
def test_an_answer_that_does_not_fit_the_selection_is_refused(source: Source, copy: WeightCopy, wrong: dict[str, object]) -> None:
    source.make(0)
    bring(copy, source)
    source.make(1)
    transfer = Transfer(replace(REQUEST, held_step=0))
    transfer.take(replace(source.page(transfer.request), **wrong))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage):
        copy.understood(transfer)


def test_a_patch_is_refused_where_no_step_is_held(source: Source, copy: WeightCopy) -> None:
    source.make(0)
    source.make(1)
    with pytest.raises(MalformedMessage, match="no step is held"):
        copy.understood(source.fetch(replace(REQUEST, held_step=0)))


def test_an_answer_that_fits_no_memory_is_refused(source: Source) -> None:
    source.make(0)
    with pytest.raises(MalformedMessage, match="which no memory has"):
        Transfer(REQUEST).take(replace(source.page(REQUEST), num_bytes=(1 << 64) - 1))
