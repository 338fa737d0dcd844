"""The content of posts: what is unpacked is what was packed, bit by bit, and bytes from anywhere are refused with a reason."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.content import PerWorkerDataset, check, pack, unpack

ARRAYS = st.sampled_from(["float16", "float32", "float64", "int32", "int64", "uint8", "bool"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
PLAIN = st.none() | st.booleans() | st.integers(-(1 << 4000), 1 << 4000) | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(NESTED)
def test_numbers_text_and_containers_come_back_as_they_were(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(st.lists(ARRAYS, max_size=4))
def test_arrays_come_back_with_the_same_bits(values: list[Array]) -> None:
    found = unpack(pack(values))
    assert [(one.dtype, one.shape, one.tobytes()) for one in found] == [(one.dtype, one.shape, one.tobytes()) for one in values]
    assert all(one.flags.writeable for one in found)


def test_rows_scalars_and_datasets_come_back_as_they_were() -> None:
    rows, iterator = IndexedSlices(np.array([3, 1]), np.ones((2, 2), np.float32), (5, 2)), iter(PerWorkerDataset("numbers", 1))
    found, scalar, of_dataset, bare = unpack(pack((rows, np.float32(1.5), iterator, IndexedSlices([], np.zeros((0, 2))))))
    assert (found.indices.tolist(), found.values.tolist(), found.dense_shape) == ([3, 1], [[1, 1], [1, 1]], (5, 2))
    assert (type(scalar), of_dataset, bare.dense_shape) == (np.float32, iterator, None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.arange(3, dtype=np.int16), "an array of int16 cannot travel between processes; want one of float16"),
        (IndexedSlices(np.array([0.5]), np.zeros((1, 2))), "indices of float64 are no rows"),
        (IndexedSlices(np.array([1]), np.zeros((1, 2), np.int8)), "an array of int8"),
    ],
)
def test_arrays_that_cannot_travel_are_refused_before_they_are_packed(value: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        check(value)
    with pytest.raises(InvalidSpec, match=f"the sum: {words}"):
        pack([value], what="the sum")


def _content(text: bytes, *, more: bytes = b"") -> Array:
    whole = len(text).to_bytes(8, "little").ljust(16, b"\0") + text.ljust(-(-len(text) // 16) * 16, b" ") + more
    content = aligned_bytes(len(whole))
    content[:] = np.frombuffer(whole, np.uint8)
    return content


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"array": 0},
        {"array": 2},
        {"array": "a"},
        {"rows": [0]},
        {"dict": []},
        {"dataset": [math.inf, math.inf, math.inf]},
        {"two": 1, "kinds": 2},
        {"list": [{"set": []}]},
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(structure: Any) -> None:
    with pytest.raises(MalformedMessage, match="a post cannot be read"):
        unpack(_content(json.dumps([structure, []]).encode()))


@pytest.mark.parametrize(
    "described",
    [[["float64", [2]]], [["float64", [-1]]], [["int16", [1]]], [["float64", [1 << 62, 4]]], [["float64", 1]], [["float64"]], [1], 1],
)
def test_arrays_beyond_their_content_are_refused(described: Any) -> None:
    with pytest.raises(MalformedMessage, match="a post cannot be read"):
        unpack(_content(json.dumps([1, described]).encode(), more=bytes(8)))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (3).to_bytes(16, "little"), b"\0" * 16, bytes([255] * 64)])
def test_bytes_that_are_no_content_are_refused(content: bytes) -> None:
    with pytest.raises(MalformedMessage, match="a post cannot be read"):
        unpack(np.frombuffer(content, np.uint8))


def test_a_structure_too_deep_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="a post cannot be read"):
        unpack(_content(b"[" * 100_000))
