"""State of a program's own: which values can be kept, the errors for others, and when state is sent. No session."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage
from ps_protocol.roles.contribution import MAX_USER_STATE_BYTES
from worker_client.model.user_state import UserState

RNG = np.random.default_rng(3).bit_generator.state
VALUES: list[Any] = [
    None, True, 0, -7, 1 << 200, 0.1, -0.0, 5e-324, "", "é\n\ud800", [], {}, [1, [2.5, {"a": None}]],
    {"": {"b": [False]}}, b"", bytes(range(256)),
    RNG,
]  # fmt: skip
ARRAYS = [
    np.arange(6).reshape(2, 3), np.array([np.nan, -0.0, np.inf], np.float16), np.zeros((0, 2), np.uint8),
    np.array(3.5, ">f8"), np.array([True]),
    np.arange(8)[::2],
]  # fmt: skip


def there_and_back(value: Any) -> Any:
    state, other = UserState(), UserState()
    state["x"] = value
    other.restore(state.to_send())
    assert repr(other["x"]) == repr(state["x"]), "the same before it has travelled as after"
    return other["x"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = there_and_back(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("array", ARRAYS, ids=repr)
def test_arrays_come_back_bit_for_bit_and_writable(array: Any) -> None:
    found = there_and_back({"a": array})["a"]
    assert (found.dtype, found.shape) == (array.dtype.newbyteorder("<"), array.shape)
    assert found.tobytes() == array.astype(found.dtype).tobytes()
    assert found.flags.writeable


def test_scalars_of_numpy_are_numbers_and_tuples_are_lists() -> None:
    assert there_and_back((np.float32(0.5), np.int64(3), np.bool_(True))) == [0.5, 3, True]


NO_STATES = [
    "[]", "3", "{", '{"a": NaN}', '{"a": {"$bytes": 3}}', '{"a": {"$bytes": "?"}}', '{"a": {"$array": ["O", [1], "AAAAAAAAAAA="]}}',
    '{"a": {"$array": ["<f4", [3], "AAAA"]}}', '{"a": {"$array": ["<f4", [-1, 0], ""]}}', '{"a": {"$array": 1}}',
    f'{{"a": {{"$array": ["<f4", [{1 << 70}], ""]}}}}', '{"a": {"$array": ["f4,f4", [0], ""]}}', '{"a": {"$array": ["zz", [0], ""]}}',
    "[" * 100_000,
]  # fmt: skip


class Loss:
    """As a tensor of another library that has no dimension."""

    def __init__(self, value: Any) -> None:
        self.value, self.ndim = value, 0

    def item(self) -> Any:
        return self.value


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert there_and_back({"loss": Loss(0.25)}) == {"loss": 0.25}
    with pytest.raises(InvalidSpec, match=r"user_state\['x'\]: got nan"):
        there_and_back(Loss(float("nan")))
    with pytest.raises(InvalidSpec, match="more than 32"):
        itself = Loss(None)
        itself.value = itself
        there_and_back(itself)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), r"user_state\['best'\]: got nan, which JSON has no number for; leave it out, or set None"),
        ({"a": [1, np.float32("-inf")]}, r"user_state\['best'\]\['a'\]\[1\]: got -inf"),
        ({1, 2}, r"user_state\['best'\]: got a set, want None, a bool, number, str, bytes, NumPy array of numbers"),
        ([0, {"f": print}], r"user_state\['best'\]\[1\]\['f'\]: got a builtin_function"),
        ({3: "x"}, r"user_state\['best'\]: got the key 3, want a str"),
        ({"$bytes": "AA=="}, r"user_state\['best'\]: got the key '\$bytes'"),
        (np.array(["a"]), r"user_state\['best'\]: got a ndarray"),
        (np.array([None]), r"user_state\['best'\]: got a ndarray"),
        (CYCLE, "more than 32 lists and dicts within each other"),
        (10**5000, r"user_state\['best'\]: Exceeds the limit"),
    ],
    ids=["nan", "inf", "set", "function", "int key", "reserved key", "strings", "objects", "cycle", "long int"],
)
def test_a_value_that_user_state_cannot_hold_is_refused_by_name_and_changes_nothing(value: Any, words: str) -> None:
    state = UserState()
    state["best"] = 1
    with pytest.raises(InvalidSpec, match=words):
        state["best"] = value
    assert dict(state) == {"best": 1}


@pytest.mark.parametrize("name", ["", "a" * 257, 3, None])
def test_names_are_short_strings(name: Any) -> None:
    with pytest.raises(InvalidSpec, match="want a str of 1 to 256 characters"):
        UserState()[name] = 1


def test_more_than_64_kib_are_refused_with_the_name_and_the_size() -> None:
    state = UserState()
    state["a"] = "a" * (MAX_USER_STATE_BYTES - 100)
    with pytest.raises(LimitExceeded, match=r"user_state\['b'\]: with its 102 bytes the state has 65551 bytes as JSON, 65536 at most"):
        state["b"] = "b" * 100
    state["a"] = ""
    state["b"] = "b" * (MAX_USER_STATE_BYTES - 20)
    assert MAX_USER_STATE_BYTES - 20 < len(state.to_send()) <= MAX_USER_STATE_BYTES


def test_a_user_state_is_sent_only_until_the_chief_has_it() -> None:
    state = UserState()
    assert state.to_send() == ""
    state["a"] = 1
    first = state.to_send()
    assert first == '{"a":1}'
    assert state.to_send() == first, "a contribution that did not count has brought nothing"
    state.counted(first)
    assert state.to_send() == ""
    state["a"] = 1
    assert state.to_send() == ""
    del state["a"]
    assert state.to_send() == "{}"
    state["b"] = 2
    state.counted("{}")
    assert state.to_send() == '{"b":2}', "set after the contribution was sent"


def test_a_restored_user_state_replaces_all_values() -> None:
    state = UserState()
    state["b"] = state["a"] = 1
    state.restore('{"a": [1.5, {"$bytes": "AP8="}]}')
    assert dict(state) == {"a": [1.5, b"\x00\xff"]}
    assert state.to_send() == ""
    state.restore("")
    assert not state


def test_reading_gives_copies() -> None:
    state = UserState()
    given = {"position": 3}
    state["sampler"] = given
    given["position"] = 4
    state["sampler"]["position"] = 5
    assert state["sampler"] == {"position": 3}


@pytest.mark.parametrize("text", NO_STATES, ids=range(len(NO_STATES)))
def test_invalid_state_is_refused(text: str) -> None:
    state = UserState()
    state["x"] = 1
    with pytest.raises(MalformedMessage, match="the state of this worker's program is not one"):
        state.restore(text)
    assert dict(state) == {"x": 1}
