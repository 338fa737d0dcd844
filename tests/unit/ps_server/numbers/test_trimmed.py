"""Trimmed means, compared with slow ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.merging import MergeSpec, merge_of
from ps_protocol.model.variables import Array
from ps_server.numbers.row_gradients import RowGradient, trimmed_mean_of_rows
from ps_server.numbers.trimmed import trimmed_mean_of

FLOAT64 = np.dtype(np.float64)


def slow(values: list[tuple[float, float]], merge: MergeSpec) -> float:
    """The trimmed mean of (value, weight) of an element's contributions."""
    ordered = sorted(values, key=lambda one: (np.isnan(one[0]), one[0]))
    num_trimmed = int(np.floor(merge.number * len(values) + 1e-9))
    kept = ordered[num_trimmed : len(ordered) - num_trimmed]
    return sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(1, 40), st.sampled_from(["0.1", "0.25", "0.34", "0.49"]), st.booleans())
def test_each_element_is_the_weighted_mean_without_the_largest_and_smallest(
    seed: int, number: int, size: int, share: str, has_weights: bool
) -> None:
    rng, merge = np.random.default_rng(seed), merge_of(f"trimmed_mean:{share}")
    blocks = [rng.permutation(np.arange(size) * number + position).astype(np.float64) for position in range(number)]
    weights = [float(weight) for weight in rng.uniform(0.5, 2.0, number)] if has_weights else []
    found = trimmed_mean_of(blocks, merge, out=np.empty(size), weights=weights)
    expected = [
        slow([(block[at], weight) for block, weight in zip(blocks, weights or [1.0] * number, strict=True)], merge) for at in range(size)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_what_a_few_contributions_say_that_is_not_finite_or_huge_is_left_out() -> None:
    blocks = [np.full(3, value, np.float32) for value in (1.0, 2.0, 3.0)]
    bad = np.array([np.nan, np.inf, -1e30], np.float32)
    found = trimmed_mean_of([blocks[0], bad, *blocks[1:]], merge_of("trimmed_mean:0.25"), out=np.empty(3, np.float32))
    assert [*found] == [2.5, 2.5, 1.5]


def test_halves_are_summed_in_float32() -> None:
    blocks = [np.full(5, value, np.float16) for value in (2048.0, 1.0, 2048.0, 1.0, 60000.0)]
    found = trimmed_mean_of(blocks, merge_of("trimmed_mean:0.2"), out=np.empty(5, np.float32))
    assert [*found] == [np.float32(4097) / np.float32(3)] * 5


def test_an_elements_mean_does_not_depend_on_what_lies_beside_it() -> None:
    blocks = [np.random.default_rng(seed).standard_normal(50_000).astype(np.float32) for seed in range(5)]
    merge, weights = merge_of("trimmed_mean:0.2"), [1.0, 3.0, 2.0, 0.1, 7.0]
    whole = trimmed_mean_of(blocks, merge, out=np.empty(50_000, np.float32), weights=weights)
    part = trimmed_mean_of([block[49_000:49_900] for block in blocks], merge, out=np.empty(900, np.float32), weights=weights)
    np.testing.assert_array_equal(whole[49_000:49_900], part)


@pytest.mark.parametrize("lacks_none", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_trimmed_among_the_contributions_that_have_it(seed: int, lacks_none: bool) -> None:
    rng, merge = np.random.default_rng(seed), merge_of("trimmed_mean:0.34")
    weights = [float(weight) for weight in rng.uniform(0.5, 2.0, 5)]
    gradients: list[RowGradient | None] = [_some_rows(rng) for _ in weights]
    gradients[3] = None
    found = trimmed_mean_of_rows(gradients, merge, weights=weights, lacks_none=lacks_none, sum_dtype=FLOAT64)
    for row, values in zip(found.indices, found.rows, strict=True):
        for column in range(2):
            given = []
            for gradient, weight in zip(gradients, weights, strict=True):
                value = None if gradient is None else dict(zip(gradient.indices, gradient.rows[:, column], strict=True)).get(row)
                if value is not None or lacks_none:
                    given.append((float(value or 0.0), weight))
            assert values[column] == pytest.approx(slow(given, merge), rel=1e-12)


def _some_rows(rng: np.random.Generator) -> RowGradient:
    indices: Array = np.sort(rng.permutation(8)[: int(rng.integers(2, 7))]).astype(np.int64)
    return RowGradient(indices=indices, rows=rng.standard_normal((indices.size, 2)))
