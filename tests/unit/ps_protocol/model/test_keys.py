"""Keys: spreading loses none of them and is even; texts have keys."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.keys import NUM_BUCKETS, buckets_for, buckets_of, gathered, key_range, spread, text_keys


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_spread_keys_are_gathered_again(keys: list[int]) -> None:
    assert gathered(spread(np.array(keys, np.int64))).tolist() == keys


def test_signed_and_unsigned_keys_of_the_same_bits_are_the_same_key() -> None:
    assert spread(np.array([(1 << 64) - 1], np.uint64)).tolist() == spread(np.array([-1], np.int64)).tolist()


def test_the_ranges_of_consecutive_buckets_cover_all_keys_without_overlap() -> None:
    bounds = [key_range(start, start + NUM_BUCKETS // 8, num_buckets=NUM_BUCKETS) for start in range(0, NUM_BUCKETS, NUM_BUCKETS // 8)]
    assert (bounds[0][0], bounds[-1][1]) == (-(1 << 63), (1 << 63) - 1)
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(bounds))


@pytest.mark.parametrize("num_buckets", [1, 2, 64, NUM_BUCKETS, 1 << 30])
def test_a_key_is_in_the_range_of_its_bucket(num_buckets: int) -> None:
    spread_keys = np.concatenate([spread(np.arange(50)), np.array([-(1 << 63), -1, 0, (1 << 63) - 1])])
    for key, bucket in zip(spread_keys.tolist(), buckets_of(spread_keys, num_buckets=num_buckets).tolist(), strict=True):
        low, high = key_range(bucket, bucket + 1, num_buckets=num_buckets)
        assert low <= key <= high


@pytest.mark.parametrize(
    ("max_rows", "expected"), [(0, NUM_BUCKETS), (1, 1), (31, 1), (32, 2), (100, 4), (65_535, 1024), (1 << 20, 1 << 14)]
)
def test_a_bound_has_buckets_of_enough_rows(max_rows: int, expected: int) -> None:
    assert buckets_for(max_rows) == expected


@pytest.mark.parametrize("step", [1, 1 << 20, 1 << 48])
def test_keys_that_count_up_are_spread_evenly(step: int) -> None:
    spread_keys = spread(np.arange(30_000, dtype=np.int64) * step)
    bounds = [key_range(start, start + 21845, num_buckets=NUM_BUCKETS) for start in (0, 21845)]
    shares = [np.count_nonzero((spread_keys >= low) & (spread_keys <= high)) for low, high in bounds]
    assert all(9_600 < share < 10_400 for share in shares)


def test_texts_have_stated_keys() -> None:
    keys = text_keys(["", "user-1", "naïve"])
    assert keys.dtype == np.int64
    assert keys.tolist() == [int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little", signed=True), *text_keys(["user-1", "naïve"])]
    assert text_keys("user-1").tolist() == [keys[1]]
    assert text_keys([]).size == 0
    with pytest.raises(InvalidSpec, match="got a int, want a str"):
        text_keys([3])  # type: ignore[list-item]
