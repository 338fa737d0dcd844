"""Values that differ by replica: taken apart for each replica, and put together from what the replicas return."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec
from worker_client.strategy.values import Mirrored, PerReplica, leaves, map_nested, regroup, select

Pair = namedtuple("Pair", ["left", "right"])

# Structures whose leaves are strings: each replica makes objects of its own from them, or all share one.
STRUCTURES = st.recursive(
    st.sampled_from(["same", "own"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)
SHARED = object()


@given(STRUCTURES, st.integers(2, 5))
def test_merging_wraps_exactly_what_differs_and_selecting_gives_each_replica_its_own_back(structure: Any, num_replicas: int) -> None:
    results = {replica: map_nested(lambda leaf: SHARED if leaf == "same" else object(), structure) for replica in range(num_replicas)}
    merged = regroup(results)
    for kind, leaf in zip(leaves(structure), leaves(merged), strict=True):
        assert leaf is SHARED if kind == "same" else isinstance(leaf, PerReplica)
    for replica, result in results.items():
        own = select(replica, merged)
        assert type(own) is type(result)
        assert all(mine is given for mine, given in zip(leaves(own), leaves(result), strict=True))


@given(STRUCTURES)
def test_the_result_of_a_single_replica_stays_as_it_is(structure: Any) -> None:
    result = map_nested(lambda leaf: object(), structure)
    assert all(mine is given for mine, given in zip(leaves(regroup({7: result})), leaves(result), strict=True))


def test_a_named_tuple_stays_one() -> None:
    merged = regroup({0: Pair(SHARED, 1.5), 1: Pair(SHARED, 2.5)})
    assert isinstance(merged, Pair)
    assert merged.left is SHARED
    assert merged.right.values == {0: 1.5, 1: 2.5}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((1, 2), (1, 2, 3), "length 3"),
        ((1, 2), [1, 2], "a list"),
        ({"a": 1}, {"b": 1}, "keys"),
        (1, (1,), "a tuple"),
        ((1,), 1, "a int"),
        ((1, (2, 3)), (1, (2,)), "length 1"),
    ],
)
def test_results_that_are_nested_differently_are_refused(first: Any, second: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"replica 1 returned {words}.*same structure"):
        regroup({0: first, 1: second})


@pytest.mark.parametrize("kind", [PerReplica, Mirrored])
def test_values_are_by_replica_id(kind: Any) -> None:
    for wrong, got in (([1, 2], "a list"), ((1,), "a tuple"), ({}, "nothing"), (np.ones(2), "a ndarray")):
        with pytest.raises(InvalidSpec, match=f"{kind.__name__}: got {got}, want a dict of values by replica id"):
            kind(wrong)


def test_a_value_without_a_part_for_a_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing for replica 2, only for 0, 1"):
        select(2, [PerReplica({0: 1, 1: 2})])


def test_a_mirrored_value_is_read_as_an_array_and_a_per_replica_one_is_not() -> None:
    mirrored = Mirrored({0: np.ones(2), 1: np.ones(2)})
    np.testing.assert_array_equal(np.asarray(mirrored) + 1, [2, 2])
    assert np.array(mirrored) is not mirrored.values[0]
    with pytest.raises(TypeError, match="reduce it with reduce_to"):
        np.asarray(PerReplica({0: np.ones(2), 1: np.ones(2)}))


def test_the_values_of_a_dict_are_processed_in_the_order_of_its_keys() -> None:
    seen = list[int]()
    for nested in ({"a": 1, "b": [2, 3]}, {"b": [2, 3], "a": 1}):
        assert list(map_nested(lambda one: seen.append(one), nested)) == list(nested)
    assert seen == [1, 2, 3, 1, 2, 3]


class Sized(tuple[Any, ...]):
    """A tuple that is made of a number, not of elements."""

    def __new__(cls, size: int) -> "Sized":
        return super().__new__(cls, range(size + 0))


class Point(namedtuple("Point", ["x", "y"])):
    """A named tuple with a constructor of its own."""

    def __new__(cls, both: float) -> "Point":
        return super().__new__(cls, both, both)


def test_a_tuple_keeps_its_type_and_one_that_cannot_be_made_again_is_refused() -> None:
    point = map_nested(lambda one: one + 1, Point(1.0))
    assert (type(point), point.x, point.y) == (Point, 2.0, 2.0)
    calls: list[Callable[[], Any]] = [lambda: select(0, [Sized(2)]), lambda: regroup({0: Sized(2), 1: Sized(2)})]
    for call in calls:
        with pytest.raises(InvalidSpec, match=r"a Sized cannot be made again of other elements: TypeError: .*; want a tuple"):
            call()


def test_a_structure_has_at_most_100_levels() -> None:
    def nested(depth: int) -> Any:
        structure: Any = 1.0
        for level in range(depth):
            structure = [structure] if level % 2 else {"a": structure}
        return structure

    assert leaves(nested(100)) == [1.0]
    assert leaves(regroup({0: nested(100), 1: nested(100)})) == [1.0]
    for depth in (101, 700, 5000):
        with pytest.raises(InvalidSpec, match="nested in more than 100 levels"):
            select(0, nested(depth))
        with pytest.raises(InvalidSpec, match="nested in more than 100 levels"):
            regroup({0: nested(depth), 1: nested(depth)})
