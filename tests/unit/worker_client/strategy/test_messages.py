"""Arrays and rows as vectors of floats, and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ps_protocol.errors import InvalidSpec, MalformedMessage
from worker_client import IndexedSlices
from worker_client.strategy.messages import pack, unpack

ARRAYS = st.sampled_from(["float16", "float32", "float64", "int32", "uint8", "bool"]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
ROWS = st.builds(
    IndexedSlices,
    hnp.arrays("int64", st.integers(0, 4), elements=st.integers(-9, 1 << 50)),
    hnp.arrays("float32", st.tuples(st.integers(0, 4), st.integers(1, 2))),
    st.none() | st.just((9, 2)),
)


def _same(one: Any, other: Any) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == np.ascontiguousarray(other).tobytes()  # NaN and -0.0 too


@given(st.lists(ARRAYS | ROWS, max_size=5))
def test_what_is_packed_is_unpacked_bit_by_bit(values: list[Any]) -> None:
    vectors = pack(values)
    assert all(vector.ndim == 1 and vector.dtype.kind == "f" and vector.size for vector in vectors.values())
    for given_value, value in zip(values, unpack(vectors.__getitem__), strict=True):
        if isinstance(given_value, IndexedSlices):
            _same(value.indices, given_value.indices)
            _same(value.values, given_value.values)
            assert value.dense_shape == given_value.dense_shape
        else:
            _same(value, given_value)


def test_what_cannot_travel_exactly_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="complex128"):
        pack([np.zeros(2, np.complex128)])
    with pytest.raises(InvalidSpec, match=r"beyond 2\^53"):
        pack([np.array([1 << 60])])


@pytest.mark.parametrize("head", [[], [1.0], [1.0, 0.0, 99.0, 0.0], [1.0, 0.0, 1.0, 2.0, 3.0], [float("nan")], [float("inf")]])
def test_a_head_that_is_not_one_messages_is_told(head: list[float]) -> None:
    with pytest.raises(MalformedMessage, match="the head of a message cannot be read"):
        unpack(lambda _: np.array(head))
