"""The index of a table's keys: it agrees with a dict, however it grows, and who searches meanwhile finds all that was there before."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.keys import spread
from ps_protocol.model.variables import Array
from ps_server.numbers import key_index
from ps_server.numbers.key_index import KeyIndex

ANY_KEY = st.integers(-(1 << 63), (1 << 63) - 1)
# Keys of few buckets and few tags, so that buckets overflow into others and around the end.
CROWDED_KEY = st.builds(
    lambda tag, bucket, number: tag << 40 | number << 20 | bucket, st.integers(0, 2), st.integers(500, 511), st.integers(0, 99)
)


def _index(num_keys: int) -> KeyIndex:
    return KeyIndex(np.empty(num_keys, np.int64))


def _array(keys: object) -> Array:
    return np.array(keys, np.int64)


@given(batches=st.lists(st.lists(st.one_of(ANY_KEY, CROWDED_KEY, st.integers(-3, 3)), max_size=60), max_size=12), others=st.lists(ANY_KEY))
def test_keys_get_the_next_numbers_as_in_a_dict(batches: list[list[int]], others: list[int]) -> None:
    index, known = _index(1000), dict[int, int]()
    for batch in batches:
        new = [key for key in dict.fromkeys(batch) if key not in known]
        known |= {key: len(known) + position for position, key in enumerate(new)}
        index.add(_array(new))
        wanted = [*known, *others]
        assert index.find(_array(wanted)).tolist() == [known.get(key, -1) for key in wanted]
    assert index.num_rows == len(known)
    assert index.keys[: len(known)].tolist() == [*known]


@pytest.mark.parametrize("batch", [1, 1000, 20_000])
def test_it_finds_all_keys_at_every_moment_of_its_growth(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_CLEARED_BYTES", 512)
    monkeypatch.setattr(key_index, "_MOVED_ROWS", 16)
    num_keys = 2500 if batch == 1 else 40_000
    keys, strangers = spread(np.arange(num_keys)), spread(np.arange(num_keys, num_keys + 500))
    index, sizes = _index(num_keys), set()
    for start in range(0, num_keys, batch):
        index.add(keys[start : start + batch])
        sizes.add(index.nbytes)
        known = index.num_rows
        some = np.unique(np.linspace(0, known - 1, 300).astype(np.int64))
        np.testing.assert_array_equal(index.find(keys[some]), some)
        assert index.load < 0.9
        assert not (index.find(strangers[:50]) >= 0).any()
    np.testing.assert_array_equal(index.find(keys), np.arange(num_keys))
    assert len(sizes) > (1 if batch == 20_000 else 2)


@given(st.lists(st.lists(st.tuples(st.integers(0, 63), st.one_of(CROWDED_KEY, ANY_KEY)), max_size=40), max_size=20))
def test_a_row_that_gets_another_key_is_no_more_that_of_the_former(batches: list[list[tuple[int, int]]]) -> None:
    index, of_row = _index(64), dict[int, int]()
    index.add(_array(range(64)))
    of_row = dict(enumerate(range(64)))
    gone = set[int]()
    for batch in batches:
        changes = {row: key for row, key in batch if key not in of_row.values()}
        changes = {row: key for row, key in changes.items() if list(changes.values()).count(key) == 1}
        gone.update(of_row[row] for row in changes)
        index.replace(_array([*changes]), _array([*changes.values()]))
        of_row |= changes
        assert index.find(_array([*of_row.values()])).tolist() == [*of_row]
        assert index.find(_array([*(gone - set(of_row.values()))])).tolist() == [-1] * len(gone - set(of_row.values()))


def test_places_of_former_keys_are_given_up_while_keys_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_CLEARED_BYTES", 512)
    monkeypatch.setattr(key_index, "_MOVED_ROWS", 16)
    keys, num_rows = spread(np.arange(30_000)), 1500
    index, now = _index(num_rows), keys[:num_rows].copy()
    index.add(now)
    for start in range(num_rows, keys.size - 50, 50):
        rows = np.arange(start, start + 50) * 7 % num_rows
        index.replace(rows, keys[start : start + 50])
        now[rows] = keys[start : start + 50]
        np.testing.assert_array_equal(index.find(now), np.arange(num_rows))
        assert index.load < 0.9
    assert index._places.num_places <= 8192
    assert not (index.find(np.setdiff1d(keys, now)) >= 0).any()


def test_growth_is_spread_over_calls() -> None:
    index, most = _index(1 << 19), 1 << 14
    keys = spread(np.arange(1 << 19))
    moved = []
    for start in range(0, 1 << 19, 1024):
        before = 0 if index._next is None else index._num_moved
        index.add(keys[start : start + 1024])
        if index._next is not None:
            moved.append(index._num_moved - before)
    assert len(moved) > 10
    assert max(moved) <= most


def test_those_who_search_while_others_add_find_all_keys_that_were_there() -> None:
    keys = spread(np.arange(300_000))
    index, known, wrong, is_over = _index(keys.size), [0], list[int](), threading.Event()

    def search() -> None:
        random = np.random.default_rng(1)
        while not is_over.is_set():
            some = random.integers(0, max(1, known[0]), 500)
            found = index.find(keys[some])
            wrong.extend(some[(found != some) & (known[0] > 0)].tolist())

    searching = threading.Thread(target=search)
    searching.start()
    for start in range(0, keys.size, 3000):
        index.add(keys[start : start + 3000])
        known[0] = index.num_rows
    is_over.set()
    searching.join(20)
    assert wrong == []


def test_places_take_less_than_nine_bytes_a_row_at_seventy_percent() -> None:
    index = _index(1 << 20)
    index.add(spread(np.arange(1 << 19)))
    assert index._places.nbytes / (0.7 * index._places.num_places) < 9
