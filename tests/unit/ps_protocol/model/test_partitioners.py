"""Partitioners: the original's, case by case, and invalid partitions."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.variables import (
    Partition,
    Partitioner,
    fixed_size_partitioner,
    min_max_variable_partitioner,
    partition_of,
    variable_axis_size_partitioner,
)
from tests.support.repository import RECORDED_CASES

CASES = json.loads((RECORDED_CASES / "partitioner.json").read_text())["cases"]
PARTITIONERS: dict[str, Callable[..., Partitioner]] = {
    "fixed_size": fixed_size_partitioner,
    "variable_axis_size": variable_axis_size_partitioner,
    "min_max": min_max_variable_partitioner,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["partitioner"])
def test_variables_are_cut_as_the_original_cuts_them(case: dict[str, Any]) -> None:
    partitioner = PARTITIONERS[case["partitioner"]](**case["arguments"])
    assert partitioner(case["shape"], case["dtype"]) == case["expect"]


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (fixed_size_partitioner(5), (3, 2), (0, 3)),
        (fixed_size_partitioner(2, axis=1), (3, 4), (1, 2)),
        (variable_axis_size_partitioner(8), (3, 4), (0, 3)),
        (variable_axis_size_partitioner(1 << 20), (0, 4), (0, 1)),
        (min_max_variable_partitioner(8, min_slice_size=16), (6, 4), (0, 6)),
        (min_max_variable_partitioner(8, min_slice_size=1 << 20), (6, 4), (0, 1)),
        (lambda shape, dtype: [1, np.int64(2)], (3, 4), (1, 2)),
        (lambda shape, dtype: [1, 1], (3, 4), (0, 1)),
    ],
)
def test_partition_has_one_axis_and_no_more_slices_than_fit(partitioner: Partitioner, shape: tuple[int, ...], expected: Any) -> None:
    axis, num_slices = expected
    assert partition_of(partitioner, name="w", shape=shape, dtype="float32") == Partition(axis=axis, num_slices=num_slices)


def returning(counts: Any) -> Partitioner:
    def partitioner(shape: Sequence[int], dtype: Any) -> Any:
        return counts

    return partitioner


@pytest.mark.parametrize(
    ("counts", "shape", "words"),
    [
        ([2, 2], (4, 4), "only one axis can be cut"),
        ([2], (4, 4), "want a list of 2 numbers"),
        (None, (4, 4), "returned None"),
        ([5, 1], (4, 4), "axis 0 has 4, want 1 to that many"),
        ([0, 1], (4, 4), "axis 0 has 4, want 1 to that many"),
        ([2.0, 1], (4, 4), "axis 0 has 4, want 1"),
        ([], (), "is for a scalar, which cannot be cut"),
    ],
)
def test_an_invalid_partition_is_refused_with_a_reason(counts: Any, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidSpec, match=rf"variable 'w': its partitioner .*{words}"):
        partition_of(returning(counts), name="w", shape=shape, dtype="float32")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fixed_size_partitioner(0), "num_shards = 0, want a whole number >= 1"),
        (lambda: variable_axis_size_partitioner(0), "max_shard_bytes = 0"),
        (lambda: variable_axis_size_partitioner(8, bytes_per_string_element=0), "bytes_per_string_element = 0"),
        (lambda: variable_axis_size_partitioner(8, max_shards=0), "max_shards = 0"),
        (lambda: min_max_variable_partitioner(0), "max_partitions = 0"),
        (lambda: min_max_variable_partitioner(2, min_slice_size=0), "min_slice_size = 0"),
        (lambda: fixed_size_partitioner(2, axis=-1), "axis = -1"),
        (lambda: fixed_size_partitioner(2, axis=2)((3, 4), "float32"), "cannot cut axis 2 .* it has 2 axes"),
    ],
)
def test_bad_argument_is_refused_with_a_reason(make: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        make()
