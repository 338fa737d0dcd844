"""Counts of keys without rows: what a bucket says follows from its keys alone, is seldom too high, and forgets what is long ago."""

import itertools

import numpy as np
import pytest

from ps_protocol.model.keys import KeySpec, buckets_of, spread
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.variables import ANY, Array, DataType, Initializer, InitializerKind, VariableSpec
from ps_server.numbers.occurrences import BUCKET_BYTES, Occurrences


def _piece(max_rows: int, start: int = 0, stop: int | None = None) -> VariableSlice:
    variable = VariableSpec(
        name="emb", data_type=DataType.FLOAT32, shape=(ANY, 1), is_sparse=True, keys=KeySpec(max_rows=max_rows or None),
        initializer=Initializer(kind=InitializerKind.CONSTANT),
    )  # fmt: skip
    return VariableSlice(variable=variable, start=start, stop=variable.num_rows if stop is None else stop)


def _occurrences(piece: VariableSlice, *, most: int) -> tuple[Occurrences, Array]:
    memory = np.zeros((piece.stop - piece.start) * BUCKET_BYTES, np.uint8)
    return Occurrences(piece, memory, most=most), memory


def _keys(count: int, first: int = 0) -> Array:
    return np.sort(spread(np.arange(first, first + count)))


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_key_has_occurred_as_often_as_it_was_counted_where_few_others_have(times: int) -> None:
    counts, _ = _occurrences(_piece(0), most=9)
    keys = _keys(1000)
    for _ in range(times):
        counts.count(keys)
    assert counts.estimates(keys).tolist() == [times] * 1000
    assert not counts.estimates(_keys(1000, first=1000)).any()


def test_no_count_is_higher_than_it_needs_to_be() -> None:
    counts, memory = _occurrences(_piece(0), most=3)
    for _ in range(9):
        counts.count(_keys(100))
    assert memory.reshape(-1, BUCKET_BYTES)[:, :-1].max() == 3


def _model_step(counters: list[list[int]], keys: Array, *, most: int, num_buckets: int) -> None:
    """The same in plain Python, key by key in any order: all of a step's keys see what was before it."""
    before, wanted = [one.copy() for one in counters], dict[tuple[int, int], int]()
    where = buckets_of(keys, num_buckets=num_buckets).tolist()
    for key, bucket in zip(keys.tolist(), where, strict=True):
        places = [row * 64 + (key >> 6 * row) % 64 for row in range(4)]
        raised = min(most, 1 + min(before[bucket][place] for place in places))
        for place in places:
            wanted[bucket, place] = max(wanted.get((bucket, place), 0), raised)
    for (bucket, place), value in wanted.items():
        counters[bucket][place] = max(before[bucket][place], value)
    for bucket in set(where):
        counters[bucket][256] += where.count(bucket)
        if counters[bucket][256] >= 64:
            counters[bucket] = [value >> 1 for value in counters[bucket][:256]] + [0]


@pytest.mark.parametrize("cut", [(), (2, 3), (1, 2, 3, 4, 5, 6, 7)])
def test_a_bucket_counts_its_own_keys_alone_in_any_order_and_however_the_table_is_cut(cut: tuple[int, ...]) -> None:
    random, num_buckets = np.random.default_rng(4), 8
    pieces = [_piece(150, start, stop) for start, stop in itertools.pairwise([0, *cut, num_buckets])]
    parts = [_occurrences(piece, most=5) for piece in pieces]
    expected = [[0] * BUCKET_BYTES for _ in range(num_buckets)]
    for _ in range(40):
        keys = np.unique(spread(random.zipf(1.2, 80) % 2000))
        _model_step(expected, keys, most=5, num_buckets=num_buckets)
        for piece, (counts, _) in zip(pieces, parts, strict=True):
            least, greatest = piece.index_range
            counts.count(keys[(keys >= least) & (keys <= greatest)])
    assert np.concatenate([memory for _, memory in parts]).reshape(-1, BUCKET_BYTES).tolist() == expected
    whole, memory = _occurrences(_piece(150), most=5)
    for piece, (_, theirs) in zip(pieces, parts, strict=True):
        whole.take_over(piece, theirs)
    assert memory.reshape(-1, BUCKET_BYTES).tolist() == expected


@pytest.mark.parametrize(("admit_after", "share"), [(2, 0.05), (3, 0.0001)])
def test_few_keys_are_taken_for_ones_that_occurred_more_often(admit_after: int, share: float) -> None:
    piece = _piece(65_535)
    counts, _ = _occurrences(piece, most=admit_after)
    num_early = 0
    for step in range(200):
        keys = _keys(1_000, first=step * 1_000)
        num_early += int((counts.estimates(keys) + 1 >= admit_after).sum())
        counts.count(keys)
    assert 3 * 64 * piece.extent < 200_000, "each bucket has forgotten three times"
    assert num_early / 200_000 <= share


def test_what_is_long_ago_is_forgotten() -> None:
    counts, _ = _occurrences(_piece(65_535), most=2)
    keys = _keys(1_000)
    counts.count(keys)
    for step in range(100):
        counts.count(_keys(1_000, first=(1 + step) * 1_000))
    assert counts.estimates(keys).mean() < 0.5
