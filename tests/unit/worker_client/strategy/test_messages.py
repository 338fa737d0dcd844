"""Arrays and rows as vectors of floats, and back."""

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ps_protocol.errors import InvalidSpec, MalformedMessage
from worker_client import IndexedSlices
from worker_client.strategy.links import new_sender
from worker_client.strategy.messages import HEAD, Message, Serial, check, pack, unpack

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


SERIALS = st.builds(Serial, st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 48) - 1))


@given(SERIALS, st.lists(ARRAYS | ROWS, max_size=5))
def test_packed_messages_are_unpacked_bit_for_bit(serial: Serial, values: list[Any]) -> None:
    vectors = pack(Message(serial, values))
    assert all(vector.ndim == 1 and vector.dtype.kind == "f" and vector.size for vector in vectors.values())
    message = unpack(vectors.__getitem__)
    assert message.serial == serial
    for given_value, value in zip(values, message.values, strict=True):
        if isinstance(given_value, IndexedSlices):
            _same(value.indices, given_value.indices)
            _same(value.values, given_value.values)
            assert value.dense_shape == given_value.dense_shape
        else:
            _same(value, given_value)


def _like(one: Any, fill: float) -> Any:
    if isinstance(one, IndexedSlices):
        return IndexedSlices(np.full_like(one.indices, fill), np.full_like(one.values, fill), one.dense_shape)
    return np.full_like(one, fill)


@given(SERIALS, SERIALS, st.lists(ARRAYS | ROWS, min_size=1, max_size=5), st.data())
def test_parts_of_two_messages_are_never_taken_for_one(first: Serial, second: Serial, values: list[Any], data: st.DataObject) -> None:
    hypothesis.assume(first != second)
    messages = [pack(Message(serial, [_like(one, fill) for one in values])) for serial, fill in ((first, 1), (second, 2))]
    sources = data.draw(st.fixed_dictionaries({name: st.integers(0, 1) for name in messages[0]}))
    torn = {name: messages[source][name] for name, source in sources.items()}
    if len(set(sources.values())) == 1:
        assert unpack(torn.__getitem__).serial == (first, second)[sources[HEAD]]
    else:
        with pytest.raises(MalformedMessage, match="are of different messages"):
            unpack(torn.__getitem__)


@given(SERIALS, SERIALS, st.lists(ARRAYS | ROWS, max_size=5))
def test_a_sum_of_two_messages_is_refused_as_malformed(first: Serial, second: Serial, values: list[Any]) -> None:
    one, other = (pack(Message(serial, [_like(value, 1) for value in values])) for serial in (first, second))
    with pytest.raises(MalformedMessage, match="cannot be read"):
        unpack(lambda name: one[name] + other[name])


def test_a_run_numbers_its_messages_and_two_runs_differ() -> None:
    sender, other = new_sender(), new_sender()
    serials = [sender.message([]).serial for _ in range(3)]
    assert [serial.number for serial in serials] == [1, 2, 3]
    assert {serial.run for serial in serials} == {sender.run} != {other.run}


def test_a_value_that_cannot_be_packed_exactly_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="complex128"):
        pack(Message(Serial(1, 1), [np.zeros(2, np.complex128)]))
    with pytest.raises(InvalidSpec, match=r"beyond 2\^53"):
        pack(Message(Serial(1, 1), [np.array([1 << 60])]))
    with pytest.raises(InvalidSpec, match="indices of float64 are no rows; want integers"):
        check(IndexedSlices(np.array([0.7]), np.ones((1, 2))))


MARK = [1.0, *([0.0] * 12)]


@pytest.mark.parametrize(
    "head",
    [
        [],
        MARK[:5],
        [*([1.0] * 15)],
        [1.0, 256.0, *MARK[2:], 0.0, 0.0],
        [1.0, float("nan"), *MARK[2:], 0.0, 0.0],
        *([*MARK, turn, 0.0] for turn in (2.0, -1.0, float("nan"), float("inf"))),
        *([*MARK, 1.0, *content] for content in ([], [1.0, 0.0, 99.0, 0.0], [1.0, 0.0, 1.0, 2.0, 3.0], [float("nan")], [float("inf")])),
        *([*MARK, 0.0, 1.0, 0.0, 1.0, float(len(shape)), *shape] for shape in ([-1.0, -4.0], [-1.0, 0.0], [0.0, 2.0**62], [0.0] * 65)),
    ],
)
def test_a_malformed_message_head_is_refused(head: list[float]) -> None:
    with pytest.raises(MalformedMessage, match="the head of a message cannot be read"):
        unpack(lambda _: np.array(head))
